"""Which elements of a storage a strided view touches, and how many a set of views covers. No I/O.

A view becomes runs of consecutive elements. Counting their union is exact however the views overlap, and
costs a sort over the runs, not over the elements.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import numpy as np
import numpy.typing as npt
import torch

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Region:
    """Geometry of a strided view: elements, not bytes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Region:
        """Describe a tensor within its storage."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))

    @property
    def numel(self) -> int:
        """Elements of the view."""
        return prod(self.shape)

    def runs(self) -> tuple[_Ints, int]:
        """Return the first element of each run, shape ``(runs,)``, and the length that all runs have."""
        if self.numel == 0:
            return np.empty(0, np.int64), 0
        outer, length = self._split()
        starts = np.full(1, self.offset, np.int64)
        for count, step in outer:
            starts = (starts[:, None] + np.arange(count, dtype=np.int64) * step).reshape(-1)
        return starts, length

    def _split(self) -> tuple[list[tuple[int, int]], int]:
        """Split the dimensions into strided outer ones and one inner run."""
        # A set of elements does not depend on the order of the dimensions, nor on how often one is visited.
        dims = [(n, s) for n, s in zip(self.shape, self.stride, strict=True) if n > 1 and s != 0]
        dims.sort(key=lambda dim: dim[1])
        length, used = 1, 0
        for count, step in dims:
            if step != length:
                break
            length, used = length * count, used + 1
        return dims[used:], length


def first_index(region: Region, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index of the region's first element in a contiguous tensor of ``shape``."""
    return _unravel(region.offset, shape)


def last_index(region: Region, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index of the region's last element in a contiguous tensor of ``shape``."""
    span = sum((n - 1) * s for n, s in zip(region.shape, region.stride, strict=True))
    return _unravel(region.offset + span, shape)


@dataclass
class Cover:
    """A growing set of regions of one storage."""

    starts: list[_Ints] = field(default_factory=list)
    ends: list[_Ints] = field(default_factory=list)
    written: int = 0
    """Elements of all regions, counting each as often as it was added."""

    def add(self, region: Region) -> None:
        """Add a region."""
        starts, length = region.runs()
        self.starts.append(starts)
        self.ends.append(starts + length)
        self.written += region.numel

    def size(self) -> int:
        """Return how many different elements the regions cover."""
        if not self.starts:
            return 0
        starts, ends = np.concatenate(self.starts), np.concatenate(self.ends)
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], ends[order]
        reached = np.maximum.accumulate(np.concatenate(([np.int64(0)], ends[:-1])))
        return int(np.maximum(ends - np.maximum(starts, reached), 0).sum())


def _unravel(position: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        position, at = divmod(position, max(size, 1))
        index.append(at)
    return tuple(reversed(index))
