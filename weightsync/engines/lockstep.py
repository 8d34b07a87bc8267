"""Keeps the policy ranks of one refit in step, so that no rank waits for another inside a collective.

Making the next weight is often a collective of all policy ranks, while each rank's receiver has its own
pace and may fail. So before a rank goes on to its next bucket it waits here, outside any collective, until
every rank has come as far; and where one has failed, all of them stop at the same place.

Policy rank 0 leads. Ranks may have streams of different length: one that has finished is waited for no more.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from weightsync.control import Gate, Go, Link
from weightsync.engines.waiting import Budget, Waiter
from weightsync.errors import ProtocolError
from weightsync.topology import RankId

_PHASE = "keeping in step"
Meet = Callable[[Link], Awaitable[None]]
"""Opens the refit on a link."""


class Lockstep(Protocol):
    """What a sending or draining rank sees of it."""

    async def begin(self, meet: Meet) -> None:
        """Meet the other ranks."""

    async def step(self) -> None:
        """Wait until every rank has come here; raises when one has failed."""

    async def finish(self) -> None:
        """This rank's stream is at its end."""

    def stop(self, error: BaseException) -> None:
        """This rank has failed: the others stop at their next step."""

    def end(self) -> None:
        """The refit is over for this rank, one way or the other."""


class SoloLockstep:
    """One policy rank: nobody to wait for."""

    async def begin(self, meet: Meet) -> None:
        """Return at once."""

    async def step(self) -> None:
        """Return at once."""

    async def finish(self) -> None:
        """Return at once."""

    def stop(self, error: BaseException) -> None:
        """Return at once."""

    def end(self) -> None:
        """Return at once."""


class _Stepper:
    """What the leader and the followers share.

    Args:
        links: to the other ranks.
        waiter: runs blocking waits.
        budget: the refit's time.
        patience_s: seconds to wait for another rank. Longer than a rank waits for its own receiver, so that
            the rank which knows the cause is the first to give up.
    """

    def __init__(self, links: Sequence[Link], waiter: Waiter, budget: Budget, patience_s: float) -> None:
        self._links = list(links)
        self._waiter = waiter
        self._budget = budget
        self._patience_s = patience_s
        self._step = 0

    async def begin(self, meet: Meet) -> None:
        """Meet the other ranks."""
        for link in self._links:
            await meet(link)

    def stop(self, error: BaseException) -> None:
        """Tell the ranks at the other ends that this one has failed."""
        for link in self._links:
            link.abort(error)

    def end(self) -> None:
        """Close this refit on every link."""
        for link in self._links:
            link.end()

    def _patience(self) -> float:
        return self._budget.clip(self._patience_s)

    def _require_same_step(self, link: Link, step: int) -> None:
        if step != self._step:
            raise ProtocolError(
                f"{link.peer} is at step {step}, this rank at step {self._step}", peer=link.peer, phase=_PHASE
            )


class LeaderLockstep(_Stepper):
    """Policy rank 0: collects every rank's arrival, then lets all go."""

    def __init__(self, links: Sequence[Link], waiter: Waiter, budget: Budget, patience_s: float) -> None:
        super().__init__(links, waiter, budget, patience_s)
        self._waiting_for = list(self._links)

    async def step(self) -> None:
        """Let the ranks go on once all that have not finished are here."""
        try:
            await self._waiter.run(self._collect)
        except BaseException as error:
            # The others must hear it from here: they are not connected to the rank that failed.
            self.stop(error)
            raise
        for link in self._waiting_for:
            link.send(Go(self._step))
        self._step += 1

    async def finish(self) -> None:
        """Serve the others until each of them has finished, too."""
        while self._waiting_for:
            await self.step()

    def _collect(self) -> None:
        still_running = []
        for link in self._waiting_for:
            gate = link.receive(Gate, phase=_PHASE, timeout_s=self._patience())
            self._require_same_step(link, gate.step)
            if not gate.finished:
                still_running.append(link)
        self._waiting_for = still_running


class FollowerLockstep(_Stepper):
    """Any other policy rank: says that it is here, waits for the leader's word."""

    async def step(self) -> None:
        """Wait for the leader."""
        (leader,) = self._links
        leader.send(Gate(self._step, finished=False))
        go = await self._waiter.run(lambda: leader.receive(Go, phase=_PHASE, timeout_s=self._patience()))
        self._require_same_step(leader, go.step)
        self._step += 1

    async def finish(self) -> None:
        """Say that this rank needs no more steps."""
        (leader,) = self._links
        leader.send(Gate(self._step, finished=True))


def step_links(
    rank: int, world_size: int, *, dial: Callable[[RankId], Link], answer: Callable[[RankId], Link]
) -> list[Link]:
    """Make a policy rank's links to those that it keeps in step with: rank 0 answers, all others dial it."""
    leader, *others = (RankId("policy", each) for each in range(world_size))
    return [dial(leader)] if rank else [answer(other) for other in others]


def make_lockstep(
    rank: int, links: Sequence[Link], waiter: Waiter, budget: Budget, patience_s: float
) -> Lockstep:
    """Return a policy rank's part in the lockstep; arguments as for the classes."""
    if not links:
        return SoloLockstep()
    kind: type[LeaderLockstep | FollowerLockstep] = FollowerLockstep if rank else LeaderLockstep
    return kind(links, waiter, budget, patience_s)
