"""What the built-in cluster layers share: workers that answer for one or several ranks.

A *unit* is one addressable worker: a policy worker (one rank) or an engine host (all ranks of its engine).
A cluster layer supplies a `Caller`, which starts calls on units and hands back raw answers; the groups
here turn these into outcomes with global ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Protocol

from weightsync.cluster.base import PendingCall, gather, lost_outcome
from weightsync.errors import ConfigurationError, ErrorRecord, ProtocolError
from weightsync.outcomes import Outcome


@dataclass(frozen=True)
class Unit:
    """One worker and the global ranks that it answers for."""

    index: int
    worker: Any
    ranks: range


@dataclass(frozen=True)
class Request:
    """One call to one unit: ``worker.entry(method, kwargs)``."""

    unit: Unit
    entry: str
    method: str
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class RawAnswer:
    """What one unit's call came to: a value, an error met on the way, or the news of its death."""

    index: int
    value: Any = None
    error: ErrorRecord | None = None
    lost: str | None = None
    """Why the worker is gone, and what to do about it."""


class AnswerSource(Protocol):
    """The answers of one set of requests.

    It keeps them: a caller that is interrupted while it takes some must not lose them, or their workers would
    count as busy for ever.
    """

    def take(self, timeout_s: float, awaited: Collection[int]) -> list[RawAnswer]:
        """Return the answers of these units that are there; waits for the first at most ``timeout_s`` s."""


class Caller(Protocol):
    """Starts calls on workers."""

    def start(self, requests: Sequence[Request]) -> AnswerSource:
        """Start all calls at once, without waiting for any."""


class UnitCall:
    """A `PendingCall` over units.

    Args:
        side: ``"policy"`` or ``"rollout"``.
        units: the units called.
        source: where their answers come in.
        per_unit: one outcome for each unit (of its first rank) instead of one for each rank.
    """

    def __init__(self, side: str, units: Sequence[Unit], source: AnswerSource, *, per_unit: bool) -> None:
        self.side = side
        self._units = {unit.index: unit for unit in units}
        self._source = source
        self._per_unit = per_unit
        self._lost: set[int] = set()

    @property
    def outstanding(self) -> frozenset[int]:
        """Ranks that have not answered yet."""
        return frozenset(rank for unit in self._units.values() for rank in self._answering(unit))

    @property
    def lost(self) -> frozenset[int]:
        """Ranks whose worker is gone."""
        return frozenset(self._lost)

    def poll(self, timeout_s: float) -> list[Outcome]:
        """Return the outcomes that newly came in; waits for the first at most ``timeout_s`` seconds."""
        if not self._units:
            return []
        answers = self._source.take(max(timeout_s, 0.0), frozenset(self._units))
        return [outcome for answer in answers for outcome in self._outcomes(answer)]

    def _answering(self, unit: Unit) -> range:
        return unit.ranks[:1] if self._per_unit else unit.ranks

    def _outcomes(self, answer: RawAnswer) -> list[Outcome]:
        unit = self._units.pop(answer.index)
        if answer.lost is not None:
            self._lost.update(unit.ranks)
            return [lost_outcome(self.side, rank, answer.lost) for rank in unit.ranks]
        if answer.error is not None:
            return self._failed(unit, answer.error)
        try:
            return list(self._read(unit, answer.value))
        except (KeyError, TypeError, AttributeError, ValueError, ProtocolError) as error:
            return self._failed(unit, _malformed(error, answer.value))

    def _failed(self, unit: Unit, record: ErrorRecord) -> list[Outcome]:
        return [
            Outcome(rank, error=replace(record, context=replace(record.context, side=self.side, rank=rank)))
            for rank in self._answering(unit)
        ]

    def _read(self, unit: Unit, value: Any) -> Iterator[Outcome]:
        items = list(value) if isinstance(value, list | tuple) else [value]
        outcomes = [Outcome.from_dict(item) for item in items]
        answering = self._answering(unit)
        if len(outcomes) != len(answering):
            raise ProtocolError(f"{len(outcomes)} outcomes came from a worker of {len(answering)}")
        if self._per_unit:
            return (replace(outcome, rank=unit.ranks[0]) for outcome in outcomes)
        return _globally_ranked(self.side, unit.ranks, outcomes)


