"""A policy rank as its reader knows it: what it has packed, what it has digested, how much of it is read."""

from __future__ import annotations

from collections import deque

import numpy as np

from weightsync.control import Digests, Link, Packed
from weightsync.errors import ProtocolError

NEWS: tuple[type[Packed | Digests], ...] = (Packed, Digests)


class Source:
    """A policy rank, as far as this rank has heard of it and read from it."""

    def __init__(self, rank: int, link: Link) -> None:
        self.rank = rank
        self.link = link
        self.buckets: deque[Packed] = deque()
        self.next_row = 0
        """Of those that it packs."""
        self.announced = 0
        """Rows that are packed so far."""
        self.lent_digests: list[int] = []
        self.packed_digests: list[int] = []
        self._lent_rows = self._packed_rows = 0

    def expect(self, lent: int, packed: int) -> None:
        """Learn how many rows this rank reads from it: where they are, and packed."""
        self._lent_rows, self._packed_rows = lent, packed

    def take_in(self) -> None:
        """Take in what it has said."""
        while (news := self._next()) is not None:
            self.enter(news)

    def _next(self) -> Packed | Digests | None:
        return self.link.poll(*NEWS, phase="receive")

    def enter(self, news: Packed | Digests) -> None:
        """Take in a message.

        Raises:
            ProtocolError: it does not follow the one before.
        """
        values = np.frombuffer(news.digests, np.uint64).tolist() if len(news.digests) % 8 == 0 else []
        if isinstance(news, Digests):
            self._require(news.first == len(self.lent_digests) and bool(values), "digests out of order")
            self._require(len(self.lent_digests) + len(values) <= self._lent_rows, "too many digests")
            self.lent_digests += values
            return
        count = len(news.offsets) // 8
        sound = news.first == self.announced and count == len(values) > 0 and not len(news.offsets) % 8
        self._require(sound, f"{news.describe()} out of order")
        self._require(self.announced + count <= self._packed_rows, f"{news.describe()} with too many rows")
        self.announced += count
        self.packed_digests += values
        self.buckets.append(news)

    def _require(self, sound: bool, what: str) -> None:
        if not sound:
            raise ProtocolError(f"{self.link.peer} sent {what}", peer=self.link.peer)
