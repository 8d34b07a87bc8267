"""From a plan to arrays of addresses: made once with numpy, so that a refit costs no Python for each region.

A `Descriptors` row moves ``count`` runs of ``nbytes`` bytes each; the next run begins ``source_step`` bytes
further in the sender's memory, and ``target_step`` in the receiver's. Rows that are neighbours on both sides
have been joined. Whole rows of a matrix are one run, a slice of its columns is many, which `runs` spells out
for transports that know nothing but contiguous memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields

import numpy as np

from weightsync.errors import ConfigurationError
from weightsync.layout.pieces import Layout
from weightsync.layout.plan import CopyGroup, ReshardPlan
from weightsync.layout.regions import Ints

Addresses = Callable[[int], Mapping[str, int]]
"""Gives the byte address of each storage of a rank, by the storage's name."""

MAX_RUNS = 50_000_000


@dataclass(frozen=True)
class Descriptors:
    """What one rollout rank reads. All arrays have shape ``(rows,)`` and dtype int64; units are bytes.

    Attributes:
        source: policy rank to read from.
        source_offset: address of the first run in the policy rank's memory.
        target_offset: address of the first run in this rank's memory.
        nbytes: of one run.
        count: number of runs.
        source_step: from one run to the next in the policy rank's memory; 0 for a single run.
        target_step: likewise in this rank's memory.
    """

    source: Ints
    source_offset: Ints
    target_offset: Ints
    nbytes: Ints
    count: Ints
    source_step: Ints
    target_step: Ints

    def __len__(self) -> int:
        return len(self.source)

    @property
    def total_bytes(self) -> int:
        """Bytes of all runs."""
        return int((self.nbytes * self.count).sum())

    @property
    def total_runs(self) -> int:
        """Number of contiguous runs."""
        return int(self.count.sum())

    def select(self, rows: Ints) -> Descriptors:
        """Return some of the rows, by index or mask."""
        return Descriptors(*(getattr(self, each.name)[rows] for each in fields(self)))

    def runs(self, limit: int = MAX_RUNS) -> Descriptors:
        """Return one row for each contiguous run.

        Raises:
            ConfigurationError: there are more than ``limit``: pack strided rows into a buffer instead.
        """
        if self.total_runs > limit:
            raise ConfigurationError(
                f"{self.total_runs} contiguous runs are too many to spell out (limit {limit}); have the "
                "sender pack strided rows into a buffer"
            )
        step = np.arange(self.total_runs, dtype=np.int64) - np.repeat(
            np.cumsum(self.count) - self.count, self.count
        )
        source, source_offset, target_offset, nbytes = (
            np.repeat(each, self.count)
            for each in (self.source, self.source_offset, self.target_offset, self.nbytes)
        )
        source_offset = source_offset + step * np.repeat(self.source_step, self.count)
        target_offset = target_offset + step * np.repeat(self.target_step, self.count)
        ones = np.ones_like(source)
        return _joined(Descriptors(source, source_offset, target_offset, nbytes, ones, 0 * ones, 0 * ones))


class Compiler:
    """Makes the descriptors of a plan's rollout ranks, one rank at a time.

    Args:
        plan: of the refit.
        policy_addresses: of the policy ranks' storages; default: as if each rank had one buffer
            (`Layout.virtual_addresses`).
        rollout_addresses: likewise of the rollout ranks'.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        policy_addresses: Addresses | None = None,
        rollout_addresses: Addresses | None = None,
    ) -> None:
        self._groups = plan.groups
        self._read = _Bases(plan.policy, policy_addresses)
        self._write = _Bases(plan.rollout, rollout_addresses)

    def compile(self, target: int, source: int | None = None) -> Descriptors:
        """Return what one rollout rank reads, sorted by policy rank and address.

        Args:
            target: the rollout rank.
            source: only what it reads from this policy rank.

        Raises:
            ConfigurationError: an address is missing.
        """
        rows: list[Ints] = []
        for group in self._groups:
            if source is not None and source not in group.sources:
                continue
            for column in np.flatnonzero(group.targets == target).tolist():
                rows.extend(_rows(group, column, source, self._read, self._write))
        if not rows:
            return Descriptors(*(np.empty(0, np.int64) for _ in fields(Descriptors)))
        return _joined(Descriptors(*np.concatenate(rows, axis=1)))


def count_descriptors(plan: ReshardPlan) -> tuple[Ints, Ints]:
    """Count, without addresses, the rows and the contiguous runs that each rollout rank reads by.

    Neighbours are not joined yet: whether tensors are neighbours depends on the addresses.

    Returns:
        Rows and runs by rollout rank, shape ``(ranks,)`` each.
    """
    rows, runs = np.zeros((2, plan.rollout.ranks), np.int64)
    for group in plan.groups:
        targets, sizes = group.targets.tolist(), (group.hi - group.lo).tolist()
        into = group.target.strides[group.pieces].tolist()
        for strides, holders in _by_strides(group):
            counts = np.isin(group.chosen(), holders).sum(axis=0).tolist()
            for target, size, write, count in zip(targets, sizes, into, counts, strict=True):
                outer, _, each, _ = _geometry(size, strides, write)
                rows[target] += len(outer) * count
                runs[target] += len(outer) * count * each
    return rows, runs


def _by_strides(group: CopyGroup) -> Iterable[tuple[list[int], Ints]]:
    """Yield the strides with which holders have a group's box, and those holders."""
    unique, inverse = np.unique(group.source.strides[group.holders], axis=0, return_inverse=True)
    for index, strides in enumerate(unique.tolist()):
        yield strides, group.holders[inverse.reshape(-1) == index]