def _globally_ranked(side: str, ranks: range, outcomes: Sequence[Outcome]) -> Iterator[Outcome]:
    """Rename ranks within an engine to global ones.

    A rollout worker counts from 0 within its engine before it is connected, and from the prefix of an
    earlier group when it has been part of one. After a connection that failed on some ranks the two are
    mixed: then their order tells, which is that of the ranks.
    """
    given = sorted(outcome.rank for outcome in outcomes)
    if side == "policy" and given != list(ranks):
        raise ProtocolError(
            f"policy worker {ranks[0]} says it is rank {given[0]}: list workers in rank order"
        )
    if given != list(range(given[0], given[0] + len(ranks))):
        return map(_renamed, outcomes, ranks)
    return (_renamed(outcome, outcome.rank - given[0] + ranks[0]) for outcome in outcomes)


def _renamed(outcome: Outcome, rank: int) -> Outcome:
    error = outcome.error
    if error is not None and error.context.side == "rollout" and error.context.rank == outcome.rank:
        error = replace(error, context=replace(error.context, rank=rank))
    return replace(outcome, rank=rank, error=error)


def _malformed(error: Exception, value: Any) -> ErrorRecord:
    message = error.message if isinstance(error, ProtocolError) else f"no outcome: {value!r:.200}"
    return ErrorRecord(kind=ProtocolError.__name__, message=message)


class UnitGroup:
    """Workers of one rank each.

    Args:
        side: ``"policy"`` or ``"rollout"``.
        workers: in rank order; at least one.
        caller: how to call them.
    """

    rpc_entry = "checkpoint_engine_rpc"
    """The worker's method that takes calls of the worker protocol."""

    def __init__(self, side: str, workers: Sequence[Any], caller: Caller) -> None:
        if not workers:
            raise ConfigurationError(f"a {side} group needs at least one worker")
        self._require_workers(workers)
        self.side = side
        self._caller = caller
        self._made = 0
        self._units = _numbered([self._unit(worker) for worker in workers])

    def _require_workers(self, workers: Sequence[Any]) -> None:
        """Check that these can be called.

        Raises:
            ConfigurationError: one of them has not the methods.
        """

    def _unit(self, worker: Any, size: int = 1) -> Unit:
        self._made += 1
        return Unit(self._made - 1, worker, range(size))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._units[-1].ranks.stop

    def submit(
        self,
        method: str,
        kwargs: Mapping[str, Any] | None = None,
        *,
        each: Sequence[Mapping[str, Any]] | None = None,
        only: Collection[int] | None = None,
    ) -> PendingCall:
        """Start a method of the worker protocol on every worker; see `WorkerGroup.submit`."""
        if each is not None and len(each) != len(self._units):
            raise ConfigurationError(f"{len(each)} argument sets for {len(self._units)} {self.side} workers")
        return self._start(self.rpc_entry, method, kwargs, each, only)

    def replace(self, first_rank: int, worker: Any) -> None:
        """Put another worker in the place of one; see `ElasticGroup.replace`."""
        position = self._position(first_rank)
        self._require_workers([worker])
        self._units[position] = replace(self._unit(worker), ranks=self._units[position].ranks)

    def _position(self, first_rank: int) -> int:
        for position, unit in enumerate(self._units):
            if unit.ranks[0] == first_rank:
                return position
        known = ", ".join(str(unit.ranks[0]) for unit in self._units)
        raise ConfigurationError(f"no {self.side} worker begins at rank {first_rank}; they begin at {known}")

    def _start(
        self,
        entry: str,
        method: str,
        kwargs: Mapping[str, Any] | None,
        each: Sequence[Mapping[str, Any]] | None,
        only: Collection[int] | None = None,
    ) -> UnitCall:
        chosen = [
            (unit, each[position] if each else {})
            for position, unit in enumerate(self._units)
            if only is None or unit.ranks[0] in only
        ]
        units = [unit for unit, _ in chosen]
        requests = [Request(unit, entry, method, {**(kwargs or {}), **own}) for unit, own in chosen]
        source = self._caller.start(requests)
        return UnitCall(self.side, units, source, per_unit=entry == "refit_control")


