"""The layout of one side: for each tensor, which rank has which box of it, and where in its memory.

A `Pattern` says this once for all tensors that lie alike (every layer's ``q_proj``), so that a model of
45,000 tensors needs some hundreds of patterns. A `Layout` gives each tensor its pattern and its storages.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from weightsync.errors import ConfigurationError, ManifestError
from weightsync.layout.regions import Box, Ints, contiguous_strides
from weightsync.tensors import ALIGNMENT

ABSENT = -1


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What the planner needs to know of a tensor."""

    name: str
    shape: tuple[int, ...]
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return Box.whole(self.shape).numel * self.itemsize


@dataclass(frozen=True, slots=True)
class Piece:
    """One rank's box of a tensor, and where it lies in the rank's storage. Units are elements.

    Attributes:
        rank: who has it.
        box: which elements.
        offset: from the storage's first element to the box's first.
        strides: between neighbours along each dimension of the tensor; default: the box is contiguous.
        extent: size of the storage; default: just large enough for a contiguous box.
        slot: which of the tensor's storages it is; more than one where a tensor is stored twice.
    """

    rank: int
    box: Box
    offset: int = 0
    strides: tuple[int, ...] | None = None
    extent: int | None = None
    slot: int = 0


@dataclass(frozen=True)
class Pattern:
    """Pieces of a tensor as arrays, sorted by rank: ``(pieces,)``; boxes and strides ``(pieces, dims)``."""

    shape: tuple[int, ...]
    rank: Ints
    lo: Ints
    hi: Ints
    offset: Ints
    strides: Ints
    extent: Ints
    slot: Ints

    @classmethod
    def of(cls, shape: Sequence[int], pieces: Iterable[Piece]) -> Pattern:
        """Make a pattern; pieces without elements are left out.

        Raises:
            ConfigurationError: a piece lies outside the tensor.
        """
        whole = Box.whole(shape)
        kept = sorted((piece for piece in pieces if piece.box.numel), key=lambda piece: piece.rank)
        for piece in kept:
            if len(piece.box.lo) != len(shape) or not whole.contains(piece.box):
                raise ConfigurationError(f"{piece.box} is outside a tensor of shape {list(shape)}")
        dims = len(shape)
        strides = [piece.strides or contiguous_strides(piece.box.shape) for piece in kept]
        extents = [piece.offset + piece.box.numel if piece.extent is None else piece.extent for piece in kept]
        return cls(
            shape=tuple(shape),
            rank=_ints([piece.rank for piece in kept]),
            lo=_ints([piece.box.lo for piece in kept], dims),
            hi=_ints([piece.box.hi for piece in kept], dims),
            offset=_ints([piece.offset for piece in kept]),
            strides=_ints(strides, dims),
            extent=_ints(extents),
            slot=_ints([piece.slot for piece in kept]),
        )

    def __len__(self) -> int:
        return len(self.rank)

    def box(self, piece: int) -> Box:
        """Return the box of one piece."""
        return Box(tuple(self.lo[piece].tolist()), tuple(self.hi[piece].tolist()))

    def numel(self) -> Ints:
        """Return the elements of each piece, shape ``(pieces,)``."""
        sizes: Ints = np.prod(self.hi - self.lo, axis=1, dtype=np.int64)
        return sizes

    def content(self) -> Hashable:
        """Return a key that equal patterns share."""
        arrays = (self.rank, self.lo, self.hi, self.offset, self.strides, self.extent, self.slot)
        return self.shape, tuple(each.tobytes() for each in arrays)


