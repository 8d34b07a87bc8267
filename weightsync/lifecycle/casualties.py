"""The engine hosts that a refit leaves out because they failed, where the others may go on. No I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from weightsync.cluster.base import Failure
from weightsync.cluster.view import ranks_of
from weightsync.crew import Crew, StepError
from weightsync.failures import Distance, distance_of
from weightsync.topology import RankId

_ROLLOUT_RANK = re.compile(r"rollout rank (\d+)")


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
        blamed = ranks_to_blame(error.failures, self._crew.lost) & here if self._tolerated else set()
        hosts = self.hosts | {self._crew.host_of(rank) for rank in blamed}
        left = set(self._crew.rollout.rank_prefixes) - hosts
        if not blamed or not left:
            raise StepError(error.phase, failures) from error
        self.hosts, self.failures = hosts, failures
        self.left = self._crew.among(left)

    def failure_of(self, rank: int) -> Failure | None:
        """Return what a rank itself has said, or was said of it."""
        own, gone = RankId("rollout", rank), set(self._crew.lost)
        said = [failure for failure in self.failures if failure.who == own]
        return min(said, key=lambda failure: distance_of(failure, gone), default=None)


def ranks_to_blame(failures: Sequence[Failure], lost: Iterable[RankId]) -> set[int]:
    """Return the rollout ranks that a failure comes from; none if it comes from the policy's side.

    Ranks that were silent count, for they cannot be used; those that only complain about a peer do not, if
    that peer is a rollout rank or has failed itself.
    """
    gone = set(lost)
    by_distance: dict[Distance, list[Failure]] = {}
    for failure in failures:
        by_distance.setdefault(distance_of(failure, gone), []).append(failure)
    own = [*by_distance.get(Distance.LOST, ()), *by_distance.get(Distance.OWN, ())]
    if any(failure.who.side == "policy" for failure in own):
        return set()
    silent = by_distance.get(Distance.SILENT, [])
    first_hand = {failure.who.rank for failure in (*own, *silent) if failure.who.side == "rollout"}
    if first_hand:
        return first_hand
    complaints = by_distance.get(Distance.ABOUT_A_PEER, [])
    accused = {rank for failure in complaints for rank in accused_by(failure)}
    if accused:
        return accused
    if any(failure.who.side == "policy" for failure in complaints):
        return set()
    return {failure.who.rank for failure in complaints}


def accused_by(failure: Failure) -> set[int]:
    """Return the rollout rank that a rank complains about, if it is one."""
    found = _ROLLOUT_RANK.fullmatch(failure.record.context.peer or "")
    return {int(found[1])} if found else set()
