"""Both worker groups as the synchronizer uses them: one step at a time, remembering who is dead or late.

A rank whose worker died is *lost*: it must be replaced. A rank whose call was given up is *busy* until
that call ends: using its worker before would only queue behind it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from weightsync.cluster.base import (
    Answers,
    ColocatedGroup,
    Failure,
    Listener,
    PendingCall,
    RolloutGroup,
    WorkerGroup,
    driver_failure,
    gather,
)
from weightsync.cluster.view import HostView, ranks_of
from weightsync.errors import ErrorRecord, ProtocolError
from weightsync.topology import RankId

_SETTLE_S = 1.0


class StepError(Exception):
    """One step of the lifecycle failed; turned into a `RefitError` before anyone outside sees it."""

    def __init__(self, phase: str, failures: Sequence[Failure]) -> None:
        super().__init__(phase)
        self.phase = phase
        self.failures = list(failures)


class Deadline:
    """A point in time that several waits share."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left_s(self, at_least_s: float = 0.0) -> float:
        """Return the seconds that are left, never less than ``at_least_s``."""
        return max(self._end - time.monotonic(), at_least_s)


@dataclass(frozen=True)
class _Departure:
    """Ranks of one side that have left, and whether those behind them have moved up."""

    gone: frozenset[RankId]
    moving_up: bool

    def now(self, who: RankId) -> RankId | None:
        """Return who that is afterwards; `None` if it has left."""
        first = min(self.gone)
        if who in self.gone:
            return None
        behind = self.moving_up and who.side == first.side and who > first
        return RankId(who.side, who.rank - len(self.gone)) if behind else who


@dataclass(frozen=True)
class _Call:
    call: PendingCall
    own: Deadline
    """Until when a healthy worker may be waiting in it."""
    since: list[_Departure] = field(default_factory=list)
    """Who has left since it was started, with the ranks of that time."""

    @property
    def outstanding(self) -> set[RankId]:
        ranks = (self.now(rank) for rank in self.call.outstanding)
        return {who for who in ranks if who is not None}

    def now(self, rank: int) -> RankId | None:
        """Return who a rank of the call is by now; `None` if it has left."""
        who: RankId | None = RankId(self.call.side, rank)
        for departure in self.since:
            who = departure.now(who) if who is not None else None
        return who


