"""A policy rank as its reader knows it: what it has packed, what it has digested, how much of it is read."""

from __future__ import annotations

from collections import deque

import numpy as np

from weightsync.control import Digests, Exposed, Link, Packed
from weightsync.errors import ManifestError, ProtocolError
from weightsync.layout.regions import Ints
from weightsync.layout.rows import Rows

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

    def await_exposed(self, manifest: str, digest_kind: str, storages: int, *, timeout_s: float) -> Exposed:
        """Wait until it says where its shards are.

        Args:
            manifest: digest of the stream's, as this rank knows it.
            digest_kind: of this rank.
            storages: how many its table has.
            timeout_s: seconds to wait.

        Raises:
            ManifestError: it has other weights.
            ProtocolError: it digests otherwise, or does not say all.
            WeightSyncError: it has failed, is lost, or says nothing.
        """
        told = self.link.receive(Exposed, phase="receive", timeout_s=timeout_s)
        if told.manifest != manifest:
            raise ManifestError(
                f"{self.link.peer} has other weights than when the engines were connected: call "
                "shutdown() and init_communicator()"
            )
        if told.digest_kind != digest_kind:
            raise ProtocolError(
                f"the sender digests with {told.digest_kind!r}, this side with {digest_kind!r}: set verify "
                "and device alike on both sides"
            )
        if len(told.addresses) != 8 * storages:
            raise ProtocolError(f"{self.link.peer} did not say where each of its shards is")
        return told

    def addresses_of(self, rows: Rows, part: slice, address: int, room: int) -> Ints:
        """Return where some rows of the oldest bucket are.

        Args:
            rows: all that it packs for this rank.
            part: those that are wanted.
            address: of its buffer that has the bucket.
            room: bytes of that buffer.

        Raises:
            ProtocolError: they cannot be there.
        """
        bucket = self.buckets[0]
        offsets: Ints = np.frombuffer(bucket.offsets, np.int64)
        mine = offsets[part.start - bucket.first : part.stop - bucket.first]
        beyond = part.stop > len(rows)
        sizes = rows.packed_bytes[part]
        if beyond or bucket.nbytes > room or (mine < 0).any() or (mine > bucket.nbytes - sizes).any():
            raise ProtocolError(
                f"{self.link.peer} names rows that cannot be in bucket {bucket.seq}", peer=self.link.peer
            )
        return mine + address

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
        count = rows_in(news)
        sound = news.first == self.announced and count == len(values) > 0 and not len(news.offsets) % 8
        self._require(sound, f"{news.describe()} out of order")
        self._require(self.announced + count <= self._packed_rows, f"{news.describe()} with too many rows")
        self.announced += count
        self.packed_digests += values
        self.buckets.append(news)

    def _require(self, sound: bool, what: str) -> None:
        if not sound:
            raise ProtocolError(f"{self.link.peer} sent {what}", peer=self.link.peer)


def rows_in(bucket: Packed) -> int:
    """Return how many rows a bucket has for this rank."""
    return len(bucket.offsets) // 8
