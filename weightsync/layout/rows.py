"""A plan as rows of numbers: which bytes of whose storages go where. Made once with numpy; no I/O.

Both ends of a transfer make the same rows from the same tables, in the same order, so that they need not be
sent. Offsets are bytes within storages: addresses may change from one refit to the next, rows do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from weightsync.layout.descriptors import Compiler
from weightsync.layout.groups import Groups
from weightsync.layout.pieces import ABSENT, Layout
from weightsync.layout.plan import CopyGroup, ReshardPlan
from weightsync.layout.regions import Ints
from weightsync.layout.tables import RankTable
from weightsync.tensors import ALIGNMENT, WeightManifest, dtype_from_name

_GAP = ALIGNMENT
"""Bytes between storages while rows are made, so that no row runs from one into the next."""


@dataclass(frozen=True)
class Rows:
    """Copies from policy ranks to one rollout rank. Arrays of shape ``(rows,)``, int64; units are bytes.

    A row is ``count`` runs of ``nbytes``, ``source_step`` and ``target_step`` apart. Bytes and offsets of the
    source are those of the tensor as it is sent, which its storage may have in another dtype.

    Attributes:
        source: policy rank.
        source_storage: index into the storages of that rank's table.
        source_offset: of the first run in that storage.
        target_storage: index into the storages of the rollout rank's table.
        target_offset: of the first run in that storage.
        nbytes: of one run.
        count: number of runs.
        source_step: from one run to the next.
        target_step: likewise.
        dtype: index into `RowMaker.dtypes`: as it is sent.
        key: rows of one key go into storages that belong together; keys rise in the order of the stream.
    """

    source: Ints
    source_storage: Ints
    source_offset: Ints
    target_storage: Ints
    target_offset: Ints
    nbytes: Ints
    count: Ints
    source_step: Ints
    target_step: Ints
    dtype: Ints
    key: Ints

    def __len__(self) -> int:
        return len(self.source)

    @property
    def packed_bytes(self) -> Ints:
        """Bytes of each row, shape ``(rows,)``."""
        sizes: Ints = self.nbytes * self.count
        return sizes

    @property
    def total_bytes(self) -> int:
        """Bytes of all rows."""
        return int(self.packed_bytes.sum())

    def select(self, rows: Ints | np.ndarray | slice) -> Rows:
        """Return some of the rows, by index or mask."""
        return Rows(*(getattr(self, each.name)[rows] for each in fields(self)))

    def in_order(self) -> Rows:
        """Return the rows in the order that both ends agree on."""
        order = np.lexsort(
            (self.target_offset, self.target_storage, self.dtype, self.source_step, self.count, self.nbytes,
             self.source_offset, self.source_storage, self.source, self.key)
        )  # fmt: skip
        return self.select(order)

    def single(self) -> Rows:
        """Return one row for each run."""
        step = np.arange(int(self.count.sum()), dtype=np.int64)
        step -= np.repeat(np.cumsum(self.count) - self.count, self.count)
        each = self.select(np.repeat(np.arange(len(self)), self.count))
        none = np.zeros(len(each), np.int64)
        return replace(
            each,
            source_offset=each.source_offset + step * each.source_step,
            target_offset=each.target_offset + step * each.target_step,
            count=none + 1,
            source_step=none,
            target_step=none,
        )

    def cut(self, limit: int) -> Rows:
        """Return the rows with none larger than ``limit`` bytes, in the same order.

        Args:
            limit: at least 16; what is left when it is divided by 16 is not used.
        """
        limit -= limit % _LARGEST_ITEM
        if not len(self) or int(self.packed_bytes.max()) <= limit:
            return self
        wide = (self.nbytes > limit) & (self.count > 1)
        if wide.any():
            parts = [
                self.select(slice(i, i + 1)).single() if wide[i] else self.select(slice(i, i + 1))
                for i in range(len(self))
            ]
            return joined(parts).cut(limit)
        return self._cut_runs(limit)

    def _cut_runs(self, limit: int) -> Rows:
        """Cut rows of several runs between runs, and single runs anywhere that suits every element size."""
        alone = self.count == 1
        unit = np.where(alone, 1, self.nbytes)
        have = np.where(alone, self.nbytes, self.count)
        most = np.where(alone, limit, limit // np.maximum(unit, 1))
        parts = -(-have // most)
        each = self.select(np.repeat(np.arange(len(self)), parts))
        nth = np.arange(len(each), dtype=np.int64) - np.repeat(np.cumsum(parts) - parts, parts)
        first, most = nth * np.repeat(most, parts), np.repeat(most, parts)
        size = np.minimum(np.repeat(have, parts) - first, most)
        alone = np.repeat(alone, parts)
        return replace(
            each,
            source_offset=each.source_offset + first * np.where(alone, 1, each.source_step),
            target_offset=each.target_offset + first * np.where(alone, 1, each.target_step),
            nbytes=np.where(alone, size, each.nbytes),
            count=np.where(alone, 1, size),
        )


_LARGEST_ITEM = 16

MOST_IN_A_BUCKET = 1 << 20
"""Items: each is named in the message that tells of the bucket, and messages are bounded."""


def joined(parts: Sequence[Rows]) -> Rows:
    """Return all rows of some parts, one after another."""
    if not parts:
        return Rows(*(np.empty(0, np.int64) for _ in fields(Rows)))
    return Rows(*(np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(Rows)))


class RowMaker:
    """Makes the rows of a plan, one rollout rank at a time.

    Args:
        plan: of the refit.
        manifest: of the tensors that the plan moves.
        policy: tables of the policy ranks.
        rollout: tables of the rollout ranks.

    Attributes:
        dtypes: names of those in which tensors are sent.
        keys: of the rollout side's storages, as `storage_keys` gives them.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        manifest: WeightManifest,
        policy: Sequence[RankTable],
        rollout: Sequence[RankTable],
    ) -> None:
        self._plan = plan
        self._policy, self._rollout = policy, rollout
        names = [spec.dtype for spec in manifest.tensors]
        self.dtypes = tuple(dict.fromkeys(names))
        kinds = {name: index for index, name in enumerate(self.dtypes)}
        self._kinds = np.array([kinds[name] for name in names], np.int64)
        self.keys = storage_keys(plan.rollout)
        self._compilers: dict[int, Compiler] = {}

    @cached_property
    def itemsizes(self) -> Ints:
        """Bytes of an element of each of `dtypes`."""
        return np.array([dtype_from_name(name).itemsize for name in self.dtypes], np.int64)

    def rows(self, target: int, source: int | None = None) -> Rows:
        """Return what one rollout rank gets, in order; with ``source`` only what that policy rank gives."""
        parts = [self._rows(target, source, kind) for kind in range(len(self.dtypes))]
        return joined([part for part in parts if len(part)]).in_order()

    def _compiler(self, kind: int) -> Compiler:
        """Return what makes the rows of the tensors that are sent in one dtype."""
        if kind not in self._compilers:
            groups = [part for group in self._plan.groups if (part := _of_kind(group, self._kinds, kind))]
            itemsize = int(self.itemsizes[kind])
            self._compilers[kind] = Compiler(
                replace(self._plan, groups=groups),
                lambda rank: _bases(self._policy[rank], itemsize),
                lambda rank: _bases(self._rollout[rank], itemsize),
            )
        return self._compilers[kind]

    def _rows(self, target: int, source: int | None, kind: int) -> Rows:
        itemsize = int(self.itemsizes[kind])
        found = self._compiler(kind).compile(target, source)
        to, into = _located(self._rollout[target], itemsize, found.target_offset)
        of, out = np.empty_like(to), np.empty_like(to)
        for rank in np.unique(found.source).tolist():
            mine = found.source == rank
            of[mine], out[mine] = _located(self._policy[rank], itemsize, found.source_offset[mine])
        names = [storage.name for storage in self._rollout[target].storages]
        keys = np.array([self.keys.get(name, -1) for name in names], np.int64)
        return Rows(
            source=found.source, source_storage=of, source_offset=out, target_storage=to,
            target_offset=into, nbytes=found.nbytes, count=found.count, source_step=found.source_step,
            target_step=found.target_step, dtype=np.full(len(found), kind, np.int64), key=keys[to],
        )  # fmt: skip


