"""Loads a weight stream into the model of one vLLM worker, through vLLM's own reload lifecycle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch

from weightsync.engines.base import ParameterBatch
from weightsync.errors import ConfigurationError, LifecycleError, ManifestError
from weightsync.rollout.loader import Batch
from weightsync.rollout.vllm import reload
from weightsync.rollout.vllm.coverage import CoverageReport
from weightsync.rollout.vllm.cpu import ExpertKernels, is_cpu_platform, repack_embeddings
from weightsync.rollout.vllm.destinations import VllmDestinations
from weightsync.rollout.vllm.inverse import invert
from weightsync.rollout.vllm.layout import rank_layout
from weightsync.rollout.vllm.trial import TrialModel
from weightsync.tensors import MAX_NAMES_SHOWN, WeightManifest, list_names

_FUSED_EXPERTS = ("*.experts.gate_up_proj", "*.experts.down_proj")
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
        self._memory: VllmDestinations | None = None
        self._open = False
        self._reloading = False
        self._parameters = reload.ParameterReload()
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
        if self._open:  # the engine announced no manifest: this one is made of what came
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

    def layout(self, manifest: WeightManifest, sharding: str) -> VllmDestinations:
        """Return what this rank stores of the tensors, and where; see `RegionLoader`."""
        report = self.coverage(manifest)
        _require_complete(report, self._allow_missing, self._allow_unused)
        if self._trial is None:
            raise LifecycleError("a manifest was tried without a trial model", phase="layout")
        layout = rank_layout(report, self._trial.parameters, sharding=sharding)
        why = _why_memory_is_exchanged(self._config)
        self._memory = VllmDestinations(manifest, layout, lambda: self.model, why_none_in_place=why)
        return self._memory

    def passes_over(self, name: str) -> bool:
        """Whether a tensor has another name here or may be unused; see `RegionLoader`."""
        tied = any(name in report.tied for report in self._checked.values())
        return tied or _matches(name, self._allow_unused)

    def begin(self) -> None:
        """Start a refit; the model is set aside for reloading when something needs it; see `WeightLoader`."""
        self.notes = {"detached_bytes": 0}
        # Used once: a stream without a manifest must not be judged by an earlier one's.
        self._report, self._next_report = self._next_report, CoverageReport()
        self._open, self._reloading = True, False
        if self._memory is None:
            with self._context():
                self._begin_reload()

    def load(self, batch: Batch) -> None:
        """Load a batch, and copy what vLLM defers out of its memory; see `WeightLoader`."""
        # A tied output layer's own name: vLLM takes it only beside the embedding, in the same call.
        skipped = frozenset((*self._report.unused, *self._report.absent))
        used = [(name, tensor) for name, tensor in batch if name not in skipped]
        with self._context():
            self._begin_reload()
            if used:
                self.model.load_weights(iter(used))  # type: ignore[operator]
            self._detach(used)

    def load_parameters(self, batch: ParameterBatch) -> None:
        """Load parameters of this rank as vLLM's own loaders would fill them; see `RegionLoader`."""
        if self._memory is None:
            raise LifecycleError("parameters came before layout", side="rollout", phase="load")
        with self._context():
            for name, value in batch:
                self._memory.require_fit(name, value)
                if name in self._memory.handed_over:
                    self._begin_reload()
                layer, last = self._memory.owner(name)
                copier = self._memory.copier(name)
                if name in self._memory.handed_over:
                    self._parameters.load(layer, last, value, copier)
                else:
                    copier(getattr(layer, last), value)
            self._detach(batch)

    def finish(self) -> None:
        """End the reload; see `WeightLoader`.

        Raises:
            ManifestError: vLLM did not take tensors that it was given.
        """
        with self._context():
            if self._reloading:
                self._end_reload()
            else:
                reload.process_attention(self.model, self._config.model_config)
            self._repack()
        self._open = self._reloading = False
        self._reset_derived_state()
        self.notes["casts"] = _count(self._report.casts)

    def abort(self) -> None:
        """Give unfinished layers their old weights back; see `WeightLoader`.

        What was written in place keeps what it has.
        """
        with self._context():
            if self._reloading:
                reload.abandon_reload(self.model, self._config.model_config)
            self._parameters.put_back()
            self._repack()
        self._open = self._reloading = False
        self._kernels.put_back()

    def served(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters as vLLM stores them, fused and sharded; see `WeightLoader`."""
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()

    def originals(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what can be read back out of the parameters, as it came; see `WeightLoader`."""
        return invert(self._report, dict(self.model.named_parameters(remove_duplicate=False)))

    def _begin_reload(self) -> None:
        """Set the model aside, but for what is written in place; once in a refit."""
        if self._reloading:
            return
        self._reloading = True
        in_place = self._layers_in_place()  # while they still have the parameters by which they are known
        self._kernels.take(self.model)
        reload.begin_reload(self.model)
        reload.release_layers(in_place)

    def _layers_in_place(self) -> list[torch.nn.Module]:
        return [] if self._memory is None else self._memory.layers_in_place()

    def _end_reload(self) -> None:
        lost = [name for name in reload.unloaded_parameters(self.model) if name in self._report.written]
        if lost:
            raise ManifestError(f"vLLM took nothing for {list_names(lost)}", tensor=lost[0], phase="load")
        reload.finish_reload(self.model, self._config.model_config)
        self._parameters.put_back()
        self._kernels.put_back()

    def _repack(self) -> None:
        repack_embeddings(self.model, self._layers_in_place())

    def _detach(self, batch: Batch) -> None:
        storages = {tensor.untyped_storage().data_ptr() for _, tensor in batch}
        self.notes["detached_bytes"] += reload.detach_deferred(self.model, storages - {0})

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
    fused = any(_matches(name, _FUSED_EXPERTS) for name in reasons)
    hint = (
        "; experts that the policy keeps fused are sent one by one with split_experts=True" if fused else ""
    )
    raise ManifestError(
        f"{what}: {', '.join(shown)}" + (f" and {more} more" if more else "") + hint,
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


def _why_memory_is_exchanged(vllm_config: Any) -> str | None:
    """Say why the memory of parameters may be other memory later, though it keeps its addresses."""
    if vllm_config.model_config.enable_sleep_mode and not is_cpu_platform():
        # Nobody would notice: what was registered with a transport is the memory, not its address.
        return "vLLM's sleep mode gives its memory back and puts other memory in its place"
    return None


def _count(casts: dict[str, str]) -> dict[str, int]:
    kinds = sorted(set(casts.values()))
    return {kind: list(casts.values()).count(kind) for kind in kinds}


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
