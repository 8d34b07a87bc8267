"""Files in /dev/shm: what is there, who uses it, and what a job has left there."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

_SHM = Path("/dev/shm")


def shared_files() -> frozenset[str]:
    """Return the names in /dev/shm."""
    with suppress(OSError):
        return frozenset(os.listdir(_SHM))
    return frozenset()


def left_behind(before: Collection[str], own: Collection[int]) -> list[str]:
    """Return the names in /dev/shm that have come since, and that no process of another job uses.

    Args:
        before: those that were there.
        own: ids of the job's processes.
    """
    new = shared_files().difference(before)
    if not new:
        return []
    foreign: set[str] = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) not in own:
            foreign |= _used_by(int(entry))
    return sorted(new - foreign)


def descriptors(pid: int) -> Iterator[str]:
    """Yield what the descriptors of a process refer to.

    Raises:
        OSError: there is no such process.
    """
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):  # closed meanwhile
            yield os.readlink(f"/proc/{pid}/fd/{name}")


def shared_mappings(pid: int) -> set[str]:
    """Return what a process has mapped of files in /dev/shm, and of memory that has no name.

    Raises:
        OSError: there is no such process.
    """
    lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    found = (line.split(maxsplit=5)[5:] for line in lines)
    return {f"{line.split()[4]} {path[0]}" if path[0].startswith("/memfd:") else path[0]
            for line, path in zip(lines, found, strict=True) if path and is_shared(path[0])}  # fmt: skip


def is_shared(path: str) -> bool:
    """Say whether a path, as /proc shows it, is that of shared memory."""
    return path.startswith((f"{_SHM}/", "/memfd:"))


def _used_by(pid: int) -> set[str]:
    paths: set[str] = set()
    with suppress(OSError):
        paths = shared_mappings(pid) | set(descriptors(pid))
    return {Path(path).name for path in paths if path.startswith(f"{_SHM}/")}