class HostGroup(UnitGroup):
    """Engine hosts, each with one or several ranks, numbered in the order given.

    Args:
        hosts: one for each inference engine.
        caller: how to call them.
        startup_s: seconds that all hosts together have to answer the first call, engine start included.

    Raises:
        WeightSyncError: a host is dead, answers nothing in time or cannot describe itself.
    """

    def __init__(self, hosts: Sequence[Any], caller: Caller, startup_s: float) -> None:
        super().__init__("rollout", hosts, caller)
        self._startup_s = startup_s
        self._units = self._describe(self._units)
        self._assign()

    @property
    def rank_prefixes(self) -> tuple[int, ...]:
        """The first global rollout rank of each host."""
        return tuple(unit.ranks[0] for unit in self._units)

    def control(
        self,
        action: str,
        kwargs: Mapping[str, Any] | None = None,
        *,
        only: Collection[int] | None = None,
    ) -> PendingCall:
        """Start ``refit_control(action, kwargs)`` on every host; see `RolloutGroup.control`."""
        return self._start("refit_control", action, kwargs, None, only)

    def add(self, workers: Sequence[Any]) -> tuple[int, ...]:
        """Take in further hosts, as the last ones; see `ElasticGroup.add`.

        Raises:
            WeightSyncError: as for the constructor; the group is as it was.
        """
        self._require_workers(workers)
        new = self._describe(_numbered([self._unit(worker) for worker in workers]))
        self._change([*self._units, *new])
        return self.rank_prefixes[-len(new) :]

    def replace(self, first_rank: int, worker: Any) -> None:
        """Put another host in the place of one; see `ElasticGroup.replace`.

        Raises:
            ConfigurationError: it has another number of ranks.
            WeightSyncError: as for the constructor; the group is as it was.
        """
        position = self._position(first_rank)
        self._require_workers([worker])
        (new,) = self._describe([self._unit(worker)])
        old = self._units[position]
        if len(new.ranks) != len(old.ranks):
            raise ConfigurationError(
                f"the host at rank {first_rank} has {len(old.ranks)} ranks, the new one {len(new.ranks)}: "
                f"remove the one and add the other"
            )
        self._change([*self._units[:position], new, *self._units[position + 1 :]])

    def remove(self, first_rank: int) -> None:
        """Let a host go; see `ElasticGroup.remove`.

        Raises:
            ConfigurationError: no host begins there, or it is the last one.
        """
        position = self._position(first_rank)
        if len(self._units) == 1:
            raise ConfigurationError("a rollout group needs at least one worker: this is the last one")
        self._change([*self._units[:position], *self._units[position + 1 :]])

    def _change(self, units: list[Unit]) -> None:
        before, self._units = self._units, _numbered(units)
        known = {unit.index: unit.ranks for unit in before}
        try:
            self._assign({unit.ranks[0] for unit in self._units if known.get(unit.index) != unit.ranks})
        except BaseException:
            self._units = before
            raise

    def _describe(self, units: list[Unit]) -> list[Unit]:
        """Ask hosts how many ranks they have."""
        source = self._caller.start([Request(unit, "refit_control", "describe", {}) for unit in units])
        described = self._answers(UnitCall("rollout", units, source, per_unit=True), units)
        sizes = [_world_size(index, described[unit.ranks[0]]) for index, unit in enumerate(units)]
        return _numbered([replace(unit, ranks=range(size)) for unit, size in zip(units, sizes, strict=True)])

    def _assign(self, only: Collection[int] | None = None) -> None:
        """Tell hosts their first rank."""
        prefixes = [{"rank_prefix": prefix} for prefix in self.rank_prefixes]
        self._answers(self._start("refit_control", "assign_ranks", None, prefixes, only), self._units)

    def _answers(self, call: PendingCall, units: Sequence[Unit]) -> dict[int, Any]:
        answers = gather("join", [call], timeout_s=self._startup_s, grace_s=self._startup_s)
        for failure in answers.failures:
            host = next(number for number, unit in enumerate(units) if failure.who.rank in unit.ranks)
            record = replace(failure.record, message=f"engine host {host}: {failure.record.message}")
            raise record.to_exception()
        return answers.of("rollout")


def _numbered(units: Sequence[Unit]) -> list[Unit]:
    """Give each unit its ranks: as many as it has, behind those of the one before."""
    starts = accumulate((len(unit.ranks) for unit in units), initial=0)
    return [
        replace(unit, ranks=range(start, start + len(unit.ranks)))
        for unit, start in zip(units, starts, strict=False)
    ]


def _world_size(host: int, description: Any) -> int:
    size = description.get("world_size") if isinstance(description, Mapping) else None
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ProtocolError(f"engine host {host} describes itself as {description!r:.200}", side="rollout")
    return size
