"""The policy rank's half of a refit by regions: say what may be read, pack the rest, wait for the readers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from weightsync.control import Digests, Exposed, Link, Loaded, Packed, Release, Taken
from weightsync.engines.buffers import synchronize
from weightsync.engines.refit import Refit
from weightsync.engines.regions.digests import RowDigests
from weightsync.engines.regions.lending import Lender
from weightsync.engines.regions.outgoing import Outgoing, PackedBucket
from weightsync.engines.regions.plan import RegionPlan
from weightsync.engines.slots import Slots
from weightsync.errors import ProtocolError, WeightSyncError
from weightsync.layout.rows import Rows

T = TypeVar("T")
_ANSWERS: tuple[type[Release | Loaded | Taken], ...] = (Release, Loaded, Taken)
_DIGESTS_AT_ONCE = 512


class RegionSender:
    """Gives one refit's regions to their readers. Blocks; made anew for each refit.

    Args:
        refit: whose buffers, transport and deadlines are used.
        plan: of the refit.
        lender: of this rank's shards, taken already.
        links: to the rollout ranks that read from this one, by rank.
    """

    def __init__(self, refit: Refit, plan: RegionPlan, lender: Lender, links: Mapping[int, Link]) -> None:
        self._refit = refit
        self._plan = plan
        self._lender = lender
        self._links = dict(links)
        self._reading = dict(links)
        """Those that have not taken everything."""
        self._buffers = refit.buffers
        self._slots = Slots(len(self._buffers))
        self._used: set[int] = set()
        self._holders: dict[int, tuple[int, set[int]]] = {}
        """Of each bucket that is out: its buffer, and the rollout ranks that still read it."""
        self._outgoing = lender.outgoing(plan, refit.who.rank, tuple(links), refit.bucket_size)
        self._last: int | None = None
        self.bytes_packed = 0
        self.bytes_lent = sum(rows.total_bytes for rows in self._outgoing.lent.values())

    @property
    def outgoing(self) -> Outgoing:
        """What is given."""
        return self._outgoing

    def run(self) -> None:
        """Give everything; returns once every reader has loaded it.

        Raises:
            WeightSyncError: with peer, phase, bucket and bytes so far where they are known.
        """
        try:
            self._expose()
            self._send_digests()
            for seq, bucket in enumerate(self._outgoing.buckets):
                self._send_bucket(seq, bucket)
            self._await_taken()
        except WeightSyncError as error:
            error.with_context(phase="send", bucket=self._last, bytes_done=self.bytes_packed)
            raise

    def _expose(self) -> None:
        # What the optimizer has queued on the device is done before anybody reads.
        for device in {self._lender.storage(i).device for i in np.flatnonzero(self._lender.lent).tolist()}:
            synchronize(device)
        message = Exposed(
            self._lender.table.manifest,
            self._refit.digest_kind,
            self._lender.addresses.tobytes(),
            self._lender.keys(),
        )
        for link in self._links.values():
            link.send(message)

    def _send_digests(self) -> None:
        if self._refit.checks.mode == "off":
            return

        digest = cache(RowDigests(self._lender.storage).of)  # once what several readers get
        for target, rows in self._outgoing.lent.items():
            for first in range(0, len(rows), _DIGESTS_AT_ONCE):
                some = rows.select(slice(first, first + _DIGESTS_AT_ONCE))
                with self._refit.stopwatch.phase("digest"):
                    values = self._digests_of(some, first, digest)
                self._links[target].send(Digests(first, values.tobytes()))

    def _digests_of(self, rows: Rows, first: int, digest: Callable[..., int]) -> npt.NDArray[np.uint64]:
        values = np.zeros(len(rows), np.uint64)
        columns = (rows.source_storage, rows.source_offset, rows.nbytes, rows.count, rows.source_step)
        for index, (storage, *span) in enumerate(np.stack(columns, axis=1).tolist()):
            if self._refit.is_row_checked(first + index):
                values[index] = digest(storage, *span)
        return values

    def _send_bucket(self, seq: int, bucket: PackedBucket) -> None:
        slot = self._await_slot()
        buffer = self._buffers[slot]
        with self._refit.stopwatch.phase("pack"):
            self._lender.pack(seq, slot, bucket, buffer, self._plan.dtypes)
            synchronize(buffer.device)
        self._used.add(slot)
        with self._refit.stopwatch.phase("digest"):
            messages = self._messages(seq, slot, bucket)

        def enter() -> None:
            self._last = seq
            self._holders[seq] = slot, set(messages)
            self._slots.share(slot, len(messages))
            self._slots.drop(slot)

        self._refit.watch.wake(enter)
        for target, message in messages.items():
            self._links[target].send(message)
        self.bytes_packed += bucket.nbytes

    def _messages(self, seq: int, slot: int, bucket: PackedBucket) -> dict[int, Packed]:
        sizes = bucket.items.packed_bytes.tolist()
        starts = bucket.offsets.tolist()

        digests_of = RowDigests(self._buffers.__getitem__)

        @cache
        def digest(item: int) -> int:
            return digests_of.of(slot, starts[item], sizes[item], 1, 0)

        messages = {}
        for target, (first, items) in bucket.shares.items():
            wanted = [
                digest(item) if self._refit.is_row_checked(row) else 0
                for row, item in enumerate(items.tolist(), start=first)
            ]
            offsets, digests = bucket.offsets[items], np.array(wanted, np.uint64)
            messages[target] = Packed(seq, slot, bucket.nbytes, first, offsets.tobytes(), digests.tobytes())
        return messages

    def _await_slot(self) -> int:
        def probe() -> int | None:
            self._take_in()
            return self._slots.take()

        slot = self._await(probe, "waiting for a buffer")
        if slot in self._used and self._refit.transport.settles:
            self._refit.transport.settle(slot, timeout_s=self._refit.patience(), check=self._check)
        return slot

    def _await_taken(self) -> None:
        while self._reading:
            self._await(self._take_in, "waiting for the readers to finish")

    def _await(self, probe: Callable[[], T | None], phase: str) -> T:
        started = time.monotonic()
        with self._refit.stopwatch.phase("wait"):
            found = self._refit.watch.until(probe, timeout_s=self._refit.patience())
        if found is None:
            raise self._overdue(phase, time.monotonic() - started)
        return found

    def _take_in(self) -> bool | None:
        """Take in what the readers have said; `True` if anything, else `None`. To be called by a watch."""
        heard = None
        for target, link in list(self._reading.items()):
            while target in self._reading and (answer := _next_of(link)) is not None:
                heard = True
                self._enter(target, link, answer)
        return heard

    def _enter(self, target: int, link: Link, answer: Release | Loaded | Taken) -> None:
        if isinstance(answer, Loaded):
            return  # it goes on: that is all there is to know
        if isinstance(answer, Taken):
            if any(target in holders for _, holders in self._holders.values()):
                raise ProtocolError(
                    f"{link.peer} says that it has taken all, and cannot have", peer=link.peer
                )
            del self._reading[target]
            return
        slot, holders = self._holders.get(answer.seq, (0, set[int]()))
        if target not in holders:
            raise ProtocolError(f"{link.peer} released bucket {answer.seq}, which it does not have")
        holders.remove(target)
        self._slots.drop(slot)
        if not holders:
            del self._holders[answer.seq]

    def _check(self) -> None:
        for link in self._reading.values():
            link.check()

    def _overdue(self, phase: str, waited_s: float) -> WeightSyncError:
        holders: Sequence[int] = [rank for _, each in self._holders.values() for rank in each]
        late = next((rank for rank in self._reading if not holders or rank in holders), None)
        if late is None:
            return ProtocolError("no reader is waited for", phase=phase)
        return self._reading[late].overdue(*_ANSWERS, phase=phase, waited_s=waited_s)


def _next_of(link: Link) -> Release | Loaded | Taken | None:
    return link.poll(*_ANSWERS, phase="waiting for the readers")
