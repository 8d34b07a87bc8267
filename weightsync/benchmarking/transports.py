"""Checkpoint engines as trials: which of them can run here, in which topologies, and their refits."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Any

from weightsync.benchmarking.crew import Crew, Member, ProcessCrew, ask
from weightsync.benchmarking.regions import REGIONS, RegionWorker
from weightsync.benchmarking.shapes import ModelHandle
from weightsync.benchmarking.trial import BenchSettings, Measurement, Trial, absent
from weightsync.benchmarking.workers import EngineWorker, Stretch
from weightsync.engines.base import CheckpointEngine
from weightsync.engines.regions.engine import RegionEngine
from weightsync.engines.registry import (
    create_checkpoint_engine,
    known_checkpoint_engines,
    resolve_checkpoint_engine,
)
from weightsync.errors import ConfigurationError, WeightSyncError
from weightsync.signatures import constructor_of
from weightsync.topology import AUTO, TOPOLOGIES, make_topology

KIND = "transport"
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Wish:
    """A transport to measure, in one topology or (empty) in all that fit."""

    transport: str
    topology: str = ""

    @classmethod
    def read(cls, text: str) -> Wish:
        """Read ``nixl``, ``nixl:ring``, ``my_pkg.refit:MyEngine`` or ``my_pkg.refit:MyEngine:ring``."""
        head, _, last = text.strip().rpartition(":")
        if head and last in {*TOPOLOGIES, REGIONS}:
            return cls(head, last)
        return cls(text.strip())


class EngineTrial(Trial):
    """Refits through checkpoint engines, in processes of their own.

    Args:
        wish: transport and topology.
        settings: of the run.
        required: see `Trial`.
    """

    kind = KIND

    def __init__(self, wish: Wish, settings: BenchSettings, *, required: bool) -> None:
        self.name, self.topology = wish.transport, wish.topology
        self.required = required
        self._settings = settings
        cls = resolve_checkpoint_engine(wish.transport)
        # An engine that must share a process with its peer gets one for each pair of ranks.
        self._together = "processes" in cls.lacks
        self._by_regions = self.exact = wish.topology == REGIONS
        if self._by_regions and not issubclass(cls, RegionEngine):
            raise ConfigurationError(f"{wish.transport} cannot refit by regions")
        self._engine = _engine_settings(cls, wish, settings)

    def refusal(self) -> str | None:
        """Return why it cannot run here; `None` if nothing speaks against it."""
        settings = self._settings
        try:
            engine = create_checkpoint_engine(
                self.name, bucket_size_bytes=settings.bucket_bytes, engine_kwargs=self._engine
            )
        except WeightSyncError as error:
            return error.message
        try:
            return engine.refuses(
                train_world_size=settings.policy_ranks, rollout_world_size=settings.rollout_ranks
            )
        finally:
            engine.close()

    def crew(self, model: ModelHandle) -> AbstractContextManager[Crew]:
        """Return a process for each rank."""
        settings = self._settings
        return ProcessCrew(
            RegionWorker if self._by_regions else EngineWorker,
            model,
            settings.policy_ranks,
            settings.rollout_ranks,
            threads=settings.threads,
            tensor_parallel=settings.rollout_tp,
            together=self._together,
        )

    def begin(self, crew: Crew) -> None:
        """Make the engines, prepare and connect them, as a synchronizer does."""
        worlds = (self._settings.policy_ranks, self._settings.rollout_ranks)
        made = [
            self._make(member, rank, sides)
            for rank, (member, sides) in enumerate(zip(crew.members, self._sides(), strict=True))
        ]
        metadata = [each["policy"] for each in made if "policy" in each]
        metadata += [each["rollout"] for each in made if "rollout" in each]
        ranked = [*enumerate(crew.policy), *(() if self._together else enumerate(crew.rollout))]
        for rank, member in ranked:
            member.start("join", rank, *worlds, metadata)
        for _, member in ranked:
            member.result()

    def _make(self, member: Member, rank: int, sides: tuple[str, ...]) -> Any:
        arguments = (self.name, self._settings.bucket_bytes, self._engine, sides)
        if not self._by_regions:
            return ask([member], "make", *arguments)[0]
        return ask([member], "make_regions", *arguments, (rank, self._settings.policy_ranks))[0]

    def refit(self, crew: Crew, number: int) -> list[Stretch]:
        """Run one refit; every rank is told its number first, which is not timed."""
        ask(crew.members, "open", number)
        done = list(chain.from_iterable(ask(crew.members, "refit")))
        ask(crew.members, "finish")
        return done

    def connect_seconds(self, crew: Crew) -> dict[str, float]:
        """Return what connecting took for what refits keep, by phase; the slowest rank's."""
        found: dict[str, float] = {}
        for seconds in ask(crew.members, "connect_seconds") if self._by_regions else ():
            for phase, value in seconds.items():
                found[phase] = max(value, found.get(phase, 0.0))
        return found

    def end(self, crew: Crew) -> None:
        """Close the engines."""
        ask(crew.members, "close")

    def _sides(self) -> list[tuple[str, ...]]:
        policy, rollout = self._settings.policy_ranks, self._settings.rollout_ranks
        if self._together:
            return [("policy", "rollout") if rank < rollout else ("policy",) for rank in range(policy)]
        return [*[("policy",)] * policy, *[("rollout",)] * rollout]


