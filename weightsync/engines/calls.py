"""One call of an engine at a time, and in order: others are refused, never queued behind a refit."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from weightsync.errors import LifecycleError
from weightsync.topology import RankId


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


def not_prepared() -> LifecycleError:
    """Return the error of a call before `prepare`."""
    return LifecycleError("the engine is not prepared: call prepare() and join the process group first")


def require_open(*, closed: bool) -> None:
    """Check that an engine is not closed.

    Raises:
        LifecycleError: it is.
    """
    if closed:
        raise LifecycleError("this engine is closed: make a new one")


def require_unjoined(who: RankId | None) -> None:
    """Check that a worker has no rank yet.

    Raises:
        LifecycleError: it has joined a process group; another one takes another `prepare`.
    """
    if who is not None:
        raise LifecycleError(
            f"this engine has joined as {who} already: call prepare() again on every worker before a new "
            f"process group"
        )


def require_joined(who: RankId | None, side: str) -> RankId:
    """Return a worker's rank.

    Raises:
        LifecycleError: it has none on this side.
    """
    if who is None or who.side != side:
        raise LifecycleError(
            f"this engine has not joined as a {side} worker: call init_{side}_process_group() first"
        )
    return who
