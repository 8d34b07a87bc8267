"""Conformance: a stream, loader or caller that fails is a typed error everywhere; the next refit works."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from weightsync.engines.base import CheckpointEngine
from weightsync.errors import WeightSyncError
from weightsync.testing.crew import ThreadCrew, World, aside
from weightsync.testing.oracle import ConformanceError, check
from weightsync.testing.suite import Suite
from weightsync.testing.work import FIRST, HOLD, MIDDLE, PLACES, RAISE, STOP, InjectedError, Plan

_SIDES = ("policy", "rollout")
_SEVERAL = [
    ((2, 2), "policy", 1),
    ((2, 2), "rollout", 1),
    pytest.param((2, 2), "policy", 0, marks=pytest.mark.slow),
    pytest.param((2, 4), "rollout", 0, marks=pytest.mark.slow),
]


class PairFaultCases(Suite):
    """Faults inside a process, with one policy and one rollout rank in this one."""

    @pytest.mark.parametrize("place", PLACES)
    @pytest.mark.parametrize("side", _SIDES)
    def test_one_of_a_pair_raises(self, pair: ThreadCrew, side: str, place: str) -> None:
        """Its stream, or its loader: the other one hears of it."""
        self.need("losses")
        fault = {(side, 0): Plan(fault=RAISE, place=place)}
        outcomes = pair.refit(Plan(), fault)
        self.require_failed(pair, outcomes, at=f"{side} rank 0", kind=InjectedError.__name__)
        pair.recovers()

    @pytest.mark.parametrize("place", [FIRST, MIDDLE])
    def test_a_receiver_stops_asking(self, pair: ThreadCrew, place: str) -> None:
        """It has not agreed that all came: that is no success for the sender."""
        self.need("losses")
        sender, _ = pair.refit(Plan(), {("rollout", 0): Plan(fault=STOP, place=place)})
        self.require_failed(pair, [sender])
        pair.recovers()

    @pytest.mark.parametrize("side", _SIDES)
    def test_a_second_refit_while_one_runs(self, pair: ThreadCrew, side: str) -> None:
        """It is refused, and the first one goes on."""
        self.need("checks")
        pair.begin(Plan(), {("policy", 0): Plan(fault=HOLD, place=MIDDLE)})
        pair.policy[0].wait_until_held(self.bound_s)
        try:
            engine = (pair.policy if side == "policy" else pair.rollout)[0].engine
            _require_refused(side, engine, self.bound_s, "a second refit while one ran")
        finally:
            pair.policy[0].go_on()
            outcomes = pair.outcomes()
        failed = [str(outcome) for outcome in outcomes if not outcome.done]
        check(not failed, f"refusing a second refit broke the first: {'; '.join(failed)}")
        pair.works(Plan(seed=3))

    @pytest.mark.parametrize("side", _SIDES)
    def test_a_refit_before_init(self, side: str) -> None:
        """Neither before `prepare` nor before joining."""
        self.need("checks")
        engine = self.make()
        try:
            _require_refused(side, engine, self.bound_s, "a refit before prepare()")
            engine.prepare()
            _require_refused(side, engine, self.bound_s, "a refit before joining")
        finally:
            engine.close()

    @pytest.mark.slow
    @pytest.mark.parametrize("side", _SIDES)
    def test_closed_during_a_refit(self, side: str) -> None:
        """It ends the refit on both sides; new engines in its place refit again."""
        self.need("losses")
        with self.crew_of((1, 1)) as crew:
            held, closed = crew.policy[0], (crew.policy if side == "policy" else crew.rollout)[0]
            crew.begin(Plan(), {("policy", 0): Plan(fault=HOLD, place=MIDDLE, pace_s=0.02)})
            held.wait_until_held(self.bound_s)
            closing = _Beside(closed.engine.close)
            closing.let_begin()
            held.go_on()
            outcomes = crew.outcomes()
            closing.require_ended(self.bound_s, f"close() of {closed.who} during a refit")
            for outcome in outcomes:
                check(not outcome.done, f"{outcome}, though {closed.who} was closed in the middle")
            self.require_failed(crew, [outcome for outcome in outcomes if outcome.who != closed.who])
            crew.end_ranks([closed])
            crew.replace(closed)
            crew.recovers()

    @pytest.mark.parametrize("side", _SIDES)
    def test_started_anew_with_the_same_rank(self, side: str) -> None:
        """A new engine in the place of an old one takes part after all have connected again."""
        with self.crew_of((1, 1)) as crew:
            crew.works(Plan(seed=1))
            old = (crew.policy if side == "policy" else crew.rollout)[0]
            crew.end_ranks([old])
            crew.replace(old)
            crew.recovers()


class SeveralFaultCases(Suite):
    """The same with several ranks a side."""

    @pytest.mark.parametrize(("world", "side", "rank"), _SEVERAL, ids=str)
    def test_one_of_several_raises(self, world: World, side: str, rank: int) -> None:
        """No rank is left waiting, and none takes half a stream for all of it."""
        self.need("losses")
        with self.crew_of(world) as crew:
            outcomes = crew.refit(Plan(), {(side, rank): Plan(fault=RAISE, place=MIDDLE)})
            self.require_in_time(crew, outcomes)
            for outcome in outcomes:
                known = outcome.who == f"{side} rank {rank}" and outcome.kind == InjectedError.__name__
                check(outcome.done or outcome.typed or known, f"{outcome}; that is no WeightSyncError")
            check(any(outcome.typed for outcome in outcomes), f"nobody heard that {side} rank {rank} failed")
            crew.recovers()


class _Beside:
    """A call that runs in a thread while the test goes on."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._errors: list[BaseException] = []
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def let_begin(self) -> None:
        """Give it the time to come to where it waits."""
        self._thread.join(0.2)

    def require_ended(self, timeout_s: float, what: str) -> None:
        """Check that it came to its end, and raise what it raised."""
        self._thread.join(timeout_s)
        check(not self._thread.is_alive(), f"{what} did not end within {timeout_s:g} s")
        if self._errors:
            raise self._errors[0]

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:  # noqa: BLE001 - raised again in the test
            self._errors.append(error)


def _one_weight() -> Iterator[tuple[str, torch.Tensor]]:
    yield "weight", torch.ones(3)


async def _refit(side: str, engine: CheckpointEngine) -> None:
    if side == "policy":
        await engine.send_weights(iter(_one_weight()))  # type: ignore[arg-type]
        return
    async for _ in engine.receive_weight_batches():
        return


def _require_refused(side: str, engine: CheckpointEngine, bound_s: float, what: str) -> None:
    try:
        aside(lambda: asyncio.run(_refit(side, engine)), bound_s, what)
    except WeightSyncError:
        return
    except ConformanceError:
        raise
    except Exception as error:
        raise ConformanceError(f"{what} raised {error!r}, no WeightSyncError") from error
    raise ConformanceError(f"{what} was not refused")
