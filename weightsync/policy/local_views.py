"""How one rank's part of a tensor lies in its memory, and which boxes of the tensor it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from weightsync.errors import ConfigurationError
from weightsync.layout.holdings import Ranges, local_ranges, placements_from_torch
from weightsync.layout.regions import Box, contiguous_strides
from weightsync.tensors import dtype_name


@dataclass(frozen=True)
class LocalView:
    """How a rank's part of a tensor lies in its memory: what its boxes follow from.

    Attributes:
        shape: of the whole tensor.
        local: shape of the local one.
        strides: of the local one, in elements.
        dtype: as it is stored.
        mesh: shape of the device mesh; `None` for a plain tensor.
        coordinate: of this rank in the mesh; `None` if it is not part of it.
        placements: as DTensor has them.
        fault: why the memory cannot be lent; empty if it can.
    """

    shape: tuple[int, ...]
    local: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    mesh: tuple[int, ...] | None = None
    coordinate: tuple[int, ...] | None = None
    placements: tuple[Any, ...] = ()
    fault: str = ""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> LocalView:
        """Look at a tensor."""
        local = local_tensor(tensor)
        fault = _memory_fault(local)
        strides = () if fault else tuple(local.stride())
        if not fault and local.is_contiguous():
            strides = contiguous_strides(local.shape)  # of sizes 1, torch may have any
        view = tuple(tensor.shape), tuple(local.shape), strides, local.dtype
        if not isinstance(tensor, DTensor):
            return cls(*view, fault=fault)
        mesh = tensor.device_mesh
        place = mesh.get_coordinate()
        coordinate = None if place is None else tuple(place)
        return cls(*view, tuple(mesh.shape), coordinate, tuple(tensor.placements), fault)

    def boxes(self) -> list[tuple[Box, int]]:
        """Return the boxes of the tensor that are here, each with its offset in the local memory.

        Raises:
            ConfigurationError: it cannot be said, or the memory cannot be lent.
        """
        if self.mesh is not None and self.coordinate is None:
            return []
        ranges, held = self._ranges(), self.placed()
        if 0 in held and 0 in self.local:
            return []  # the other sizes of an empty shard may be anything
        if held != self.local:
            raise ConfigurationError(
                f"its local tensor has shape {list(self.local)}, but as it is placed {list(held)}"
            )
        if self.fault:
            raise ConfigurationError(self.fault)
        return list(_boxes(ranges, self.strides))

    def placed(self) -> tuple[int, ...]:
        """Return the shape that the local tensor has, as the placements say.

        Raises:
            ConfigurationError: they do not say it.
        """
        return tuple(sum(hi - lo for lo, hi in runs) for runs in self._ranges())

    def _ranges(self) -> list[Ranges]:
        if self.mesh is None or self.coordinate is None:
            return [((0, size),) for size in self.shape]
        return local_ranges(self.shape, self.mesh, self.coordinate, placements_from_torch(self.placements))

    def __str__(self) -> str:
        placed = f", placed as {list(self.placements)}" if self.mesh is not None else ""
        return f"{dtype_name(self.dtype)}{list(self.local)} of {list(self.shape)}{placed}"


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a tensor: without a collective, a copy or autograd."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _memory_fault(local: torch.Tensor) -> str:
    if torch.nn.parameter.is_lazy(local) or local.is_meta:
        return "it has no values yet: it is lazy, or on the meta device"
    if hasattr(local, "__tensor_flatten__") or local.layout is not torch.strided or local.is_quantized:
        return f"its local tensor, a {type(local).__name__} ({local.layout}), has no plain memory"
    if local.is_conj() or local.is_neg():
        return "it is lazily conjugated or negated"
    if not local.is_contiguous() and not _is_dense(local.shape, local.stride()):
        return f"its memory has gaps: shape {list(local.shape)}, strides {list(local.stride())}"
    return ""


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements fill their memory, in any order of the dimensions."""
    filled = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1 and stride != filled:
            return False
        filled *= size
    return True


def _boxes(ranges: Sequence[Ranges], strides: Sequence[int]) -> Iterator[tuple[Box, int]]:
    starts = [list(accumulate((hi - lo for lo, hi in runs), initial=0)) for runs in ranges]
    for index in product(*(range(len(runs)) for runs in ranges)):
        chosen = [runs[at] for runs, at in zip(ranges, index, strict=True)]
        box = Box(tuple(lo for lo, _ in chosen), tuple(hi for _, hi in chosen))
        yield box, sum(start[at] * step for start, at, step in zip(starts, index, strides, strict=True))
