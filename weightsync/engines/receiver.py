"""The receiving half of every built-in transport: fetch ahead, check, hand over, account for everything.

A thread (the pump) brings the next bucket in while the consumer loads the current one. The consumer is the
async generator `BucketReceiver.batches`; everything that touches the model happens in the caller's thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

import torch

from weightsync.buckets import Chunk, ChunkMerger, unpack_bucket
from weightsync.control import Bucket, ChunkEntry, Complete, Done, Link, Manifest, Release
from weightsync.engines.stats import Stopwatch
from weightsync.engines.transport import BucketTransport
from weightsync.engines.waiting import Budget, Waiter
from weightsync.errors import DeadlineError, DigestError, IncompleteStreamError, ManifestError, ProtocolError
from weightsync.tensors import (
    TensorMeta,
    TensorSpec,
    WeightManifest,
    digest_bytes,
    digest_kind,
    dtype_from_name,
    list_names,
)

_POISON = 0xFF
"""Fills released buffers in debug mode: NaN in every float format, so that late readers show."""
_EXPECTED: tuple[type[Manifest | Bucket | Done], ...] = (Manifest, Bucket, Done)
_CHECK_S = 0.05
_JOIN_S = 10.0


@dataclass(frozen=True)
class Arrived:
    """A bucket whose bytes are in the local buffer ``slot`` and whose digests agree."""

    bucket: Bucket
    slot: int


class Account:
    """Holds what arrives against what was promised: nothing unknown, repeated, changed or missing."""

    def __init__(self) -> None:
        self._promised: WeightManifest | None = None
        self._specs: list[TensorSpec] = []
        self._names: set[str] = set()
        self._buckets = 0

    def promise(self, manifest: WeightManifest) -> None:
        """Take the sender's manifest; it comes once, before the first bucket."""
        if self._promised is not None or self._specs:
            raise ProtocolError("the sender announced a manifest in the middle of its stream")
        self._promised = manifest

    def enter(self, bucket: Bucket) -> None:
        """Enter one bucket's chunks.

        Raises:
            ProtocolError: a bucket is missing or repeated.
            ManifestError: a chunk opens a tensor that is not the next one promised, or came before.
        """
        if bucket.seq != self._buckets:
            raise ProtocolError(f"expected bucket {self._buckets}, got bucket {bucket.seq}")
        self._buckets += 1
        for entry in bucket.chunks:
            if entry.chunk_offset == 0:
                self._enter_tensor(entry.spec)

    def _enter_tensor(self, spec: TensorSpec) -> None:
        if spec.name in self._names:
            raise ManifestError("a tensor came twice", tensor=spec.name)
        if self._promised is not None:
            index = len(self._specs)
            promised = self._promised.tensors[index] if index < len(self._promised) else None
            if spec != promised:
                raise ManifestError(
                    f"got {spec}, but the manifest promised {promised or 'no more'}", tensor=spec.name
                )
        self._names.add(spec.name)
        self._specs.append(spec)

    def close(self, done: Done) -> WeightManifest:
        """Check the end of the stream; returns what has come.

        Raises:
            IncompleteStreamError: less came than was promised or sent.
        """
        came = WeightManifest(tuple(self._specs))
        missing = [name for name in self._promised.names if name not in self._names] if self._promised else []
        if missing:
            raise IncompleteStreamError(f"promised and never came: {list_names(missing)}", tensor=missing[0])
        counts = (self._buckets, len(came), came.nbytes, came.digest())
        if counts != (done.buckets, done.tensors, done.nbytes, done.manifest_digest):
            raise IncompleteStreamError(
                f"the sender sent {done.tensors} tensors of {done.nbytes} bytes in {done.buckets} buckets, "
                f"{len(came)} tensors of {came.nbytes} bytes in {self._buckets} buckets came"
            )
        return came


