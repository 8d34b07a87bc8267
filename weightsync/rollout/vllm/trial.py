"""A second copy of a worker's model on the meta device, on which a refit is tried out without memory."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from weightsync.rollout.vllm.coverage import CoverageReport, RankPlace, build_report, meta_tensors
from weightsync.rollout.vllm.tracer import LoadTracer
from weightsync.tensors import WeightManifest

_MAX_REFUSALS = 20
_MAX_REASON_CHARS = 200


class TrialModel:
    """The model of one vLLM worker without its memory; made once, tried as often as manifests change.

    Args:
        vllm_config: the worker's configuration.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._config = _private_copy(vllm_config)
        self._model = _build_on_meta(self._config)
        self._place = rank_place(vllm_config)

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """The parameters by name, each storage once: shapes before any processing, and no memory."""
        return dict(self._model.named_parameters())

    def try_manifest(self, manifest: WeightManifest) -> CoverageReport:
        """Run ``load_weights`` on tensors of the manifest's shapes, and report what it did."""
        from vllm.config import set_current_vllm_config

        sources = meta_tensors(manifest)
        targets = [*self._model.named_parameters(), *self._model.named_buffers()]
        tracer = LoadTracer(targets, sources)
        with set_current_vllm_config(self._config), torch.device("meta"), torch.no_grad(), tracer:
            refused = _feed(self._model, sources)
        report = build_report(manifest, tracer.writes, self.parameters, refused, self._place)
        report.experts = expert_parameters(self._model)
        return report


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


def _private_copy(vllm_config: Any) -> Any:
    """Copy a configuration so that a second model does not enter itself into the first one's registries."""
    config = copy.copy(vllm_config)
    compilation = copy.copy(vllm_config.compilation_config)
    compilation.static_forward_context = {}
    compilation.static_all_moe_layers = []
    compilation.enabled_custom_ops = Counter()
    compilation.disabled_custom_ops = Counter()
    config.compilation_config = compilation
    return config