def transport_trials(
    wishes: Sequence[Wish], settings: BenchSettings
) -> tuple[list[Trial], list[Measurement]]:
    """Return the trials of the transports, and why others cannot run here.

    Args:
        wishes: what to measure; none means every transport that this process knows.
        settings: of the run.

    Raises:
        ConfigurationError: a wish names no transport.
    """
    trials: list[Trial] = []
    without: list[Measurement] = []
    required = bool(wishes)
    for wish in wishes or [Wish(name) for name in known_checkpoint_engines()]:
        try:
            found = _trials_of(wish, settings, required=required)
        except WeightSyncError as error:
            if wish.transport not in known_checkpoint_engines():
                raise
            key = "error" if required else "unavailable"
            reason: dict[str, Any] = {key: error.message}
            without.append(Measurement(kind=KIND, name=wish.transport, topology=wish.topology, **reason))
            continue
        for trial in found:
            refusal = trial.refusal()
            if refusal is None:
                trials.append(trial)
            else:
                without.append(absent(trial, refusal))
    return trials, without


def _trials_of(wish: Wish, settings: BenchSettings, *, required: bool) -> list[EngineTrial]:
    if wish.topology or settings.topology:
        wish = Wish(wish.transport, wish.topology or settings.topology)
        return [EngineTrial(wish, settings, required=required)]
    cls = resolve_checkpoint_engine(wish.transport)
    names = _distinct_topologies(cls, settings)
    if issubclass(cls, RegionEngine):
        names.append(REGIONS)
    return [EngineTrial(Wish(wish.transport, name), settings, required=required) for name in names or [""]]


def _distinct_topologies(cls: type[CheckpointEngine], settings: BenchSettings) -> list[str]:
    """Return the engine's topologies that fit the ranks; of those with the same connections, the first."""
    names: tuple[str, ...] = getattr(cls, "topologies", ())
    found: dict[tuple[Any, ...], str] = {}
    for name in names:
        try:
            topology = make_topology(
                name,
                train_world_size=settings.policy_ranks,
                rollout_world_size=settings.rollout_ranks,
            )
        except ConfigurationError:
            continue
        found.setdefault((frozenset(topology.edges), topology.owners), name)
    return list(found.values()) or list(names[:1])


def _engine_settings(cls: type[CheckpointEngine], wish: Wish, settings: BenchSettings) -> dict[str, Any]:
    """Return what the engine is to be made with, as far as its constructor takes it."""
    constructor = constructor_of(cls)
    wanted = {"device": "cpu", "verify": settings.verify, "bind_host": _LOOPBACK}
    taken: dict[str, Any] = {name: value for name, value in wanted.items() if constructor.takes(name)}
    if wish.topology == REGIONS:
        return {**taken, "topology": AUTO, "shard_weights": "all"}
    return {**taken, "topology": wish.topology} if wish.topology else taken
