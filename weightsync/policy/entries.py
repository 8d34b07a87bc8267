"""What a model holds, under the names of its Hugging Face checkpoint. No collectives, no copies.

Modules are walked as they are nested, so a wrapper is left out of a name because it *is* a wrapper, never
because a name looks like one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from weightsync.errors import ConfigurationError, ManifestError

_WRAPPED = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


@dataclass(frozen=True)
class StateEntry:
    """One parameter or persistent buffer: its name and where it lives.

    The tensor is looked up when it is wanted: an optimizer or a reload may have put another in its place.
    """

    name: str
    owner: nn.Module
    key: str
    is_buffer: bool

    def tensor(self) -> torch.Tensor:
        """Return the tensor that is there now.

        Raises:
            ManifestError: it was removed from the model.
        """
        held = self.owner._buffers if self.is_buffer else self.owner._parameters
        value = held.get(self.key)
        if value is None:
            raise ManifestError("the model no longer has this tensor", tensor=self.name)
        return value


def state_entries(model: nn.Module, *, include_buffers: bool = True) -> list[StateEntry]:
    """List parameters and persistent buffers, module by module, in the order of registration.

    Shared tensors are listed under each of their names.

    Raises:
        ConfigurationError: the model is wrapped in FSDP 1, whose parameters are not single tensors.
    """
    entries = []
    for prefix, module in named_modules_unwrapped(model):
        for key, value in module._parameters.items():
            if value is not None:
                entries.append(StateEntry(prefix + key, module, key, is_buffer=False))
        if include_buffers:
            entries.extend(_persistent_buffers(prefix, module))
    return entries


def named_modules_unwrapped(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield every module with its name prefix (ending in a dot), wrappers left out of the prefix."""
    if any(base.__name__ == "FullyShardedDataParallel" for base in type(model).__mro__):
        raise ConfigurationError(
            f"{prefix.rstrip('.') or 'the model'} is wrapped in FullyShardedDataParallel (FSDP 1), "
            "which is not supported; shard the model with torch.distributed.fsdp.fully_shard"
        )
    yield prefix, model
    for key, child in model._modules.items():
        if child is not None:
            step = "" if _is_wrapper(model, key) else f"{key}."
            yield from named_modules_unwrapped(child, prefix + step)


def _is_wrapper(module: nn.Module, child: str) -> bool:
    if child == "module":
        return isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel)
    return child in _WRAPPED


def _persistent_buffers(prefix: str, module: nn.Module) -> Iterator[StateEntry]:
    for key, value in module._buffers.items():
        if value is not None and key not in module._non_persistent_buffers_set:
            yield StateEntry(prefix + key, module, key, is_buffer=True)
