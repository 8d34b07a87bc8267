"""Which rollout ranks a failure comes from, and which busy ranks are merely waiting for those. No I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from weightsync.cluster.base import Failure
from weightsync.crew import Crew
from weightsync.errors import PeerLostError
from weightsync.failures import Distance, distance_of
from weightsync.topology import RankId

_ROLLOUT_RANK = re.compile(r"rollout rank (\d+)")


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


def patience_of(crew: Crew, failures: Sequence[Failure]) -> dict[RankId, float]:
    """Return in how many seconds busy ranks give up by themselves.

    A healthy one waits out its own ``connect_s`` for a peer that is gone. One that a peer calls lost, as a
    stopped process is, will not end anything.
    """
    lost = [failure for failure in failures if failure.record.kind == PeerLostError.__name__]
    gone = {RankId("rollout", rank) for failure in lost for rank in accused_by(failure)}
    return {who: left for who, left in crew.patient().items() if who not in gone}
