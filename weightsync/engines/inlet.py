"""The thread that brings buckets in: from every source, ahead of the consumer, and on to the targets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from weightsync.buckets import unpack_bucket
from weightsync.byte_digests import digest_bytes
from weightsync.control import Bucket, ChunkEntry, Done, Link, Manifest, Release
from weightsync.engines.buffers import POISON, await_readers, overwrite
from weightsync.engines.outlet import Outlet
from weightsync.engines.pump import Pump
from weightsync.engines.refit import Refit, saying_what_was_heard
from weightsync.engines.slots import Slots
from weightsync.errors import DigestError, ProtocolError, WeightSyncError
from weightsync.tensors import TensorMeta, dtype_from_name
from weightsync.topology import RankId

_EXPECTED: tuple[type[Manifest | Bucket | Done], ...] = (Manifest, Bucket, Done)


@dataclass(frozen=True)
class Promised:
    """A source's manifest."""

    source: RankId
    manifest: Manifest


@dataclass(frozen=True)
class Arrived:
    """A bucket that is all there, as the bytes ``data``, and whose digests agree."""

    source: RankId
    bucket: Bucket
    data: torch.Tensor
    slot: int | None
    """The local buffer that it fills; `None` where it is read in place."""


@dataclass(frozen=True)
class Ended:
    """Every source has sent everything, and every target has loaded it."""

    dones: Mapping[RankId, Done]


Event = Promised | Arrived | Ended


class Inlet:
    """Brings in the buckets of one refit; forwards each, while it is loaded, from the buffer that it fills.

    Args:
        refit: whose buffers, transport and deadlines are used.
        sources: the control links to the senders.
        targets: the control links to those that it forwards to; only with a single source.
    """

    def __init__(self, refit: Refit, sources: Mapping[RankId, Link], targets: Sequence[Link]) -> None:
        self._refit = refit
        self._sources = dict(sources)
        self._waiting = dict(sources)
        """Those that have not ended."""
        self._buffers = refit.buffers
        self._in_place = refit.transport.in_place
        self._forwards = bool(targets)
        # A target may still read what the consumer has given back.
        self._poisons = refit.poison_released and not self._in_place and not self._forwards
        self._slots = Slots(len(self._buffers))
        self._loading: set[int] = set()
        """The buffers that the consumer has."""
        self._used: set[int] = set()
        self._outlet = Outlet(refit, targets, self._slots)
        self._dones: dict[RankId, Done] = {}
        self._pump: Pump[Event] = Pump(refit, sources.values(), self._run)
        self.bytes_received = 0

    # The consumer's side.

    def start(self) -> None:
        """Start the thread."""
        self._pump.start()

    async def next_event(self) -> Event:
        """Return what comes next; raises what has gone wrong."""
        return await self._pump.next_event()

    def give_back(self, arrived: Arrived) -> None:
        """Take back a bucket that the consumer has loaded."""
        # Work that the consumer has queued on the device still reads the buffer; the next read into it does
        # not wait for any device.
        await_readers(arrived.data)
        slot = arrived.slot
        if slot is None:
            self._sources[arrived.source].send(Release(arrived.bucket.seq))
            return

        if self._poisons:
            overwrite(arrived.data, POISON)

        def drop() -> None:
            self._loading.discard(slot)
            self._slots.drop(slot)

        self._refit.watch.wake(drop)

    def close(self) -> None:
        """End the thread and wait for it.

        Raises:
            DeadlineError: a transfer could not be ended.
        """
        self._pump.close()

    @property
    def is_running(self) -> bool:
        """Whether a transfer may still write into a buffer."""
        return self._pump.is_running

    # The thread.

    def _run(self) -> None:
        while self._waiting:
            self._take_next()
        self._finish_forwarding()
        self._pump.put(Ended(self._dones))

    def _take_next(self) -> None:
        slot = None if self._in_place else self._await_slot()
        try:
            source, message = self._await_message()
            if isinstance(message, Bucket):
                arrived = self._bring_in(source, message, slot)
                slot = None
                self._pump.put(arrived)
        finally:
            if slot is not None:
                unused = slot
                self._refit.watch.wake(lambda: self._slots.drop(unused))
        if isinstance(message, Manifest):
            self._refit.checks.last = len(message.tensors) - 1
            self._outlet.tell(message)
            self._pump.put(Promised(source, message))
        elif isinstance(message, Done):
            self._dones[source] = message
            del self._waiting[source]
            self._outlet.tell_last(message)

    def _await_slot(self) -> int:
        """Return a buffer that neither the consumer nor a target uses any more."""

        def probe() -> int | None:
            self._pump.check()
            self._outlet.take_in()
            return self._slots.take()

        started = time.monotonic()
        while (slot := self._refit.watch.until(probe, timeout_s=self._refit.patience())) is None:
            # The consumer may take all the time of the refit; a target has to get on.
            if not self._loading:
                raise self._outlet.overdue("forwarding", time.monotonic() - started)
        if slot in self._used and self._forwards:
            with saying_what_was_heard(self._outlet.links, "forwarding"):
                self._refit.transport.settle(slot, timeout_s=self._refit.patience(), check=self._pump.check)
        return slot

    def _await_message(self) -> tuple[RankId, Manifest | Bucket | Done]:
        def probe() -> tuple[RankId, Manifest | Bucket | Done] | None:
            self._pump.check()
            self._outlet.take_in()
            for source, link in list(self._waiting.items()):
                message = link.poll(*_EXPECTED, phase="receive")
                if message is not None:
                    # To the end of the row, so that none is kept waiting by a busy one.
                    self._waiting[source] = self._waiting.pop(source)
                    return source, message
            return None

        started = time.monotonic()
        news = self._refit.watch.until(probe, timeout_s=self._refit.patience())
        if news is None:
            link = next(iter(self._waiting.values()))
            raise link.overdue(*_EXPECTED, phase="receive", waited_s=time.monotonic() - started)
        return news

    def _bring_in(self, source: RankId, bucket: Bucket, slot: int | None) -> Arrived:
        size = self._refit.bucket_size
        if bucket.nbytes > size:
            raise ProtocolError(f"bucket {bucket.seq} has {bucket.nbytes} bytes, the buffers here {size}")
        data = self._fetch(source, bucket, slot)
        if slot is not None:
            self._used.add(slot)
            self._refit.watch.wake(lambda: self._loading.add(slot))
            self._sources[source].send(Release(bucket.seq))
        self.bytes_received += bucket.nbytes
        with self._refit.stopwatch.phase("verify"):
            require_digests(bucket, data, self._refit.is_checked)
        if slot is not None:
            self._outlet.publish(bucket.seq, slot, bucket.nbytes, bucket.chunks)
        return Arrived(source, bucket, data, slot)

    def _fetch(self, source: RankId, bucket: Bucket, slot: int | None) -> torch.Tensor:
        if not bucket.nbytes:
            return self._buffers[0][:0]
        heard = saying_what_was_heard([self._sources[source]], "fetch")
        with self._refit.stopwatch.phase("fetch"), heard, _at(bucket):
            return self._refit.transport.fetch(
                source, bucket, slot or 0, timeout_s=self._refit.patience(), check=self._check_sources
            )

    def _finish_forwarding(self) -> None:
        def probe() -> bool | None:
            self._pump.check()
            return self._outlet.take_in() or self._outlet.is_finished or None

        while not self._outlet.is_finished:
            started = time.monotonic()
            if self._refit.watch.until(probe, timeout_s=self._refit.patience()) is None:
                raise self._outlet.overdue("forwarding", time.monotonic() - started)

    def _check_sources(self) -> None:
        self._pump.check()
        self._outlet.check()


