"""What policy ranks hold of a tensor that is placed on a mesh of devices, as DTensor places it.

Placements are read left to right, one a mesh dimension. `Sharded` cuts as ``torch.chunk`` does: the last
shards may be smaller, or empty. With a ``split_factor`` above 1 it is DTensor's strided shard: FSDP2 over a
tensor that tensor parallelism has already cut along the same dimension. Such a shard may be several boxes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np

from weightsync.errors import ConfigurationError
from weightsync.layout.pieces import Piece
from weightsync.layout.regions import Box, Ints, contiguous_strides

Ranges = tuple[tuple[int, int], ...]
"""Index ranges along one dimension, in the order in which the local tensor has them."""


@dataclass(frozen=True, slots=True)
class Sharded:
    """Cut along a dimension of the tensor, over one dimension of the mesh."""

    dim: int
    split_factor: int = 1


@dataclass(frozen=True, slots=True)
class Replicated:
    """Whole on every rank of one dimension of the mesh."""


Placed = Sharded | Replicated


def placements_from_torch(placements: Iterable[Any]) -> tuple[Placed, ...]:
    """Return placements of a ``torch.distributed.tensor.DTensor`` in the planner's terms.

    Raises:
        ConfigurationError: a partial or unknown placement, whose values no rank holds.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    placed: list[Placed] = []
    for each in placements:
        if isinstance(each, _StridedShard):
            placed.append(Sharded(each.dim, int(each.split_factor)))
        elif isinstance(each, Shard):
            placed.append(Sharded(each.dim))
        elif isinstance(each, Replicate):
            placed.append(Replicated())
        else:
            raise ConfigurationError(
                f"no rank holds the values of a tensor placed as {each}; redistribute it to Shard or "
                "Replicate"
            )
    return tuple(placed)


def dtensor_pieces(shape: Sequence[int], mesh: Ints, placements: Sequence[Placed]) -> list[Piece]:
    """Return what each rank of a mesh holds, in contiguous local tensors.

    Args:
        shape: of the whole tensor.
        mesh: ranks, one array dimension for each mesh dimension.
        placements: one for each mesh dimension.

    Raises:
        ConfigurationError: not as many placements as mesh dimensions, or a dimension that the tensor lacks.
    """
    if len(placements) != mesh.ndim:
        raise ConfigurationError(
            f"{len(placements)} placements do not fit a mesh of {mesh.ndim} dimensions; write one for each"
        )
    pieces: list[Piece] = []
    for coordinate in np.ndindex(*mesh.shape):
        ranges = local_ranges(shape, mesh.shape, coordinate, placements)
        pieces.extend(box_pieces(int(mesh[coordinate]), ranges))
    return pieces


def local_ranges(
    shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placed]
) -> list[Ranges]:
    """Return the index ranges that one rank holds, for each dimension of the tensor."""
    ranges: list[Ranges] = [((0, size),) for size in shape]
    for size, index, placed in zip(mesh, coordinate, placements, strict=True):
        if isinstance(placed, Replicated):
            continue
        dim = placed.dim + len(shape) if placed.dim < 0 else placed.dim
        if not 0 <= dim < len(shape):
            raise ConfigurationError(f"a tensor of shape {list(shape)} cannot be sharded along {placed.dim}")
        parts = [_chunk(ranges[dim], placed.split_factor, part) for part in range(placed.split_factor)]
        ranges[dim] = _merged(run for part in parts for run in _chunk(part, size, index))
    return ranges


def box_pieces(rank: int, ranges: Sequence[Ranges]) -> list[Piece]:
    """Return the boxes of a contiguous local tensor that has these index ranges."""
    local = tuple(sum(hi - lo for lo, hi in runs) for runs in ranges)
    strides, extent = contiguous_strides(local), prod(local)
    starts = [np.cumsum([0, *(hi - lo for lo, hi in runs)]).tolist() for runs in ranges]
    pieces = []
    for index in product(*(range(len(runs)) for runs in ranges)):
        chosen = [runs[at] for runs, at in zip(ranges, index, strict=True)]
        box = Box(tuple(lo for lo, _ in chosen), tuple(hi for _, hi in chosen))
        offset = sum(start[at] * stride for start, at, stride in zip(starts, index, strides, strict=True))
        pieces.append(Piece(rank, box, offset, strides, extent))
    return pieces


def chunk_bounds(size: int, chunks: int, index: int) -> tuple[int, int]:
    """Return the first index of a chunk and the one after its last, as ``torch.chunk`` cuts."""
    width = -(-size // chunks)
    return min(index * width, size), min((index + 1) * width, size)


def _chunk(ranges: Ranges, chunks: int, index: int) -> Ranges:
    """Cut the elements of index ranges into chunks, and return one of them."""
    start, end = chunk_bounds(sum(hi - lo for lo, hi in ranges), chunks, index)
    found, position = [], 0
    for lo, hi in ranges:
        first, last = max(start - position, 0), min(end - position, hi - lo)
        if first < last:
            found.append((lo + first, lo + last))
        position += hi - lo
    return tuple(found)


def _merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for lo, hi in ranges:
        if merged and merged[-1][1] == lo:
            merged[-1] = (merged[-1][0], hi)
        else:
            merged.append((lo, hi))
    return tuple(merged)
