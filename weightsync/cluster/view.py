"""Some engine hosts of a rollout group as a group of their own, with their global ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from weightsync.cluster.base import PendingCall, RolloutGroup, WorkerGroup


def ranks_of(group: WorkerGroup) -> list[int]:
    """Return the ranks of a group, in order: all of its world, but for a `HostView`."""
    return group.ranks if isinstance(group, HostView) else list(range(group.world_size))


class HostView:
    """Some hosts of a group.

    Args:
        group: all hosts.
        hosts: those that this view has, by their first rank.
    """

    side = "rollout"

    def __init__(self, group: RolloutGroup, hosts: Collection[int]) -> None:
        self._group: RolloutGroup = group
        self._hosts = frozenset(hosts)
        if isinstance(group, HostView):  # where each host ends, only the whole group knows
            self._group, self._hosts = group._group, self._hosts & group._hosts

    @property
    def world_size(self) -> int:
        """Number of ranks of the whole group."""
        return self._group.world_size

    @property
    def rank_prefixes(self) -> tuple[int, ...]:
        """The first global rank of each host of this view."""
        return tuple(prefix for prefix in self._group.rank_prefixes if prefix in self._hosts)

    @property
    def ranks(self) -> list[int]:
        """The global ranks of this view's hosts."""
        starts = self._group.rank_prefixes
        ends = (*starts[1:], self._group.world_size)
        return [
            rank
            for start, end in zip(starts, ends, strict=True)
            if start in self._hosts
            for rank in range(start, end)
        ]

    def submit(
        self,
        method: str,
        kwargs: Mapping[str, Any] | None = None,
        *,
        each: Sequence[Mapping[str, Any]] | None = None,
        only: Collection[int] | None = None,
    ) -> PendingCall:
        """Start a call on this view's hosts; ``each`` still has an entry for every host of the group."""
        return self._group.submit(method, kwargs, each=each, only=self._among(only))

    def control(
        self,
        action: str,
        kwargs: Mapping[str, Any] | None = None,
        *,
        only: Collection[int] | None = None,
    ) -> PendingCall:
        """Start a control call on this view's hosts."""
        return self._group.control(action, kwargs, only=self._among(only))

    def _among(self, only: Collection[int] | None) -> frozenset[int]:
        return self._hosts if only is None else self._hosts & frozenset(only)
