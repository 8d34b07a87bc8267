"""What the synchronizer asks of a cluster layer: submit a call to every worker, hear the answers one by one.

`weightsync.cluster.local` and `weightsync.cluster.ray` implement these protocols. Any other way to reach
workers can too; what crosses it is plain data, described in ``docs/worker-protocol.md``. Two sketches:

A driver that is rank 0 of a torchrun job, with one RPC connection to every other rank::

    class TorchrunPolicyGroup:
        side = "policy"

        def __init__(self, clients):                 # in rank order; clients[0] calls this very process
            self.clients, self.world_size = clients, len(clients)

        def submit(self, method, kwargs=None, *, each=None):
            futures = {
                rank: client.call_soon("checkpoint_engine_rpc", method, {**(kwargs or {}), **extra})
                for rank, (client, extra) in enumerate(zip(self.clients, each or repeat({})))
            }
            return FuturesCall("policy", futures)    # poll(): concurrent.futures.wait, Outcome.from_dict

Inference servers behind HTTP, each with ``tp`` ranks::

    class HttpRolloutGroup:
        side = "rollout"

        def __init__(self, urls, tp):
            self.urls, self.world_size = urls, len(urls) * tp
            self.rank_prefixes = tuple(range(0, self.world_size, tp))

        def submit(self, method, kwargs=None, *, each=None):   # a server answers with a list of outcomes
            return self._post("/checkpoint_engine_rpc", method, kwargs, each)

        def control(self, action, kwargs=None, *, only=None):  # ... and here with one; `only` chooses servers
            return self._post("/refit_control", action, kwargs, None, only)

(JSON cannot carry the bytes of an engine's metadata: encode the body as msgpack.) A connection that is
refused or reset becomes `lost_outcome`, and its ranks join ``PendingCall.lost``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, runtime_checkable

from weightsync.errors import DeadlineError, ErrorContext, ErrorRecord, PeerLostError, WeightSyncError
from weightsync.outcomes import Outcome
from weightsync.topology import RankId

_SLICE_S = 0.2
_SHARED_SLICE_S = 0.02


class PendingCall(Protocol):
    """One call under way on every worker of a group."""

    @property
    def side(self) -> str:
        """``"policy"`` or ``"rollout"``."""

    @property
    def outstanding(self) -> frozenset[int]:
        """Ranks that have not answered yet."""

    @property
    def lost(self) -> frozenset[int]:
        """Ranks that answered with a `PeerLostError` because their worker is gone for good."""

    def poll(self, timeout_s: float) -> list[Outcome]:
        """Return the outcomes that newly came in, after at most about ``timeout_s`` seconds.

        Returns as soon as there is one. Never raises for a worker's failure: that is an outcome with an
        error, one for each rank of the worker.
        """


class WorkerGroup(Protocol):
    """All workers of one side."""

    @property
    def side(self) -> str:
        """``"policy"`` or ``"rollout"``."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    def submit(
        self,
        method: str,
        kwargs: Mapping[str, Any] | None = None,
        *,
        each: Sequence[Mapping[str, Any]] | None = None,
        only: Collection[int] | None = None,
    ) -> PendingCall:
        """Start ``checkpoint_engine_rpc(method, kwargs)`` on every worker, without waiting.

        Args:
            method: a ``checkpoint_method`` of the worker protocol.
            kwargs: its keyword arguments, plain data.
            each: further keyword arguments, one mapping for each policy worker or engine host, in order.
            only: the policy workers or engine hosts to call, by their first rank; by default all. Given only
                where workers come and go.
        """


class RolloutGroup(WorkerGroup, Protocol):
    """The inference engines. One engine host may hold several ranks."""

    @property
    def rank_prefixes(self) -> tuple[int, ...]:
        """The first global rollout rank of each engine host, in order, starting at 0."""

    def control(
        self,
        action: str,
        kwargs: Mapping[str, Any] | None = None,
        *,
        only: Collection[int] | None = None,
    ) -> PendingCall:
        """Start ``refit_control(action, kwargs)`` on every engine host; one outcome for each host.

        Args:
            action: of the worker protocol.
            kwargs: its keyword arguments, plain data.
            only: the hosts to call, by their first rank; by default all. Given for ``resume`` when some hosts
                must stay paused, and where workers come and go.
        """


@runtime_checkable
class ElasticGroup(Protocol):
    """A group whose workers come and go. Ranks stay contiguous: those behind a removed worker move up."""

    def add(self, workers: Sequence[Any]) -> tuple[int, ...]:
        """Take in further workers, as the last ones; returns the first rank of each."""

    def replace(self, first_rank: int, worker: Any) -> None:
        """Put another worker, of as many ranks, in the place of one."""

    def remove(self, first_rank: int) -> None:
        """Let a worker go."""


@runtime_checkable
class ColocatedGroup(Protocol):
    """A rollout group whose engine hosts live in the policy workers: one call has to run both halves.

    Such a worker runs one call at a time, so that a call to send and another to receive would wait for each
    other.
    """

    def transfer(self) -> tuple[PendingCall, PendingCall]:
        """Start sending and receiving on every worker; returns the rollout side's call and the policy's."""


