"""One refit on one rank: what its two halves work with, how it meets its peer and how it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from weightsync.control import Deadlines, Link
from weightsync.engines.stats import Stopwatch
from weightsync.engines.telling import tell_unmet
from weightsync.engines.transport import BucketTransport
from weightsync.engines.waiting import Budget, Waiter
from weightsync.errors import IncompleteStreamError, WeightSyncError
from weightsync.tensors import WeightManifest


@dataclass(frozen=True, kw_only=True)
class Refit:
    """What belongs to one refit on one rank. ``epoch`` and ``version`` `None` take the peer's."""

    side: str
    rank: int
    epoch: int | None
    version: int | None
    transport: BucketTransport
    buffers: list[torch.Tensor]
    waiter: Waiter
    deadlines: Deadlines
    verify: bool
    budget: Budget
    unmet: list[Link]
    """The links on which this refit has not been tried yet: their peers wait, and know nothing."""
    stopwatch: Stopwatch = field(default_factory=Stopwatch)

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
            error.with_context(side=self.side, rank=self.rank)
        return error

    async def meet(self, link: Link) -> None:
        """Open this refit together with the peer."""
        self.unmet.remove(link)
        with self.stopwatch.phase("connect"):
            begin = partial(link.begin, epoch=self.epoch, version=self.version)
            await self.waiter.run(begin, undo=link.end)

    def tell_unmet(self, error: BaseException) -> None:
        """Tell the peers that wait to be met that the refit has failed without them."""
        tell_unmet(self.unmet, self.sign(error), epoch=self.epoch, version=self.version)
        self.unmet.clear()

    @contextmanager
    def on(self, link: Link, *, drain: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Tell the peer of a failure of the block, and end the refit on the link and on the transport.

        ``drain`` ends what still uses the buffers. It comes after the link has ended, which wakes it, and
        before the transport shuts, which drops the connection that it uses.
        """
        try:
            yield
        except GeneratorExit:
            link.abort(self.sign(IncompleteStreamError("the consumer stopped before the end of the stream")))
            raise
        except BaseException as error:
            link.abort(self.sign(error))
            raise
        finally:
            link.end()
            try:
                drain()
            finally:
                self.transport.shut()

    def figures(self, moved: WeightManifest | None = None, batches: int = 0) -> dict[str, float]:
        """Return what `CheckpointEngine.refit_stats` gives: counts, and ``seconds_<phase>``."""
        seconds = {f"seconds_{phase}": value for phase, value in self.stopwatch.seconds().items()}
        counts = {"bytes": moved.nbytes, "tensors": len(moved)} if moved else {"bytes": 0, "tensors": 0}
        return {**counts, "batches": batches, **seconds}
