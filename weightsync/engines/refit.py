"""One refit on one rank: what its two halves work with, how it meets its peers and how it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from weightsync.control import ChunkEntry, Deadlines, Link, Watch
from weightsync.engines.sampling import ChunkChecks
from weightsync.engines.shelf import Shelf
from weightsync.engines.stats import Stopwatch
from weightsync.engines.telling import tell_all, tell_unmet
from weightsync.engines.transport import BucketTransport
from weightsync.engines.waiting import Budget, Waiter
from weightsync.errors import (
    DeadlineError,
    IncompleteStreamError,
    LifecycleError,
    ProtocolError,
    WeightSyncError,
)
from weightsync.tensors import WeightManifest
from weightsync.topology import RankId, Topology

_SETTLE_S = 10.0
_PEERS_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Refit:
    """What belongs to one refit on one rank. ``epoch`` and ``version`` `None` take the peer's."""

    who: RankId
    topology: Topology
    epoch: int | None
    version: int | None
    transport: BucketTransport
    buffers: list[torch.Tensor]
    waiter: Waiter
    watch: Watch
    deadlines: Deadlines
    checks: ChunkChecks
    poison_released: bool
    budget: Budget
    unmet: list[Link]
    """The links on which this refit has not been tried yet: their peers wait, and know nothing."""
    is_late: bool = False
    """Whether this rank asks for what its sources hold, in a refit of its own."""
    shelf: Shelf | None = None
    """Where a sending rank keeps what it sends; `None` if it does not."""
    agreed: list[tuple[int, int | None]] = field(default_factory=list)
    """Epoch and version of each peer that was met."""
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    _over: threading.Event = field(default_factory=threading.Event)

    @property
    def bucket_size(self) -> int:
        """Bytes of a bucket."""
        return self.buffers[0].numel()

    def patience(self) -> float:
        """Return the seconds that a peer has for its next message.

        Raises:
            DeadlineError: the refit's time is spent.
        """
        return self.budget.clip(self.deadlines.stall_s)

    def sign(self, error: BaseException) -> BaseException:
        """Say in an error whose it is; returns it."""
        if isinstance(error, WeightSyncError):
            error.with_context(side=self.who.side, rank=self.who.rank)
        return error

    @property
    def digest_kind(self) -> str:
        """Kind of the digests that chunks carry."""
        return self.checks.kind(self.buffers[0].device)

    def is_checked(self, entry: ChunkEntry) -> bool:
        """Whether the digest of a chunk counts."""
        epoch = self.agreed[-1][0] if self.agreed else self.epoch or 0
        return self.checks.wants(epoch, entry.ordinal, entry.spec, entry.chunk_offset, entry.chunk_size)

    def is_row_checked(self, row: int) -> bool:
        """Whether the digest of a row that moves by regions counts."""
        return self.checks.wants_row(self.agreed[-1][0] if self.agreed else self.epoch or 0, row)

    async def meet(self, link: Link) -> None:
        """Open this refit together with a peer."""
        self.unmet.remove(link)
        with self.stopwatch.phase("connect"):
            begin = partial(link.begin, epoch=self.epoch, version=self.version)
            try:
                self.agreed.append(await self.waiter.run(begin, undo=link.end))
            except DeadlineError as error:
                if not self.is_late:
                    raise
                why = "it may be in a refit, serve another latecomer, or have been prepared anew"
                raise DeadlineError(f"{error.message}; {why}: try again", peer=link.peer) from error

    async def open(self, links: Sequence[Link], *, sending: bool) -> None:
        """Meet the peers that buckets come from or go to, then let the transport begin."""
        for link in links:
            await self.meet(link)
        if self.is_late:
            self._require_one_version()

        def check() -> None:
            if self._over.is_set():
                raise LifecycleError("the refit was ended before it began")
            for link in links:
                link.check()

        timeout_s = self.budget.clip(self.deadlines.connect_s)
        with self.stopwatch.phase("connect"), saying_what_was_heard(links, "open"):
            try:
                await self.waiter.run(
                    lambda: self.transport.open(sending=sending, timeout_s=timeout_s, check=check)
                )
            except BaseException:
                self._over.set()
                self.waiter.settle(_SETTLE_S)
                raise

    def _require_one_version(self) -> None:
        if len(set(self.agreed)) > 1:
            told = ", ".join(str(version) for _, version in self.agreed)
            raise ProtocolError(
                f"the policy ranks hold different versions ({told}): try again", phase="begin"
            )

    def tell_unmet(self, error: BaseException) -> None:
        """Tell the peers that wait to be met that the refit has failed without them."""
        tell_unmet(self.unmet, self.sign(error), epoch=self.epoch, version=self.version)
        self.unmet.clear()

    @contextmanager
    def on(self, links: Sequence[Link], *, drain: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Tell the peers of a failure of the block, and end the refit on the links and on the transport.

        ``drain`` ends what still uses the buffers. It comes after the links have ended, which wakes it, and
        before the transport shuts, which drops the connections that it uses.
        """
        try:
            yield
        except GeneratorExit:
            stopped = IncompleteStreamError("the consumer stopped before the end of the stream")
            tell_all(links, self.sign(stopped))
            raise
        except BaseException as error:
            tell_all(links, self.sign(error))
            raise
        finally:
            for link in links:
                link.end()
            try:
                drain()
            finally:
                self.transport.shut()

    def figures(
        self, moved: WeightManifest | None = None, batches: int = 0, bytes_moved: int = 0
    ) -> dict[str, float]:
        """Return what `CheckpointEngine.refit_stats` gives: counts, and ``seconds_<phase>``."""
        seconds = {f"seconds_{phase}": value for phase, value in self.stopwatch.seconds().items()}
        counts = {"bytes": moved.nbytes, "tensors": len(moved)} if moved else {"bytes": 0, "tensors": 0}
        if self.is_late and self.agreed[0][1] is not None:
            counts["version"] = self.agreed[0][1]
        return {**counts, "batches": batches, "bytes_moved": bytes_moved, **seconds}


@contextmanager
def saying_what_was_heard(links: Sequence[Link], phase: str) -> Iterator[None]:
    """Say in the error of a transport that waited in vain what its peers have said last on these links."""
    try:
        yield
    except DeadlineError as error:
        heard = "; ".join(f"{link.peer}: {link.last_heard}" for link in links[:_PEERS_SHOWN])
        rest = f" and {len(links) - _PEERS_SHOWN} more" if len(links) > _PEERS_SHOWN else ""
        error.message = f"{error.message}; last heard of {heard}{rest}"
        error.with_context(phase=phase, peer=links[0].peer if len(links) == 1 else None)
        raise
