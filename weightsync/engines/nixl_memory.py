"""Memory as NIXL addresses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_MEMORY_KINDS = ("DRAM", "VRAM")

Descriptions = npt.NDArray[np.uint64]
"""Address, bytes and device index of pieces of memory, shape ``(pieces, 3)``."""


@dataclass(frozen=True)
class MemoryRegion:
    """A registered buffer as a peer addresses it: first byte, length, device index and memory kind."""

    address: int
    nbytes: int
    device_index: int
    kind: str
    """``"DRAM"`` or ``"VRAM"``."""

    @classmethod
    def of(cls, buffer: torch.Tensor) -> MemoryRegion:
        """Describe a contiguous buffer."""
        kind = "VRAM" if buffer.device.type == "cuda" else "DRAM"
        return cls(buffer.data_ptr(), buffer.numel() * buffer.element_size(), buffer.device.index or 0, kind)

    @classmethod
    def from_list(cls, data: list[Any]) -> MemoryRegion:
        """Read a peer's `to_list`.

        Raises:
            ValueError: it is none.
        """
        kinds = (int, int, int, str)
        if len(data) != len(kinds) or not all(map(isinstance, data, kinds)) or data[3] not in _MEMORY_KINDS:
            raise ValueError(f"{data!r:.80} does not describe a buffer")
        address, nbytes, device_index = data[:3]
        if min(address, nbytes, device_index) < 0 or max(address + nbytes, device_index) >= 2**63:
            raise ValueError(f"no buffer can be at {data!r:.80}")
        return cls(*data)

    def to_list(self) -> list[Any]:
        """Return plain data for the metadata exchange."""
        return [self.address, self.nbytes, self.device_index, self.kind]

    def part(self, nbytes: int) -> list[tuple[int, int, int]]:
        """Return NIXL's description of the first ``nbytes`` bytes."""
        return [(self.address, nbytes, self.device_index)]