class _Bases:
    """Addresses of tensors' storages, by rank."""

    def __init__(self, layout: Layout, addresses: Addresses | None) -> None:
        self._layout = layout
        self._addresses = addresses or layout.virtual_addresses
        self._tables: dict[int, Mapping[str, int]] = {}

    def addresses(self, tensors: Ints, rank: int, slot: int) -> Ints:
        """Return addresses of the storages of some tensors on a rank, shape ``(tensors,)``.

        Raises:
            ConfigurationError: one is missing.
        """
        table, storages = self._table(rank), self._layout.storages
        try:
            return np.array([table[storages[tensor][slot]] for tensor in tensors.tolist()], np.int64)
        except KeyError as error:
            raise ConfigurationError(
                f"no address is known for the storage {error}", side=self._layout.side, rank=rank
            ) from None

    def _table(self, rank: int) -> Mapping[str, int]:
        if rank not in self._tables:
            self._tables[rank] = self._addresses(rank)
        return self._tables[rank]

    def shift(self, tensors: Ints) -> Ints:
        """Return the elements by which the tensors lie beyond their pattern."""
        return self._layout.shift[tensors]


def _rows(group: CopyGroup, column: int, only: int | None, read: _Bases, write: _Bases) -> Iterable[Ints]:
    """Yield arrays of shape ``(fields, rows)`` for one box of a group's tensors."""
    piece, target = int(group.pieces[column]), int(group.targets[column])
    chosen = group.chosen()[:, column]
    for holder in np.unique(chosen).tolist():
        source = int(group.source.rank[holder])
        if only not in {None, source}:
            continue
        mine = group.tensors[chosen == holder]
        shape = group.hi[column] - group.lo[column]
        source_strides, target_strides = group.source.strides[holder], group.target.strides[piece]
        from_, to = (
            int(pattern.offset[at] + (group.lo[column] - pattern.lo[at]) @ pattern.strides[at])
            for pattern, at in ((group.source, holder), (group.target, piece))
        )
        first = read.addresses(mine, source, int(group.source.slot[holder]))
        first = first + (from_ + read.shift(mine)) * group.itemsize
        into = write.addresses(mine, target, int(group.target.slot[piece]))
        into = into + (to + write.shift(mine)) * group.itemsize
        outer, run, count, step = _geometry(shape.tolist(), source_strides.tolist(), target_strides.tolist())
        bytes_of = group.itemsize
        sizes = np.array([run * bytes_of, count, step[0] * bytes_of, step[1] * bytes_of])[:, None]
        for source_extra, target_extra in outer:
            rows = np.empty((len(fields(Descriptors)), len(mine)), np.int64)
            rows[0] = source
            rows[1] = first + source_extra * group.itemsize
            rows[2] = into + target_extra * group.itemsize
            rows[3:] = sizes
            yield rows


def _geometry(
    shape: list[int], source: list[int], target: list[int]
) -> tuple[list[tuple[int, int]], int, int, tuple[int, int]]:
    """Split a box into contiguous runs, evenly spaced runs, and the rest, in elements.

    Returns:
        Offsets of each set of runs on both sides; elements of a run; runs of a set; their steps.
    """
    dims = [(n, s, t) for n, s, t in zip(shape, source, target, strict=True) if n > 1]
    dims.sort(key=lambda dim: (dim[2], dim[1]))
    merged: list[tuple[int, int, int]] = []
    for size, s, t in dims:
        if merged and (s, t) == (merged[-1][0] * merged[-1][1], merged[-1][0] * merged[-1][2]):
            merged[-1] = (merged[-1][0] * size, merged[-1][1], merged[-1][2])
        else:
            merged.append((size, s, t))
    run = merged.pop(0)[0] if merged and merged[0][1:] == (1, 1) else 1
    count, *step = merged.pop(0) if merged else (1, 0, 0)
    outer = [(0, 0)]
    for size, s, t in merged:
        outer = [(a + i * s, b + i * t) for i in range(size) for a, b in outer]
    return outer, run, count, (step[0], step[1])


def _joined(rows: Descriptors) -> Descriptors:
    """Sort rows by sender and address, and join single runs that are neighbours on both sides."""
    rows = rows.select(np.lexsort((rows.source_offset, rows.target_offset, rows.source)))
    if len(rows) < 2:
        return rows
    single = rows.count == 1
    follows = single[1:] & single[:-1] & (rows.source[1:] == rows.source[:-1])
    follows &= rows.source_offset[1:] == rows.source_offset[:-1] + rows.nbytes[:-1]
    follows &= rows.target_offset[1:] == rows.target_offset[:-1] + rows.nbytes[:-1]
    starts = np.flatnonzero(np.concatenate(([True], ~follows)))
    joined = rows.select(starts)
    return Descriptors(
        source=joined.source,
        source_offset=joined.source_offset,
        target_offset=joined.target_offset,
        nbytes=np.add.reduceat(rows.nbytes, starts),
        count=joined.count,
        source_step=joined.source_step,
        target_step=joined.target_step,
    )
