"""The engine hosts that a refit leaves out because they failed, where the others may go on. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

from weightsync.cluster.base import Failure
from weightsync.cluster.view import ranks_of
from weightsync.crew import Crew, StepError
from weightsync.failures import distance_of
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

    def leave_out(self, error: StepError) -> None:
        """Leave out the hosts that a failed step is to be blamed on.

        Raises:
            StepError: the same, if there must be none, the policy side has failed, or no host is left.
        """
        failures = [*self.failures, *error.failures]
        here = set(ranks_of(self.left.rollout))
        blamed = self._blamed_for(error.failures) & here if self._tolerated else set()
        hosts = self.hosts | {self._crew.host_of(rank) for rank in blamed}
        left = set(self._crew.rollout.rank_prefixes) - hosts
        if not blamed or not left:
            raise StepError(error.phase, failures) from error
        self.hosts, self.failures = hosts, failures
        self.left = self._crew.among(left)

    def _blamed_for(self, failures: Sequence[Failure]) -> set[int]:
        patient = patience_of(self._crew, failures)
        # Who is silent because it waits for the one that has failed is asked again once it has given up.
        suspects = [each for each in failures if each.how != "silent" or each.who not in patient]
        return ranks_to_blame(suspects or failures, self._crew.lost)

    def failure_of(self, rank: int) -> Failure | None:
        """Return what a rank itself has said, or was said of it."""
        own, gone = RankId("rollout", rank), set(self._crew.lost)
        said = [failure for failure in self.failures if failure.who == own]
        return min(said, key=lambda failure: distance_of(failure, gone), default=None)
