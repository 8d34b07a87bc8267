"""All ranks of a refit under test: made, joined, refitted, replaced and closed as a synchronizer does it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

from weightsync.testing.oracle import ConformanceError, check
from weightsync.testing.ranks import ProcessRank, Rank, ThreadRank, make_barrier
from weightsync.testing.work import EngineClass, Outcome, Plan

R = TypeVar("R", bound=Rank)
World = tuple[int, int]
"""Number of policy ranks, number of rollout ranks."""


@dataclass(frozen=True)
class Setup:
    """The engine under test, and the limits of its tests.

    Attributes:
        engine: short name, ``module:ClassName`` or the class itself.
        settings: keywords of its constructor.
        bucket_size: bytes.
        bound_s: seconds within which every call must end.
        step_s: seconds that a rank waits for the other policy ranks at a step of its stream.
    """

    engine: EngineClass
    settings: Mapping[str, Any]
    bucket_size: int
    bound_s: float
    step_s: float


class Crew(Generic[R]):
    """Policy and rollout ranks. Joined by `join`; ended at the end of the ``with`` block.

    Args:
        world: how many of them.
        setup: their engine.
    """

    def __init__(self, world: World, setup: Setup) -> None:
        self.setup = setup
        self.epoch = 0
        self.policy = [self.make_rank("policy", rank) for rank in range(world[0])]
        self.rollout = [self.make_rank("rollout", rank) for rank in range(world[1])]

    def make_rank(self, side: str, rank: int) -> R:
        """Make a rank and its engine."""
        raise NotImplementedError

    @property
    def ranks(self) -> list[R]:
        """All ranks, policy ranks first."""
        return [*self.policy, *self.rollout]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End every rank."""
        self.end_ranks(self.ranks)

    def end_ranks(self, ranks: Iterable[R]) -> None:
        """End some ranks, whatever state they are in."""
        for rank in ranks:
            rank.end()

    def all(self, command: str, ranks: Iterable[R] | None = None, **arguments: Any) -> list[Any]:
        """Run a command on all ranks at once; returns their values, or raises the first error."""
        chosen = self.ranks if ranks is None else list(ranks)
        for rank in chosen:
            rank.start(command, **arguments)
        return [rank.result(self.setup.bound_s) for rank in chosen]

    def join(self) -> None:
        """Prepare all ranks and connect them, as before the first refit."""
        self.metadata: list[bytes] = self.all("prepare")
        self.all("join", train=len(self.policy), rollout=len(self.rollout), metadata=self.metadata)

    def join_late(self, count: int = 1) -> list[R]:
        """Make rollout ranks that join after a refit; no other rank is called. The caller ends them."""
        train, rollout = len(self.policy), len(self.rollout)
        late = [self.make_rank("rollout", rollout + i) for i in range(count)]
        try:
            self.all("prepare", late)
            metadata = self.metadata[:train]
            self.all("join_late", late, train=train, rollout=rollout + count, metadata=metadata)
        except BaseException:
            self.end_ranks(late)
            raise
        return late

    def rejoin(self) -> None:
        """Finalize all ranks and connect them anew, as after a fault."""
        self.all("finalize")
        self.join()

    def replace(self, rank: R) -> None:
        """Put a new rank in the place of one that was ended; `rejoin` comes next."""
        side = self.policy if rank.side == "policy" else self.rollout
        side[rank.rank] = self.make_rank(rank.side, rank.rank)

    def begin(
        self, plan: Plan, special: Mapping[tuple[str, int], Plan] | None = None, without: R | None = None
    ) -> None:
        """Open the next refit and start it on all ranks, but for one that is lost."""
        self.epoch += 1
        ranks = [rank for rank in self.ranks if rank is not without]
        self.all("open", ranks, epoch=self.epoch)
        for rank in ranks:
            rank.start("refit", plan=(special or {}).get((rank.side, rank.rank), plan))

    def outcomes(self, without: R | None = None) -> list[Outcome]:
        """Return how the refit ended on all ranks, policy ranks first."""
        deadline = time.monotonic() + self.setup.bound_s
        return [
            rank.result(max(0.0, deadline - time.monotonic())) for rank in self.ranks if rank is not without
        ]

    def refit(self, plan: Plan, special: Mapping[tuple[str, int], Plan] | None = None) -> list[Outcome]:
        """Run one refit; returns how it ended on all ranks."""
        self.begin(plan, special)
        return self.outcomes()

    def works(self, plan: Plan, special: Mapping[tuple[str, int], Plan] | None = None) -> None:
        """Run one refit, which must end well on all ranks.

        Raises:
            ConformanceError: it did not.
        """
        failed = [str(outcome) for outcome in self.refit(plan, special) if not outcome.done]
        check(not failed, "; ".join(failed))

    def recovers(self) -> None:
        """Connect all ranks anew and run a refit, which must end well."""
        self.rejoin()
        self.works(Plan("mixed", seed=6))


@dataclass
class _Steps:
    """Where policy ranks in threads of this process wait for each other. Mended before each refit."""

    parties: int
    timeout_s: float
    _barrier: threading.Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.mend()

    def mend(self) -> None:
        self._barrier = threading.Barrier(self.parties)

    def step(self) -> None:
        try:
            self._barrier.wait(self.timeout_s)
        except threading.BrokenBarrierError:
            raise ConformanceError(
                f"not all {self.parties} policy ranks took the stream's next step within {self.timeout_s:g} s"
            ) from None


class ThreadCrew(Crew[ThreadRank]):
    """Ranks in this process, each in a thread."""

    def __init__(self, world: World, setup: Setup) -> None:
        self._steps = _Steps(world[0], setup.step_s)
        super().__init__(world, setup)

    def make_rank(self, side: str, rank: int) -> ThreadRank:
        """Make a rank and its engine in this process."""
        setup = self.setup
        return ThreadRank(side, rank, setup.engine, setup.bucket_size, setup.settings, step=self._steps.step)

    def begin(
        self,
        plan: Plan,
        special: Mapping[tuple[str, int], Plan] | None = None,
        without: ThreadRank | None = None,
    ) -> None:
        """See `Crew`."""
        self._steps.mend()
        super().begin(plan, special, without)

    def end_ranks(self, ranks: Iterable[ThreadRank]) -> None:
        """Close the ranks' engines, also one whose rank does not return."""
        chosen = list(ranks)
        super().end_ranks(chosen)
        for rank in chosen:
            aside(rank.engine.close, self.setup.bound_s, f"close() of {rank.who}")


class ProcessCrew(Crew[ProcessRank]):
    """Ranks in processes of their own. All must be alive in a refit whose stream is ``in_step``."""

    def __init__(self, world: World, setup: Setup) -> None:
        self._barrier = make_barrier(world[0])
        super().__init__(world, setup)

    def make_rank(self, side: str, rank: int) -> ProcessRank:
        """Start a process with a rank and its engine."""
        setup = self.setup
        return ProcessRank(side, rank, setup.engine, setup.bucket_size, setup.settings, barrier=self._barrier)


def aside(call: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """Run a call in a thread of its own; returns its value, or raises what it raised.

    Raises:
        ConformanceError: it did not end in time.
    """
    results: list[tuple[bool, Any]] = []

    def run() -> None:
        try:
            results.append((False, call()))
        except BaseException as error:  # noqa: BLE001 - raised again below
            results.append((True, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    check(not thread.is_alive(), f"{what} did not end within {timeout_s:g} s")
    raised, value = results[0]
    if raised:
        raise value
    return value
