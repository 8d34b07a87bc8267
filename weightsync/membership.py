"""Workers that come, go and are replaced while the others keep their connections, buffers and versions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from weightsync.cluster.base import ElasticGroup, WorkerGroup
from weightsync.connection import Connection
from weightsync.crew import Crew, Deadline
from weightsync.errors import ConfigurationError
from weightsync.topology import RankId


class Membership:
    """Changes who belongs to the two groups, and connects those that are new.

    Args:
        crew: the workers.
        connection: of their engines.
        limit_s: seconds for one change.
        check: called once the groups have changed, before a worker is called; raises to refuse.
    """

    def __init__(
        self, crew: Crew, connection: Connection, limit_s: float, *, check: Callable[[], None]
    ) -> None:
        self._crew = crew
        self._connection = connection
        self._limit_s = limit_s
        self._check = check

    def add(self, hosts: Sequence[Any]) -> tuple[int, ...]:
        """Take engine hosts in, behind the others; returns their first ranks.

        Raises:
            ConfigurationError: the group cannot change, or a host has too little memory.
            StepError: a worker failed; the new hosts are out again, and all others must connect anew.
        """
        group, world = _elastic(self._crew.rollout), self._crew.rollout.world_size
        new = group.add(hosts)
        count = self._crew.rollout.world_size - world
        self._connection.insert("rollout", world, count)
        try:
            self._connect(rollout=new)
        except BaseException:
            for first_rank in reversed(new):
                group.remove(first_rank)
            self._connection.remove("rollout", world, count)
            raise
        return new

    def replace_rollout(self, first_rank: int, host: Any) -> None:
        """Put an engine host, of as many ranks, in the place of one that is gone or shall go.

        Raises:
            ConfigurationError: the group cannot change, no host begins there, or the new one has another
                number of ranks or too little memory.
            StepError: a worker failed; all must connect anew.
        """
        group, ranks = _elastic(self._crew.rollout), self.ranks_at(first_rank)
        self._let_go(ranks)
        group.replace(first_rank, host)
        self._crew.forget(ranks)
        self._connect(rollout=[first_rank])

    def replace_policy(self, rank: int, worker: Any) -> None:
        """Put a policy worker in the place of one that is gone.

        Raises:
            ConfigurationError: the group cannot change, has no such rank, or the worker too little memory.
            StepError: a worker failed; all must connect anew.
        """
        _elastic(self._crew.policy).replace(rank, worker)
        self._crew.forget([RankId("policy", rank)])
        self._connect(policy=[rank])

    def remove(self, first_rank: int) -> None:
        """Let an engine host go; the ranks behind it move up.

        Raises:
            ConfigurationError: the group cannot change, no host begins there, or it is the last one.
            StepError: a worker failed; all must connect anew.
        """
        group, ranks = _elastic(self._crew.rollout), self.ranks_at(first_rank)
        if len(self._crew.rollout.rank_prefixes) > 1:
            self._let_go(ranks)
        group.remove(first_rank)
        self._crew.forget(ranks, moving_up=True)
        self._connection.remove("rollout", first_rank, len(ranks))
        self._connect()

    def ranks_at(self, first_rank: int) -> list[RankId]:
        """Return the ranks of the host that begins there; none if no host does."""
        part = self._crew.among([first_rank]).rollout
        return [RankId("rollout", rank) for rank in getattr(part, "ranks", ())]

    def _let_go(self, ranks: Sequence[RankId]) -> None:
        """Close the engine of a host that leaves, if it is there to hear it."""
        gone = self._crew.busy() | set(self._crew.lost)
        if ranks and not gone & set(ranks):
            call = self._crew.rollout.submit("close_checkpoint_engine", only=[ranks[0].rank])
            self._crew.hear("close", call, timeout_s=min(5.0, self._limit_s))

    def _connect(self, *, policy: Collection[int] = (), rollout: Collection[int] = ()) -> None:
        self._check()
        deadline = Deadline(self._limit_s)
        if not self._connection.is_due:
            self._connection.change(deadline, policy=policy, rollout=rollout)
            return
        self._connection.lacks_engines = True
        self._connection.again(deadline)


def _elastic(group: WorkerGroup) -> ElasticGroup:
    needed = ("add", "replace") if group.side == "rollout" else ("replace",)
    if any(getattr(group, name, None) is None for name in needed):
        raise ConfigurationError(
            f"the {group.side} group {type(group).__name__} has fixed workers: see weightsync.cluster.base."
            f"ElasticGroup for what it needs, or make a new synchronizer"
        )
    return group  # type: ignore[return-value]
