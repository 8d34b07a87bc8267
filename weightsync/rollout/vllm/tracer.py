"""Watches a model's own ``load_weights`` run on the meta device: which tensor is written where.

Views keep storage, offset, shape and strides on the meta device, so each copy tells which region of which
named tensor lands in which region of which parameter, with no knowledge of the architecture. A value that is
computed from a tensor (a transform) is followed through its operations, without its geometry.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weightsync.rollout.vllm.regions import Region

_FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default)


@dataclass(frozen=True, slots=True)
class Write:
    """One write into a parameter."""

    target: str
    into: Region
    sources: frozenset[str]
    """Names of the tensors it came from; empty for a constant, as in padding."""
    read: Region | None
    """The region of the one source that was copied; `None` after a transform."""
    source_dtype: torch.dtype | None
    target_dtype: torch.dtype
    fill: float | None = None
    """The constant, where it is one and known."""


class LoadTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every write into known parameters while it is active.

    Args:
        targets: parameters and buffers by name; of names that share a storage the first one counts.
        sources: the tensors that are handed to ``load_weights``, by name; each with its own storage.
    """

    def __init__(
        self, targets: Iterable[tuple[str, torch.Tensor]], sources: Iterable[tuple[str, torch.Tensor]]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.writes: list[Write] = []
        self.reworked: set[str] = set()
        """Targets that were changed by what is neither a tensor nor a constant, as by their own values."""
        self._targets: dict[int, str] = {}
        for name, tensor in targets:
            self._targets.setdefault(_storage(tensor), name)
        self._sources = {_storage(tensor): name for name, tensor in sources}
        self._values: dict[int, torch.Tensor] = {}
        self._derived: dict[int, frozenset[str]] = {}
        self._alive: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, then note what it wrote."""
        kwargs = kwargs or {}
        out = self._run(func, args, kwargs)
        changed = list(_written(func, args, kwargs))
        if changed:
            self._note_writes(func, changed, args, kwargs)
        else:
            self._note_outputs(out, (args, kwargs))
        return out

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _lacks_memory(func, args):
            return args[0]
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            args = (self._values_of(args[0]), *args[1:])
        out = func(*args, **kwargs)
        if func is torch.ops.aten._to_copy.default and out.is_meta and not args[0].is_meta:
            # Loaders move small tables, as of the experts of a rank, beside the tensors, and read them there.
            self._values[_storage(out)] = args[0].contiguous()
            self._alive.append(out)
        return out

    def _values_of(self, tensor: torch.Tensor) -> torch.Tensor:
        values = self._values.get(_storage(tensor))
        if values is None:
            return tensor
        return values.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def note_replaced(self, targets: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Note the targets that were given other memory instead of being written to, once all is loaded."""
        known = set(self._targets.values())
        for name, tensor in targets:
            names = self._lineage([tensor]) if name in known else frozenset()
            if names and _storage(tensor) not in self._targets:
                into = Region.of(tensor)
                self.writes.append(Write(name, into, names, None, None, tensor.dtype))

    def _note_writes(
        self, func: Any, changed: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        givers = [leaf for leaf in inputs if not any(leaf is target for target in changed)]
        names = self._lineage(givers)
        for target in changed:
            name = self._targets.get(_storage(target))
            if name is None:
                self._derive(target, names | self._lineage([target]))
            elif names or func in _FILLS:
                write = self._write(func, name, target, givers, names)
                self.writes.append(write if names else replace(write, fill=_constant(func, args)))
            else:
                self.reworked.add(name)

    def _write(
        self, func: Any, name: str, target: torch.Tensor, givers: list[torch.Tensor], names: frozenset[str]
    ) -> Write:
        source = givers[0] if names and func is torch.ops.aten.copy_.default else None
        direct = source is not None and _storage(source) in self._sources
        return Write(
            target=name,
            into=Region.of(target),
            sources=names,
            read=Region.of(source) if source is not None and direct else None,
            source_dtype=source.dtype if source is not None else None,
            target_dtype=target.dtype,
        )

    def _note_outputs(self, out: Any, args: tuple[Any, ...]) -> None:
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        fresh = [leaf for leaf in results if not self._knows(_storage(leaf))]
        if fresh:
            names = self._lineage(leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
            for leaf in fresh:
                self._derive(leaf, names)

    def _derive(self, tensor: torch.Tensor, names: frozenset[str]) -> None:
        key = _storage(tensor)
        if names and key not in self._sources:
            self._derived[key] = names
            # A storage that is freed gives its address to the next one, which would inherit the names.
            self._alive.append(tensor)

    def _knows(self, key: int) -> bool:
        return key in self._sources or key in self._targets or key in self._derived

    def _lineage(self, tensors: Iterable[torch.Tensor]) -> frozenset[str]:
        names: set[str] = set()
        for tensor in tensors:
            key = _storage(tensor)
            if key in self._sources:
                names.add(self._sources[key])
            names |= self._derived.get(key, frozenset())
        return frozenset(names)


def _constant(func: Any, args: tuple[Any, ...]) -> float | None:
    if func is torch.ops.aten.zero_.default:
        return 0.0
    return float(args[1]) if func is torch.ops.aten.fill_.Scalar else None


def _lacks_memory(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operation copies into a tensor that insists on memory what has none."""
    if func is not torch.ops.aten.copy_.default:
        return False
    return bool(args[1].is_meta and not args[0].is_meta)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operation changes in place."""
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
