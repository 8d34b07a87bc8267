"""What a test has left in /dev/shm, whatever is done there by tests beside it, in other workers."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Collection

import psutil

from weightsync.testing.shared_files import left_behind

_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
_OTHERS = "sem.mp-gw"
_OWN = f"{_OTHERS}{_WORKER.removeprefix('gw')}-"


def sign_semaphores() -> None:
    """Let semaphores carry the name of their worker, which tells whose they were, once it is killed."""
    if _WORKER:
        multiprocessing.current_process()._config["semprefix"] = f"/mp-{_WORKER}"


def left_by_tests(before: Collection[str], patience_s: float = 2.0) -> list[str]:
    """Return the names in /dev/shm that have come since, without those of other jobs and workers.

    Args:
        before: those that were there.
        patience_s: time that what is being taken away has for it.
    """
    deadline = time.monotonic() + patience_s
    while (left := _left(before)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _left(before: Collection[str]) -> list[str]:
    this = psutil.Process()
    own = [this.pid, *(child.pid for child in this.children(recursive=True))]
    found = left_behind(before, own)
    return [name for name in found if name.startswith(_OWN) or not name.startswith(_OTHERS)]
