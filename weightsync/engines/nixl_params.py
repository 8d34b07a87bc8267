"""The parameters of a NIXL backend."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

_MOST_THREADS = 4
_PIECES_A_THREAD = 8


def backend_params(
    backend_name: str, backend_init_params: Mapping[str, Any] | None, *, threads: int = 1
) -> dict[str, str]:
    """Return a backend's parameters as NIXL takes them: strings, with UCX's peer-error handling on.

    Args:
        backend_name: NIXL backend.
        backend_init_params: as they were written; they win.
        threads: that UCX may divide reads of many pieces among, see `reading_threads`.
    """
    params = {str(key): _as_text(value) for key, value in (backend_init_params or {}).items()}
    if backend_name == "UCX":
        params.setdefault("ucx_error_handling_mode", "peer")
        if threads > 1:
            params.setdefault("num_threads", str(threads))
            params.setdefault("split_batch_size", str(_PIECES_A_THREAD))
    return params


def reading_threads(device: str, sharding: str) -> int:
    """Return how many threads reads of regions are worth.

    Within one host the kernel copies host memory in the reader's own thread, at less than half of what the
    memory can do. Other memory is read by hardware. Threads that have nothing to do cost nothing.
    """
    if sharding == "none" or not device.startswith("cpu"):
        return 1
    return min(_MOST_THREADS, len(os.sched_getaffinity(0)))


def _as_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