def _of_kind(group: CopyGroup, kinds: Ints, kind: int) -> CopyGroup | None:
    """Return the part of a group whose tensors are sent in one dtype."""
    mine = kinds[group.tensors] == kind
    if not mine.any():
        return None
    choice = None if group.choice is None else group.choice[mine]
    return replace(group, tensors=group.tensors[mine], choice=choice)


def _bases(table: RankTable, itemsize: int) -> Mapping[str, int]:
    names = [storage.name for storage in table.storages]
    return dict(zip(names, _starts(table, itemsize).tolist(), strict=True))


def _starts(table: RankTable, itemsize: int) -> Ints:
    sizes = np.array([storage.numel * itemsize + _GAP for storage in table.storages], np.int64)
    starts: Ints = np.cumsum(sizes) - sizes
    return starts


def _located(table: RankTable, itemsize: int, addresses: Ints) -> tuple[Ints, Ints]:
    """Return storage and offset of each address of `_bases`."""
    starts = _starts(table, itemsize)
    index = np.searchsorted(starts, addresses, side="right") - 1
    return index, addresses - starts[index]


def storage_keys(rollout: Layout) -> dict[str, int]:
    """Return a key for each storage by name, the same for storages that a tensor connects.

    Storages are filled in the order of their keys. The key is the place in the stream of the first tensor
    that goes into any storage of that key, on any rank.
    """
    groups = Groups()
    first: dict[str, int] = {}
    for index, (names, pattern) in enumerate(zip(rollout.storages, rollout.pattern_of.tolist(), strict=True)):
        if pattern == ABSENT:
            continue
        for name in names:
            first.setdefault(name, index)
            groups.join(name, names[0])
    keys: dict[str, int] = {}
    for name, index in first.items():
        keys[groups.root(name)] = min(keys.get(groups.root(name), index), index)
    return {name: keys[groups.root(name)] for name in first}


def in_buckets(sizes: Ints, limit: int, alignment: int = ALIGNMENT) -> Iterator[tuple[slice, Ints]]:
    """Deal items out to buckets, in order.

    Args:
        sizes: bytes of each item, none above ``limit``; shape ``(items,)``.
        limit: bytes of a bucket.
        alignment: of each item in its bucket.

    Yields:
        The items of a bucket, and where each begins in it.
    """
    first, offset = 0, 0
    offsets: list[int] = []
    for index, size in enumerate(sizes.tolist()):
        start = -(-offset // alignment) * alignment
        if offsets and (start + size > limit or len(offsets) == MOST_IN_A_BUCKET):
            yield slice(first, index), np.array(offsets, np.int64)
            first, start, offsets = index, 0, []
        offsets.append(start)
        offset = start + size
    if offsets:
        yield slice(first, first + len(offsets)), np.array(offsets, np.int64)
