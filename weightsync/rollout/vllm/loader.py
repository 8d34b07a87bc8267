"""Loads a weight stream into the model of one vLLM worker, through vLLM's own reload lifecycle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch

from weightsync.errors import ConfigurationError, ManifestError
from weightsync.rollout.loader import Batch
from weightsync.rollout.vllm import reload
from weightsync.rollout.vllm.coverage import CoverageReport
from weightsync.rollout.vllm.cpu import ExpertKernels, repack_tied_head
from weightsync.rollout.vllm.inverse import invert
from weightsync.rollout.vllm.trial import TrialModel
from weightsync.tensors import MAX_NAMES_SHOWN, WeightManifest, list_names

_HARMLESS = ("*rotary_emb.inv_freq", "*rotary_emb.cos_cached", "*rotary_emb.sin_cached")


class VllmLoader:
    """The `WeightLoader` of a vLLM worker. Tensors bear Hugging Face names and full shapes.

    A manifest is tried on a copy of the model without memory before anything is written, so that unknown
    names, misfits and parameters left out, also halves of fused ones, are found first.

    Args:
        worker: vLLM's worker, its model loaded.
        allow_missing: patterns of vLLM parameter names that need not be written.
        allow_unused: patterns of tensor names that may come and are not used, or only in part.

    Attributes:
        notes: facts about the last refit for its figures: ``casts`` by kind, ``detached_bytes``.
    """

    kind = "vLLM"

    def __init__(
        self, worker: Any, allow_missing: Sequence[str] = (), allow_unused: Sequence[str] = ()
    ) -> None:
        _require_supported(worker.vllm_config)
        self._config = worker.vllm_config
        self._worker = worker
        self._allow_missing = tuple(allow_missing)
        self._allow_unused = (*_HARMLESS, *allow_unused)
        self._trial: TrialModel | None = None
        self._checked: dict[str, CoverageReport] = {}
        self._report = CoverageReport()
        self._next_report = CoverageReport()
        self._reloading = False
        self._kernels = ExpertKernels()
        self.notes: dict[str, Any] = {}

    @property
    def model(self) -> torch.nn.Module:
        """The model as the worker holds it now."""
        model: torch.nn.Module = self._worker.model_runner.get_model()
        return model

    def check_manifest(self, manifest: WeightManifest) -> None:
        """Refuse a manifest that would not fill this rank's model; see `WeightLoader`."""
        report = self.coverage(manifest)
        _require_complete(report, self._allow_missing, self._allow_unused)
        if self._reloading:  # the engine announced no manifest: this one is made of what came
            self._report = report
        else:
            self._next_report = report

    def coverage(self, manifest: WeightManifest) -> CoverageReport:
        """Return what a manifest would do to this rank's model. The same manifest is tried only once."""
        digest = manifest.digest()
        if digest not in self._checked:
            self._trial = self._trial or TrialModel(self._config)
            # Shapes rarely change during a training run: one entry is enough, and bounds the memory.
            self._checked = {digest: self._trial.try_manifest(manifest)}
        return self._checked[digest]

    def begin(self) -> None:
        """Set the model aside for reloading; see `WeightLoader`."""
        self.notes = {"detached_bytes": 0}
        # Used once: a stream without a manifest must not be judged by an earlier one's.
        self._report, self._next_report = self._next_report, CoverageReport()
        self._reloading = True
        with self._context():
            self._kernels.take(self.model)
            reload.begin_reload(self.model)

    def load(self, batch: Batch) -> None:
        """Load a batch, and copy what vLLM defers out of its memory; see `WeightLoader`."""
        # A tied output layer's own name: vLLM takes it only beside the embedding, in the same call.
        skipped = frozenset((*self._report.unused, *self._report.absent))
        used = [(name, tensor) for name, tensor in batch if name not in skipped]
        storages = {tensor.untyped_storage().data_ptr() for _, tensor in used}
        with self._context():
            if used:
                self.model.load_weights(iter(used))  # type: ignore[operator]
            self.notes["detached_bytes"] += reload.detach_deferred(self.model, storages - {0})

    def finish(self) -> None:
        """End the reload; see `WeightLoader`.

        Raises:
            ManifestError: vLLM did not take tensors that it was given.
        """
        with self._context():
            lost = [name for name in reload.unloaded_parameters(self.model) if name in self._report.written]
            if lost:
                raise ManifestError(f"vLLM took nothing for {list_names(lost)}", tensor=lost[0], phase="load")
            reload.finish_reload(self.model, self._config.model_config)
            repack_tied_head(self.model)
        self._reloading = False
        self._kernels = ExpertKernels()
        self._reset_derived_state()
        self.notes["casts"] = _count(self._report.casts)

    def abort(self) -> None:
        """Give unfinished layers their old weights back; see `WeightLoader`."""
        self._reloading = False
        with self._context():
            reload.abandon_reload(self.model, self._config.model_config)
            repack_tied_head(self.model)
        self._kernels.put_back()

    def served(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters as vLLM stores them, fused and sharded; see `WeightLoader`."""
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()

    def originals(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what can be read back out of the parameters, as it came; see `WeightLoader`."""
        return invert(self._report, dict(self.model.named_parameters(remove_duplicate=False)))

    @contextmanager
    def _context(self) -> Iterator[None]:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self._config), torch.device(self._worker.device), torch.no_grad():
            yield

    def _reset_derived_state(self) -> None:
        # vLLM does this after its own weight updates, but not inside the layerwise lifecycle.
        reset = getattr(self._worker.model_runner, "reset_lora_state", None)
        if reset is not None:
            reset()


def _require_complete(
    report: CoverageReport, allow_missing: Sequence[str], allow_unused: Sequence[str]
) -> None:
    unused = [n for n in report.unused if n not in report.tied and not _matches(n, allow_unused)]
    partly = {n: why for n, why in report.partly_read.items() if not _matches(n, allow_unused)}
    missing = {n: why for n, why in report.missing.items() if not _matches(n, allow_missing)}
    _refuse("vLLM refuses", report.refused)
    _refuse("the model does not use", dict.fromkeys(unused, "unknown to it"))
    _refuse("shapes do not fit", partly)
    _refuse("dtypes do not fit", report.mistyped)
    _refuse("parameters would not be filled", missing)
    _refuse("parameters would be written twice", report.overlapping)


def _refuse(what: str, reasons: dict[str, str]) -> None:
    if not reasons:
        return
    shown = [f"{name!r} ({why})" for name, why in list(reasons.items())[:MAX_NAMES_SHOWN]]
    more = len(reasons) - len(shown)
    raise ManifestError(
        f"{what}: {', '.join(shown)}" + (f" and {more} more" if more else ""),
        tensor=next(iter(reasons)),
        phase="manifest",
    )


def _require_supported(vllm_config: Any) -> None:
    if vllm_config.quant_config is not None:
        raise ConfigurationError(
            "checkpoint-engine refit does not update quantised models: start vLLM without quantization"
        )
    speculative = vllm_config.speculative_config
    if speculative is not None and getattr(speculative, "draft_model_config", None) is not None:
        raise ConfigurationError(
            "checkpoint-engine refit does not update draft models: start vLLM without a draft model"
        )
    if vllm_config.parallel_config.enable_eplb:
        raise ConfigurationError(
            "checkpoint-engine refit does not follow experts that vLLM copies or moves between ranks (EPLB): "
            "start vLLM with enable_eplb=False"
        )


def _count(casts: dict[str, str]) -> dict[str, int]:
    kinds = sorted(set(casts.values()))
    return {kind: list(casts.values()).count(kind) for kind in kinds}


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
