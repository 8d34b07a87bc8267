"""The sending half of every built-in transport: pack, publish, wait for the receiver, keep in step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial

import torch

from weightsync.buckets import Placement, place_chunks, split_weight_chunks
from weightsync.control import Bucket, ChunkEntry, Complete, Done, Link, Manifest, Release
from weightsync.engines.buffers import synchronize
from weightsync.engines.lockstep import Lockstep
from weightsync.engines.refit import Refit
from weightsync.engines.stream import PromisedOrder, Weights
from weightsync.errors import ErrorContext, ProtocolError, WeightSyncError
from weightsync.tensors import TensorSpec, WeightManifest, digest_bytes, digest_kind


async def drain_weights(weights: Weights, lockstep: Lockstep, refit: Refit) -> None:
    """Consume a stream on a rank that sends nothing, one item at a time, in step with those that send.

    The bucket boundaries, and so the steps, are those that the sending ranks come to with the same stream.
    """
    promise = PromisedOrder.of(weights, refit.stopwatch)
    await lockstep.step()
    bucket, size = 0, refit.bucket_size
    for placement in place_chunks(split_weight_chunks(promise.watch(weights), size), size):
        if placement.bucket != bucket:
            bucket = placement.bucket
            await lockstep.step()
        del placement  # or its tensor would still be there while the stream makes the next one
    await lockstep.finish()


@dataclass
class _OpenBucket:
    """The bucket being filled."""

    seq: int
    slot: int
    entries: list[ChunkEntry] = field(default_factory=list)
    nbytes: int = 0


class BucketSender:
    """Sends one weight stream to one receiver. Made anew for each refit.

    Args:
        refit: whose buffers, transport and deadlines are used.
        link: the control link to the receiver.
        lockstep: keeps this rank in step with the other policy ranks.
    """

    def __init__(self, refit: Refit, link: Link, lockstep: Lockstep) -> None:
        self._refit = refit
        self._link = link
        self._lockstep = lockstep
        self._buffers = refit.buffers
        self._stopwatch = refit.stopwatch
        self._free = list(range(len(self._buffers)))
        self._in_flight: dict[int, int] = {}
        self._bytes_sent = 0
        self.buckets_sent = 0
        self._failure: BaseException | None = None
        self._tensor: str | None = None

    async def send(self, weights: Weights) -> WeightManifest:
        """Send the whole stream; returns once the receiver has loaded it.

        Raises:
            WeightSyncError: with peer, phase, bucket, tensor and bytes so far where they are known.
        """
        try:
            return await self._send(weights)
        except Exception as error:
            if error is not self._failure:
                self._locate(error)
            raise

    async def _send(self, weights: Weights) -> WeightManifest:
        await self._lockstep.step()
        promise = PromisedOrder.of(weights, self._stopwatch)
        if promise.manifest is not None:
            self._link.send(Manifest(promise.manifest.tensors, self._digest_kind()))
        await self._send_buckets(promise.watch(weights))
        sent = promise.sent()
        self._link.send(Done(self.buckets_sent, len(sent), sent.nbytes, sent.digest()))
        await self._lockstep.finish()
        await self._wait("waiting for the receiver to finish", self._await_complete)
        return sent

    async def _send_buckets(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        current: _OpenBucket | None = None
        size = self._refit.bucket_size
        for placement in place_chunks(split_weight_chunks(weights, size), size):
            self._tensor = placement.meta.name
            if current is None:
                current = await self._open_bucket(placement.bucket)
            elif placement.bucket != current.seq:
                self._publish(current)
                current = await self._open_bucket(placement.bucket)
                await self._lockstep.step()
            self._attempt(partial(self._fill, current, placement))
            self._tensor = None
            del placement  # as in `drain_weights`
        if current is not None:
            self._publish(current)
        self._raise_failure()

    async def _open_bucket(self, seq: int) -> _OpenBucket:
        self._raise_failure()
        if not self._free:
            await self._wait("waiting for a buffer", self._await_release)
        return _OpenBucket(seq, self._free.pop(0))

    def _fill(self, bucket: _OpenBucket, placement: Placement) -> None:
        meta, start = placement.meta, placement.meta.offset or 0
        with self._stopwatch.phase("pack"):
            target = self._buffers[bucket.slot][start : placement.end]
            target.copy_(placement.data)
            digest = digest_bytes(target) if self._refit.verify else 0
        spec = TensorSpec(meta.name, tuple(meta.shape), str(meta.dtype).removeprefix("torch."))
        bucket.entries.append(ChunkEntry(spec, meta.chunk_offset, meta.chunk_size, start, digest))
        bucket.nbytes = max(bucket.nbytes, placement.end)

    def _publish(self, bucket: _OpenBucket) -> None:
        def publish() -> None:
            synchronize(self._buffers[bucket.slot].device)
            payload = self._refit.transport.publish(bucket.slot, bucket.nbytes) if bucket.nbytes else b""
            self._in_flight[bucket.seq] = bucket.slot
            self._link.send(Bucket(bucket.seq, bucket.slot, bucket.nbytes, tuple(bucket.entries), payload))
            self._bytes_sent += bucket.nbytes
            self.buckets_sent += 1

        self._attempt(publish)

    def _attempt(self, act: Callable[[], None]) -> None:
        """Run a local step; keep its error until the next bucket.

        Between two steps the other ranks may already be inside the collective that makes the next weight.
        This rank goes on consuming the stream up to the next bucket, so that none of them is left there.
        """
        if self._failure is None:
            try:
                act()
            except Exception as error:  # noqa: BLE001 - raised again by _raise_failure
                self._locate(error)
                self._failure = error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _wait(self, phase: str, wait: Callable[[str], None]) -> None:
        with self._stopwatch.phase("wait"):
            await self._refit.waiter.run(lambda: wait(phase))

    def _await_release(self, phase: str) -> None:
        self._take_release(self._link.receive(Release, phase=phase, timeout_s=self._refit.patience()))

    def _await_complete(self, phase: str) -> None:
        while self._in_flight:
            self._await_release(phase)
        self._link.receive(Complete, phase=phase, timeout_s=self._refit.patience())

    def _take_release(self, release: Release) -> None:
        slot = self._in_flight.pop(release.seq, None)
        if slot is None:
            raise ProtocolError(f"the receiver released bucket {release.seq}, which it was never given")
        self._free.append(slot)

    def _digest_kind(self) -> str:
        return digest_kind(self._buffers[0].device) if self._refit.verify else "off"

    def _locate(self, error: Exception) -> None:
        """Say in an error how far the stream has come."""
        if isinstance(error, WeightSyncError):
            error.with_context(**asdict(self._whereabouts()))
        else:
            error.add_note(f"while sending: {self._whereabouts()}")

    def _whereabouts(self) -> ErrorContext:
        return ErrorContext(
            phase="send",
            peer=self._link.peer,
            bucket=max(self._in_flight, default=None),
            tensor=self._tensor,
            bytes_done=self._bytes_sent,
        )
