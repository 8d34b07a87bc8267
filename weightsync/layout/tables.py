"""What one rank tells of the tensors of a manifest: which boxes it has, and where in its memory. No I/O.

Every worker hands its table to all others when they connect; `join_tables` makes one side's `Layout` of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from weightsync.errors import ConfigurationError, ManifestError
from weightsync.layout.pieces import ABSENT, Layout, LayoutBuilder, Pattern, Piece, TensorInfo
from weightsync.layout.regions import Box, contiguous_strides
from weightsync.tensors import (
    MAX_DIMENSIONS,
    MAX_NAME_CHARS,
    TensorSpec,
    WeightManifest,
    dtype_from_name,
)

MAX_TABLE_ENTRIES = 1 << 22
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
        """Return the table as bytes."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> RankTable:
        """Read `encode`'s bytes.

        Raises:
            ConfigurationError: they are damaged, or the table contradicts itself.
        """
        try:
            table = msgspec.msgpack.decode(data, type=cls)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise ConfigurationError(f"a peer's layout is damaged: {error}") from error
        table._check()
        return table

    def _check(self) -> None:
        if len({storage.name for storage in self.storages}) < len(self.storages):
            raise ConfigurationError("a peer's layout is damaged: two storages have one name")
        ways = len(self.pattern_of) == len(self.slots)
        known = all(index < len(self.patterns) for index in self.pattern_of)
        if not ways or not known:
            raise ConfigurationError("a peer's layout is damaged: its tensors and patterns do not fit")
        for index, slots in zip(self.pattern_of, self.slots, strict=True):
            if any(slot >= len(self.storages) for slot in slots):
                raise ConfigurationError("a peer's layout is damaged: it names a storage that it lacks")
            for held in self.patterns[index] if index != ABSENT else ():
                if held.slot >= len(slots):
                    raise ConfigurationError("a peer's layout is damaged: it names a slot that it lacks")
                _require_inside(held, self.storages[slots[held.slot]])


def _require_inside(held: Held, storage: Storage) -> None:
    """Check that a box lies within its storage: a row of the plan is a read of, or a write into, memory."""
    if not len(held.lo) == len(held.hi) == len(held.strides):
        raise ConfigurationError("a peer's layout is damaged: a box has sides of several lengths")
    sizes = [hi - lo for lo, hi in zip(held.lo, held.hi, strict=True)]
    last = held.offset + sum((n - 1) * s for n, s in zip(sizes, held.strides, strict=True))
    if min(sizes, default=1) < 1 or last >= storage.numel:
        raise ConfigurationError(f"a peer's layout is damaged: a box is outside {storage.name!r:.200}")


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


def tensor_infos(manifest: WeightManifest) -> list[TensorInfo]:
    """Return what the planner needs to know of a manifest's tensors, as they are sent."""
    return [_info(spec) for spec in manifest.tensors]


def _info(spec: TensorSpec) -> TensorInfo:
    return TensorInfo(spec.name, tuple(spec.shape), dtype_from_name(spec.dtype).itemsize)


def join_tables(
    side: str, manifest: WeightManifest, tables: Sequence[RankTable], *, without: Collection[str] = ()
) -> Layout:
    """Make the layout of one side from its ranks' tables.

    Args:
        side: ``"policy"`` or ``"rollout"``.
        manifest: of the refit.
        tables: by rank.
        without: tensors that are not moved by regions; no rank has them in the layout.

    Raises:
        ManifestError: a rank's table is of another manifest.
        ConfigurationError: a table does not fit the manifest.
    """
    digest, count = manifest.digest(), len(manifest)
    for rank, table in enumerate(tables):
        if table.manifest != digest:
            raise ManifestError(
                "this rank's layout was made for other tensors: call init_communicator again",
                side=side, rank=rank,
            )  # fmt: skip
        if len(table.pattern_of) != count:
            raise ConfigurationError("a layout does not have one entry for each tensor", side=side, rank=rank)
    builder, infos = LayoutBuilder(side, len(tables)), tensor_infos(manifest)
    left_out = frozenset(without)
    ids = np.array([table.pattern_of for table in tables], np.int64).reshape(len(tables), count)
    for index, info in enumerate(infos):
        column = ids[:, index]
        if info.name in left_out or not (column != ABSENT).any():
            builder.add(info, ABSENT)
            continue
        names = _names(tables, index)
        slots = tuple(
            tuple(names.index(table.storages[slot].name) for slot in table.slots[index]) for table in tables
        )
        key = (info.shape, column.tobytes(), slots, _extents(tables, index))
        known = builder.known(key)
        if known is None:
            pieces = _pieces(tables, index, column.tolist(), slots)
            known = builder.add_pattern(key, Pattern.of(info.shape, pieces))
        builder.add(info, known, *names)
    return builder.build()


def _names(tables: Sequence[RankTable], tensor: int) -> list[str]:
    """Return the names of a tensor's storages, over all ranks."""
    return list(dict.fromkeys(table.storages[slot].name for table in tables for slot in table.slots[tensor]))


def _extents(tables: Sequence[RankTable], tensor: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(table.storages[slot].numel for slot in table.slots[tensor]) for table in tables)


def _pieces(
    tables: Sequence[RankTable], tensor: int, column: Sequence[int], slots: Sequence[tuple[int, ...]]
) -> list[Piece]:
    pieces = []
    for rank, (table, pattern) in enumerate(zip(tables, column, strict=True)):
        for held in table.patterns[pattern] if pattern != ABSENT else ():
            extent = table.storages[table.slots[tensor][held.slot]].numel
            slot = slots[rank][held.slot]
            pieces.append(Piece(rank, Box(held.lo, held.hi), held.offset, held.strides, extent, slot))
    return pieces
