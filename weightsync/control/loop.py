"""The I/O thread of a hub: the one thread that touches its sockets."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

_log = logging.getLogger(__name__)

Job = Callable[[], None]
_IDLE_S = 3600.0
_OVERSLEPT_S = 0.5


class IoLoop:
    """Runs jobs, socket callbacks and a clock on one daemon thread.

    Args:
        name: of the thread.
        tick: called after every round with the monotonic time; returns when it wants to be called next.
        forgive: called with the seconds by which this process itself was late (stopped, or starved), which
            must not be held against the peers.
        teardown: called last, on the thread.
        count: counts what must not happen, under ``internal``.
    """

    def __init__(
        self,
        name: str,
        *,
        tick: Callable[[float], float | None],
        forgive: Callable[[float], None],
        teardown: Job,
        count: Callable[[str], None],
    ) -> None:
        self._tick, self._forgive, self._teardown, self._count = tick, forgive, teardown, count
        self._jobs: deque[Job] = deque()
        self._callbacks: dict[zmq.Socket[bytes], Job] = {}
        self._poller = zmq.Poller()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()
        self._pid = os.getpid()
        self._stopping = False
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread; sockets made before belong to it from now on."""
        self._thread.start()

    def discard(self) -> None:
        """Give back what was made for a thread that will not start."""
        self._stopping = True
        os.close(self._wake_fd)

    def submit(self, job: Job) -> bool:
        """Have ``job`` run on the thread, in order; `False` when it has stopped or is another process's."""
        with self._wake_lock:
            if self._stopping or os.getpid() != self._pid:
                return False
            self._jobs.append(job)
            os.eventfd_write(self._wake_fd, 1)
            return True

    def watch(self, socket: zmq.Socket[bytes], callback: Job | None) -> None:
        """Call ``callback`` whenever the socket is readable; `None` ends that. On the thread, or before."""
        if callback is None:
            self._callbacks.pop(socket, None)
            with contextlib.suppress(KeyError):
                self._poller.unregister(socket)
        else:
            self._callbacks[socket] = callback
            self._poller.register(socket, zmq.POLLIN)

    def stop(self, timeout_s: float) -> bool:
        """Stop after the jobs submitted so far; returns whether the thread ended in time."""
        with self._wake_lock:
            if os.getpid() != self._pid:
                return True
            if not self._stopping:
                self._stopping = True
                os.eventfd_write(self._wake_fd, 1)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        due: float | None = None
        try:
            while not self._stopping:
                now = time.monotonic()
                self._poll(max(0.0, min(_IDLE_S, due - now if due is not None else _IDLE_S)))
                late = time.monotonic() - due if due is not None else 0.0
                if late > _OVERSLEPT_S:
                    self._guard(lambda seconds=late: self._forgive(seconds))  # type: ignore[misc]
                due = self._next_due()
            self._run_jobs()
        finally:
            self._guard(self._teardown)
            with self._wake_lock:
                self._stopping = True
                os.close(self._wake_fd)

    def _poll(self, timeout_s: float) -> None:
        ready = dict(self._poller.poll(math.ceil(timeout_s * 1000)))
        if ready.pop(self._wake_fd, 0):
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
        self._run_jobs()
        for socket, callback in list(self._callbacks.items()):
            if socket in ready and not socket.closed:
                self._guard(callback)

    def _run_jobs(self) -> None:
        for _ in range(len(self._jobs)):
            self._guard(self._jobs.popleft())

    def _next_due(self) -> float | None:
        try:
            return self._tick(time.monotonic())
        except Exception:  # noqa: BLE001 - logged and counted
            _log.exception("control channel: the clock of %s failed", self._thread.name)
            self._count("internal")
            return time.monotonic() + 1.0

    def _guard(self, job: Job) -> None:
        try:
            job()
        except Exception:  # noqa: BLE001 - logged and counted
            # One link's trouble must not take the thread, and with it every other link, down.
            _log.exception("control channel: %s", self._thread.name)
            self._count("internal")