class BucketReceiver:
    """Receives one weight stream from one sender. Made anew for each refit.

    Args:
        link: the control link to the sender, already begun.
        transport: moves the buckets' bytes.
        buffers: the transport's buffers.
        waiter: runs blocking waits.
        budget: the refit's time.
        stall_s: seconds without progress after which the sender is given up.
        verify: whether chunks carry digests that are to be checked.
        poison_released: overwrite each buffer when the consumer gives it back.
        manifest_check: called with the manifest before the first batch; raises to refuse the refit.
        stopwatch: where the time goes.
    """

    def __init__(
        self,
        *,
        link: Link,
        transport: BucketTransport,
        buffers: list[torch.Tensor],
        waiter: Waiter,
        budget: Budget,
        stall_s: float,
        verify: bool,
        poison_released: bool,
        manifest_check: Callable[[WeightManifest], None] | None,
        stopwatch: Stopwatch,
    ) -> None:
        self._link = link
        self._transport = transport
        self._buffers = buffers
        self._waiter = waiter
        self._budget = budget
        self._stall_s = stall_s
        self._verify = verify
        self._poison_released = poison_released
        self._manifest_check = manifest_check
        self._stopwatch = stopwatch
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[Manifest | Arrived | Done | BaseException] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._pump = threading.Thread(target=self._run_pump, name="weightsync-receive", daemon=True)
        self.received: WeightManifest | None = None
        """What has come, once the stream has ended well."""
        self.batches_yielded = 0
        self.bytes_received = 0

    async def batches(self) -> AsyncGenerator[list[tuple[str, torch.Tensor]], None]:
        """Yield batches of whole tensors; each is valid until the next one is asked for.

        Raises:
            WeightSyncError: the sender failed or was lost, or what came is not what was promised.
        """
        for slot in range(len(self._buffers)):
            self._free.put(slot)
        self._pump.start()
        account, merger = Account(), ChunkMerger()
        while True:
            event = await self._next_event()
            if isinstance(event, Manifest):
                self._take_manifest(event, account)
            elif isinstance(event, Arrived):
                account.enter(event.bucket)
                tensors = merger.feed(self._chunks(event))
                if tensors:
                    self.batches_yielded += 1
                    yield tensors
                del tensors
                self._give_back(event.slot)
            else:
                merger.require_complete()
                self.received = account.close(event)
                self._link.send(Complete())
                return

    def close(self) -> None:
        """End the pump and wait for it, so that no transfer writes into a buffer any more.

        Raises:
            DeadlineError: a transfer could not be ended.
        """
        self._stop.set()
        if self._pump.is_alive():
            self._pump.join(_JOIN_S)
            if self._pump.is_alive():
                raise DeadlineError(f"a transfer did not end within {_JOIN_S:g} s", peer=self._link.peer)

    async def _next_event(self) -> Manifest | Arrived | Done:
        with self._stopwatch.phase("receive"):
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                event = await self._waiter.run(self._events.get)
        if isinstance(event, BaseException):
            raise event
        return event

    def _take_manifest(self, message: Manifest, account: Account) -> None:
        expected = digest_kind(self._buffers[0].device) if self._verify else "off"
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
        if self._poison_released:
            self._buffers[slot].fill_(_POISON)
        self._free.put(slot)

    # The pump's thread.

    def _run_pump(self) -> None:
        try:
            while not self._stop.is_set():
                timeout_s = self._budget.clip(self._stall_s)
                message = self._link.receive(*_EXPECTED, phase="receive", timeout_s=timeout_s)
                if isinstance(message, Bucket):
                    self._events.put(self._bring_in(message))
                    continue
                self._events.put(message)
                if isinstance(message, Done):
                    return
        except BaseException as error:  # noqa: BLE001 - raised again in the consumer's thread
            self._events.put(error)

    def _bring_in(self, bucket: Bucket) -> Arrived:
        size = self._buffers[0].numel()
        if bucket.nbytes > size:
            raise ProtocolError(f"bucket {bucket.seq} has {bucket.nbytes} bytes, the buffers here {size}")
        slot = self._await_free_slot()
        if bucket.nbytes:
            with self._stopwatch.phase("fetch"):
                timeout_s = self._budget.clip(self._stall_s)
                self._transport.fetch(bucket, slot, timeout_s=timeout_s, check=self._check)
        self._link.send(Release(bucket.seq))
        self.bytes_received += bucket.nbytes
        if self._verify:
            with self._stopwatch.phase("verify"):
                self._require_digests(bucket, slot)
        return Arrived(bucket, slot)

    def _await_free_slot(self) -> int:
        while True:
            try:
                return self._free.get(timeout=_CHECK_S)
            except queue.Empty:
                self._check()
                self._budget.clip(_CHECK_S)

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
