"""Conformance: a rollout rank that comes after a refit is given its weights, and no policy rank is called."""

from __future__ import annotations

import pytest

from weightsync.errors import ConfigurationError
from weightsync.testing.crew import ThreadCrew, World
from weightsync.testing.oracle import ConformanceError, check
from weightsync.testing.ranks import ThreadRank
from weightsync.testing.suite import Suite
from weightsync.testing.work import MIDDLE, RAISE, InjectedError, Outcome, Plan


class LatecomerCases(Suite):
    """Ranks in this process. Where the engine lacks this, joining late is a `ConfigurationError`."""

    @pytest.mark.parametrize("world", [(1, 1), (2, 2)], ids=lambda world: f"{world[0]} to {world[1]}")
    def test_latecomers_are_given_the_last_refit(self, world: World) -> None:
        """Each refit's weights replace the earlier ones; several may come, at once or in turn."""
        with self._crew(world) as crew:
            for seed, count in ((0, 1), (3, 2)):
                crew.works(Plan("mixed", seed=seed))
                for _ in range(2):
                    self._serves(crew, Plan("mixed", seed=seed), count)
            crew.works(Plan("plain"))

    def test_a_latecomer_that_fails_harms_nobody(self) -> None:
        """The next one is served, and the next refit works."""
        with self._crew((1, 1)) as crew:
            crew.works(Plan(seed=1))
            late = crew.join_late()
            try:
                (outcome,) = _received(crew, late, Plan(seed=1, fault=RAISE, place=MIDDLE))
                self.require_failed(crew, [outcome], at=late[0].who, kind=InjectedError.__name__)
            finally:
                crew.end_ranks(late)
            self._serves(crew, Plan(seed=1), 1)
            crew.works(Plan(seed=2))
            self._serves(crew, Plan(seed=2), 1)

    def test_a_latecomer_before_any_refit(self) -> None:
        """There is nothing for it, and it is told so."""
        with self._crew((1, 1)) as crew:
            late = crew.join_late()
            try:
                self.require_failed(crew, _received(crew, late, Plan()))
            finally:
                crew.end_ranks(late)
            crew.works(Plan())

    def _crew(self, world: World) -> ThreadCrew:
        reason = self.lacks().get("latecomers")
        crew = self.crew_of(world)
        if reason is None:
            return crew
        try:
            late = crew.join_late()
        except ConfigurationError:
            pytest.skip(reason)
        else:
            crew.end_ranks(late)
        finally:
            crew.end()
        raise ConformanceError(f"a rank joined late, though its engine lacks latecomers: {reason}")

    def _serves(self, crew: ThreadCrew, plan: Plan, count: int) -> None:
        late = crew.join_late(count)
        try:
            outcomes = _received(crew, late, plan)
            failed = [str(outcome) for outcome in outcomes if not outcome.done]
            check(not failed, "; ".join(failed))
            for rank in late:
                version = rank.engine.refit_stats().get("version")
                check(version == crew.epoch, f"{rank.who} was given version {version}, not {crew.epoch}")
        finally:
            crew.end_ranks(late)


def _received(crew: ThreadCrew, late: list[ThreadRank], plan: Plan) -> list[Outcome]:
    outcomes: list[Outcome] = crew.all("refit", late, plan=plan)
    return outcomes
