"""The receiving half of every built-in transport: fetch ahead, check, hand over, account for everything.

A thread (the `Inlet`) brings the next bucket in while the consumer loads the current one. The consumer is the
async generator `BucketReceiver.batches`; everything that touches the model happens in the caller's thread.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from weightsync.buckets import Chunk, ChunkMerger, unpack_bucket
from weightsync.capacity import total_memory_bytes
from weightsync.control import Complete, Link, Manifest
from weightsync.engines.account import Account
from weightsync.engines.inlet import Arrived, Ended, Inlet, Promised, metas_of
from weightsync.engines.parts import KeptParts
from weightsync.engines.refit import Refit
from weightsync.errors import ProtocolError, WeightSyncError
from weightsync.tensors import WeightManifest
from weightsync.topology import RankId


class BucketReceiver:
    """Receives one weight stream, from one sender or in shares from several. Made anew for each refit.

    Args:
        refit: whose buffers, transport and deadlines are used.
        sources: the control links to the senders.
        targets: the control links to those that the buckets are forwarded to.
        parts: memory for tensors that are larger than a bucket.
        manifest_check: called with the manifest before the first batch; raises to refuse the refit.
    """

    def __init__(
        self,
        refit: Refit,
        sources: Mapping[RankId, Link],
        targets: Mapping[RankId, Link],
        *,
        parts: KeptParts,
        manifest_check: Callable[[WeightManifest], None] | None,
    ) -> None:
        self._refit = refit
        self._sources = sources
        self._parts = parts
        self._manifest_check = manifest_check
        self._stopwatch = refit.stopwatch
        self._inlet = Inlet(refit, sources, list(targets.values()))
        self.received: WeightManifest | None = None
        """What has come, once the stream has ended well."""
        self.batches_yielded = 0
        self.digests: dict[str, int] = {}
        """Of the tensors of the current batch that came in one piece, as they were checked."""
        self._bucket: int | None = None

    async def batches(self) -> AsyncGenerator[list[tuple[str, torch.Tensor]], None]:
        """Yield batches of whole tensors; each is valid until the next one is asked for.

        Raises:
            WeightSyncError: a sender failed or was lost, or what came is not what was promised.
        """
        self._inlet.start()
        room = total_memory_bytes(str(self._refit.buffers[0].device))
        self._parts.begin()
        account = Account()
        merger = ChunkMerger(len(self._sources), limit_bytes=room, memory=self._parts)
        with self._located():
            while not isinstance(event := await self._next_event(), Ended):
                if isinstance(event, Promised):
                    self._take_manifest(event, account)
                    continue
                self._bucket = event.bucket.seq
                account.enter(event.source, event.bucket)
                tensors = merger.feed(self._chunks(event))
                if tensors:
                    self.batches_yielded += 1
                    self.digests = self._digests(event) if self._refit.checks.mode == "full" else {}
                    yield tensors
                del tensors
                self._inlet.give_back(event)
            merger.require_complete()
            self.received = account.close(event.dones)
            for link in self._sources.values():
                link.send(Complete())
            if self._refit.is_late:
                await self._refit.waiter.run(self._await_last_words)

    def figures(self) -> dict[str, float]:
        """Return what `CheckpointEngine.refit_stats` gives."""
        return self._refit.figures(self.received, self.batches_yielded, self.bytes_received)

    def close(self) -> None:
        """End the inlet and wait for it, so that no transfer writes into a buffer any more.

        Raises:
            DeadlineError: a transfer could not be ended.
        """
        self._inlet.close()

    @property
    def bytes_received(self) -> int:
        """What has come so far, padding included."""
        return self._inlet.bytes_received

    @property
    def is_running(self) -> bool:
        """Whether a transfer may still write into a buffer."""
        return self._inlet.is_running

    def _await_last_words(self) -> None:
        """Hear from every sender that its buckets stayed as they were until all of them were loaded."""
        for link in self._sources.values():
            link.receive(Complete, phase="waiting for the last word", timeout_s=self._refit.patience())

    @contextmanager
    def _located(self) -> Iterator[None]:
        """Say in errors how far the stream had come."""
        try:
            yield
        except WeightSyncError as error:
            peer = next(iter(self._sources.values())).peer if len(self._sources) == 1 else None
            error.with_context(
                phase="receive", peer=peer, bucket=self._bucket, bytes_done=self.bytes_received
            )
            raise

    async def _next_event(self) -> Promised | Arrived | Ended:
        with self._stopwatch.phase("receive"):
            return await self._inlet.next_event()

    def _take_manifest(self, event: Promised, account: Account) -> None:
        message: Manifest = event.manifest
        expected = self._refit.digest_kind
        if message.digest_kind != expected:
            raise ProtocolError(
                f"the sender digests with {message.digest_kind!r}, this side with {expected!r}: "
                f"set verify and device alike on both sides"
            )
        manifest = WeightManifest.build(message.tensors)
        if account.promise(event.source, manifest) and self._manifest_check is not None:
            self._manifest_check(manifest)

    def _chunks(self, arrived: Arrived) -> list[Chunk]:
        return unpack_bucket(arrived.data, metas_of(arrived.bucket.chunks))

    def _digests(self, arrived: Arrived) -> dict[str, int]:
        chunks = arrived.bucket.chunks
        return {each.spec.name: each.digest for each in chunks if each.chunk_size == each.spec.nbytes}
