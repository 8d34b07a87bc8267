"""How much memory a refit takes at most, from what Linux tells of a process.

The kernel keeps the highest resident size of each process (``VmHWM``), which can be set back. Pages that
several processes have mapped count in each of them, so the ones that were mapped since are counted once.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc/self")
_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ (\S+) \S+ (\S+) (\d+)\s*(.*)$")


@dataclass(frozen=True)
class MemoryMark:
    """A process's memory when its peak was set back."""

    resident: int
    shared: dict[str, int]


@dataclass(frozen=True)
class MemoryUse:
    """What a process has come to since its mark, bytes."""

    extra: int
    """Highest resident size above the mark."""
    shared: dict[str, int]
    """Resident bytes of each file and shared mapping that was not there at the mark."""


def mark_memory() -> MemoryMark:
    """Set this process's peak back to what it uses now."""
    _PROC.joinpath("clear_refs").write_text("5")
    return MemoryMark(_status("VmRSS"), _shared())


def memory_since(mark: MemoryMark) -> MemoryUse:
    """Return what this process has used at most since a mark."""
    shared = {
        key: size - mark.shared.get(key, 0)
        for key, size in _shared().items()
        if size > mark.shared.get(key, 0)
    }
    return MemoryUse(max(0, _status("VmHWM") - mark.resident), shared)


def together(uses: Iterable[MemoryUse]) -> int:
    """Return the bytes of several processes; what they have mapped together counts once."""
    found = list(uses)
    mapped: dict[str, list[int]] = defaultdict(list)
    for use in found:
        for key, size in use.shared.items():
            mapped[key].append(size)
    repeated = sum(sum(sizes) - max(sizes) for sizes in mapped.values())
    return max(0, sum(use.extra for use in found) - repeated)


def _status(key: str) -> int:
    for line in _PROC.joinpath("status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) << 10
    raise OSError(f"this system does not tell {key} of a process: the benchmark needs Linux")


def _shared() -> dict[str, int]:
    """Return resident bytes by device and inode: shared mappings, and files in memory."""
    sizes: dict[str, int] = defaultdict(int)
    current: str | None = None
    for line in _PROC.joinpath("smaps").read_text().splitlines():
        if (mapping := _MAPPING.match(line)) is not None:
            rights, device, inode, path = mapping.groups()
            in_memory = rights.endswith("s") or path.startswith(("/dev/shm/", "/memfd:"))
            current = f"{device}:{inode}" if in_memory and inode != "0" else None
        elif current is not None and line.startswith("Rss:"):
            sizes[current] += int(line.split()[1]) << 10
    return dict(sizes)
