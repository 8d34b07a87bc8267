"""From strided views, as a load is traced, to pieces: which box of a tensor lands where in a parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weightsync.layout.pieces import Piece
from weightsync.layout.regions import Box, contiguous_strides


@dataclass(frozen=True, slots=True)
class View:
    """A strided view of a storage; units are elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def piece_from_copy(
    rank: int, shape: Sequence[int], read: View, into: View, *, extent: int, slot: int = 0
) -> Piece | None:
    """Return the piece that one copy fills.

    Args:
        rank: that copies.
        shape: of the whole tensor, which is contiguous.
        read: what is read of it.
        into: what is written of the parameter; the same shape.
        extent: elements of the parameter's storage.
        slot: of the parameter among the tensor's.

    Returns:
        The piece; `None` where what is read is no box of the tensor.
    """
    if read.shape != into.shape:
        return None
    lo = _unravel(read.offset, shape)
    whole = contiguous_strides(shape)
    sizes, strides = [1] * len(shape), list(whole)
    pending = [(n, r, w) for n, r, w in zip(read.shape, read.stride, into.stride, strict=True) if n > 1]
    for size, step, write in pending:
        found = _spread(size, step, shape, whole, lo)
        if found is None:
            return None
        for dim, part, factor in found:
            if sizes[dim] != 1:
                return None
            sizes[dim], strides[dim] = part, write * factor
    if any(first + size > limit for first, size, limit in zip(lo, sizes, shape, strict=True)):
        return None
    box = Box(tuple(lo), tuple(first + size for first, size in zip(lo, sizes, strict=True)))
    return Piece(rank, box, into.offset, tuple(strides), extent, slot)


def _spread(
    size: int, step: int, shape: Sequence[int], whole: Sequence[int], lo: Sequence[int]
) -> list[tuple[int, int, int]] | None:
    """Find the dimensions of a tensor that one dimension of a view runs along, the innermost first.

    Returns:
        Of each: which one, how many of its indices, and the view's steps from one to the next.
    """
    candidates = [dim for dim, stride in enumerate(whole) if stride == step and shape[dim] > 1]
    if not candidates:
        return None
    dim, factor, found = candidates[0], 1, []
    # A flattened view runs on into the next outer dimension, once it has all of this one.
    while size > shape[dim] - lo[dim]:
        if lo[dim] or size % shape[dim] or dim == 0:
            return None
        found.append((dim, shape[dim], factor))
        size, factor, dim = size // shape[dim], factor * shape[dim], dim - 1
    found.append((dim, size, factor))
    return found


def _unravel(position: int, shape: Sequence[int]) -> list[int]:
    index = []
    for size in reversed(shape):
        position, at = divmod(position, max(size, 1))
        index.append(at)
    return index[::-1]
