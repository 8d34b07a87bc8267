"""Turns at something that only one thread may use at a time, given in the order of asking."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from weightsync.errors import DeadlineError


class Turns:
    """A lock that is fair: a thread that takes turn after turn does not keep the others waiting."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()

    @contextmanager
    def take(self, timeout_s: float | None, phase: str) -> Iterator[None]:
        """Wait for a turn, and hold it.

        Args:
            timeout_s: how long to wait, in seconds; `None`: until it comes.
            phase: for the error.

        Raises:
            DeadlineError: it did not come in time.
        """
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            if not self._changed.wait_for(lambda: self._waiting[0] is ticket, timeout_s):
                self._waiting.remove(ticket)
                raise DeadlineError(f"a running generate or call did not end in {timeout_s:g} s", phase=phase)
        try:
            yield
        finally:
            with self._changed:
                self._waiting.popleft()
                self._changed.notify_all()
