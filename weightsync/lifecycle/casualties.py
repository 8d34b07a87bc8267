"""The engine hosts that a refit leaves out because they failed, where the others may go on. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from weightsync.cluster.base import Failure
from weightsync.cluster.view import ranks_of
from weightsync.crew import Crew, StepError
from weightsync.failures import Distance, distance_of
from weightsync.lifecycle.blame import patience_of, ranks_to_blame
from weightsync.topology import RankId


class Casualties:
    """Who was left out of one refit, and why.

    Args:
        crew: all that took part at the beginning.
        tolerated: whether the others may go on at all.

    Attributes:
        left: the crew without them.
        hosts: they, by their first ranks.
        failures: what they, and their peers because of them, have said.
    """

    def __init__(self, crew: Crew, *, tolerated: bool) -> None:
        self.left = crew
        self.hosts: set[int] = set()
        self.failures: list[Failure] = []
        self._crew = crew
        self._tolerated = tolerated

    def leave_out(self, error: StepError, *, others_are_awaited: bool = False) -> None:
        """Leave out the hosts that a failed step is to be blamed on.

        Args:
            error: of the step.
            others_are_awaited: whether those that were silent get more time next. Unless they are the only
                ones to be blamed, they may be waiting for one that has failed.

        Raises:
            StepError: the same, if there must be none, the policy side has failed, or no host is left.
        """
        failures = [*self.failures, *error.failures]
        here = set(ranks_of(self.left.rollout))
        blame = self._blame if others_are_awaited else ranks_to_blame
        blamed = blame(error.failures, self._crew.lost) & here if self._tolerated else set()
        hosts = self.hosts | {self._crew.host_of(rank) for rank in blamed}
        left = set(self._crew.rollout.rank_prefixes) - hosts
        if not blamed or not left:
            raise StepError(error.phase, failures) from error
        self.hosts, self.failures = hosts, failures
        self.left = self._crew.among(left)

    def _blame(self, failures: Sequence[Failure], lost: Collection[RankId]) -> set[int]:
        certain = [each for each in failures if distance_of(each, lost) <= Distance.OWN]
        if blamed := ranks_to_blame(certain, lost):
            return blamed
        patient = patience_of(self._crew, failures)
        suspects = [each for each in failures if each.how != "silent" or each.who not in patient]
        return ranks_to_blame(suspects or failures, lost)

    def failure_of(self, rank: int) -> Failure | None:
        """Return what a rank itself has said, or was said of it."""
        own, gone = RankId("rollout", rank), set(self._crew.lost)
        said = [failure for failure in self.failures if failure.who == own]
        return min(said, key=lambda failure: distance_of(failure, gone), default=None)
