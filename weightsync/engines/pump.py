"""A thread that brings in, ahead of its consumer, what the consumer takes one by one."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from weightsync.control import Link
from weightsync.engines.buffers import bind_thread
from weightsync.engines.refit import Refit
from weightsync.engines.waiting import BRIEFLY_S
from weightsync.errors import DeadlineError, IncompleteStreamError, WeightSyncError

E = TypeVar("E")
_JOIN_S = 10.0
_MARGIN_S = 10.0
_LOOK_S = 0.25
_GRACE_S = 1.0
"""So long the thread has to say itself that a source has failed."""


class Pump(Generic[E]):
    """Runs one function in a thread, and hands what it puts to the consumer; its error is the last event.

    Args:
        refit: whose deadlines and device are used.
        sources: the control links to those that are waited for.
        run: brings everything in; calls `put` and, while it waits, `check`.
    """

    def __init__(self, refit: Refit, sources: Iterable[Link], run: Callable[[], None]) -> None:
        self._refit = refit
        self._sources = list(sources)
        self._peer = self._sources[0].peer if len(self._sources) == 1 else None
        self._run_it = run
        self._events: queue.SimpleQueue[E | BaseException] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weightsync-receive", daemon=True)

    # The consumer's side.

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def event(self) -> E | BaseException | None:
        """Return what has come next, or comes in a moment; `None` if nothing does."""
        try:
            return self._events.get(timeout=BRIEFLY_S)
        except queue.Empty:
            return None

    def await_event(self) -> E | BaseException:
        """Wait for what comes next, or for the failure of a source that the thread does not hear of.

        A `DeadlineError` comes where the thread hangs in a call that knows no deadline.
        """
        # The thread keeps the deadlines, one for the message and one for the bytes; this is for the rest.
        timeout_s = 2 * self._refit.deadlines.stall_s + _MARGIN_S
        end, give_up, failure = time.monotonic() + timeout_s, math.inf, None
        while (now := time.monotonic()) < min(end, give_up):
            try:
                return self._events.get(timeout=min(end - now, _LOOK_S))
            except queue.Empty:
                if failure is None and (failure := self._failure()) is not None:
                    give_up = time.monotonic() + _GRACE_S
        if failure is not None and now >= give_up:
            return failure
        return DeadlineError(
            f"nothing was brought in within {timeout_s:g} s, and no reason was given",
            peer=self._peer, phase="receive",
        )  # fmt: skip

    async def next_event(self) -> E:
        """Return what comes next, without blocking the event loop; raises what the thread has raised."""
        event = self.event()
        if event is None:
            event = await self._refit.waiter.run(self.await_event)
        if isinstance(event, BaseException):
            raise event
        return event

    def close(self) -> None:
        """End the thread and wait for it.

        Raises:
            DeadlineError: a transfer could not be ended.
        """
        self._stop.set()
        self._refit.watch.wake()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)
            if self._thread.is_alive():
                raise DeadlineError(
                    f"a transfer did not end within {_JOIN_S:g} s", peer=self._peer, phase="receive"
                )

    @property
    def is_running(self) -> bool:
        """Whether a transfer may still write into a buffer."""
        return self._thread.is_alive()

    # The thread's side.

    def put(self, event: E) -> None:
        """Hand something to the consumer."""
        self._events.put(event)

    def check(self) -> None:
        """Raise if the consumer has stopped, or a source has failed; return at once otherwise."""
        if self._stop.is_set():
            raise IncompleteStreamError("the consumer stopped before the end of the stream")
        for link in self._sources:
            link.check()

    def _run(self) -> None:
        run = self._run_it
        # A method of whoever has this pump: such a ring would keep the buffers until garbage is collected.
        del self._run_it
        try:
            bind_thread(self._refit.buffers[0].device)
            run()
        except BaseException as error:  # noqa: BLE001 - raised again in the consumer's thread
            # The last event, always: the consumer's wait for the next one has no other end.
            self._events.put(error)

    def _failure(self) -> WeightSyncError | None:
        try:
            for link in self._sources:
                link.check()
        except WeightSyncError as error:
            return error
        return None
