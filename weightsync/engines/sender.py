"""The sending half of every built-in transport: pack, publish, wait for the receivers, keep in step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TypeVar

import msgspec
import torch

from weightsync.buckets import Placement, largest_chunk, place_chunks, split_weight_chunks
from weightsync.byte_digests import digest_bytes
from weightsync.control import ChunkEntry, Done, Link, Manifest
from weightsync.engines.buffers import POISON, overwrite, synchronize
from weightsync.engines.lockstep import Lockstep
from weightsync.engines.outlet import Outlet
from weightsync.engines.refit import Refit, saying_what_was_heard
from weightsync.engines.slots import Slots
from weightsync.engines.stream import PromisedOrder, Weights
from weightsync.engines.waiting import BRIEFLY_S
from weightsync.errors import ErrorContext, WeightSyncError
from weightsync.tensors import TensorSpec, WeightManifest

T = TypeVar("T")


def place_stream(weights: Iterator[tuple[str, torch.Tensor]], refit: Refit) -> Iterator[Placement]:
    """Cut and place a stream, alike on every policy rank: each sees where all of them open a bucket."""
    size, owners = refit.bucket_size, refit.topology.owners
    return place_chunks(split_weight_chunks(weights, largest_chunk(size, owners)), size, owners)


async def drain_weights(weights: Weights, lockstep: Lockstep, refit: Refit) -> None:
    """Consume a stream on a rank that sends nothing, one item at a time, in step with those that send.

    The bucket boundaries, and so the steps, are those that the sending ranks come to with the same stream.
    """
    promise = PromisedOrder.of(weights, refit.stopwatch)
    await lockstep.step()
    for placement in place_stream(promise.watch(weights), refit):
        if placement.opens:
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
    """Sends one weight stream, or this rank's share of it. Made anew for each refit.

    Args:
        refit: whose buffers, transport and deadlines are used.
        links: the control links to the receivers.
        share: of the stream, of `Topology.owners`.
        lockstep: keeps this rank in step with the other policy ranks.
    """

    def __init__(self, refit: Refit, links: Sequence[Link], share: int, lockstep: Lockstep) -> None:
        self._refit = refit
        self._share = share
        self._lockstep = lockstep
        self._buffers = refit.buffers
        self._stopwatch = refit.stopwatch
        self._slots = Slots(len(self._buffers))
        self._outlet = Outlet(refit, links, self._slots)
        self._peer = links[0].peer if len(links) == 1 else None
        self._used: set[int] = set()
        self._cleans = refit.transport.settles or refit.poison_released
        """Whether a buffer that was used is to be made ready again."""
        self.bytes_sent = 0
        self.buckets_sent = 0
        self._failure: BaseException | None = None
        self._tensor: str | None = None

    async def send(self, weights: Weights) -> WeightManifest:
        """Send the whole stream; returns once every receiver has loaded it.

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
            self._refit.checks.last = len(promise.manifest) - 1
            self._outlet.tell(Manifest(promise.manifest.tensors, self._refit.digest_kind))
        await self._send_buckets(weights, promise)
        sent = promise.sent()
        self._outlet.tell_last(Done(self.buckets_sent, len(sent), sent.nbytes, sent.digest()))
        await self._lockstep.finish()
        await self._wait(self._await_finish)
        return sent

    async def _send_buckets(self, weights: Weights, promise: PromisedOrder) -> None:
        current: _OpenBucket | None = None
        for placement in place_stream(promise.watch(weights), self._refit):
            self._tensor = placement.meta.name
            if placement.owner == self._share and (current is None or placement.opens):
                if current is not None:
                    self._publish(current)
                current = await self._open_bucket(placement.bucket)
            if placement.opens:
                self._raise_failure()
                await self._lockstep.step()
            if placement.owner == self._share and current is not None:
                self._attempt(partial(self._fill, current, placement, promise.last))
            self._tensor = None
            del placement  # as in `drain_weights`
        if current is not None:
            self._publish(current)
        self._raise_failure()

    async def _open_bucket(self, seq: int) -> _OpenBucket:
        self._raise_failure()
        if self._refit.shelf is not None:
            self._refit.watch.wake(self._outlet.take_in)
            return _OpenBucket(seq, self._refit.shelf.take(self._slots, self._buffers))
        with self._stopwatch.phase("wait"):
            slot = self._refit.watch.until(self._next_slot, timeout_s=BRIEFLY_S)
        if slot is None or (slot in self._used and self._cleans):
            slot = await self._wait(partial(self._make_ready, slot))
        return _OpenBucket(seq, slot)

    def _next_slot(self) -> int | None:
        """Return a buffer that all targets have released, or `None`. To be called by a watch."""
        self._outlet.take_in()
        return self._slots.take()

    def _fill(self, bucket: _OpenBucket, placement: Placement, ordinal: int) -> None:
        meta, start = placement.meta, placement.meta.offset or 0
        spec = TensorSpec(meta.name, tuple(meta.shape), str(meta.dtype).removeprefix("torch."))
        entry = ChunkEntry(spec, meta.chunk_offset, meta.chunk_size, start, 0, ordinal)
        with self._stopwatch.phase("pack"):
            target = self._buffers[bucket.slot][start : placement.end]
            target.copy_(placement.data)
        if self._refit.is_checked(entry):
            with self._stopwatch.phase("digest"):
                entry = msgspec.structs.replace(entry, digest=digest_bytes(target))
        bucket.entries.append(entry)
        bucket.nbytes = max(bucket.nbytes, placement.end)

    def _publish(self, bucket: _OpenBucket) -> None:
        def publish() -> None:
            synchronize(self._buffers[bucket.slot].device)
            self._used.add(bucket.slot)
            self._outlet.publish(bucket.seq, bucket.slot, bucket.nbytes, tuple(bucket.entries))
            self._refit.watch.wake(lambda: self._slots.drop(bucket.slot))
            self.bytes_sent += bucket.nbytes
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

    async def _wait(self, wait: Callable[[], T]) -> T:
        with self._stopwatch.phase("wait"):
            return await self._refit.waiter.run(wait)

    def _make_ready(self, slot: int | None) -> int:
        """Return a buffer that nobody reads any more; ``slot``, unless that is `None`."""
        while slot is None:
            self._await_answer("waiting for a buffer")
            slot = self._slots.take()
        transport = self._refit.transport
        if slot in self._used:
            with saying_what_was_heard(self._outlet.links, "waiting for a buffer"):
                transport.settle(slot, timeout_s=self._refit.patience(), check=self._outlet.check)
            self._poison(slot)
        return slot

    def _await_finish(self) -> None:
        while not self._outlet.is_finished:
            self._await_answer("waiting for the receivers to finish")
        if self._refit.shelf is None:
            for slot in self._used:
                self._poison(slot)

    def _poison(self, slot: int) -> None:
        """Overwrite a buffer that all receivers have released, none of which may: others still read it."""
        if self._refit.poison_released and self._refit.transport.in_place:
            overwrite(self._buffers[slot], POISON)

    def _await_answer(self, phase: str) -> None:
        started, timeout_s = time.monotonic(), self._refit.patience()
        if self._refit.watch.until(self._outlet.take_in, timeout_s=timeout_s) is None:
            raise self._outlet.overdue(phase, time.monotonic() - started)

    def _locate(self, error: Exception) -> None:
        """Say in an error how far the stream has come."""
        if isinstance(error, WeightSyncError):
            error.with_context(**asdict(self._whereabouts()))
        else:
            error.add_note(f"while sending: {self._whereabouts()}")

    def _whereabouts(self) -> ErrorContext:
        return ErrorContext(
            phase="send",
            peer=self._peer,
            bucket=self._outlet.last_given,
            tensor=self._tensor,
            bytes_done=self.bytes_sent,
        )