class Crew:
    """The workers of both sides.

    Args:
        policy: the senders.
        rollout: the receivers.
        grace_s: seconds that the others have to report once one rank has failed.
        listener: told about progress.

    Attributes:
        lost: ranks whose worker died, and what is known of it.
        stale: engine hosts, by first rank, whose caches may be of other weights than they hold: they must not
            resume before their caches were reset.
    """

    def __init__(
        self, policy: WorkerGroup, rollout: RolloutGroup, *, grace_s: float, listener: Listener | None = None
    ) -> None:
        self.policy = policy
        self.rollout = rollout
        self.lost: dict[RankId, ErrorRecord] = {}
        self.stale: set[int] = set()
        self._grace_s = grace_s
        self._listener = listener
        self._overdue: list[_Call] = []

    def require(
        self, phase: str, *calls: PendingCall, deadline: Deadline, patience_s: float = 0.0
    ) -> Answers:
        """Wait for calls that must all succeed; ``patience_s`` as for `hear`.

        Raises:
            StepError: one of them did not.
        """
        answers = self.hear(phase, *calls, timeout_s=deadline.left_s(), patience_s=patience_s)
        if answers.failures:
            raise StepError(phase, answers.failures)
        return answers

    def hear(
        self,
        phase: str,
        *calls: PendingCall,
        timeout_s: float,
        patience_s: float = 0.0,
        hurries: bool = True,
    ) -> Answers:
        """Wait for calls, but not for ranks that are busy; failures are returned.

        Args:
            phase: what the calls do.
            calls: as the groups started them.
            timeout_s: seconds for all of it.
            patience_s: seconds that a healthy worker itself may wait in such a call: until they are over, one
                that is given up is no suspect.
            hurries: whether the others have only a short time left once one has failed.
        """
        excused = frozenset(self.busy())
        # Also if the wait is interrupted: they are under way.
        self._overdue.extend(_Call(call, Deadline(patience_s)) for call in calls)
        answers = gather(
            phase,
            calls,
            timeout_s=timeout_s,
            grace_s=self._grace_s if hurries else timeout_s,
            excused=excused,
            listener=self._listener,
        )
        self._forget_ended()
        for failure in answers.failures:
            if failure.how == "lost":
                self.lost.setdefault(failure.who, failure.record)
        return answers

    def busy(self) -> set[RankId]:
        """Return the ranks with a call that was given up and has not ended; does not look for news."""
        return {who for overdue in self._overdue for who in overdue.outstanding}

    def patient(self) -> dict[RankId, float]:
        """Return the busy ranks whose own deadline has not passed, with the seconds that it has left."""
        # Further calls queue behind the one that it waits in: the longest deadline counts.
        left = {
            who: overdue.own.left_s()
            for overdue in sorted(self._overdue, key=lambda overdue: overdue.own.left_s())
            for who in overdue.outstanding
        }
        return {who: seconds for who, seconds in left.items() if seconds > 0}

    def _forget_ended(self) -> None:
        # In place: parts of this crew share the list.
        self._overdue[:] = [overdue for overdue in self._overdue if overdue.outstanding]

    def settle(self, within_s: float = _SETTLE_S, among: Collection[RankId] | None = None) -> set[RankId]:
        """Give late calls a moment to end; return the ranks that are busy still.

        Args:
            within_s: the moment, in seconds.
            among: the ranks that are waited for, by default all.
        """
        deadline = Deadline(within_s)
        while (self.busy() if among is None else self.busy() & set(among)) and deadline.left_s() > 0:
            for overdue in list(self._overdue):
                late = overdue.call.poll(min(0.05, deadline.left_s()))
                for outcome in late:
                    who = overdue.now(outcome.rank) if outcome.rank in overdue.call.lost else None
                    if who is not None and outcome.error is not None:
                        self.lost[who] = outcome.error
            self._forget_ended()
        return self.busy()

    def forget(self, gone: Collection[RankId], *, moving_up: bool = False) -> None:
        """Forget what is known of ranks whose worker has left.

        Args:
            gone: ranks of one side, contiguous.
            moving_up: the ranks behind them take their numbers, in place of new workers.
        """
        departure = _Departure(frozenset(gone), moving_up)
        for overdue in self._overdue:
            overdue.since.append(departure)
        self._forget_ended()
        lost = {departure.now(who): error for who, error in self.lost.items()}
        self.lost.clear()
        self.lost.update({who: error for who, error in lost.items() if who is not None})
        if min(gone).side == "rollout":
            stale = [departure.now(RankId("rollout", rank)) for rank in self.stale]
            self.stale.clear()
            self.stale.update({who.rank for who in stale if who is not None})

    def among(self, hosts: Collection[int]) -> Crew:
        """Return the same crew with some of the engine hosts, named by their first ranks."""
        part = copy(self)
        part.rollout = HostView(self.rollout, hosts)
        return part

    @property
    def colocated(self) -> bool:
        """Whether engine hosts live in the policy workers."""
        return isinstance(self.rollout, ColocatedGroup)

    def transfer(self, *, staged: bool = False) -> tuple[PendingCall, PendingCall]:
        """Start receiving and sending on all workers, at once; ``staged``: into host memory only."""
        if isinstance(self.rollout, ColocatedGroup):
            return self.rollout.transfer()
        method = "stage_weights_from_checkpoint_engine" if staged else "update_weights_from_checkpoint_engine"
        receiving = self.rollout.submit(method)
        return receiving, self.policy.submit("send_weights_via_checkpoint_engine")

    def host_of(self, rank: int) -> int:
        """Return the first rank of the engine host that a rollout rank belongs to."""
        return max(prefix for prefix in self.rollout.rank_prefixes if prefix <= rank)

    def on_both(self, method: str, kwargs: Mapping[str, Any] | None = None) -> list[PendingCall]:
        """Start a call on every worker of both sides, receivers first."""
        return [self.rollout.submit(method, kwargs), self.policy.submit(method, kwargs)]


def require_complete(answers: Answers, group: WorkerGroup, phase: str) -> list[Any]:
    """Return one side's values in rank order.

    Raises:
        StepError: the group did not answer for exactly the ranks that it says it has.
    """
    values = answers.of(group.side)
    if list(values) == ranks_of(group):
        return list(values.values())
    message = f"the {group.side} group has {len(ranks_of(group))} ranks, but answered for {list(values)}"
    who = RankId(group.side, min(values, default=0))
    raise StepError(phase, [driver_failure(who, phase, ProtocolError, message)])
