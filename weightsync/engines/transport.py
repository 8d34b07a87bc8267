"""How a bucket's bytes reach the peer: the part that differs from transport to transport."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from weightsync.control import Bucket

SLOTS = 2
"""Transfer buffers of a worker: one is filled or loaded while the other is on its way."""


class BucketTransport(ABC):
    """Moves buckets between the equally numbered workers of a pair.

    Life: `allocate` -> `describe` -> `connect` -> (`open` -> `publish` or `fetch` ... -> `shut`) once a
    refit -> `disconnect` -> `release` -> `close`. After `disconnect`, `describe` and `connect` may follow
    again; after `release`, `allocate`.
    """

    @abstractmethod
    def allocate(self, bucket_size: int) -> list[torch.Tensor]:
        """Make and register `SLOTS` buffers of ``bucket_size`` bytes; returns them, flat uint8."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return plain data from which a peer's `connect` can reach this worker's buffers."""

    @abstractmethod
    def connect(self, peer: dict[str, Any]) -> None:
        """Learn the peer from its `describe`."""

    @abstractmethod
    def open(self, *, sending: bool) -> None:
        """Begin a refit."""

    @abstractmethod
    def publish(self, slot: int, nbytes: int) -> bytes:
        """Make the first ``nbytes`` bytes of a filled buffer available; returns the message's payload."""

    @abstractmethod
    def fetch(self, bucket: Bucket, slot: int, *, timeout_s: float, check: Callable[[], None]) -> None:
        """Bring a bucket's bytes into the local buffer ``slot``; returns when they are all there.

        ``check`` is to be called while waiting; it raises when the refit is lost.
        """

    @abstractmethod
    def shut(self) -> None:
        """End a refit; the next `open` mends what this one broke. Never raises for a dead peer."""

    @abstractmethod
    def disconnect(self) -> None:
        """Leave the peer: it may be another one that `connect` is told of next. Idempotent."""

    @abstractmethod
    def release(self) -> None:
        """Disconnect, deregister and free the buffers. Idempotent."""

    @abstractmethod
    def close(self) -> None:
        """Release, and give back everything else. Idempotent; the instance is not used again."""
