"""Conformance: ranks in processes of their own, some of which are killed or stopped.

The faults strike several sets of processes at once, and each test looks at its own: waiting for deadlines
one after the other would take minutes.
"""

from __future__ import annotations

import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import pytest

from weightsync.engines.registry import resolve_checkpoint_engine
from weightsync.testing.crew import ProcessCrew, Setup, World
from weightsync.testing.oracle import ConformanceError, check
from weightsync.testing.ranks import ProcessRank, preload
from weightsync.testing.suite import Suite
from weightsync.testing.work import HOLD, LAST, MIDDLE, EngineClass, Outcome, Plan

_BEFORE = "before"
_SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
_SIDES = ("policy", "rollout")
_AT_ONCE = 4
_MOMENT_S = 0.2
_LANE_S = 200.0
_PAIR: World = (1, 1)
_SEVERAL: World = (2, 2)


class Strike(NamedTuple):
    """One fault: which signal comes to rank 0 of which side, and where in a refit."""

    fault: str
    side: str
    place: str

    def __str__(self) -> str:
        return f"{self.fault} of {self.side} 0, {self.place}"


Lane = list[Strike]
"""Strikes that share their processes, and come one after the other."""

Results = dict[Strike, "Future[None]"]

_PAIR_LANES: list[Lane] = [
    [Strike(fault, side, place) for place in (_BEFORE, MIDDLE, LAST)] for fault in _SIGNALS for side in _SIDES
]
_SEVERAL_LANES: list[Lane] = [
    [Strike("SIGKILL", side, MIDDLE) for side in _SIDES],
    [Strike("SIGSTOP", "rollout", MIDDLE)],
]


class _ProcessSuite(Suite):
    @classmethod
    def require_processes(cls, world: World) -> None:
        """Skip where the engine cannot be in several processes, or not in so many."""
        cls.need("processes")
        reason = cls.refusal(world)
        if reason is not None:
            pytest.skip(reason)
        preload(_modules_of(cls.engine))

    @classmethod
    def strike_all(cls, world: World, lanes: list[Lane]) -> Results:
        """Let every fault strike; returns how each of them ended."""
        cls.need("losses")
        cls.require_processes(world)
        results: Results = {strike: Future() for lane in lanes for strike in lane}
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for lane in lanes:
                pool.submit(_run_lane, lane, world, cls.setup_of(), results)
        return results

    @classmethod
    def refit_in_processes(cls, world: World) -> None:
        """Refit several times, and once more after all have joined anew."""
        cls.require_processes(world)
        with ProcessCrew(world, cls.setup_of()) as crew:
            crew.join()
            for seed in (0, 1, 3):
                crew.works(Plan("mixed", seed=seed, in_step=True, watched=True))
            crew.recovers()


class PairProcessCases(_ProcessSuite):
    """One policy and one rollout rank, each in a process of its own."""

    @pytest.fixture(scope="class")
    @classmethod
    def struck_pairs(cls) -> Results:
        """How each fault of a pair ended."""
        return cls.strike_all(_PAIR, _PAIR_LANES)

    @pytest.mark.slow
    def test_two_processes_refit(self) -> None:
        """Each engine is in a process of its own."""
        self.refit_in_processes(_PAIR)

    @pytest.mark.slow
    @pytest.mark.parametrize("strike", [strike for lane in _PAIR_LANES for strike in lane], ids=str)
    def test_one_of_two_processes_is_lost(self, struck_pairs: Results, strike: Strike) -> None:
        """Its peer raises a typed error in time; with another process in its place both refit again."""
        struck_pairs[strike].result(timeout=0)


class SeveralProcessCases(_ProcessSuite):
    """Several ranks a side, each in a process of its own."""

    @pytest.fixture(scope="class")
    @classmethod
    def struck_several(cls) -> Results:
        """How each fault of several ranks ended."""
        return cls.strike_all(_SEVERAL, _SEVERAL_LANES)

    @pytest.mark.slow
    def test_several_processes_refit(self) -> None:
        """Each item of the stream takes all policy processes."""
        self.refit_in_processes(_SEVERAL)

    @pytest.mark.slow
    @pytest.mark.parametrize("strike", [strike for lane in _SEVERAL_LANES for strike in lane], ids=str)
    def test_one_of_several_processes_is_lost(self, struck_several: Results, strike: Strike) -> None:
        """Its peers raise typed errors in time, and nobody hangs; then all refit again."""
        struck_several[strike].result(timeout=0)


def _modules_of(engine: EngineClass) -> list[str]:
    cls = resolve_checkpoint_engine(engine) if isinstance(engine, str) else engine
    return [cls.__module__]


def _run_lane(lane: Lane, world: World, setup: Setup, results: Results) -> None:
    """Let the strikes of a lane come one after the other; after one that went wrong with new processes."""
    crew: ProcessCrew | None = None
    ends = time.monotonic() + _LANE_S
    for strike in lane:
        try:
            check(time.monotonic() < ends, f"the faults before {strike} took more than {_LANE_S:g} s")
            if crew is None:
                crew = ProcessCrew(world, setup)
                crew.join()
            _strike(crew, strike)
            results[strike].set_result(None)
        except BaseException as error:  # noqa: BLE001 - raised by the test
            results[strike].set_exception(error)
            if crew is not None:
                crew.end()
            crew = None
    if crew is not None:
        crew.end()


def _strike(crew: ProcessCrew, strike: Strike) -> None:
    """Run one refit in which a process is lost, judge the others, replace it, and refit again."""
    crew.works(Plan("plain", seed=1))
    victim = (crew.policy if strike.side == "policy" else crew.rollout)[0]
    if strike.place == _BEFORE:
        victim.signal(_SIGNALS[strike.fault])
        crew.begin(Plan(), without=victim)
    else:
        crew.begin(Plan(), {(victim.side, victim.rank): Plan(fault=HOLD, place=strike.place)})
        victim.wait_until_held(crew.setup.bound_s)
        time.sleep(_MOMENT_S)  # the others come to where they wait for this one
        victim.signal(_SIGNALS[strike.fault])
    _judge(crew.outcomes(without=victim), victim, crew.setup.bound_s)
    victim.end()
    crew.replace(victim)
    crew.recovers()


def _judge(outcomes: list[Outcome], victim: ProcessRank, bound_s: float) -> None:
    for outcome in outcomes:
        check(outcome.done or outcome.typed, f"{outcome}; that is no WeightSyncError")
        check(outcome.seconds < bound_s, f"{outcome}: too late")
    heard = [outcome for outcome in outcomes if not outcome.done and not outcome.who.startswith(victim.side)]
    if not heard:
        raise ConformanceError(
            f"{victim.who} was lost, and no rank of the other side says so: {'; '.join(map(str, outcomes))}"
        )
