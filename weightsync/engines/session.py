"""A worker's control links to its peers, from one `prepare` to the next: the paired topology."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from weightsync.control import ControlHub, Link
from weightsync.engines.metadata import WorkerMetadata
from weightsync.errors import LifecycleError

_log = logging.getLogger(__name__)


class Session:
    """The control hub of one worker and the links of its process group.

    A policy rank is dialled by its rollout rank; policy rank 0 is dialled by the other policy ranks.

    Args:
        hub: the session owns it.
        own: what this worker tells its peers.
    """

    def __init__(self, hub: ControlHub, own: WorkerMetadata) -> None:
        self._hub = hub
        self.own = own
        self._dropped: Counter[str] = Counter()
        self.role: str | None = None
        """``"policy"`` or ``"rollout"``, once joined."""
        self.rank: int | None = None
        self.link: Link | None = None
        """To the other side; a policy rank may have none."""
        self.step_links: list[Link] = []
        """Of a policy rank: to the ranks that it keeps in step with."""

    def require_unjoined(self) -> None:
        """Check that this session has no process group yet.

        Raises:
            LifecycleError: it has; another one takes another `prepare`.
        """
        if self.role is not None:
            raise LifecycleError(
                f"this engine has joined as {self.role} rank {self.rank} already: call prepare() again "
                f"on every worker before a new process group"
            )

    def join_policy(
        self, rank: int, policy: list[WorkerMetadata], partner: tuple[int, WorkerMetadata] | None
    ) -> None:
        """Make the links of a policy rank; ``partner`` is its rollout rank, if it has one."""
        if partner is not None:
            self.link = self._hub.accept(partner[1].card(f"rollout rank {partner[0]}"))
        if rank:
            self.step_links = [self._hub.connect(policy[0].card("policy rank 0"))]
        else:
            others = enumerate(policy[1:], start=1)
            self.step_links = [self._hub.accept(entry.card(f"policy rank {r}")) for r, entry in others]
        self.role, self.rank = "policy", rank

    def join_rollout(self, rank: int, partner: tuple[int, WorkerMetadata]) -> None:
        """Make the link of a rollout rank to its policy rank."""
        self.link = self._hub.connect(partner[1].card(f"policy rank {partner[0]}"))
        self.role, self.rank = "rollout", rank

    @property
    def links(self) -> list[Link]:
        """All of them."""
        return [*self.step_links, self.link] if self.link is not None else list(self.step_links)

    def abort(self, error: BaseException) -> None:
        """Tell every peer of the open refit why this side failed."""
        for link in self.links:
            link.abort(error)

    @contextmanager
    def saying_drops(self) -> Iterator[None]:
        """Log at the end of a refit, in one line, what the control channel has dropped since the last one."""
        try:
            yield
        finally:
            counted = Counter(self._hub.counters)
            fresh, self._dropped = counted - self._dropped, counted
            if fresh:
                # A heartbeat that crosses the end of its refit is dropped, too, and nobody need hear of it.
                level = logging.WARNING if set(fresh) - {"late"} else logging.DEBUG
                what = ", ".join(f"{count} {name}" for name, count in sorted(fresh.items()))
                _log.log(
                    level, "%s rank %s: the control channel dropped messages: %s", self.role, self.rank, what
                )

    def close(self) -> None:
        """Leave every peer. Idempotent."""
        self._hub.close()
