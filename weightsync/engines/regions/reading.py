"""What a transport has to be able to do for a refit by regions: lend memory, and read a peer's."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from weightsync.layout.regions import Ints
from weightsync.topology import RankId


@dataclass(frozen=True)
class Spans:
    """Contiguous pieces to read: addresses in the peer's memory and in the local one, and bytes."""

    remote: Ints
    local: Ints
    nbytes: Ints

    def cut(self, limit: int) -> Spans:
        """Return the same in pieces of at most ``limit`` bytes."""
        parts = -(-self.nbytes // limit)
        nth = np.arange(int(parts.sum()), dtype=np.int64) - np.repeat(np.cumsum(parts) - parts, parts)
        remote, local, nbytes = (np.repeat(each, parts) for each in (self.remote, self.local, self.nbytes))
        start = nth * limit
        return Spans(remote + start, local + start, np.minimum(nbytes - start, limit))


class Reading(Protocol):
    """A read that is prepared once and may be started again and again."""

    @abstractmethod
    def start(self) -> None:
        """Begin to read."""

    @abstractmethod
    def has_ended(self) -> bool:
        """Whether everything is here.

        Raises:
            TransportError: it failed.
        """

    @abstractmethod
    def release(self) -> None:
        """Let go of it, also in the middle. Idempotent."""

    @property
    @abstractmethod
    def is_released(self) -> bool:
        """Whether it can be started no more; also after the transport has lost the peer."""


@runtime_checkable
class OneSidedTransport(Protocol):
    """A `BucketTransport` whose receivers can read more of a sender's memory than its buffers."""

    @abstractmethod
    def lend(self, memory: Sequence[torch.Tensor]) -> None:
        """Let peers read these tensors, and reads write into them; others that were lent are lent no more.

        Args:
            memory: flat and contiguous, on the device of the buffers, none empty. It must stay where it is.
        """

    @abstractmethod
    def keys(self) -> bytes:
        """Return what peers need to reach all that is lent now."""

    @abstractmethod
    def learn_keys(self, who: RankId, keys: bytes) -> None:
        """Learn a peer's `keys`."""

    @abstractmethod
    def buffer_of(self, who: RankId, slot: int) -> tuple[int, int]:
        """Return address and bytes of a peer's buffer."""

    @abstractmethod
    def break_off(self, who: RankId) -> None:
        """Drop the connection to a peer at the end of this refit: a read of it was given up."""

    @abstractmethod
    def prepare_read(self, who: RankId, spans: Spans) -> Reading:
        """Prepare a read of a peer's lent memory, or of its buffers."""