@contextmanager
def _at(bucket: Bucket) -> Iterator[None]:
    """Say in an error which bucket it is about: the consumer may be at an earlier one."""
    try:
        yield
    except WeightSyncError as error:
        error.with_context(bucket=bucket.seq)
        raise


def require_digests(bucket: Bucket, data: torch.Tensor, is_checked: Callable[[ChunkEntry], bool]) -> None:
    """Check the digests of those chunks of a bucket that have one.

    Raises:
        DigestError: bytes came changed.
    """
    checked = [entry for entry in bucket.chunks if is_checked(entry)]
    chunks = unpack_bucket(data, metas_of(checked))
    for entry, (meta, chunk) in zip(checked, chunks, strict=True):
        if digest_bytes(chunk) != entry.digest:
            raise DigestError(
                f"bytes {meta.chunk_offset} to {meta.chunk_offset + meta.chunk_size} arrived changed",
                tensor=meta.name, bucket=bucket.seq,
            )  # fmt: skip


def metas_of(chunks: Iterable[ChunkEntry]) -> list[TensorMeta]:
    """Return the chunks' descriptions, as `unpack_bucket` takes them."""
    return [
        TensorMeta(
            name=entry.spec.name,
            shape=torch.Size(entry.spec.shape),
            dtype=dtype_from_name(entry.spec.dtype),
            chunk_offset=entry.chunk_offset,
            chunk_size=entry.chunk_size,
            offset=entry.offset,
        )
        for entry in chunks
    ]
