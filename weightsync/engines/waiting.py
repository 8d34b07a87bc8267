"""Waiting without blocking the event loop, and the time budget of one refit."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from weightsync.errors import DeadlineError

T = TypeVar("T")
_LISTEN_S = 0.01

BRIEFLY_S = 0.002
"""So long a caller may wait in an event loop's own thread: about as long as it packs or loads a bucket there.

Most waits of a refit are shorter, and handing one to another thread and back takes longer than the wait.
"""


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


class _Wait(Generic[T]):
    """One blocking wait, whose caller may leave before its end."""

    def __init__(self, wait: Callable[[], T], undo: Callable[[], object]) -> None:
        self._wait, self._undo = wait, undo
        self._lock = threading.Lock()
        self._abandoned = self._succeeded = False

    def __call__(self) -> T:
        result = self._wait()
        with self._lock:
            self._succeeded = True
            if self._abandoned:
                self._undo()
        return result

    def abandon(self) -> None:
        """The caller has left: what the wait brings, or has just brought, is taken back."""
        with self._lock:
            self._abandoned = True
            if self._succeeded:
                self._undo()


class Waiter:
    """Runs blocking waits in one thread of its own, so that an event loop stays free meanwhile.

    Waits are bounded by their own time-outs; a cancelled caller leaves at most one behind, and the next wait
    begins after it.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weightsync-wait")

    async def run(self, wait: Callable[[], T], *, undo: Callable[[], object] = lambda: None) -> T:
        """Return what ``wait`` returns, or raise what it raises.

        ``undo`` takes back what a wait has achieved after its caller was cancelled.
        """
        job = _Wait(wait, undo)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, job)
        except BaseException:
            job.abandon()
            raise

    def settle(self, timeout_s: float) -> None:
        """Wait until a wait that its caller has left is over.

        Raises:
            DeadlineError: it is not.
        """
        try:
            self._pool.submit(lambda: None).result(timeout_s)
        except TimeoutError:
            raise DeadlineError(f"a wait that was given up did not end within {timeout_s:g} s") from None

    def close(self) -> None:
        """Let the thread end when its current wait does."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def await_ended(
    has_ended: Callable[[], bool],
    *,
    timeout_s: float,
    check: Callable[[], None],
    what: str,
    pauses_s: tuple[float, float] = (0.0002, 0.001),
) -> None:
    """Wait for what tells nobody of its end, by asking again and again.

    Args:
        has_ended: asked; may wait for a moment itself.
        timeout_s: seconds that it may take.
        check: called meanwhile; raises to give up early.
        what: is waited for, for the error.
        pauses_s: seconds between two questions, at first and at most.

    Raises:
        DeadlineError: it did not end in time.
    """
    end = time.monotonic() + timeout_s
    pause, longest = pauses_s
    while not has_ended():
        check()
        if time.monotonic() >= end:
            raise DeadlineError(f"{what} did not end within {timeout_s:g} s")
        time.sleep(pause)
        pause = min(1.5 * pause, longest)


def await_reason(check: Callable[[], None], seconds: float) -> None:
    """Give ``check`` a while to raise why something failed; returns if it does not.

    A library only sees that a peer is gone; the control channel hears which one, and why, a moment later.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        check()
        time.sleep(_LISTEN_S)
