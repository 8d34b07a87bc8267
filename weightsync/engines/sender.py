"""The sending half of every built-in transport: pack, publish, wait for the receiver, keep in step."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial

import torch

from weightsync.buckets import Placement, place_chunks, split_weight_chunks
from weightsync.control import Bucket, ChunkEntry, Complete, Done, Link, Manifest, Release
from weightsync.engines.buffers import synchronize
from weightsync.engines.lockstep import Lockstep
from weightsync.engines.stats import Stopwatch
from weightsync.engines.transport import BucketTransport
from weightsync.engines.waiting import Budget, Waiter
from weightsync.errors import ErrorContext, ManifestError, ProtocolError, WeightSyncError
from weightsync.tensors import TensorSpec, WeightManifest, digest_bytes, digest_kind

Weights = Generator[tuple[str, torch.Tensor], None, None]


@dataclass
class PromisedOrder:
    """Watches a stream as it is consumed: counts it, and holds it to its manifest if it has one."""

    manifest: WeightManifest | None
    stopwatch: Stopwatch
    specs: list[TensorSpec] = field(default_factory=list)

    def watch(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the stream's items, timing how long each takes to make."""
        while True:
            with self.stopwatch.phase("gather"):
                item = next(weights, None)
            if item is None:
                break
            name, tensor = item
            spec = TensorSpec.of(name, tensor)
            self._require_promised(spec)
            self.specs.append(spec)
            yield name, tensor
        self._require_all_came()

    def sent(self) -> WeightManifest:
        """Return the manifest of what has come."""
        return WeightManifest(tuple(self.specs))

    def _require_promised(self, spec: TensorSpec) -> None:
        if self.manifest is None:
            return
        index = len(self.specs)
        promised = self.manifest.tensors[index] if index < len(self.manifest) else None
        if spec != promised:
            raise ManifestError(
                f"item {index} of the weight stream is {spec}, its manifest promised {promised or 'no more'}",
                tensor=spec.name,
            )

    def _require_all_came(self) -> None:
        if self.manifest is not None and len(self.specs) < len(self.manifest):
            missing = self.manifest.tensors[len(self.specs)]
            raise ManifestError(
                f"the weight stream ended after {len(self.specs)} of {len(self.manifest)} promised tensors; "
                f"the next was {missing}",
                tensor=missing.name,
            )


def closing_stream(weights: Weights) -> AbstractContextManager[object]:
    """Return a context that closes a generator at its end, so that its clean-up runs then and not later."""
    return closing(weights) if hasattr(weights, "close") else nullcontext()


async def drain_weights(weights: Weights, bucket_size: int, lockstep: Lockstep, stopwatch: Stopwatch) -> None:
    """Consume a stream on a rank that sends nothing, one item at a time, in step with those that send.

    The bucket boundaries, and so the steps, are those that the sending ranks come to with the same stream.
    """
    promise = PromisedOrder(getattr(weights, "manifest", None), stopwatch)
    await lockstep.step()
    bucket = 0
    for placement in place_chunks(split_weight_chunks(promise.watch(weights), bucket_size), bucket_size):
        if placement.bucket != bucket:
            bucket = placement.bucket
            await lockstep.step()
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
        link: the control link to the receiver, already begun.
        transport: moves the buckets' bytes.
        buffers: the transport's buffers; one is filled while the others are on their way.
        lockstep: keeps this rank in step with the other policy ranks.
        waiter: runs blocking waits.
        budget: the refit's time.
        stall_s: seconds without progress after which the receiver is given up.
        verify: whether chunks carry digests.
        stopwatch: where the time goes.
    """

    def __init__(
        self,
        *,
        link: Link,
        transport: BucketTransport,
        buffers: list[torch.Tensor],
        lockstep: Lockstep,
        waiter: Waiter,
        budget: Budget,
        stall_s: float,
        verify: bool,
        stopwatch: Stopwatch,
    ) -> None:
        self._link = link
        self._transport = transport
        self._buffers = buffers
        self._lockstep = lockstep
        self._waiter = waiter
        self._budget = budget
        self._stall_s = stall_s
        self._verify = verify
        self._stopwatch = stopwatch
        self._free = list(range(len(buffers)))
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
        except WeightSyncError as error:
            error.with_context(**asdict(self._whereabouts()))
            raise
        except Exception as error:
            error.add_note(f"while sending: {self._whereabouts()}")
            raise

    async def _send(self, weights: Weights) -> WeightManifest:
        await self._lockstep.step()
        promise = PromisedOrder(getattr(weights, "manifest", None), self._stopwatch)
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
        size = self._buffers[0].numel()
        for placement in place_chunks(split_weight_chunks(weights, size), size):
            self._tensor = placement.meta.name
            if current is None:
                current = await self._open_bucket(placement.bucket)
            elif placement.bucket != current.seq:
                self._publish(current)
                current = await self._open_bucket(placement.bucket)
                await self._lockstep.step()
            self._attempt(partial(self._fill, current, placement))
        if current is not None:
            self._publish(current)
        self._raise_failure()
        self._tensor = None

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
            digest = digest_bytes(target) if self._verify else 0
        spec = TensorSpec(meta.name, tuple(meta.shape), str(meta.dtype).removeprefix("torch."))
        bucket.entries.append(ChunkEntry(spec, meta.chunk_offset, meta.chunk_size, start, digest))
        bucket.nbytes = max(bucket.nbytes, placement.end)

    def _publish(self, bucket: _OpenBucket) -> None:
        def publish() -> None:
            synchronize(self._buffers[bucket.slot].device)
            payload = self._transport.publish(bucket.slot, bucket.nbytes) if bucket.nbytes else b""
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
                self._failure = error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _wait(self, phase: str, wait: Callable[[str], None]) -> None:
        with self._stopwatch.phase("wait"):
            await self._waiter.run(lambda: wait(phase))

    def _await_release(self, phase: str) -> None:
        self._take_release(self._link.receive(Release, phase=phase, timeout_s=self._patience()))

    def _await_complete(self, phase: str) -> None:
        while self._in_flight:
            self._await_release(phase)
        self._link.receive(Complete, phase=phase, timeout_s=self._patience())

    def _take_release(self, release: Release) -> None:
        slot = self._in_flight.pop(release.seq, None)
        if slot is None:
            raise ProtocolError(f"the receiver released bucket {release.seq}, which it was never given")
        self._free.append(slot)

    def _patience(self) -> float:
        return self._budget.clip(self._stall_s)

    def _digest_kind(self) -> str:
        return digest_kind(self._buffers[0].device) if self._verify else "off"

    def _whereabouts(self) -> ErrorContext:
        return ErrorContext(
            phase="send",
            peer=self._link.peer,
            bucket=max(self._in_flight, default=None),
            tensor=self._tensor,
            bytes_done=self._bytes_sent,
        )
