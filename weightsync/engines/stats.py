"""Where the time of a refit goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Adds up seconds by phase. One thread at a time for each phase."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside the ``with`` block for a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - start

    def seconds(self) -> dict[str, float]:
        """Return seconds by phase, and ``total`` since the stopwatch was made."""
        return {**self._seconds, "total": time.perf_counter() - self._start}
