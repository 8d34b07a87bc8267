"""The base of the conformance tests: what a subclass says of its engine, and how tests get their ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import pytest

from weightsync.engines.base import CAPABILITIES, CheckpointEngine
from weightsync.errors import ConfigurationError
from weightsync.testing.crew import Crew, Setup, ThreadCrew, World
from weightsync.testing.oracle import ConformanceError, check
from weightsync.testing.ranks import Rank
from weightsync.testing.work import EngineClass, Outcome, Plan, make_engine


class Suite:
    """What all conformance tests share. Subclasses of `EngineConformance` set the attributes."""

    engine: ClassVar[EngineClass]
    """Short name, ``module:ClassName`` or class of the engine under test."""

    settings: ClassVar[Mapping[str, Any]] = {}
    """Keywords of its constructor; its deadlines should be short, so that the tests of faults are."""

    bucket_size: ClassVar[int] = 1 << 20
    """Bytes of a bucket; streams are made to fit around it."""

    bound_s: ClassVar[float] = 20.0
    """Seconds within which every call, and every failure of a peer, must have an end."""

    step_s: ClassVar[float] = 10.0
    """Seconds that policy ranks wait for each other at an item of their streams."""

    collective_s: ClassVar[float | None] = None
    """The same where a rollout rank is late or slow; set to less than a second, it shows whether the engine
    waits for that rank where policy ranks do not wait for each other, that is outside of collectives."""

    @classmethod
    def setup_of(cls, **changes: Any) -> Setup:
        """Return the engine and its limits."""
        common: dict[str, Any] = {
            "engine": cls.engine,
            "settings": cls.settings,
            "bucket_size": cls.bucket_size,
            "bound_s": cls.bound_s,
            "step_s": cls.step_s,
        }
        return Setup(**{**common, **changes})

    @classmethod
    def make(cls) -> CheckpointEngine:
        """Make one engine that belongs to no crew."""
        return make_engine(cls.engine, cls.bucket_size, cls.settings)

    @classmethod
    def need(cls, capability: str) -> None:
        """Skip a test of what the engine says it lacks, with its reason."""
        check(capability in CAPABILITIES, f"no such capability: {capability}")
        reason = cls.lacks().get(capability)
        if reason is not None:
            pytest.skip(reason)

    @classmethod
    def lacks(cls) -> Mapping[str, str]:
        """Return what the engine declares that it cannot do, with the reasons."""
        declared: Mapping[str, str] = cls._asked(lambda engine: engine.lacks)
        return declared

    @classmethod
    def refusal(cls, world: World) -> str | None:
        """Return why the engine refuses a number of ranks; `None` if it takes them."""
        reason: str | None = cls._asked(
            lambda engine: engine.refuses(train_world_size=world[0], rollout_world_size=world[1])
        )
        return reason

    @classmethod
    def crew_of(cls, world: World, **changes: Any) -> ThreadCrew:
        """Make and join ranks in this process; skip a test of what the engine refuses, and does."""
        reason = cls.refusal(world)
        if reason is not None:
            cls._require_refused(world, reason)
            pytest.skip(reason)
        crew = ThreadCrew(world, cls.setup_of(**changes))
        try:
            crew.join()
        except BaseException:
            crew.end()
            raise
        return crew

    @pytest.fixture(scope="class")
    @classmethod
    def pair(cls) -> Iterator[ThreadCrew]:
        """One policy and one rollout rank, which all tests of a class share."""
        crew = cls.crew_of((1, 1))
        yield crew
        crew.end()

    # Judging outcomes.

    @staticmethod
    def require_failed(crew: Crew[Any], outcomes: list[Outcome], *, at: str = "", kind: str = "") -> None:
        """Check that a fault was an error on every rank in time, a typed one but where it was injected.

        Args:
            crew: whose outcomes these are.
            outcomes: of all live ranks.
            at: the rank at which the fault was injected, whose own error it is.
            kind: the class name of that error.
        """
        for outcome in outcomes:
            check(not outcome.done, f"{outcome}, though the refit failed")
            if outcome.who == at and kind:
                check(outcome.kind == kind, f"{outcome}; it should have raised {kind}")
            else:
                check(outcome.typed, f"{outcome}; that is no WeightSyncError")
        Suite.require_in_time(crew, outcomes)

    @staticmethod
    def require_in_time(crew: Crew[Any], outcomes: list[Outcome]) -> None:
        """Check that every rank came to an end within the bound."""
        for outcome in outcomes:
            check(outcome.seconds < crew.setup.bound_s, f"{outcome}: too late")

    @classmethod
    def _asked(cls, question: Callable[[CheckpointEngine], Any]) -> Any:
        engine = cls.make()
        try:
            return question(engine)
        finally:
            engine.close()

    @classmethod
    def _require_refused(cls, world: World, reason: str) -> None:
        check(
            bool(reason.strip()), f"refuses() gave no reason for {world[0]} policy, {world[1]} rollout ranks"
        )
        with ThreadCrew(world, cls.setup_of()) as crew:
            metadata = crew.all("prepare")
            for rank in crew.ranks:
                rank.start("join", train=world[0], rollout=world[1], metadata=metadata)
            for rank in crew.ranks:
                _require_refusal(rank, cls.bound_s, reason)


def _require_refusal(rank: Rank, bound_s: float, reason: str) -> None:
    try:
        rank.result(bound_s)
    except ConfigurationError:
        return
    except ConformanceError:
        raise
    except Exception as error:
        raise ConformanceError(f"{rank.who} raised {error!r}, no ConfigurationError: {reason}") from error
    raise ConformanceError(f"{rank.who} joined, though its engine refuses that: {reason}")


def plans(stream: str, count: int, **common: Any) -> list[Plan]:
    """Return the plans of several refits with changing seeds."""
    return [Plan(stream, seed=seed, **common) for seed in range(count)]
