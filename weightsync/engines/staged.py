"""What transports share whose receivers fetch into registered buffers of their own."""

from __future__ import annotations

from abc import abstractmethod

import torch

from weightsync.engines.buffers import allocate_bucket
from weightsync.engines.transport import SLOTS, BucketTransport


class StagedTransport(BucketTransport):
    """Makes the buffers, alike for those that are filled and those that are fetched into.

    Args:
        device: of the buffers.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bucket_size = 0
        self._buffers: list[torch.Tensor] = []

    @abstractmethod
    def register(self, buffer: torch.Tensor) -> None:
        """Let peers read a buffer."""

    def allocate(self, bucket_size: int) -> list[torch.Tensor]:
        """Make and register two buffers."""
        self._bucket_size = bucket_size
        for _ in range(SLOTS):
            self.extend()
        return list(self._buffers)

    def extend(self) -> torch.Tensor:
        """Make and register one more buffer."""
        buffer = allocate_bucket(self._bucket_size, self._device)
        # One by one, so that what a failure leaves behind is known to `release`.
        self.register(buffer)
        self._buffers.append(buffer)
        return buffer
