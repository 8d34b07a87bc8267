"""A worker's control links to its peers, from one `prepare` to the next."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from weightsync.control import ControlHub, GuestLink, Link
from weightsync.engines.lockstep import step_links
from weightsync.engines.metadata import WorkerMetadata
from weightsync.engines.telling import tell_all
from weightsync.topology import RankId, Topology

_log = logging.getLogger(__name__)


class Session:
    """The control hub of one worker and the links of its process group.

    A rank is dialled by those that it sends to; policy rank 0 is dialled by the other policy ranks, too.

    Args:
        hub: the session owns it.
        own: what this worker tells its peers.
        guests: the link for those that come later, if this worker takes any.
    """

    def __init__(self, hub: ControlHub, own: WorkerMetadata, guests: GuestLink | None = None) -> None:
        self._hub = hub
        self.own = own
        self.guests = guests
        self.watch = hub.watch()
        self._dropped: Counter[str] = Counter()
        self.who: RankId | None = None
        """Once joined."""
        self.is_late = False
        """Whether this worker has joined after the others, who know nothing of it."""
        self.topology: Topology | None = None
        """Of the next refit."""
        self.entries: list[WorkerMetadata] = []
        """All members', policy ranks first."""
        self.sources: dict[RankId, Link] = {}
        """To those that this rank receives from."""
        self.targets: dict[RankId, Link] = {}
        """To those that it sends to, or forwards to."""
        self.step_links: list[Link] = []
        """Of a policy rank: to the ranks that it keeps in step with."""
        self._made: dict[tuple[str, str], Link] = {}
        """Every link but those of latecomers, by how it was made and the peer's session."""

    def join_late(self, who: RankId, topology: Topology, entries: Sequence[WorkerMetadata]) -> None:
        """Make the links of a rank to those that know nothing of it; ``entries`` are the policy ranks'."""
        for peer in topology.sources(who):
            entry = entries[topology.index(peer)]
            self.sources[peer] = self._hub.connect(entry.card(str(peer)), ticket=entry.guests)
        self._refuse_guests()
        self.who, self.topology, self.is_late = who, topology, True

    def join(self, who: RankId, topology: Topology, entries: Sequence[WorkerMetadata]) -> None:
        """Take the links of a rank, once more for another rank or topology; those to the same peers are kept.

        Args:
            who: this worker.
            topology: of the next refits.
            entries: all workers', policy ranks first. Links to workers that are not among them are closed.
        """
        members = {entry.session for entry in entries}
        for key in [key for key in self._made if key[1] not in members]:
            self._made.pop(key).close()

        def dial(peer: RankId) -> Link:
            return self._link(self._hub.connect, peer, entries[topology.index(peer)])

        def answer(peer: RankId) -> Link:
            return self._link(self._hub.accept, peer, entries[topology.index(peer)])

        self.sources = {peer: dial(peer) for peer in topology.sources(who)}
        self.targets = {peer: answer(peer) for peer in topology.targets(who)}
        if who.side == "policy":
            self.step_links = step_links(who.rank, topology.train_world_size, dial=dial, answer=answer)
        else:
            self._refuse_guests()
        self.who, self.topology, self.entries = who, topology, list(entries)

    def _link(self, make: Callable[[dict[str, Any]], Link], peer: RankId, entry: WorkerMetadata) -> Link:
        key = make.__name__, entry.session
        if key not in self._made:
            self._made[key] = make(entry.card(str(peer)))
        link = self._made[key]
        link.rename(str(peer))
        return link

    def _refuse_guests(self) -> None:
        """Close their link: only policy ranks have anything for them."""
        if self.guests is not None:
            self.guests.close()

    @property
    def train_world_size(self) -> int:
        """Number of policy workers, once joined."""
        return self.topology.train_world_size if self.topology is not None else 0

    @property
    def links(self) -> list[Link]:
        """All of them."""
        return [*self.step_links, *self.sources.values(), *self.targets.values()]

    def abort(self, error: BaseException) -> None:
        """Tell every peer of the open refit why this side failed."""
        tell_all(self.links, error)

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
                _log.log(level, "%s: the control channel dropped messages: %s", self.who, what)

    def close(self) -> None:
        """Leave every peer. Idempotent."""
        self._hub.close()
