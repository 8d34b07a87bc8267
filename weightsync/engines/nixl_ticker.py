"""The thread in which the side that is read from answers its readers."""

from __future__ import annotations

import threading

import torch

from weightsync.engines.buffers import bind_thread
from weightsync.engines.nixl_agent import NixlAgent
from weightsync.errors import DeadlineError

_TICK_S = 0.001
_JOIN_S = 5.0


class ProgressTicker:
    """Calls `NixlAgent.progress` every millisecond while open, from a thread of its own.

    ``device`` is that of the buffers which are read.
    """

    def __init__(self, agent: NixlAgent, device: torch.device) -> None:
        self._agent = agent
        self._device = device
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin ticking; no-op while it ticks.

        Raises:
            DeadlineError: the thread of an earlier `stop` still hangs in NIXL.
        """
        if self._stop.is_set():
            self.stop()
        if self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, name="weightsync-nixl-progress", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End ticking and wait for the thread.

        Raises:
            DeadlineError: it hangs in NIXL.
        """
        if self._thread is not None:
            self._stop.set()
            self._thread.join(_JOIN_S)
            if self._thread.is_alive():
                raise DeadlineError(
                    f"NIXL did not return within {_JOIN_S:g} s: close this engine and make a new one",
                    phase="progress",
                )
            self._thread = None

    def _run(self) -> None:
        bind_thread(self._device)
        while not self._stop.wait(_TICK_S):
            self._agent.progress()