def lost_outcome(side: str, rank: int, message: str) -> Outcome:
    """Return the outcome of a rank whose worker died."""
    context = ErrorContext(side=side, rank=rank)
    return Outcome(rank, error=ErrorRecord(kind=PeerLostError.__name__, message=message, context=context))


@dataclass(frozen=True)
class Failure:
    """One rank's failure, and how the driver learnt of it."""

    who: RankId
    record: ErrorRecord
    how: Literal["reported", "lost", "silent"]
    """The worker said so, the worker is dead, or it did not answer in time."""


def driver_failure(who: RankId, phase: str, kind: type[WeightSyncError], message: str) -> Failure:
    """Return a failure that the driver found itself; a `DeadlineError` makes it a silent one."""
    context = ErrorContext(side=who.side, rank=who.rank, phase=phase)
    record = ErrorRecord(kind=kind.__name__, message=message, context=context)
    return Failure(who, record, "silent" if kind is DeadlineError else "reported")


@dataclass
class Answers:
    """What came back from one step, in order of arrival."""

    values: dict[RankId, Any] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)

    def of(self, side: str) -> dict[int, Any]:
        """Return the values of one side by rank, in rank order."""
        return {who.rank: value for who, value in sorted(self.values.items()) if who.side == side}


Listener = Callable[[str, int, frozenset[RankId]], None]
"""Called as answers come in with the phase, the number of ranks heard, and those still awaited."""


def gather(
    phase: str,
    calls: Sequence[PendingCall],
    *,
    timeout_s: float,
    grace_s: float,
    excused: frozenset[RankId] = frozenset(),
    listener: Listener | None = None,
) -> Answers:
    """Wait for the answers of several calls that run at once.

    Args:
        phase: what the calls do, for messages.
        calls: as `WorkerGroup.submit` returned them.
        timeout_s: seconds for all of it.
        grace_s: seconds that the others have to report once one rank has failed.
        excused: ranks that are not waited for (their answer still counts if it is there).
        listener: told about progress several times a second.

    Returns:
        Values and failures. A rank that did not answer in time has a `DeadlineError` failure; its call
        goes on, and is to be polled before that worker is used again.
    """
    round_ = _Round(phase, calls, grace_s, excused, time.monotonic() + timeout_s)
    while waiting := round_.waiting():
        left_s = round_.deadline - time.monotonic()
        if left_s <= 0:
            break
        slice_s = min(left_s, _SLICE_S if len(waiting) == 1 else _SHARED_SLICE_S)
        for call in waiting:
            round_.take(call, slice_s)
        if listener is not None:
            listener(phase, round_.heard, round_.awaited())
    for call in calls:
        round_.take(call, 0.0)
    round_.close(timeout_s)
    return round_.answers


class _Round:
    """The state of one `gather`."""

    def __init__(
        self,
        phase: str,
        calls: Sequence[PendingCall],
        grace_s: float,
        excused: frozenset[RankId],
        deadline: float,
    ) -> None:
        self.answers = Answers()
        self.deadline = deadline
        self._phase = phase
        self._calls = calls
        self._grace_s = grace_s
        self._excused = excused

    @property
    def heard(self) -> int:
        return len(self.answers.values) + len(self.answers.failures)

    def waiting(self) -> list[PendingCall]:
        return [call for call in self._calls if self._awaited_of(call)]

    def awaited(self) -> frozenset[RankId]:
        return frozenset().union(*(self._awaited_of(call) for call in self._calls))

    def _awaited_of(self, call: PendingCall) -> frozenset[RankId]:
        return frozenset(RankId(call.side, rank) for rank in call.outstanding) - self._excused

    def take(self, call: PendingCall, timeout_s: float) -> None:
        for outcome in call.poll(timeout_s) if call.outstanding else ():
            who = RankId(call.side, outcome.rank)
            if outcome.error is None:
                self.answers.values[who] = outcome.value
                continue
            where = ErrorContext(side=who.side, rank=who.rank, phase=self._phase)
            record = replace(outcome.error, context=outcome.error.context.merged(where))
            self._fail(Failure(who, record, "lost" if outcome.rank in call.lost else "reported"))

    def _fail(self, failure: Failure) -> None:
        if not self.answers.failures:
            self.deadline = min(self.deadline, time.monotonic() + self._grace_s)
        self.answers.failures.append(failure)

    def close(self, timeout_s: float) -> None:
        """Name the ranks that are still awaited."""
        first = self.answers.failures[0].who if self.answers.failures else None
        why = (
            f"no answer within {self._grace_s:g} s after {first} had failed"
            if first
            else f"no answer within {timeout_s:.3g} s"
        )
        self.answers.failures.extend(
            driver_failure(who, self._phase, DeadlineError, why) for who in sorted(self.awaited())
        )
