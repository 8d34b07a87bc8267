"""A call in a thread of its own, on the accelerator of the thread that starts it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

from weightsync.engines.buffers import bind_thread

T = TypeVar("T")


def in_thread(call: Callable[[], T]) -> Future[T]:
    """Run a call in a daemon thread, so that one that hangs cannot keep the process from ending."""
    future: Future[T] = Future()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None

    def run() -> None:
        try:
            if device is not None:
                bind_thread(device)
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised again where the result is taken
            future.set_exception(error)

    threading.Thread(target=run, name="weightsync-staging", daemon=True).start()
    return future
