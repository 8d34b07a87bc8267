"""The rollout rank's half of a refit by regions: read, check, hand over, account for everything."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from weightsync.control import Link, Loaded, Release, Taken
from weightsync.engines.base import ParameterBatch
from weightsync.engines.buffers import POISON, await_readers, overwrite
from weightsync.engines.pump import Pump
from weightsync.engines.refit import Refit, saying_what_was_heard
from weightsync.engines.regions.borrowing import Borrower, Place
from weightsync.engines.regions.digests import RowDigests, first_difference
from weightsync.engines.regions.incoming import Batch, Incoming
from weightsync.engines.regions.plan import RegionPlan
from weightsync.engines.regions.reading import OneSidedTransport, Reading
from weightsync.engines.regions.source import NEWS, Source, rows_in
from weightsync.engines.slots import Slots
from weightsync.engines.waiting import await_ended
from weightsync.errors import DigestError, ProtocolError, WeightSyncError
from weightsync.layout.rows import Rows
from weightsync.tensors import WeightManifest, flat_bytes
from weightsync.topology import RankId

_POLLS_S = (0.0001, 0.0005)


@dataclass(frozen=True)
class _Ready:
    """A batch that is all there, and whose digests agree."""

    batch: Batch
    place: Place
    slot: int


class _End:
    """Everything has been read."""


class RegionReceiver:
    """Reads one refit's regions. Made anew for each refit.

    Args:
        refit: whose buffers, transport and deadlines are used.
        plan: of the refit.
        borrower: of this rank's memory.
        links: to the policy ranks that it reads from, by rank.
        manifest_check: called with the manifest of the whole stream before anything is read.
        before_writing: called before anything is written into memory that is served.
    """

    def __init__(
        self,
        refit: Refit,
        plan: RegionPlan,
        borrower: Borrower,
        links: Mapping[int, Link],
        *,
        manifest_check: Callable[[WeightManifest], None] | None,
        before_writing: Callable[[], None] | None,
    ) -> None:
        self._refit = refit
        self._plan = plan
        self._borrower = borrower
        self._sources = {rank: Source(rank, link) for rank, link in links.items()}
        self._manifest_check = manifest_check
        self._before_writing = before_writing
        self._transport = _one_sided(refit.transport)
        self._slots = Slots(len(refit.buffers))
        self._pump: Pump[_Ready | _End] = Pump(refit, links.values(), self._run)
        self._incoming: Incoming | None = None
        self._bucket: int | None = None
        self.batches_yielded = 0
        self.bytes_received = 0
        self.bytes_in_place = 0

    async def batches(self, *, in_place: bool) -> AsyncGenerator[ParameterBatch, None]:
        """Yield what is handed over; each batch is valid until the next one is asked for.

        Args:
            in_place: whether memory that is served may be written into.

        Raises:
            WeightSyncError: a policy rank failed or was lost, or what came is not what was promised.
        """
        with self._located():
            await self._refit.waiter.run(self._await_exposed)
            if self._manifest_check is not None:
                self._manifest_check(self._plan.manifest)
            self._borrower.take(in_place=in_place)
            self._incoming = self._borrower.incoming(
                self._plan, self._refit.who.rank, list(self._sources), self._refit.bucket_size
            )
            if self._borrower.writes_in_place and self._before_writing is not None:
                self._before_writing()
                # Reads do not wait for what is queued on a device, and may still use what is written.
                await_readers(self._refit.buffers[0])
            for rank, source in self._sources.items():
                source.expect(len(self._incoming.lent[rank]), len(self._incoming.packed[rank]))
            self._pump.start()
            while isinstance(ready := await self._next(), _Ready):
                self.batches_yielded += 1
                handed = self._borrower.parameters(ready.batch, ready.place)
                yield ParameterBatch(handed, arrived=ready.batch.arrived, nbytes=self._nbytes(ready.batch))
                # As above: the next read into this buffer does not wait for the device either.
                await_readers(ready.place.buffer)
                if self._refit.poison_released:
                    _poison(handed)
                del handed
                self._refit.watch.wake(partial(self._slots.drop, ready.slot))
                self._tell(Loaded(self.batches_yielded))  # or a sender would hear nothing while all goes well
            self._tell(Taken())

    def _tell(self, message: Loaded | Taken) -> None:
        for source in self._sources.values():
            source.link.send(message)

    def figures(self) -> dict[str, float]:
        """Return what `CheckpointEngine.refit_stats` gives, and the bytes by the copies that they took."""
        return {
            **self._refit.figures(),
            "bytes": self.bytes_received,
            "bytes_moved": self.bytes_received,
            "tensors": len(self._plan.moved),
            "batches": self.batches_yielded,
            "bytes_in_place": self.bytes_in_place,
            "bytes_staged": self.bytes_received - self.bytes_in_place,
        }

    def close(self) -> None:
        """End the reads and wait for it.

        Raises:
            DeadlineError: one could not be ended.
        """
        self._pump.close()

    @property
    def is_running(self) -> bool:
        """Whether a read may still write into memory."""
        return self._pump.is_running

    async def _next(self) -> _Ready | _End:
        with self._refit.stopwatch.phase("receive"):
            return await self._pump.next_event()

    @contextmanager
    def _located(self) -> Iterator[None]:
        try:
            yield
        except WeightSyncError as error:
            alone = next(iter(self._sources.values())).link.peer if len(self._sources) == 1 else None
            error.with_context(
                phase="receive", peer=alone, bucket=self._bucket, bytes_done=self.bytes_received
            )
            raise

    def _nbytes(self, batch: Batch) -> int:
        incoming = self._require_incoming()
        parts = [incoming.lent[rank].select(part) for rank, part in batch.lent.items()]
        parts += [incoming.packed[rank].select(part) for rank, part in batch.packed.items()]
        return sum(part.total_bytes for part in parts)

    def _await_exposed(self) -> None:
        manifest, kind = self._borrower.table.manifest, self._refit.digest_kind
        for source in self._sources.values():
            storages = len(self._plan.policy[source.rank].storages)
            told = source.await_exposed(manifest, kind, storages, timeout_s=self._refit.patience())
            self._borrower.learn(source.rank, told.addresses, told.keys)

    # The thread.

    def _run(self) -> None:
        incoming = self._require_incoming()
        for number, batch in enumerate(incoming.batches):
            slot = self._await_slot(alone=batch.buffer_bytes > self._refit.bucket_size)
            place = self._borrower.place(batch, slot)
            with self._refit.stopwatch.phase("fetch"):
                self._fetch(incoming, number, place)
            with self._refit.stopwatch.phase("verify"):
                self._verify(incoming, batch, place)
            self._pump.put(_Ready(batch, place, slot))
        self._pump.put(_End())

    def _require_incoming(self) -> Incoming:
        if self._incoming is None:
            raise ProtocolError("nothing is read yet")
        return self._incoming

    def _await_slot(self, *, alone: bool) -> int:
        """Return a buffer; ``alone``: once no other is in use, since there is only one larger buffer."""

        def probe() -> int | None:
            self._pump.check()
            return self._slots.take() if self._slots.all_free or not alone else None

        # The consumer may take all the time of the refit.
        while (slot := self._refit.watch.until(probe, timeout_s=self._refit.patience())) is None:
            self._pump.check()
        return slot

    def _fetch(self, incoming: Incoming, number: int, place: Place) -> None:
        """Read all of a batch: what is lent at once, what is packed as it comes."""
        batch = incoming.batches[number]
        started = [(rank, self._borrower.read_lent(incoming, number, rank, place)) for rank in batch.lent]
        self._read(started)
        left = {rank for rank, part in batch.packed.items() if part.stop > part.start}
        while left:
            self._await_news(left, lambda: any(self._sources[rank].buckets for rank in left) or None)
            for rank in sorted(left):
                source, stop = self._sources[rank], batch.packed[rank].stop
                while source.buckets and source.next_row < stop:
                    self._read_bucket(incoming, source, stop, place)
                if source.next_row >= stop:
                    left.discard(rank)
        self.bytes_received += self._nbytes(batch)
        self._count_in_place(incoming, batch)

    def _read_bucket(self, incoming: Incoming, source: Source, stop: int, place: Place) -> None:
        """Read what a bucket has for this batch, and let go of it once nothing more is in it."""
        bucket, rows = source.buckets[0], incoming.packed[source.rank]
        end = bucket.first + rows_in(bucket)
        part = slice(source.next_row, min(stop, end))
        buffer = self._transport.buffer_of(RankId("policy", source.rank), bucket.slot)
        remote = source.addresses_of(rows, part, *buffer)
        self._bucket = bucket.seq
        self._read([(source.rank, self._borrower.read_packed(incoming, source.rank, part, remote, place))])
        source.next_row = part.stop
        if part.stop == end:
            source.buckets.popleft()
            source.link.send(Release(bucket.seq))

    def _read(self, readings: list[tuple[int, Reading]]) -> None:
        """Run reads side by side; what is under way after a failure is given up with its connection."""
        links = [self._sources[rank].link for rank, _ in readings]
        ended = False
        try:
            for _, reading in readings:
                reading.start()
            with saying_what_was_heard(links, "fetch"):
                await_ended(
                    lambda: all(reading.has_ended() for _, reading in readings),
                    timeout_s=self._refit.patience(),
                    check=self._pump.check,
                    what="a read",
                    pauses_s=_POLLS_S,
                )
            ended = True
        finally:
            if not ended:
                for rank, reading in readings:
                    reading.release()
                    self._transport.break_off(RankId("policy", rank))

    def _await_news(self, ranks: Iterable[int], probe: Callable[[], bool | None]) -> None:
        """Wait until some of these policy ranks have said what is waited for."""

        def look() -> bool | None:
            self._pump.check()
            self._take_in()
            return probe()

        started = time.monotonic()
        if self._refit.watch.until(look, timeout_s=self._refit.patience()) is None:
            link = self._sources[min(ranks)].link
            raise link.overdue(*NEWS, phase="receive", waited_s=time.monotonic() - started)

    def _take_in(self) -> None:
        for source in self._sources.values():
            source.take_in()

    def _verify(self, incoming: Incoming, batch: Batch, place: Place) -> None:
        if self._refit.checks.mode == "off":
            return
        for rank, part in batch.lent.items():
            source = self._sources[rank]
            self._await_news([rank], lambda s=source, p=part: len(s.lent_digests) >= p.stop or None)  # type: ignore[misc]
            self._require_alike(incoming.lent[rank], part, source.lent_digests, batch, place)
        for rank, part in batch.packed.items():
            digests = self._sources[rank].packed_digests
            self._require_alike(incoming.packed[rank], part, digests, batch, place)

    def _require_alike(self, rows: Rows, part: slice, digests: list[int], batch: Batch, place: Place) -> None:
        arrived = RowDigests(lambda index: self._borrower.target(index, batch, place))
        wrong = first_difference(rows, part, digests, arrived, self._refit.is_row_checked)
        if wrong is not None:
            offset, storage = int(rows.target_offset[wrong]), int(rows.target_storage[wrong])
            raise DigestError(
                f"bytes {offset} and following arrived changed",
                tensor=self._borrower.table.storages[storage].name,
            )

    def _count_in_place(self, incoming: Incoming, batch: Batch) -> None:
        in_place = self._borrower.in_place
        for rank, part in batch.lent.items():
            rows = incoming.lent[rank].select(part)
            self.bytes_in_place += int(rows.packed_bytes[in_place[rows.target_storage]].sum())


def _poison(handed: Iterable[tuple[str, torch.Tensor]]) -> None:
    for _, tensor in handed:
        overwrite(flat_bytes(tensor), POISON)


def _one_sided(transport: object) -> OneSidedTransport:
    if not isinstance(transport, OneSidedTransport):
        raise ProtocolError(f"{type(transport).__name__} cannot read a peer's memory")
    return transport
