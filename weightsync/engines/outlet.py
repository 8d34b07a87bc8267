"""What a rank gives to others: its buckets, published once, and released by every target in its own time.

The senders have one, and the receivers that forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weightsync.control import Bucket, ChunkEntry, Complete, Link, Message, Release
from weightsync.engines.refit import Refit
from weightsync.engines.slots import Slots
from weightsync.errors import ProtocolError, WeightSyncError

_ANSWERS: tuple[type[Release | Complete], ...] = (Release, Complete)


@dataclass
class _Given:
    """A published bucket."""

    slot: int
    holders: set[Link]


class Outlet:
    """Publishes buckets to the targets of one refit, and takes in what they answer.

    Args:
        refit: whose transport is used.
        links: the control links to the targets; there may be none.
        slots: the buffers' book, in which each target counts as a user.
    """

    def __init__(self, refit: Refit, links: Sequence[Link], slots: Slots) -> None:
        self._refit = refit
        self._slots = slots
        self.links = list(links)
        """To the targets."""
        self._loading = list(links)
        """Those that have not said that they have everything."""
        self._given: dict[int, _Given] = {}
        self._all_told = False
        self._last: int | None = None

    @property
    def is_finished(self) -> bool:
        """Whether every target has loaded everything."""
        return not self._loading

    @property
    def last_given(self) -> int | None:
        """The last bucket that a target still reads; if none does, the last one that there was."""
        return max(self._given, default=self._last)

    def publish(self, seq: int, slot: int, nbytes: int, chunks: tuple[ChunkEntry, ...]) -> None:
        """Make a filled buffer available to every target, which are its users from now on."""
        if not self.links:
            return
        payload = self._refit.transport.publish(slot, nbytes) if nbytes else b""
        self.give(Bucket(seq, slot, nbytes, chunks, payload))

    def give(self, bucket: Bucket) -> None:
        """Tell every target of a bucket that is available."""

        def enter() -> None:
            self._last = bucket.seq
            self._given[bucket.seq] = _Given(bucket.slot, set(self.links))
            self._slots.share(bucket.slot, len(self.links))

        self._refit.watch.wake(enter)
        self.tell(bucket)

    def tell(self, message: Message) -> None:
        """Tell every target."""
        if self._refit.shelf is not None:
            self._refit.shelf.said.append(message)
        for link in self.links:
            link.send(message)

    def tell_last(self, message: Message) -> None:
        """Tell every target the last that it will hear: now it may say that it has loaded everything."""
        self._all_told = True
        self.tell(message)

    def take_in(self) -> bool | None:
        """Take in what the targets have said; `True` if anything, else `None`. To be called by a watch.

        Raises:
            WeightSyncError: a target has failed, was lost, or has left.
        """
        heard = None
        for link in list(self._loading):
            while link in self._loading and (answer := self._next_of(link)) is not None:
                heard = True
                self._enter(link, answer)
        return heard

    def check(self) -> None:
        """Raise if a target that has not loaded everything has failed; return at once otherwise."""
        for link in self._loading:
            link.check()

    def overdue(self, phase: str, waited_s: float) -> WeightSyncError:
        """Return the error that says which target was waited for in vain."""
        given = self._given.get(min(self._given, default=-1))
        late = next((link for link in self._loading if given is None or link in given.holders), None)
        if late is None:
            raise ProtocolError("no target is waited for", phase=phase)
        kind: type[Message] = Release if given is not None else Complete
        return late.overdue(kind, phase=phase, waited_s=waited_s)

    def _next_of(self, link: Link) -> Release | Complete | None:
        return link.poll(*_ANSWERS, phase="waiting for the receivers")

    def _enter(self, link: Link, answer: Release | Complete) -> None:
        if isinstance(answer, Release):
            self._release(link, answer.seq)
            return
        if not self._all_told or any(link in given.holders for given in self._given.values()):
            raise ProtocolError(
                f"{link.peer} says that it has loaded everything, and cannot have", peer=link.peer
            )
        self._loading.remove(link)

    def _release(self, link: Link, seq: int) -> None:
        given = self._given.get(seq)
        if given is None or link not in given.holders:
            raise ProtocolError(
                f"{link.peer} released bucket {seq}, which it was never given", peer=link.peer
            )
        given.holders.remove(link)
        self._slots.drop(given.slot)
        if not given.holders:
            del self._given[seq]
