"""A refit by regions carried out on plain memory, message by message, as engines do it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from weightsync.engines.regions.incoming import Incoming, packed_spans, spans
from weightsync.engines.regions.outgoing import Outgoing, Packing
from weightsync.layout.pieces import ABSENT
from weightsync.tensors import dtype_from_name, flat_bytes


def filled(table, manifest, full, *, as_held=True):
    """Flat storages of a rank; boxes filled from full tensors, the rest with a pattern."""
    flats = [
        torch.full((each.nbytes,), 0x5A, dtype=torch.uint8).view(dtype_from_name(each.dtype)).clone()
        for each in table.storages
    ]
    for spec, pattern, slots in zip(manifest.tensors, table.pattern_of, table.slots, strict=True):
        for held in table.patterns[pattern] if pattern != ABSENT else ():
            box = tuple(slice(a, b) for a, b in zip(held.lo, held.hi, strict=True))
            flat = flats[slots[held.slot]]
            part = full[spec.name][box]
            flat.as_strided(part.shape, held.strides, held.offset).copy_(part)
    return flats


def promised(table, whole, manifest):
    """How often each element of each storage is named by the table, shape ``(elements,)`` each."""
    counts = [torch.zeros(each.numel, dtype=torch.int64) for each in table.storages]
    for spec, pattern, slots in zip(manifest.tensors, table.pattern_of, table.slots, strict=True):
        if pattern == ABSENT or spec.name in whole:
            continue
        for held in table.patterns[pattern]:
            shape = [b - a for a, b in zip(held.lo, held.hi, strict=True)]
            counts[slots[held.slot]].as_strided(shape, held.strides, held.offset).add_(1)
    return counts


@dataclass
class Sender:
    """A policy rank: its storages, which are lent, and what it gives."""

    rank: int
    flats: list[torch.Tensor]
    lent: np.ndarray
    outgoing: Outgoing
    dtypes: tuple[str, ...]
    bucket_size: int
    sent: int = 0
    out: dict[int, tuple[int, set[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.buffers = [torch.zeros(self.bucket_size, dtype=torch.uint8) for _ in range(2)]
        sizes = np.array([flat.numel() * flat.element_size() for flat in self.flats], np.int64)
        self.base = np.cumsum(sizes + 64) - sizes
        self.memory = np.zeros(int((sizes + 64).sum()), np.uint8)
        for start, flat in zip(self.base.tolist(), self.flats, strict=True):
            data = flat_bytes(flat).numpy()
            self.memory[start : start + len(data)] = data

    def step(self, inboxes) -> bool:
        """Send the next bucket, if a buffer is free."""
        if self.sent == len(self.outgoing.buckets) or len(self.out) == 2:
            return False
        slot = next(s for s in (0, 1) if s not in {slot for slot, _ in self.out.values()})
        bucket = self.outgoing.buckets[self.sent]
        assert bucket.nbytes <= self.bucket_size
        Packing(bucket, self.buffers[slot], lambda i: self.flats[i], self.dtypes).run()
        self.out[self.sent] = slot, set(bucket.shares)
        for target, (first, items) in bucket.shares.items():
            inboxes[target, self.rank].append((self.sent, slot, first, bucket.offsets[items]))
        self.sent += 1
        return True

    def release(self, seq, target) -> None:
        self.out[seq][1].remove(target)
        if not self.out[seq][1]:
            del self.out[seq]


class Receiver:
    """A rollout rank, as far as it has come."""

    def __init__(self, rank, table, incoming: Incoming, in_place, senders) -> None:
        self.rank, self.incoming, self.senders = rank, incoming, senders
        sizes = np.array([each.nbytes for each in table.storages], np.int64)
        self.base = np.cumsum(sizes + 64) - sizes
        self.memory = np.zeros(int((sizes + 64).sum()), np.uint8)
        self.counts = np.zeros(len(self.memory), np.int64)
        self.sizes, self.in_place = sizes, in_place
        self.next_row = dict.fromkeys(senders, 0)
        self.batch = -1
        self.left: set[int] = set()

    @property
    def is_done(self) -> bool:
        return self.batch == len(self.incoming.batches) - 1 and not self.left

    def step(self, inboxes) -> bool:
        """Go on as far as is possible; whether that was anything."""
        moved = False
        while not self.is_done:
            if not self.left:
                self._begin()
                moved = True
            moved = self._read(inboxes) or moved
            if self.left:
                return moved
        return moved

    def _begin(self) -> None:
        self.batch += 1
        batch = self.incoming.batches[self.batch]
        for rank, part in batch.lent.items():
            rows = self.incoming.lent[rank].select(part)
            sender = self.senders[rank]
            assert sender.lent[rows.source_storage].all()
            remote = sender.base[rows.source_storage] + rows.source_offset
            self._copy(spans(rows, remote, self._into(rows, batch)), sender.memory)
        self.left = {rank for rank, part in batch.packed.items() if part.stop > part.start}

    def _read(self, inboxes) -> bool:
        moved = False
        batch = self.incoming.batches[self.batch]
        for rank in sorted(self.left):
            inbox, stop = inboxes[self.rank, rank], batch.packed[rank].stop
            while inbox and self.next_row[rank] < stop:
                seq, slot, first, offsets = inbox[0]
                end = first + len(offsets)
                part = slice(self.next_row[rank], min(stop, end))
                rows = self.incoming.packed[rank].select(part)
                remote = offsets[part.start - first : part.stop - first]
                sender = self.senders[rank]
                self._copy(packed_spans(rows, remote, self._into(rows, batch)), sender.buffers[slot].numpy())
                self.next_row[rank] = part.stop
                moved = True
                if part.stop == end:
                    inbox.pop(0)
                    sender.release(seq, self.rank)
            if self.next_row[rank] >= stop:
                self.left.discard(rank)
        return moved

    def _into(self, rows, batch):
        assert np.isin(rows.target_storage, batch.storages).all()
        ends = rows.target_offset + (rows.count - 1) * rows.target_step + rows.nbytes
        assert (rows.target_offset >= 0).all()
        assert (ends <= self.sizes[rows.target_storage]).all()
        return self.base[rows.target_storage] + rows.target_offset

    def _copy(self, what, memory) -> None:
        for remote, local, nbytes in zip(
            what.remote.tolist(), what.local.tolist(), what.nbytes.tolist(), strict=True
        ):
            self.memory[local : local + nbytes] = memory[remote : remote + nbytes]
            self.counts[local : local + nbytes] += 1


def carry_out(plan, senders_flats, lent, in_place, bucket_size):
    """Run a refit by regions on plain memory; returns the receivers. Fails on a deadlock."""
    targets = range(len(plan.rollout))
    reshard = plan.reshard
    senders = {}
    for rank, flats in enumerate(senders_flats):
        readers = [t for t in targets if reshard.links[rank, t]]
        outgoing = Outgoing.of(plan, rank, readers, lent[rank], bucket_size)
        senders[rank] = Sender(rank, flats, lent[rank], outgoing, plan.dtypes, bucket_size)
    receivers = []
    for target in targets:
        mine = plan.senders(target)
        incoming = Incoming.of(plan, target, {s: lent[s] for s in mine}, in_place[target], bucket_size)
        check_agreement(incoming, senders, target)
        receivers.append(
            Receiver(target, plan.rollout[target], incoming, in_place[target], {s: senders[s] for s in mine})
        )
    inboxes = {(t, s): [] for t in targets for s in senders}
    while not all(each.is_done for each in receivers):
        moved = [each.step(inboxes) for each in senders.values()]
        moved += [each.step(inboxes) for each in receivers]
        assert any(moved), "nobody can go on"
    for sender in senders.values():
        assert sender.sent == len(sender.outgoing.buckets)
        assert not sender.out
    return receivers


def check_agreement(incoming, senders, target) -> None:
    """Both ends number the rows alike, and the keys of each sender's buckets rise."""
    for rank in incoming.lent:
        theirs = senders[rank].outgoing
        assert same_rows(theirs.lent[target], incoming.lent[rank])
        packed, at = incoming.packed[rank], 0
        keys = np.concatenate([b.items.key for b in theirs.buckets] or [np.empty(0, np.int64)])
        assert (np.diff(keys) >= 0).all()
        for bucket in theirs.buckets:
            if target not in bucket.shares:
                continue
            first, items = bucket.shares[target]
            assert first == at
            mine = packed.select(slice(first, first + len(items)))
            sent = bucket.items.select(items)
            for name in ("key", "source_storage", "source_offset", "nbytes", "count", "source_step", "dtype"):
                assert (getattr(mine, name) == getattr(sent, name)).all(), name
            at += len(items)
        assert at == len(packed)


def same_rows(one, other) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(vars(one).values(), vars(other).values(), strict=True))
