"""The engine hosts that a failed refit finds busy: they are waited for, each as long as it may need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from weightsync.cluster.view import ranks_of
from weightsync.crew import Crew, Deadline
from weightsync.topology import RankId

MOMENT_S = 2.5
"""What a rank may need from its own deadline on: in up to two seconds it tells peers that it has not met."""

_LOOK_S = 0.1


def as_they_end(crew: Crew, patience: Mapping[RankId, float], deadline: Deadline) -> Iterator[set[int]]:
    """Yield the busy hosts, by first rank, as they end what they are in; all get a moment, whatever they are.

    Args:
        crew: whose rollout ranks may be busy.
        patience: seconds that ranks may go on by themselves, before the moment.
        deadline: when nobody is waited for any more.
    """
    here = {RankId("rollout", rank) for rank in ranks_of(crew.rollout)}
    waited_s: dict[int, float] = {}
    for who in crew.busy() & here:
        host = crew.host_of(who.rank)
        waited_s[host] = max(waited_s.get(host, 0.0), patience.get(who, 0.0) + MOMENT_S)
    waiting = {host: Deadline(min(seconds, deadline.left_s())) for host, seconds in waited_s.items()}
    while waiting := {host: until for host, until in waiting.items() if until.left_s() > 0}:
        still = {crew.host_of(who.rank) for who in crew.settle(_LOOK_S, here) & here}
        ended = waiting.keys() - still
        waiting = {host: until for host, until in waiting.items() if host in still}
        if ended:
            yield ended
