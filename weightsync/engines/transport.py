"""How a bucket's bytes reach the peers: the part that differs from transport to transport."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from weightsync.control import Bucket
from weightsync.topology import RankId

SLOTS = 2
"""Transfer buffers of a worker: one is filled or loaded while the other is on its way."""

Check = Callable[[], None]
"""To be called while waiting; raises when the refit is lost."""


@dataclass(frozen=True)
class Peer:
    """Another worker, and what its transport's `describe` said."""

    who: RankId
    transport: dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where a worker stands among its peers."""

    who: RankId
    train_world_size: int
    rollout_world_size: int
    sources: tuple[Peer, ...]
    """The workers whose buckets this one fetches."""
    targets: tuple[Peer, ...]
    """The workers that fetch this one's buckets."""
    receivers: tuple[int, ...] | None = None
    """The rollout ranks that take part, in order; `None` means all."""

    @property
    def taking_part(self) -> tuple[int, ...]:
        """The rollout ranks that take part, in order."""
        return tuple(range(self.rollout_world_size)) if self.receivers is None else self.receivers


class BucketTransport(ABC):
    """Moves buckets from a worker to those that it sends to.

    Life: `allocate` -> `describe` -> `connect` -> (`open` -> `publish`, `fetch`, `settle` ... -> `shut`) once
    a refit -> `disconnect` -> `release` -> `close`. After `disconnect`, `describe` and `connect` may follow
    again; after `release`, `allocate`. A worker that receives may also publish: it forwards what it fetched.
    """

    in_place: bool = False
    """Whether `fetch` returns the sender's own memory, which is then released once the bucket is loaded."""

    @abstractmethod
    def allocate(self, bucket_size: int) -> list[torch.Tensor]:
        """Make and register `SLOTS` buffers of ``bucket_size`` bytes; returns them, flat uint8."""

    def extend(self) -> torch.Tensor:
        """Make and register one more buffer of the same size, for a sender that keeps all its buckets.

        `publish` says in its payload what a peer needs to know of such a buffer. Without this method a
        transport cannot serve a sender of that kind.
        """
        raise NotImplementedError(f"{type(self).__name__} has a fixed number of buffers")

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return plain data from which a peer's `connect` can reach this worker's buffers."""

    @abstractmethod
    def connect(self, place: Place) -> None:
        """Learn this worker's place and its peers. Does not wait for them.

        Raises:
            ConfigurationError: a peer's description is damaged, or it cannot be reached in this way.
        """

    @abstractmethod
    def open(self, *, sending: bool, timeout_s: float, check: Check) -> None:
        """Begin a refit; all of this worker's peers have begun it, too. May wait for them.

        Args:
            sending: whether `publish` will be called.
            timeout_s: seconds that it may take.
            check: see `Check`.
        """

    @abstractmethod
    def publish(self, slot: int, nbytes: int) -> bytes:
        """Make the first ``nbytes`` bytes of a filled buffer available; returns the message's payload.

        Never waits: other ranks may be inside a collective.
        """

    @abstractmethod
    def fetch(
        self, source: RankId, bucket: Bucket, slot: int, *, timeout_s: float, check: Check
    ) -> torch.Tensor:
        """Bring in a bucket; returns its bytes, flat uint8, when they are all there.

        They are in the local buffer ``slot``; with `in_place`, in the source's memory.
        """

    @property
    def settles(self) -> bool:
        """Whether `settle` may have to wait."""
        return type(self).settle is not BucketTransport.settle

    def settle(self, slot: int, *, timeout_s: float, check: Check) -> None:  # noqa: B027 - optional
        """Wait until a published buffer may be filled again; every target has released it already."""

    @abstractmethod
    def shut(self) -> None:
        """End a refit; the next `open` mends what this one broke. Never raises for a dead peer."""

    @abstractmethod
    def disconnect(self) -> None:
        """Leave the peers: they may be others that `connect` is told of next. Idempotent."""

    @abstractmethod
    def release(self) -> None:
        """Disconnect, deregister and free the buffers. Idempotent."""

    @abstractmethod
    def close(self) -> None:
        """Release, and give back everything else. Idempotent; the instance is not used again."""
