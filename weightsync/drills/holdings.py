"""What processes hold, read from /proc: memory, descriptors, threads, sockets and shared memory."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

_SHM = Path("/dev/shm")
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
    targets = list(_descriptors(pid))
    return Holdings(
        rss_mib=pages * resource.getpagesize() / _MIB,
        descriptors=len(targets),
        threads=len(os.listdir(f"/proc/{pid}/task")),
        sockets=sum(target.startswith("socket:") for target in targets),
        shared_memory=len(_shared_mappings(pid)) + sum(map(_is_shared, targets)),
    )


def growth(before: Holdings, after: Holdings) -> dict[str, float]:
    """Return what has grown by more than `LIMITS`, and by how much."""
    limits = asdict(LIMITS)
    grown = {name: value - asdict(before)[name] for name, value in asdict(after).items()}
    return {name: round(by, 1) for name, by in grown.items() if by > limits[name]}


def shared_files() -> frozenset[str]:
    """Return the names in /dev/shm."""
    with suppress(OSError):
        return frozenset(os.listdir(_SHM))
    return frozenset()


def left_behind(before: frozenset[str], own: Mapping[str, int]) -> list[str]:
    """Return the names in /dev/shm that have come since, and that no process of another job uses.

    Args:
        before: those that were there.
        own: the job's processes.
    """
    new = shared_files() - before
    if not new:
        return []
    foreign: set[str] = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) not in own.values():
            foreign |= _used_by(int(entry))
    return sorted(new - foreign)


def _used_by(pid: int) -> set[str]:
    paths: set[str] = set()
    with suppress(OSError):
        paths = _shared_mappings(pid) | set(_descriptors(pid))
    return {Path(path).name for path in paths if path.startswith(f"{_SHM}/")}


def _descriptors(pid: int) -> Iterator[str]:
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):  # closed meanwhile
            yield os.readlink(f"/proc/{pid}/fd/{name}")


def _shared_mappings(pid: int) -> set[str]:
    lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    found = (line.split(maxsplit=5)[5:] for line in lines)
    return {f"{line.split()[4]} {path[0]}" if path[0].startswith("/memfd:") else path[0]
            for line, path in zip(lines, found, strict=True) if path and _is_shared(path[0])}  # fmt: skip


def _is_shared(path: str) -> bool:
    return path.startswith((f"{_SHM}/", "/memfd:"))
