"""Conformance: any number of policy and rollout ranks, in step and out of it."""

from __future__ import annotations

import pytest

from weightsync.testing.crew import World
from weightsync.testing.suite import Suite
from weightsync.testing.work import Plan

WORLDS: tuple[World, ...] = ((1, 1), (1, 3), (3, 1), (4, 2), (2, 4), (2, 5))
"""Policy ranks and rollout ranks. What the engine refuses, it must refuse on every rank."""

_LONG = ((4, 2), (2, 5))
_WORLDS = [pytest.param(world, marks=[pytest.mark.slow] if world in _LONG else []) for world in WORLDS]


class TopologyCases(Suite):
    """Several ranks in this process; every policy rank has the same stream."""

    @pytest.mark.parametrize("world", _WORLDS, ids=lambda world: f"{world[0]} to {world[1]}")
    def test_all_ranks_in_step(self, world: World) -> None:
        """Making an item takes all policy ranks, as a collective does: each must drain its stream in step.

        Items are made when asked for and must not be collected. Names and shapes change.
        """
        with self.crew_of(world) as crew:
            for seed in (0, 3):
                crew.works(Plan("mixed", seed=seed, in_step=True, watched=True))
            crew.works(Plan("nothing", in_step=True))

    @pytest.mark.slow
    def test_a_policy_rank_that_comes_late(self) -> None:
        """The others wait for it; with `collective_s`, before their streams' first step."""
        with self.crew_of((2, 2), step_s=self.collective_s or self.step_s) as crew:
            crew.works(Plan(in_step=True), {("policy", 0): Plan(in_step=True, delay_s=self._long_s)})

    @pytest.mark.slow
    def test_a_receiver_that_comes_late_and_is_ten_times_slower(self) -> None:
        """It gets its bytes, and the others wait for it; with `collective_s`, outside of their steps."""
        with self.crew_of((2, 2), step_s=self.collective_s or self.step_s) as crew:
            slow = Plan(delay_s=self._long_s, pace_s=self._long_s)
            crew.works(Plan(in_step=True, watched=True), {("rollout", 0): slow})

    @property
    def _long_s(self) -> float:
        return 0.4 if self.collective_s is None else 1.25 * self.collective_s
