"""What brings the batches of a refit to a receiving engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Protocol

import torch


class Intake(Protocol):
    """One refit on the receiving side. Made anew for each."""

    @property
    def digests(self) -> Mapping[str, int]:
        """Of the tensors of the current batch that came in one piece, as they were checked."""

    def batches(self) -> AsyncGenerator[list[tuple[str, torch.Tensor]], None]:
        """Yield batches of tensors; each is valid until the next one is asked for."""

    def close(self) -> None:
        """End all transfers and wait for it.

        Raises:
            DeadlineError: one could not be ended.
        """

    @property
    def is_running(self) -> bool:
        """Whether a transfer may still write into memory."""

    def figures(self) -> dict[str, float]:
        """Return what `CheckpointEngine.refit_stats` gives."""
