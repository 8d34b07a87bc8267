"""Which of vLLM's layers compute with their parameters as the model's loader filled them.

What vLLM does to a layer after loading depends on the platform and on the kernels it chose; both are read
from the layer that runs. A layer that is not known here counts as processed.
"""

from __future__ import annotations

from typing import Any

import torch

from weightsync.rollout.vllm.cpu import is_cpu_platform


def why_not_as_loaded(layer: torch.nn.Module) -> str | None:
    """Say what vLLM does to a layer's parameters after they are loaded; `None` if nothing."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    if is_deferred_attention_layer(layer):
        return "attention layers are processed last"
    method: Any = getattr(layer, "quant_method", None)
    if not isinstance(method, QuantizeMethodBase):
        return None  # vLLM's reload copies such a layer's parameters and does nothing else
    if is_cpu_platform():
        return None if _is_embedding(layer) else "vLLM packs it on a CPU"
    if not _is_known_platform():
        return "what vLLM does to it on this platform is not known"
    return _why_not_on_gpu(layer, method)


def _is_embedding(layer: torch.nn.Module) -> bool:
    """Whether a layer keeps its parameter beside the packed copy, which is then made anew from it."""
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        UnquantizedEmbeddingMethod,
        VocabParallelEmbedding,
    )

    return (
        isinstance(layer, VocabParallelEmbedding) and type(layer.quant_method) is UnquantizedEmbeddingMethod
    )


def _is_known_platform() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda_alike() or current_platform.is_xpu())


def _why_not_on_gpu(layer: torch.nn.Module, method: Any) -> str | None:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    if type(method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        return None
    if type(method) is UnquantizedFusedMoEMethod:
        return _why_not_experts(layer, method)
    return f"{type(method).__name__} processes it"


def _why_not_experts(layer: Any, method: Any) -> str | None:
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    backend = method.unquantized_backend
    if backend is not UnquantizedMoeBackend.TRITON or method.moe_kernel is None:
        return f"the kernels of {backend.value} take experts in a form of their own"
    if layer.moe_config.moe_parallel_config.enable_eplb:
        return "its experts are moved between ranks"
    return None
