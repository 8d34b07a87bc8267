"""One call of an engine at a time: the others are refused, never queued behind a refit."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from weightsync.errors import LifecycleError


class CallLock:
    """Held for the whole of a call, across the awaits of an asynchronous one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder = ""
        self._thread: int | None = None

    @property
    def holder(self) -> str | None:
        """The call that runs now."""
        return self._holder if self._lock.locked() else None

    @contextmanager
    def hold(self, call: str, *, patience_s: float = 0.0) -> Iterator[None]:
        """Run the block as the only call.

        Args:
            call: its name.
            patience_s: seconds to wait for a call that runs in another thread. One of this thread could not
                end meanwhile, so it is never waited for.

        Raises:
            LifecycleError: another call is running, still.
        """
        patience_s = 0.0 if self._thread == threading.get_ident() else patience_s
        if not self._lock.acquire(timeout=patience_s):
            raise LifecycleError(
                f"{call}: {self._holder} of this engine is still running; "
                f"an engine does one thing at a time: wait for its end first"
            )
        self._holder, self._thread = call, threading.get_ident()
        try:
            yield
        finally:
            self._thread = None
            self._lock.release()
