"""What a rollout rank reads in a refit by regions: batches of whole parameters, in place or in a buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from weightsync.engines.regions.plan import Mask, RegionPlan, aligned
from weightsync.engines.regions.reading import Spans
from weightsync.errors import ConfigurationError
from weightsync.layout.pieces import ABSENT
from weightsync.layout.regions import Ints
from weightsync.layout.rows import Rows
from weightsync.layout.tables import RankTable
from weightsync.tensors import TensorSpec

MOST_IN_PLACE = 256 << 20
"""Bytes of a batch that is read in place: as far as one deadline and one check reach."""


@dataclass
class Batch:
    """Storages that are filled together.

    Attributes:
        storages: indices into this rank's table.
        handed_over: of those that are not filled in place: where each begins in the buffer.
        arrived: tensors that are complete with it.
        lent: rows that are read where the senders have them, by policy rank: places among its lent rows.
        packed: rows that are packed, likewise.
    """

    storages: list[int] = field(default_factory=list)
    handed_over: dict[int, int] = field(default_factory=dict)
    arrived: list[TensorSpec] = field(default_factory=list)
    lent: dict[int, slice] = field(default_factory=dict)
    packed: dict[int, slice] = field(default_factory=dict)
    buffer_bytes: int = 0


@dataclass(frozen=True)
class Incoming:
    """All that one rollout rank reads.

    Attributes:
        lent: by policy rank, the rows that are read where it has them, in order.
        packed: by policy rank, the rows that it packs, in order.
        batches: in the order in which they are read; at least one.
    """

    lent: Mapping[int, Rows]
    packed: Mapping[int, Rows]
    batches: Sequence[Batch]

    @classmethod
    def of(
        cls,
        plan: RegionPlan,
        target: int,
        lent: Mapping[int, Mask],
        in_place: Mask,
        bucket_size: int,
    ) -> Incoming:
        """Part the rows of a rollout rank.

        Args:
            plan: of the refit.
            target: the rollout rank.
            lent: which storages each of its policy ranks lends, shape ``(storages,)`` each.
            in_place: which of its own storages are written in place, shape ``(storages,)``.
            bucket_size: bytes of a transfer buffer.
        """
        every, read, packed = plan.rows(target), {}, {}
        _require_apart(plan.rollout[target], every)
        for sender, mask in lent.items():
            rows = every.select(every.source == sender)
            readable = plan.readable(rows, sender, mask)
            read[sender] = rows.select(readable)
            packed[sender] = rows.select(~readable).cut(bucket_size).in_order()
        batches = _batches(plan, target, every, in_place, bucket_size)
        number = np.full(len(in_place), ABSENT, np.int64)
        for index, batch in enumerate(batches):
            number[batch.storages] = index
        for sender in lent:
            _part(batches, number, sender, read[sender], packed[sender])
        return cls(read, packed, batches)

    @property
    def largest(self) -> int:
        """Bytes of the largest batch that is handed over."""
        return max(batch.buffer_bytes for batch in self.batches)


def _require_apart(table: RankTable, rows: Rows) -> None:
    """Check that nothing is written twice.

    Raises:
        ConfigurationError: two rows end in one place of a storage.
    """
    rows = rows.select(np.lexsort((rows.target_offset, rows.target_storage)))
    ends = rows.target_offset + (rows.count - 1) * rows.target_step + rows.nbytes
    solid = (rows.count == 1) | (rows.target_step == rows.nbytes)
    meet = (rows.target_storage[1:] == rows.target_storage[:-1]) & (ends[:-1] > rows.target_offset[1:])
    meet &= solid[1:] & solid[:-1]
    total = np.zeros(len(table.storages), np.int64)
    np.add.at(total, rows.target_storage, rows.packed_bytes)
    sizes = np.array([storage.nbytes for storage in table.storages], np.int64)
    twice = np.concatenate((rows.target_storage[1:][meet], np.flatnonzero(total > sizes)))
    if len(twice):
        name = table.storages[int(twice[0])].name
        raise ConfigurationError(f"a layout has two regions in one place of {name!r:.200}", side="rollout")


def _batches(plan: RegionPlan, target: int, rows: Rows, in_place: Mask, bucket_size: int) -> list[Batch]:
    storages = plan.rollout[target].storages
    first_use = {int(index): int(key) for index, key in zip(rows.target_storage, rows.key, strict=True)}
    groups: dict[int, list[int]] = {}
    for index, key in sorted(first_use.items(), key=lambda item: (item[1], item[0])):
        groups.setdefault(key, []).append(index)
    batches, total = [Batch()], 0
    batch_of: dict[int, Batch] = {}
    for key, group in groups.items():
        over = sum(aligned(storages[index].nbytes) for index in group if not in_place[index])
        size = sum(storages[index].nbytes for index in group)
        current = batches[-1]
        full = current.buffer_bytes + over > bucket_size or total + size > max(MOST_IN_PLACE, bucket_size)
        if current.storages and full:
            batches.append(current := Batch())
            total = 0
        batch_of[key], total = current, total + size
        for index in group:
            current.storages.append(index)
            if not in_place[index]:
                current.handed_over[index] = current.buffer_bytes
                current.buffer_bytes += aligned(storages[index].nbytes)
    _enter_tensors(plan, batches, batch_of)
    return batches


def _enter_tensors(plan: RegionPlan, batches: list[Batch], batch_of: Mapping[int, Batch]) -> None:
    """Say with which batch each tensor is complete; those that are stored on other ranks, with the first."""
    layout, keys = plan.reshard.rollout, plan.keys
    for spec, names in zip(plan.manifest.tensors, layout.storages, strict=True):
        if spec.name not in plan.whole:
            batch_of.get(keys.get(names[0], ABSENT), batches[0]).arrived.append(spec)


def _part(batches: list[Batch], number: Ints, sender: int, lent: Rows, packed: Rows) -> None:
    for rows, name in ((lent, "lent"), (packed, "packed")):
        mine = number[rows.target_storage]
        for index in np.unique(mine).tolist():
            lo, hi = np.searchsorted(mine, (index, index + 1))
            getattr(batches[index], name)[sender] = slice(int(lo), int(hi))


def spans(rows: Rows, remote: Ints, local: Ints) -> Spans:
    """Return what to read for some rows.

    Args:
        rows: each contiguous on both sides, or in runs.
        remote: address of the first run of each in the peer's memory, shape ``(rows,)``.
        local: likewise in this rank's memory.
    """
    placed = replace(rows, source_offset=remote, target_offset=local)
    dense = (placed.source_step == placed.nbytes) & (placed.target_step == placed.nbytes)
    placed = replace(
        placed,
        nbytes=np.where(dense, placed.nbytes * placed.count, placed.nbytes),
        count=np.where(dense, 1, placed.count),
    ).single()
    return Spans(placed.source_offset, placed.target_offset, placed.nbytes)


def packed_spans(rows: Rows, remote: Ints, local: Ints) -> Spans:
    """Return what to read for rows that were packed; arguments as for `spans`."""
    return spans(replace(rows, source_step=np.where(rows.count > 1, rows.nbytes, 0)), remote, local)
