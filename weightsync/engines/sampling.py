"""Which chunks are digested: all, none, or a sample that both ends of a transfer choose alike. No I/O."""

from __future__ import annotations

import torch
import xxhash

from weightsync.byte_digests import digest_kind
from weightsync.errors import ConfigurationError
from weightsync.tensors import TensorSpec

MODES = ("full", "sample", "off")
SAMPLE = 16
"""Of so many chunks one is digested with ``sample``."""


class ChunkChecks:
    """Chooses the chunks of one refit whose digests are made by the sender and compared by the receiver.

    With ``sample`` these are the first of the stream, its last where a manifest tells which that is, and one
    in `SAMPLE` of the others by a hash of epoch and place: in each refit others.

    Args:
        mode: one of `MODES`.

    Attributes:
        last: place of the stream's last tensor; `None` if it is not known.

    Raises:
        ConfigurationError: another mode.
    """

    def __init__(self, mode: str) -> None:
        if mode not in MODES:
            raise ConfigurationError(f"verify must be 'full', 'sample' or 'off', got {mode!r}")
        self.mode = mode
        self.last: int | None = None

    def kind(self, device: torch.device) -> str:
        """Name what is compared, and of how much: peers must do alike."""
        if self.mode == "off":
            return "off"
        return digest_kind(device) + (f"/{SAMPLE}" if self.mode == "sample" else "")

    def wants(self, epoch: int, ordinal: int, spec: TensorSpec, offset: int, size: int) -> bool:
        """Whether a chunk is digested.

        Args:
            epoch: of the refit.
            ordinal: place of its tensor in the stream.
            spec: of its tensor.
            offset: of the chunk in its tensor, in bytes.
            size: of the chunk, in bytes.
        """
        if self.mode != "sample":
            return self.mode == "full"
        if (ordinal, offset) == (0, 0) or (ordinal == self.last and offset + size == spec.nbytes):
            return True
        return _drawn(epoch, ordinal, offset)

    def wants_row(self, epoch: int, row: int) -> bool:
        """Whether a row that moves by regions is digested; ``row`` counts those from one rank to another."""
        return self.mode == "full" or (self.mode == "sample" and (row == 0 or _drawn(epoch, row, 0)))


def _drawn(epoch: int, ordinal: int, offset: int) -> bool:
    return xxhash.xxh3_64_intdigest(f"{epoch} {ordinal} {offset}".encode()) % SAMPLE == 0
