"""A second copy of a worker's model on the meta device, on which a refit is tried out without memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from weightsync.rollout.vllm.coverage import CoverageReport, RankPlace, build_report, meta_tensors
from weightsync.rollout.vllm.emulation import EnginePlace, config_at, on_meta, private_config, standing_at
from weightsync.rollout.vllm.tracer import LoadTracer
from weightsync.tensors import WeightManifest

_MAX_REFUSALS = 20
_MAX_REASON_CHARS = 200


class TrialModel:
    """The model of one vLLM worker without its memory; made once, tried as often as manifests change.

    Where ranks divide a model by layers or experts, a second trial model, of the whole, tells what is left to
    other ranks from what the model does not know.

    Args:
        vllm_config: the worker's configuration.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._config = private_config(vllm_config)
        with on_meta():
            self._model = _build_on_meta(self._config)
        self._place = rank_place(vllm_config)
        self._whole: _WholeModel | None = None
        self._divided = _is_divided(vllm_config)

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """The parameters by name, each storage once: shapes before any processing, and no memory."""
        return dict(self._model.named_parameters())

    def try_manifest(self, manifest: WeightManifest) -> CoverageReport:
        """Run ``load_weights`` on tensors of the manifest's shapes, and report what it did."""
        report = _try(self._model, self._config, manifest, self._place)
        if self._divided:
            self._whole = self._whole or _WholeModel(self._config)
            self._whole.settle(report)
        return report


class _WholeModel:
    """The model of a worker as it would be if one rank held all of it."""

    def __init__(self, config: Any) -> None:
        self._config = config_at(config, EnginePlace())
        with standing_at(EnginePlace()):
            self._model = _build_on_meta(self._config)

    def settle(self, report: CoverageReport) -> None:
        """Sort out what one rank left unread: what the whole model reads is some other rank's."""
        doubtful = {*report.unused, *report.partly_read}
        if report.manifest is None or not doubtful:
            return
        specs = (spec for spec in report.manifest.tensors if spec.name in doubtful)
        with standing_at(EnginePlace()):
            whole = _try(self._model, self._config, WeightManifest.build(specs), RankPlace())
        unknown = {*whole.unused, *whole.refused, *whole.partly_read}
        report.absent = [name for name in report.unused if name not in unknown]
        report.unused = [name for name in report.unused if name in whole.unused]
        report.refused.update(whole.refused)
        report.partly_read = whole.partly_read
        report.tied |= whole.tied


def _try(model: torch.nn.Module, config: Any, manifest: WeightManifest, place: RankPlace) -> CoverageReport:
    sources = meta_tensors(manifest)
    tracer, refused, known = _traced(model, config, sources)
    if known != set(dict(_stored(model))):  # some are made as their tensors come
        tracer, refused, _ = _traced(model, config, sources)
    report = build_report(manifest, tracer.writes, dict(model.named_parameters()), refused, place)
    report.reworked = frozenset(tracer.reworked)
    report.experts = expert_parameters(model)
    report.tied = _tied_names(model)
    return report


def _traced(
    model: torch.nn.Module, config: Any, sources: list[tuple[str, torch.Tensor]]
) -> tuple[LoadTracer, dict[str, str], set[str]]:
    """Load the sources; returns what was seen, what was refused, and the names of what was there before."""
    from vllm.config import set_current_vllm_config

    stored = _stored(model)
    tracer = LoadTracer(stored, sources)
    with on_meta(), set_current_vllm_config(config), torch.device("meta"), torch.no_grad(), tracer:
        refused = _feed(model, sources)
    tracer.note_replaced(_stored(model))
    return tracer, refused, {name for name, _ in stored}


def _stored(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _is_divided(vllm_config: Any) -> bool:
    """Whether tensors are left to ranks other than the tensor-parallel ones."""
    parallel = vllm_config.parallel_config
    ranks = max(parallel.pipeline_parallel_size, parallel.data_parallel_size)  # replicas may cut experts
    return bool(ranks > 1 or parallel.enable_expert_parallel)


def _tied_names(model: torch.nn.Module) -> frozenset[str]:
    """Return the further names of parameters that have several."""
    canonical = {name for name, _ in model.named_parameters()}
    return frozenset(name for name, _ in model.named_parameters(remove_duplicate=False)) - canonical


def expert_parameters(model: torch.nn.Module) -> frozenset[str]:
    """Return the names of the parameters that hold routed experts."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    return frozenset(
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if isinstance(module, RoutedExperts)
        for name, parameter in module.named_parameters()
        if parameter.ndim > 1  # a router's bias may be kept there, too
    )


def rank_place(vllm_config: Any) -> RankPlace:
    """Return where this worker stands in its engine."""
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return RankPlace(
        tp_rank=get_tensor_model_parallel_rank(), tp_size=vllm_config.parallel_config.tensor_parallel_size
    )


def _feed(model: Any, sources: list[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Load the sources; a tensor at which the model raises is noted, and loading goes on after it."""
    refused: dict[str, str] = {}
    current: list[tuple[str, torch.Tensor]] = []

    def items() -> Iterator[tuple[str, torch.Tensor]]:
        for source in sources:
            current[:] = [source]
            yield source
        current.clear()

    remaining = items()
    while len(refused) < _MAX_REFUSALS:
        try:
            model.load_weights(remaining)
        except Exception as error:  # noqa: BLE001 - what a model raises at a bad tensor is its own affair
            if not current:
                # The whole stream was read: the complaint is about what it lacks, and that is counted anyway.
                break
            name, tensor = current[0]
            refused[name] = f"{_form(tensor)}, {type(error).__name__}: {error}"[:_MAX_REASON_CHARS].rstrip(
                ": "
            )
        else:
            break
    return refused


def _form(tensor: torch.Tensor) -> str:
    """Say what was offered: a model's own complaint often does not."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _build_on_meta(config: Any) -> Any:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    dtype = config.model_config.dtype
    with set_current_vllm_config(config), torch.device("meta"), set_default_torch_dtype(dtype):
        return initialize_model(vllm_config=config)
