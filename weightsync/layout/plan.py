"""The reshard plan: from what policy ranks hold and rollout ranks store to copies, each element sent once.

Tensors whose patterns agree on both sides are planned together, as one `CopyGroup`; what grows with the
number of tensors is numpy's work. A plan says which boxes are copied from whom to whom; `descriptors` says at
which addresses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from weightsync.errors import ManifestError
from weightsync.layout.balance import deal, level_counts
from weightsync.layout.pieces import ABSENT, Layout, Pattern, TensorInfo
from weightsync.layout.regions import Box, Ints, disjoint_cells, intersect_all, uncovered

WORTH_SHARING = 1 << 20
"""Bytes of a part for which it is worth to have another rank send it."""


@dataclass(frozen=True)
class CopyGroup:
    """Copies of tensors that lie alike on both sides, from ranks that all hold the same box.

    Attributes:
        tensors: indices of the tensors, shape ``(tensors,)``.
        itemsize: bytes of an element.
        source: pattern of the policy side.
        target: pattern of the rollout side.
        holders: pieces of ``source`` that hold the box, shape ``(holders,)``; one rank each.
        pieces: the piece of ``target`` that each copy fills, shape ``(copies,)``.
        lo: first index of the box that each copy moves, shape ``(copies, dims)``.
        hi: one past the last index, likewise.
        choice: index into ``holders`` of each copy's sender, ``(tensors, copies)``; `None` for one holder.
    """

    tensors: Ints
    itemsize: int
    source: Pattern
    target: Pattern
    holders: Ints
    pieces: Ints
    lo: Ints
    hi: Ints
    choice: Ints | None = None

    @property
    def nbytes(self) -> Ints:
        """Bytes of each copy, shape ``(copies,)``."""
        sizes: Ints = np.prod(self.hi - self.lo, axis=1, dtype=np.int64) * self.itemsize
        return sizes

    @property
    def sources(self) -> Ints:
        """Policy ranks that hold the box, shape ``(holders,)``."""
        return self.source.rank[self.holders]

    @property
    def targets(self) -> Ints:
        """Rollout rank of each copy, shape ``(copies,)``."""
        return self.target.rank[self.pieces]

    def chosen(self) -> Ints:
        """Return the piece of ``source`` that each copy reads, shape ``(tensors, copies)``."""
        if self.choice is None:
            return np.broadcast_to(self.holders[0], (len(self.tensors), len(self.pieces)))
        return self.holders[self.choice]


@dataclass(frozen=True, slots=True)
class Copy:
    """One box of one tensor, from one rank to another."""

    tensor: str
    box: Box
    source: int
    target: int
    nbytes: int


@dataclass(frozen=True)
class ReshardPlan:
    """Every copy of a refit.

    Attributes:
        policy: layout of the senders.
        rollout: layout of the receivers.
        groups: the copies.
        links: bytes from each policy rank to each rollout rank, shape ``(policy, rollout)``.
    """

    policy: Layout
    rollout: Layout
    groups: Sequence[CopyGroup]
    links: Ints

    @property
    def tensors(self) -> Sequence[TensorInfo]:
        """Tensors in stream order."""
        return self.rollout.tensors

    @property
    def regions(self) -> int:
        """Number of copies."""
        return sum(len(group.tensors) * len(group.pieces) for group in self.groups)

    def copies(self) -> Iterator[Copy]:
        """Yield every copy, one by one; for looking at small plans."""
        for group in self.groups:
            ranks, sizes = group.source.rank[group.chosen()], group.nbytes
            for row, tensor in enumerate(group.tensors.tolist()):
                for column, target in enumerate(group.targets.tolist()):
                    box = Box(tuple(group.lo[column].tolist()), tuple(group.hi[column].tolist()))
                    name = self.tensors[tensor].name
                    yield Copy(name, box, int(ranks[row, column]), target, int(sizes[column]))


def make_plan(policy: Layout, rollout: Layout) -> ReshardPlan:
    """Plan a refit: every element that a rollout rank stores comes once, from a rank that holds it.

    Senders are chosen so that the ranks send alike, by bytes, and each link carries its part.

    Args:
        policy: who holds what.
        rollout: who stores what; the same tensors, in the same order.

    Raises:
        ManifestError: the sides do not have the same tensors, or no policy rank holds what one stores.
    """
    _require_same(policy, rollout)
    groups: list[CopyGroup] = []
    cells: dict[int, _Cells] = {}
    for kin in _classes(policy, rollout):
        if not len(kin.to):
            continue
        if kin.of is None:
            raise _not_held(rollout, kin, 0, [])
        known = cells.get(id(kin.of))
        if known is None:
            known = cells[id(kin.of)] = _find_cells(kin.of)
        groups.extend(_match(rollout, kin, kin.of, known))
    return _balanced(policy, rollout, groups)


def _require_same(policy: Layout, rollout: Layout) -> None:
    for ours, theirs in zip(policy.tensors, rollout.tensors, strict=False):
        if ours != theirs:
            raise ManifestError(
                f"the policy side has {ours.name!r} {list(ours.shape)} of {ours.itemsize} bytes an element, "
                f"the rollout side {theirs.name!r} {list(theirs.shape)} of {theirs.itemsize}",
                tensor=theirs.name,
            )
    if len(policy.tensors) != len(rollout.tensors):
        raise ManifestError(
            f"the policy side has {len(policy.tensors)} tensors, the rollout side {len(rollout.tensors)}"
        )


@dataclass(frozen=True)
class _Class:
    """Tensors that lie alike on both sides: their indices, and both patterns."""

    tensors: Ints
    itemsize: int
    of: Pattern | None
    to: Pattern


def _classes(policy: Layout, rollout: Layout) -> Iterator[_Class]:
    """Yield tensors that share both patterns and the item size, in the order in which they first come."""
    itemsizes = np.array([info.itemsize for info in rollout.tensors], np.int64)
    wanted = np.flatnonzero(rollout.pattern_of != ABSENT)
    if not len(wanted):
        return
    keys = np.stack((policy.pattern_of, rollout.pattern_of, itemsizes), axis=1)[wanted]
    unique, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    members = np.split(
        wanted[np.argsort(inverse.reshape(-1), kind="stable")], np.cumsum(np.bincount(inverse.reshape(-1)))
    )
    for index in np.argsort(first, kind="stable").tolist():
        source, target, itemsize = unique[index].tolist()
        of = policy.patterns[source] if source != ABSENT else None
        yield _Class(members[index], itemsize, of, rollout.patterns[target])


@dataclass(frozen=True)
class _Cells:
    """Disjoint boxes of a source pattern, and the pieces that hold each."""

    lo: Ints
    hi: Ints
    holders: list[Ints] = field(default_factory=list)


def _match(rollout: Layout, kin: _Class, of: Pattern, cells: _Cells) -> Iterator[CopyGroup]:
    to = kin.to
    pieces, at, lo, hi = intersect_all(to.lo, to.hi, cells.lo, cells.hi)
    found = np.zeros(len(to), np.int64)
    np.add.at(found, pieces, np.prod(hi - lo, axis=1, dtype=np.int64))
    lacking = np.flatnonzero(found != to.numel())
    if len(lacking):
        raise _not_held(rollout, kin, int(lacking[0]), [of.box(i) for i in range(len(of))])
    for cell in np.unique(at).tolist():
        mine = np.flatnonzero(at == cell)
        holders = cells.holders[cell]
        yield _spread(CopyGroup(kin.tensors, kin.itemsize, of, to, holders, pieces[mine], lo[mine], hi[mine]))


def _spread(group: CopyGroup) -> CopyGroup:
    """Cut large boxes, where more ranks hold them than there are copies, so that each can send a part."""
    parts = len(group.holders) // (len(group.tensors) * len(group.pieces))
    if parts < 2 or not group.lo.shape[1]:
        return group
    rows = group.hi[:, 0] - group.lo[:, 0]
    parts = min(parts, int(rows.min()), int(group.nbytes.min()) // WORTH_SHARING)
    if parts < 2:
        return group
    index, part = np.divmod(np.arange(len(rows) * parts), parts)
    lo, hi = group.lo[index].copy(), group.hi[index].copy()
    lo[:, 0] += rows[index] * part // parts
    hi[:, 0] = group.lo[index, 0] + rows[index] * (part + 1) // parts
    return replace(group, pieces=group.pieces[index], lo=lo, hi=hi)


def _find_cells(pattern: Pattern) -> _Cells:
    if not len(pattern):
        return _Cells(pattern.lo, pattern.hi)
    corners = np.concatenate((pattern.lo, pattern.hi), axis=1)
    unique, inverse = np.unique(corners, axis=0, return_inverse=True)
    inverse = inverse.reshape(-1)
    dims = pattern.lo.shape[1]
    lo, hi = unique[:, :dims], unique[:, dims:]
    pairs = len(intersect_all(lo, hi, lo, hi)[0])
    if pairs == len(unique):
        order = np.argsort(inverse, kind="stable")
        members = np.split(order, np.cumsum(np.bincount(inverse))[:-1])
        return _Cells(lo, hi, [_one_a_rank(pattern, each) for each in members])
    cut = disjoint_cells([pattern.box(i) for i in range(len(pattern))])
    return _Cells(
        np.array([box.lo for box, _ in cut], np.int64).reshape(len(cut), dims),
        np.array([box.hi for box, _ in cut], np.int64).reshape(len(cut), dims),
        [_one_a_rank(pattern, np.array(holders, np.int64)) for _, holders in cut],
    )


def _one_a_rank(pattern: Pattern, pieces: Ints) -> Ints:
    """Drop further pieces of a rank that holds a box twice."""
    _, first = np.unique(pattern.rank[pieces], return_index=True)
    return pieces[first]


def _not_held(rollout: Layout, kin: _Class, piece: int, boxes: list[Box]) -> ManifestError:
    gap = uncovered(kin.to.box(piece), boxes)[0]
    return ManifestError(
        f"no policy rank holds {gap} of a tensor of shape {list(kin.to.shape)}, which this rank stores",
        side=rollout.side,
        rank=int(kin.to.rank[piece]),
        tensor=rollout.tensors[int(kin.tensors[0])].name,
    )


def _balanced(policy: Layout, rollout: Layout, groups: list[CopyGroup]) -> ReshardPlan:
    """Choose the senders: first those copies that leave no choice, then the large ones, then the small."""
    links = np.zeros((policy.ranks, rollout.ranks), np.int64)
    sent = np.zeros(policy.ranks, np.float64)
    done: list[CopyGroup | None] = [None] * len(groups)
    sizes = [group.nbytes for group in groups]
    order = sorted(range(len(groups)), key=lambda i: (len(groups[i].holders) > 1, -float(sizes[i].mean())))
    for turn, index in enumerate(order):
        group, nbytes = groups[index], sizes[index]
        count, sources = len(group.tensors), group.sources
        if len(sources) == 1:
            np.add.at(links[sources[0]], group.targets, nbytes * count)
            sent[sources[0]] += float(nbytes.sum()) * count
            done[index] = group
            continue
        counts = level_counts(sent[sources], count * len(nbytes), float(nbytes.mean()))
        choice = deal(counts, count, len(nbytes), turn)
        ranks = sources[choice]
        np.add.at(links, (ranks, group.targets[None, :]), np.broadcast_to(nbytes, ranks.shape))
        sent += np.bincount(
            ranks.reshape(-1), np.broadcast_to(nbytes, ranks.shape).reshape(-1), minlength=len(sent)
        )
        done[index] = replace(group, choice=choice)
    return ReshardPlan(policy, rollout, [group for group in done if group is not None], links)
