"""Steps that must not hide an error, and waiting for the accelerator."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

import torch


def synchronize_device() -> None:
    """Wait until the accelerator, if there is one, has done what was asked of it.

    Called before a batch is given back: the engine may overwrite its memory from then on.
    """
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def quietly(error: BaseException, what: str, call: Callable[[], object]) -> None:
    """Run a clean-up step; its own failure is noted on ``error``, which is the one to report."""
    try:
        call()
    except Exception as second:  # noqa: BLE001 - the first error must not be replaced by a later one
        error.add_note(f"then could not {what}: {type(second).__name__}: {second}")


async def close_quietly(error: BaseException, batches: AsyncGenerator[Any, None]) -> None:
    """Close an engine's generator, as `quietly` does."""
    try:
        await batches.aclose()
    except Exception as second:  # noqa: BLE001 - as in `quietly`
        error.add_note(f"then could not close the stream: {type(second).__name__}: {second}")
