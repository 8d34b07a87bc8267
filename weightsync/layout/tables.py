"""What one rank tells of the tensors of a manifest: which boxes it has, and where in its memory. No I/O.

Every worker hands its table to all others when they connect; `joining` makes one side's `Layout` of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from weightsync.errors import ConfigurationError, ManifestError
from weightsync.layout.pieces import ABSENT
from weightsync.layout.regions import Box, Ints, contiguous_strides
from weightsync.tensors import MAX_DIMENSIONS, MAX_NAME_CHARS, WeightManifest, dtype_from_name

MAX_TABLE_ENTRIES = 1 << 22
MAX_TABLE_BYTES = 256 << 20
"""Of a table when it is unpacked: what compressed bytes claim to be is bounded."""

_MOST_BYTES = 1 << 56
"""Of all storages of a rank: offsets in them have to fit an int64, with room to reckon with them."""
_Size = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
_Sizes = Annotated[tuple[_Size, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
_Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]


class Storage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One contiguous piece of a rank's memory: a local shard, or a parameter as it is served."""

    name: _Name
    shape: _Sizes
    dtype: Annotated[str, msgspec.Meta(max_length=64)]

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.numel * dtype_from_name(self.dtype).itemsize


class Held(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A box of a tensor within a storage; units are elements, ``slot`` counts the tensor's storages."""

    lo: _Sizes
    hi: _Sizes
    offset: _Size
    strides: _Sizes
    slot: _Size = 0


_Pattern = Annotated[tuple[Held, ...], msgspec.Meta(max_length=MAX_TABLE_ENTRIES)]


class RankTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank holds (policy) or stores (rollout) of each tensor of a manifest.

    Attributes:
        manifest: its digest.
        storages: of this rank.
        patterns: those in use; tensors that lie alike share one.
        pattern_of: index into ``patterns`` by tensor, `ABSENT` for what this rank has nothing of.
        slots: by tensor, its storages: indices into ``storages``.
        whole: tensors that cannot be moved by regions here, by name, with the reason.
    """

    manifest: Annotated[str, msgspec.Meta(max_length=64)]
    storages: Annotated[tuple[Storage, ...], msgspec.Meta(max_length=MAX_TABLE_ENTRIES)]
    patterns: Annotated[tuple[_Pattern, ...], msgspec.Meta(max_length=MAX_TABLE_ENTRIES)]
    pattern_of: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=ABSENT)], ...], msgspec.Meta(max_length=MAX_TABLE_ENTRIES)
    ]
    slots: Annotated[tuple[tuple[_Size, ...], ...], msgspec.Meta(max_length=MAX_TABLE_ENTRIES)]
    whole: dict[_Name, str]

    def encode(self) -> bytes:
        """Return the table as bytes: compressed, since every worker is handed those of all."""
        return zlib.compress(msgspec.msgpack.encode(self), 1)

    @classmethod
    def decode(cls, data: bytes) -> RankTable:
        """Read `encode`'s bytes.

        Raises:
            ConfigurationError: they are damaged, or the table contradicts itself.
        """
        try:
            plain = zlib.decompressobj()
            table = msgspec.msgpack.decode(plain.decompress(data, MAX_TABLE_BYTES), type=cls)
        except (zlib.error, msgspec.ValidationError, msgspec.DecodeError) as error:
            raise _damaged(str(error)) from error
        if not plain.eof or plain.unused_data:
            raise _damaged("it does not end where it should")
        table._check()
        return table

    def held_tensors(self) -> Ints:
        """Return the indices of the tensors that this rank has something of, in order."""
        return np.flatnonzero(np.array(self.pattern_of, np.int64) != ABSENT)

    def _check(self) -> None:
        """Check that every box lies within its storage: a row of the plan is a read of, or into, memory."""
        if len({storage.name for storage in self.storages}) < len(self.storages):
            raise _damaged("two storages have one name")
        sizes = _sizes_of(self.storages)
        if len(self.pattern_of) != len(self.slots) or max(self.pattern_of, default=0) >= len(self.patterns):
            raise _damaged("its tensors and patterns do not fit")
        needs = [_needed(pattern) for pattern in self.patterns]
        held = self.held_tensors().tolist()
        for index in held:
            need, slots = needs[self.pattern_of[index]], self.slots[index]
            if len(need) > len(slots) or max(slots, default=0) >= len(sizes):
                raise _damaged("it names a storage that it lacks")
            for elements, slot in zip(need, slots, strict=False):
                if elements > sizes[slot]:
                    raise _damaged(f"a box is outside {self.storages[slot].name!r:.200}")
        if sum(map(len, self.slots)) > sum(len(self.slots[index]) for index in held):
            raise _damaged("it names storages of a tensor that it lacks")


def _damaged(why: str) -> ConfigurationError:
    return ConfigurationError(f"a peer's layout is damaged: {why}")


def _sizes_of(storages: Sequence[Storage]) -> list[int]:
    try:
        total = sum(storage.nbytes for storage in storages)
    except ManifestError as error:
        raise _damaged(error.message) from error
    if total > _MOST_BYTES:
        raise _damaged(f"its storages have {total} bytes")
    return [storage.numel for storage in storages]


def _needed(pattern: Sequence[Held]) -> list[int]:
    """Return how many elements each slot has to have for a pattern's boxes to lie within."""
    need = [0] * min(1 + max((held.slot for held in pattern), default=-1), len(pattern))
    for held in pattern:
        if not len(held.lo) == len(held.hi) == len(held.strides):
            raise _damaged("a box has sides of several lengths")
        if held.slot >= len(need):
            raise _damaged("it names a slot that it lacks")
        sizes = [hi - lo for lo, hi in zip(held.lo, held.hi, strict=True)]
        if min(sizes, default=1) < 1:
            raise _damaged("a box has no elements")
        last = held.offset + sum((n - 1) * s for n, s in zip(sizes, held.strides, strict=True))
        need[held.slot] = max(need[held.slot], last + 1)
    return need


class HeldBox(NamedTuple):
    """A box of a tensor within one storage, as a rank reports it; by default it is contiguous there."""

    storage: int
    box: Box
    offset: int = 0
    strides: tuple[int, ...] | None = None


@dataclass
class TableBuilder:
    """Collects a rank's table, tensor by tensor in the order of the manifest."""

    manifest: WeightManifest
    _storages: list[Storage] = field(default_factory=list)
    _patterns: dict[tuple[Held, ...], int] = field(default_factory=dict)
    _tensors: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    _whole: dict[str, str] = field(default_factory=dict)

    def add_storage(self, name: str, shape: Sequence[int], dtype: str) -> int:
        """Add a storage; returns its index."""
        self._storages.append(Storage(name, tuple(shape), dtype))
        return len(self._storages) - 1

    def add(self, name: str, boxes: Sequence[HeldBox]) -> None:
        """Say what this rank has of a tensor; boxes without elements are left out."""
        kept = [each for each in boxes if each.box.numel]
        slots = tuple(dict.fromkeys(each.storage for each in kept))
        pattern = tuple(
            Held(
                each.box.lo,
                each.box.hi,
                each.offset,
                contiguous_strides(each.box.shape) if each.strides is None else each.strides,
                slots.index(each.storage),
            )
            for each in kept
        )
        index = self._patterns.setdefault(pattern, len(self._patterns)) if pattern else ABSENT
        self._tensors[name] = index, slots

    def need_whole(self, name: str, reason: str) -> None:
        """Say that a tensor cannot be moved by regions here."""
        self._whole[name] = reason

    def build(self) -> RankTable:
        """Return the table. Tensors that were not added are absent."""
        placed = [
            self._tensors.get(spec.name, (ABSENT, ())) if spec.name not in self._whole else (ABSENT, ())
            for spec in self.manifest.tensors
        ]
        return RankTable(
            manifest=self.manifest.digest(),
            storages=tuple(self._storages),
            patterns=tuple(self._patterns),
            pattern_of=tuple(index for index, _ in placed),
            slots=tuple(slots for _, slots in placed),
            whole=dict(self._whole),
        )
