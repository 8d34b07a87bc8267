"""Boxes of a tensor: intersection, difference, and what a set of boxes leaves uncovered.

A box is a product of half-open index ranges, one for each dimension; of a scalar it has none and one element.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Box:
    """The elements with ``lo[d] <= index[d] < hi[d]`` in every dimension ``d``."""

    lo: tuple[int, ...]
    hi: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes; none is negative."""
        return tuple(max(end - start, 0) for start, end in zip(self.lo, self.hi, strict=True))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def contains(self, other: Box) -> bool:
        """Whether every element of ``other`` is in this box."""
        inside = all(a <= b for a, b in zip(self.lo, other.lo, strict=True))
        return other.numel == 0 or (inside and all(a >= b for a, b in zip(self.hi, other.hi, strict=True)))

    def intersection(self, other: Box) -> Box | None:
        """Return the elements that are in both; `None` if there are none."""
        lo = tuple(max(a, b) for a, b in zip(self.lo, other.lo, strict=True))
        hi = tuple(min(a, b) for a, b in zip(self.hi, other.hi, strict=True))
        both = Box(lo, hi)
        return both if both.numel else None

    def difference(self, other: Box) -> list[Box]:
        """Return disjoint boxes of the elements that are in this box and not in ``other``."""
        common = self.intersection(other)
        if common is None:
            return [self] if self.numel else []
        rest, lo, hi = [], list(self.lo), list(self.hi)
        for dim in range(len(lo)):
            if lo[dim] < common.lo[dim]:
                rest.append(Box(tuple(lo), (*hi[:dim], common.lo[dim], *hi[dim + 1 :])))
            if common.hi[dim] < hi[dim]:
                rest.append(Box((*lo[:dim], common.hi[dim], *lo[dim + 1 :]), tuple(hi)))
            lo[dim], hi[dim] = common.lo[dim], common.hi[dim]
        return rest

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.lo, self.hi, strict=True)) + "]"


def uncovered(whole: Box, boxes: Iterable[Box]) -> list[Box]:
    """Return disjoint boxes of the elements of ``whole`` that none of ``boxes`` has."""
    rest = [whole] if whole.numel else []
    for box in boxes:
        rest = [piece for part in rest for piece in part.difference(box)]
    return rest


def disjoint_cells(boxes: Sequence[Box]) -> list[tuple[Box, list[int]]]:
    """Cut boxes that may overlap into disjoint cells, each with the indices of the boxes that contain it."""
    cells: list[tuple[Box, list[int]]] = []
    for index, box in enumerate(boxes):
        kept: list[tuple[Box, list[int]]] = []
        for cell, holders in cells:
            common = cell.intersection(box)
            if common is None:
                kept.append((cell, holders))
                continue
            kept.append((common, [*holders, index]))
            kept.extend((part, holders) for part in cell.difference(box))
        kept.extend((part, [index]) for part in uncovered(box, [cell for cell, _ in cells]))
        cells = kept
    return cells


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a row-major tensor."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)


def intersect_all(lo_a: Ints, hi_a: Ints, lo_b: Ints, hi_b: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Intersect every box of one list with every box of another.

    Args:
        lo_a: of the first list, shape ``(a, dims)``.
        hi_a: likewise.
        lo_b: of the second list, shape ``(b, dims)``.
        hi_b: likewise.

    Returns:
        Of each pair that has elements in common: its index in the first list and in the second, shape
        ``(pairs,)``, and the common box, shape ``(pairs, dims)`` each; ordered by the first list.
    """
    meet = np.ones((len(lo_a), len(lo_b)), dtype=bool)
    for dim in range(lo_a.shape[1]):
        start = np.maximum(lo_a[:, None, dim], lo_b[None, :, dim])
        meet &= start < np.minimum(hi_a[:, None, dim], hi_b[None, :, dim])
    first, second = np.nonzero(meet)
    return first, second, np.maximum(lo_a[first], lo_b[second]), np.minimum(hi_a[first], hi_b[second])
