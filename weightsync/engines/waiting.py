"""Waiting without blocking the event loop, and the time budget of one refit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from weightsync.errors import DeadlineError

T = TypeVar("T")


class Budget:
    """The seconds that one refit may take in all."""

    def __init__(self, total_s: float) -> None:
        self._total_s = total_s
        self._end = time.monotonic() + total_s

    def clip(self, seconds: float) -> float:
        """Return how long a wait of at most ``seconds`` may last.

        Raises:
            DeadlineError: the budget is spent.
        """
        left = self._end - time.monotonic()
        if left <= 0:
            raise DeadlineError(f"the refit did not finish within total_s={self._total_s:g} s")
        return min(seconds, left)


class Waiter:
    """Runs blocking waits in one thread of its own, so that an event loop stays free meanwhile.

    Waits are bounded by their own time-outs; a cancelled caller leaves at most one behind.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weightsync-wait")

    async def run(self, wait: Callable[[], T]) -> T:
        """Return what ``wait`` returns, or raise what it raises."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, wait)

    def close(self) -> None:
        """Let the thread end when its current wait does."""
        self._pool.shutdown(wait=False, cancel_futures=True)
