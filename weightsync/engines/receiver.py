"""The receiving half of every built-in transport: fetch ahead, check, hand over, account for everything.

A thread (the pump) brings the next bucket in while the consumer loads the current one. The consumer is the
async generator `BucketReceiver.batches`; everything that touches the model happens in the caller's thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from weightsync.buckets import Chunk, ChunkMerger, unpack_bucket
from weightsync.control import Bucket, ChunkEntry, Complete, Done, Link, Manifest, Release
from weightsync.engines.account import Account
from weightsync.engines.buffers import await_readers, bind_thread, overwrite
from weightsync.engines.refit import Refit
from weightsync.errors import (
    DeadlineError,
    DigestError,
    IncompleteStreamError,
    ProtocolError,
    WeightSyncError,
)
from weightsync.tensors import TensorMeta, WeightManifest, digest_bytes, digest_kind, dtype_from_name

_POISON = 0xFF
"""Fills released buffers in debug mode: NaN in every float format, so that late readers show."""
_EXPECTED: tuple[type[Manifest | Bucket | Done], ...] = (Manifest, Bucket, Done)
_CHECK_S = 0.05
_JOIN_S = 10.0
_MARGIN_S = 10.0


@dataclass(frozen=True)
class Arrived:
    """A bucket whose bytes are in the local buffer ``slot`` and whose digests agree."""

    bucket: Bucket
    slot: int


class BucketReceiver:
    """Receives one weight stream from one sender. Made anew for each refit.

    Args:
        refit: whose buffers, transport and deadlines are used.
        link: the control link to the sender.
        poison_released: overwrite each buffer when the consumer gives it back.
        manifest_check: called with the manifest before the first batch; raises to refuse the refit.
    """

    def __init__(
        self,
        refit: Refit,
        link: Link,
        *,
        poison_released: bool,
        manifest_check: Callable[[WeightManifest], None] | None,
    ) -> None:
        self._refit = refit
        self._link = link
        self._poison_released = poison_released
        self._manifest_check = manifest_check
        self._buffers = refit.buffers
        self._stopwatch = refit.stopwatch
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[Manifest | Arrived | Done | BaseException] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._pump = threading.Thread(target=self._run_pump, name="weightsync-receive", daemon=True)
        self.received: WeightManifest | None = None
        """What has come, once the stream has ended well."""
        self.batches_yielded = 0
        self.bytes_received = 0
        self._bucket: int | None = None

    async def batches(self) -> AsyncGenerator[list[tuple[str, torch.Tensor]], None]:
        """Yield batches of whole tensors; each is valid until the next one is asked for.

        Raises:
            WeightSyncError: the sender failed or was lost, or what came is not what was promised.
        """
        for slot in range(len(self._buffers)):
            self._free.put(slot)
        self._pump.start()
        account, merger = Account(), ChunkMerger()
        with self._located():
            while not isinstance(event := await self._next_event(), Done):
                if isinstance(event, Manifest):
                    self._take_manifest(event, account)
                    continue
                self._bucket = event.bucket.seq
                account.enter(event.bucket)
                tensors = merger.feed(self._chunks(event))
                if tensors:
                    self.batches_yielded += 1
                    yield tensors
                del tensors
                self._give_back(event.slot)
            merger.require_complete()
            self.received = account.close(event)
            self._link.send(Complete())

    def close(self) -> None:
        """End the pump and wait for it, so that no transfer writes into a buffer any more.

        Raises:
            DeadlineError: a transfer could not be ended.
        """
        self._stop.set()
        if self._pump.is_alive():
            self._pump.join(_JOIN_S)
            if self._pump.is_alive():
                raise DeadlineError(
                    f"a transfer did not end within {_JOIN_S:g} s", peer=self._link.peer, phase="receive"
                )

    @property
    def is_running(self) -> bool:
        """Whether a transfer may still write into a buffer."""
        return self._pump.is_alive()

    @contextmanager
    def _located(self) -> Iterator[None]:
        """Say in errors how far the stream had come."""
        try:
            yield
        except WeightSyncError as error:
            error.with_context(
                phase="receive", peer=self._link.peer, bucket=self._bucket, bytes_done=self.bytes_received
            )
            raise

    async def _next_event(self) -> Manifest | Arrived | Done:
        with self._stopwatch.phase("receive"):
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                event = await self._refit.waiter.run(self._await_event)
        if isinstance(event, BaseException):
            raise event
        return event

    def _await_event(self) -> Manifest | Arrived | Done | BaseException:
        # The pump keeps the deadlines, one for the message and one for the bytes; this is for a pump that
        # hangs in a call which knows none.
        timeout_s = 2 * self._refit.deadlines.stall_s + _MARGIN_S
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            raise DeadlineError(
                f"nothing was brought in within {timeout_s:g} s, and no reason was given",
                peer=self._link.peer, phase="receive",
            ) from None  # fmt: skip

    def _take_manifest(self, message: Manifest, account: Account) -> None:
        expected = digest_kind(self._buffers[0].device) if self._refit.verify else "off"
        if message.digest_kind != expected:
            raise ProtocolError(
                f"the sender digests with {message.digest_kind!r}, this side with {expected!r}: "
                f"set verify and device alike on both sides"
            )
        manifest = WeightManifest.build(message.tensors)
        account.promise(manifest)
        if self._manifest_check is not None:
            self._manifest_check(manifest)

    def _chunks(self, arrived: Arrived) -> list[Chunk]:
        metas = [_meta_of(entry) for entry in arrived.bucket.chunks]
        return unpack_bucket(self._buffers[arrived.slot][: arrived.bucket.nbytes], metas)

    def _give_back(self, slot: int) -> None:
        # Work that the consumer has queued on the device still reads the buffer; the next read into it does
        # not wait for any device.
        await_readers(self._buffers[slot])
        if self._poison_released:
            overwrite(self._buffers[slot], _POISON)
        self._free.put(slot)

    # The pump's thread.

    def _run_pump(self) -> None:
        try:
            bind_thread(self._buffers[0].device)
            while True:
                timeout_s = self._refit.patience()
                message = self._link.receive(*_EXPECTED, phase="receive", timeout_s=timeout_s)
                self._events.put(self._bring_in(message) if isinstance(message, Bucket) else message)
                if isinstance(message, Done):
                    return
        except BaseException as error:  # noqa: BLE001 - raised again in the consumer's thread
            # The last event, always: the consumer's wait for the next one has no other end.
            self._events.put(error)

    def _bring_in(self, bucket: Bucket) -> Arrived:
        size = self._refit.bucket_size
        if bucket.nbytes > size:
            raise ProtocolError(f"bucket {bucket.seq} has {bucket.nbytes} bytes, the buffers here {size}")
        slot = self._await_free_slot()
        if bucket.nbytes:
            with self._stopwatch.phase("fetch"):
                timeout_s = self._refit.patience()
                self._refit.transport.fetch(bucket, slot, timeout_s=timeout_s, check=self._check)
        self._link.send(Release(bucket.seq))
        self.bytes_received += bucket.nbytes
        if self._refit.verify:
            with self._stopwatch.phase("verify"):
                self._require_digests(bucket, slot)
        return Arrived(bucket, slot)

    def _await_free_slot(self) -> int:
        while True:
            try:
                return self._free.get(timeout=_CHECK_S)
            except queue.Empty:
                self._check()
                self._refit.patience()

    def _check(self) -> None:
        if self._stop.is_set():
            raise IncompleteStreamError("the consumer stopped before the end of the stream")
        self._link.check()

    def _require_digests(self, bucket: Bucket, slot: int) -> None:
        metas = [_meta_of(entry) for entry in bucket.chunks]
        chunks = unpack_bucket(self._buffers[slot][: bucket.nbytes], metas)
        for entry, (meta, data) in zip(bucket.chunks, chunks, strict=True):
            if digest_bytes(data) != entry.digest:
                raise DigestError(
                    f"bytes {meta.chunk_offset} to {meta.chunk_offset + meta.chunk_size} arrived changed",
                    tensor=meta.name, bucket=bucket.seq,
                )  # fmt: skip


def _meta_of(entry: ChunkEntry) -> TensorMeta:
    spec = entry.spec
    return TensorMeta(
        name=spec.name,
        shape=torch.Size(spec.shape),
        dtype=dtype_from_name(spec.dtype),
        chunk_offset=entry.chunk_offset,
        chunk_size=entry.chunk_size,
        offset=entry.offset,
    )
