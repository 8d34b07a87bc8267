"""Memory for tensors that are larger than a bucket, while they are put together; kept for the next refit."""

from __future__ import annotations

import torch

from weightsync.engines.buffers import POISON, allocate_host, overwrite
from weightsync.errors import TransportError


class KeptParts:
    """Host memory that is used again, so that the system has to make its pages only once.

    On a device every tensor gets memory of its own: torch keeps that by itself, and gives it to others, too.

    Args:
        poisons: overwrite what is given back, to show late readers.
    """

    def __init__(self, *, poisons: bool) -> None:
        self._poisons = poisons
        self._free: list[torch.Tensor] = []
        self._taken: dict[int, torch.Tensor] = {}

    def begin(self) -> None:
        """Begin a refit: what the last one did not give back is free."""
        self._free += self._taken.values()
        self._taken.clear()

    def take(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return memory, shape ``(nbytes,)``, uint8.

        Raises:
            TransportError: there is not so much.
        """
        if device.type != "cpu":
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        block = min((each for each in self._free if each.numel() >= nbytes), key=len, default=None)
        if block is None:
            self._free.clear()  # too small ones would be in addition to what is needed
            block = _allocate(nbytes)
        else:
            self._free = [each for each in self._free if each is not block]
        self._taken[block.data_ptr()] = block
        return block[:nbytes]

    def give_back(self, data: torch.Tensor) -> None:
        """Take back what `take` returned."""
        if self._poisons:
            overwrite(data, POISON)
        block = self._taken.pop(data.data_ptr(), None)
        if block is not None:
            self._free.append(block)

    def free(self) -> None:
        """Give everything back to the system."""
        self._free.clear()
        self._taken.clear()


def _allocate(nbytes: int) -> torch.Tensor:
    try:
        return allocate_host(nbytes)
    except (OSError, ValueError, OverflowError) as error:
        raise TransportError(f"the system has no {nbytes} bytes: {error}") from error
