"""The seam to vLLM's layerwise reload: the only module that touches its bookkeeping.

vLLM defers writing a layer until all of its tensors came, and keeps them until then: also those that view
a transfer buffer, which its owner is about to overwrite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from weightsync.errors import LifecycleError

Copier = Callable[[torch.Tensor, torch.Tensor], None]
"""Copies a whole value (second) into a parameter (first)."""


def begin_reload(model: torch.nn.Module) -> None:
    """Set a model aside for reloading. Its layers hold no weights until they are loaded or given back."""
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    initialize_layerwise_reload(model)


def release_layers(layers: Iterable[torch.nn.Module]) -> None:
    """Take layers out of a reload that has begun: they keep their weights and may be written to."""
    from vllm.model_executor.model_loader.reload.layerwise import (
        _get_original_loader,
        _place_kernel_tensors,
        get_layerwise_info,
    )

    for layer in layers:
        info = get_layerwise_info(layer)
        if not info.can_load():
            continue
        _place_kernel_tensors(layer, info)
        info.reset()
        for parameter in layer.parameters(recurse=False):
            # Some stay with their layer during a reload, and would go on noting what they are given.
            setattr(parameter, "weight_loader", _get_original_loader(parameter))  # noqa: B010


class ParameterReload:
    """Puts whole parameters, as their rank stores them, into a model that is being reloaded.

    vLLM counts, defers, processes and copies them as it does with what its own loaders take.
    """

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, Callable[..., Any]]] = []

    def load(self, layer: torch.nn.Module, name: str, value: torch.Tensor, copier: Copier) -> None:
        """Load one parameter of a layer. vLLM may keep ``value`` until the layer is complete.

        Raises:
            LifecycleError: the layer is not being reloaded, or is complete.
        """
        from vllm.model_executor.model_loader.reload.layerwise import (
            _get_original_loader,
            get_layerwise_info,
            make_online_process_loader,
        )
        from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS

        if name in SKIP_LOAD_TENSORS:  # these stay with their layer, and vLLM does not count them
            copier(getattr(layer, name), value)
            return
        if not get_layerwise_info(layer).can_load():
            raise LifecycleError(f"vLLM takes nothing more for {type(layer).__name__}", phase="load")
        parameter: Any = getattr(layer, name)
        self._replaced.append((parameter, _get_original_loader(parameter)))
        parameter.weight_loader = copier
        parameter.weight_loader = make_online_process_loader(layer, name)
        parameter.weight_loader(parameter, value)

    def put_back(self) -> None:
        """Give the parameters their own loaders back, when the reload has ended."""
        for parameter, loader in self._replaced:
            parameter.weight_loader = loader
        self._replaced = []


def process_attention(model: torch.nn.Module, model_config: Any) -> None:
    """Make anew what attention layers derive from weights, as the end of a reload does."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    for layer in model.modules():
        if is_deferred_attention_layer(layer):
            layer.process_weights_after_loading(model_config.dtype)  # type: ignore[operator]


def finish_reload(model: torch.nn.Module, model_config: Any) -> None:
    """Process what is still deferred, and give layers that got nothing their old weights back."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    finalize_layerwise_reload(model, model_config)


def abandon_reload(model: torch.nn.Module, model_config: Any) -> None:
    """Drop everything deferred, so that unfinished layers get their old weights back."""
    for _, info in _pending(model):
        info.loaded_weights.clear()
        info.load_numel = 0
    finish_reload(model, model_config)


def detach_deferred(model: torch.nn.Module, storages: set[int]) -> int:
    """Copy deferred tensors out of borrowed memory.

    Args:
        model: a model that is being reloaded.
        storages: data pointers of the storages that are about to be given back.

    Returns:
        Bytes that were copied.
    """
    copied = 0
    for _, info in _pending(model):
        for _, bound in info.loaded_weights:
            for key, value in bound.arguments.items():
                detached, size = _detached(value, storages)
                copied += size
                if size:
                    bound.arguments[key] = detached
    return copied


def unloaded_parameters(model: torch.nn.Module) -> list[str]:
    """Return the parameters of layers that got nothing since the reload began."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, module, info in _pending_named(model)
        if not info.load_numel and not is_deferred_attention_layer(module)
        for name in module._parameters
    ]


def _detached(value: Any, storages: set[int]) -> tuple[Any, int]:
    if isinstance(value, torch.Tensor):
        if value.is_meta or value.untyped_storage().data_ptr() not in storages:
            return value, 0
        return value.clone(), value.numel() * value.element_size()
    if isinstance(value, dict):
        pairs = {key: _detached(item, storages) for key, item in value.items()}
        return {key: item for key, (item, _) in pairs.items()}, sum(size for _, size in pairs.values())
    if isinstance(value, list | tuple):
        items = [_detached(item, storages) for item in value]
        parts = [item for item, _ in items]
        named = isinstance(value, tuple) and hasattr(value, "_fields")
        return type(value)(*parts) if named else type(value)(parts), sum(size for _, size in items)
    return value, 0


def _pending(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, Any]]:
    for _, module, info in _pending_named(model):
        yield module, info


def _pending_named(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, Any]]:
    """Yield the layers that are not completely loaded, with vLLM's record of each."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for name, module in model.named_modules():
        info = get_layerwise_info(module)
        if info.can_load():
            yield name, module, info
