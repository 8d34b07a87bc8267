"""From whatever an RPC layer returns to plain values: nested awaitables, futures and Ray object refs."""

from __future__ import annotations

import asyncio
import inspect
from concurrent.futures import Future
from typing import Any


async def resolve_async(value: Any) -> Any:
    """Return ``value`` with every awaitable, future and Ray object ref in it, at any depth, replaced."""
    if isinstance(value, Future):
        return await resolve_async(await asyncio.wrap_future(value))
    if inspect.isawaitable(value):  # Ray's object refs are awaitable too
        return await resolve_async(await value)
    if isinstance(value, list | tuple):
        return list(await asyncio.gather(*(resolve_async(item) for item in value)))
    return value


def resolve(value: Any, timeout_s: float) -> Any:
    """Like `resolve_async`, for a thread without an event loop; each wait is bounded by ``timeout_s``."""
    if isinstance(value, Future):
        return resolve(value.result(timeout_s), timeout_s)
    if _is_object_ref(value):
        return resolve(value.future().result(timeout_s), timeout_s)
    if inspect.isawaitable(value):
        return asyncio.run(asyncio.wait_for(resolve_async(value), timeout_s))
    if isinstance(value, list | tuple):
        return [resolve(item, timeout_s) for item in value]
    return value


def _is_object_ref(value: Any) -> bool:
    # By shape, so that Ray is not imported where it is not used.
    return inspect.isawaitable(value) and callable(getattr(value, "future", None))