@dataclass(frozen=True)
class Layout:
    """Where each tensor lies on each rank of one side.

    Attributes:
        side: ``"policy"`` or ``"rollout"``.
        ranks: number of ranks.
        tensors: in the order of the stream.
        patterns: those in use.
        pattern_of: index into ``patterns`` by tensor, `ABSENT` for tensors that no rank has; ``(tensors,)``.
        shift: elements to add to a pattern's offsets (not to its extents), by tensor; ``(tensors,)``.
        storages: names of the storages of each tensor, by slot.
    """

    side: str
    ranks: int
    tensors: Sequence[TensorInfo]
    patterns: Sequence[Pattern]
    pattern_of: Ints
    shift: Ints
    storages: Sequence[tuple[str, ...]]

    def storage_bytes(self, rank: int) -> dict[str, int]:
        """Return the bytes of each storage that a rank has, in the order of the stream."""
        pieces: dict[int, list[tuple[int, int]]] = {}
        for index, piece in self._pieces_of.get(rank, ()):
            pattern = self.patterns[index]
            pieces.setdefault(index, []).append((int(pattern.slot[piece]), int(pattern.extent[piece])))
        sizes: dict[str, int] = {}
        mine = np.flatnonzero(np.isin(self.pattern_of, list(pieces)))
        for tensor, index in zip(mine.tolist(), self.pattern_of[mine].tolist(), strict=True):
            names, itemsize = self.storages[tensor], self.tensors[tensor].itemsize
            for slot, extent in pieces[index]:
                name, nbytes = names[slot], extent * itemsize
                if sizes.get(name, -1) < nbytes:
                    sizes[name] = nbytes
        return sizes

    def virtual_addresses(self, rank: int) -> dict[str, int]:
        """Return a byte address for each storage of a rank, as if they lay in one buffer, aligned."""
        addresses, end = {}, 0
        for name, size in self.storage_bytes(rank).items():
            addresses[name] = end
            end += -(-size // ALIGNMENT) * ALIGNMENT
        return addresses

    def held_bytes(self) -> Ints:
        """Return the bytes of tensors that each rank has, shape ``(ranks,)``."""
        total = np.zeros(self.ranks, np.int64)
        for index, weight in self._weights().items():
            pattern = self.patterns[index]
            np.add.at(total, pattern.rank, pattern.numel() * weight)
        return total

    @cached_property
    def _pieces_of(self) -> dict[int, list[tuple[int, int]]]:
        """Patterns and pieces of each rank."""
        found: dict[int, list[tuple[int, int]]] = {}
        for index, pattern in enumerate(self.patterns):
            for piece, rank in enumerate(pattern.rank.tolist()):
                found.setdefault(rank, []).append((index, piece))
        return found

    def _weights(self) -> dict[int, int]:
        """Return, for each pattern, the item sizes of its tensors added up."""
        weights: dict[int, int] = {}
        for index, info in zip(self.pattern_of.tolist(), self.tensors, strict=True):
            if index != ABSENT:
                weights[index] = weights.get(index, 0) + info.itemsize
        return weights


@dataclass
class LayoutBuilder:
    """Collects the layout of one side, tensor by tensor, in the order of the stream."""

    side: str
    ranks: int
    tensors: list[TensorInfo] = field(default_factory=list)
    _patterns: list[Pattern] = field(default_factory=list)
    _index: dict[Hashable, int] = field(default_factory=dict)
    _pattern_of: list[int] = field(default_factory=list)
    _shift: list[int] = field(default_factory=list)
    _storages: list[tuple[str, ...]] = field(default_factory=list)

    def known(self, key: Hashable) -> int | None:
        """Return the index of the pattern that was added under a key, if any."""
        return self._index.get(key)

    def add_pattern(self, key: Hashable, pattern: Pattern) -> int:
        """Add a pattern under a key that only equal patterns share; returns its index."""
        index = self._index.setdefault(key, len(self._patterns))
        if index == len(self._patterns):
            self._patterns.append(pattern)
        return index

    def add(self, tensor: TensorInfo, pattern: int, *storages: str, shift: int = 0) -> None:
        """Add a tensor that lies as a pattern says; `ABSENT` for one that no rank has."""
        self.tensors.append(tensor)
        self._pattern_of.append(pattern)
        self._shift.append(shift)
        self._storages.append(storages or (tensor.name,))

    def add_pieces(self, tensor: TensorInfo, pieces: Iterable[Piece], *storages: str) -> None:
        """Add a tensor by its pieces; equal patterns are found and shared."""
        pattern = Pattern.of(tensor.shape, pieces)
        self.add(tensor, self.add_pattern(pattern.content(), pattern), *storages)

    def build(self) -> Layout:
        """Return the layout.

        Raises:
            ConfigurationError: a pattern has a rank that is outside the world.
        """
        for pattern in self._patterns:
            if len(pattern) and not (pattern.rank[0] >= 0 and pattern.rank[-1] < self.ranks):
                raise ConfigurationError(
                    f"the layout has {self.side} rank {int(pattern.rank[-1])} of {self.ranks}"
                )
        return Layout(
            side=self.side,
            ranks=self.ranks,
            tensors=tuple(self.tensors),
            patterns=tuple(self._patterns),
            pattern_of=_ints(self._pattern_of),
            shift=_ints(self._shift),
            storages=tuple(self._storages),
        )


def layout_from_pieces(
    side: str,
    ranks: int,
    tensors: Sequence[TensorInfo],
    pieces: Mapping[str, Sequence[Piece]],
    storages: Mapping[str, tuple[str, ...]] | None = None,
) -> Layout:
    """Make a layout from what ranks report, tensor by tensor.

    Args:
        side: ``"policy"`` or ``"rollout"``.
        ranks: number of ranks.
        tensors: in the order of the stream.
        pieces: by tensor name; tensors that no rank has may be left out.
        storages: names of a tensor's storages; default: one, with the tensor's own name.

    Raises:
        ManifestError: pieces of an unknown tensor.
    """
    builder = LayoutBuilder(side, ranks)
    unknown = set(pieces) - {info.name for info in tensors}
    if unknown:
        raise ManifestError("the layout has a tensor that the manifest lacks", tensor=min(unknown), side=side)
    for info in tensors:
        builder.add_pieces(info, pieces.get(info.name, ()), *(storages or {}).get(info.name, ()))
    return builder.build()


def _ints(values: Sequence[object], dims: int | None = None) -> Ints:
    array = np.array(values, dtype=np.int64)
    return array if dims is None else array.reshape(len(values), dims)
