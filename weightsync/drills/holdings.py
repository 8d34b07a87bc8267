"""What processes hold, read from /proc: memory, descriptors, threads, sockets and shared memory."""

from __future__ import annotations

import os
import resource
from dataclasses import asdict, dataclass
from pathlib import Path

from weightsync.testing.shared_files import descriptors, is_shared, shared_mappings

_MIB = 1 << 20


@dataclass(frozen=True)
class Holdings:
    """Of one process."""

    rss_mib: float
    descriptors: int
    threads: int
    sockets: int
    shared_memory: int
    """Mappings and descriptors of files in /dev/shm, or of memory that has no name."""

    def to_dict(self) -> dict[str, float]:
        """Return what JSON can carry."""
        return {**asdict(self), "rss_mib": round(self.rss_mib, 1)}


LIMITS = Holdings(rss_mib=24.0, descriptors=2, threads=1, sockets=1, shared_memory=0)
"""What each of them may grow by over any number of refits."""


def holdings_of(pid: int) -> Holdings:
    """Return what a process holds.

    Raises:
        OSError: there is no such process.
    """
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    targets = list(descriptors(pid))
    return Holdings(
        rss_mib=pages * resource.getpagesize() / _MIB,
        descriptors=len(targets),
        threads=len(os.listdir(f"/proc/{pid}/task")),
        sockets=sum(target.startswith("socket:") for target in targets),
        shared_memory=len(shared_mappings(pid)) + sum(map(is_shared, targets)),
    )


def growth(before: Holdings, after: Holdings) -> dict[str, float]:
    """Return what has grown by more than `LIMITS`, and by how much."""
    limits = asdict(LIMITS)
    grown = {name: value - asdict(before)[name] for name, value in asdict(after).items()}
    return {name: round(by, 1) for name, by in grown.items() if by > limits[name]}
