"""The one place that allocates and gives back transfer buffers, and the one that waits for a device.

CPU buffers are page-locked where a GPU is present, else in large pages. CUDA buffers come from CuPy's memory
pool where CuPy is installed, since its blocks are not moved or split by torch's caching allocator, else from
torch.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import mmap
import sys
from typing import Any

import torch
import torch.utils.dlpack

from weightsync.errors import ConfigurationError

_log = logging.getLogger(__name__)

_LARGE_PAGE = 2 << 20

POISON = 0xFF
"""Fills released buffers in debug mode: NaN in every float format, so that late readers show."""


def require_device(device: str) -> torch.device:
    """Return the device of the transfer buffers.

    Raises:
        ConfigurationError: not ``cpu`` or ``cuda``, or ``cuda`` on a machine without a usable GPU.
    """
    if device not in {"cpu", "cuda"}:
        raise ConfigurationError(f"device must be 'cpu' or 'cuda', got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("device: cuda needs a GPU that torch can use; write device: cpu")
    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")


def allocate_bucket(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return an uninitialised transfer buffer, shape ``(nbytes,)``, uint8.

    Raises:
        ConfigurationError: CuPy is installed and fails, for another reason than that it sees no GPU.
    """
    if device.type == "cpu":
        if torch.cuda.is_available():
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return allocate_host(nbytes).fill_(0)  # or the first refit would wait for every page
    if device.type == "cuda" and importlib.util.find_spec("cupy") is not None:
        try:
            buffer = _allocate_with_cupy(nbytes, device)
        except Exception as error:  # CuPy's own exceptions cannot be named where it does not import
            raise ConfigurationError(
                f"CuPy is installed and cannot allocate {nbytes} bytes on {device}: {error}; "
                f"mend it, or uninstall it and the buffers come from torch"
            ) from error
        if buffer is not None:
            return buffer
        _log.warning("CuPy is installed and sees no GPU: the transfer buffer on %s comes from torch", device)
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def allocate_host(nbytes: int) -> torch.Tensor:
    """Return uninitialised host memory that no device needs to reach, shape ``(nbytes,)``, uint8.

    In large pages, where the system has them: they are made sooner, and a copy by the kernel from another
    process, which looks up each page, is several times as fast.

    Raises:
        OSError: there is not so much memory.
    """
    memory = mmap.mmap(-1, nbytes + _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel without them says that it does not know the advice.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _LARGE_PAGE
    return whole[start : start + nbytes]


def _allocate_with_cupy(nbytes: int, device: torch.device) -> torch.Tensor | None:
    """Return a block of CuPy's pool as a tensor; `None` where CuPy reports no usable device."""
    cupy: Any = importlib.import_module("cupy")
    if not cupy.cuda.is_available():
        return None
    with cupy.cuda.Device(device.index):
        block = cupy.empty(nbytes, dtype=cupy.uint8)
    # The DLPack capsule keeps the CuPy block alive for as long as the tensor lives.
    return torch.utils.dlpack.from_dlpack(block)


def give_back(device: torch.device) -> None:
    """Return freed transfer buffers to the driver and the system: allocators keep them for themselves.

    To be called once nothing refers to the buffers any more. Nothing to do on a machine without a GPU.
    """
    if device.type == "cuda":
        _empty_cupy_pools(device)
        torch.cuda.empty_cache()
    elif device.type != "cpu":
        _runtime(device).empty_cache()
    elif torch.cuda.is_available():
        _empty_host_cache()


def _empty_cupy_pools(device: torch.device) -> None:
    cupy: Any = sys.modules.get("cupy")
    if cupy is not None and cupy.cuda.is_available():
        with cupy.cuda.Device(device.index):
            cupy.get_default_memory_pool().free_all_blocks()
        cupy.get_default_pinned_memory_pool().free_all_blocks()


def _empty_host_cache() -> None:
    # Older releases of torch have it under a private name, or not at all.
    empty: Any = getattr(torch.accelerator, "empty_host_cache", None)
    empty = empty or getattr(torch._C, "_host_emptyCache", None)
    if empty is not None:
        empty()


def bind_thread(device: torch.device) -> None:
    """Make a device the current one of this thread: each thread begins at device 0."""
    if device.type != "cpu":
        _runtime(device).set_device(device)


def synchronize(device: torch.device) -> None:
    """Wait until the work queued on a device is done; nothing to wait for on the CPU."""
    if device.type != "cpu":
        _runtime(device).synchronize(device)


def await_readers(buffer: torch.Tensor) -> None:
    """Wait until the work that was queued on a buffer is done, also copies from page-locked memory."""
    if buffer.device.type != "cpu":
        synchronize(buffer.device)
    elif torch.accelerator.is_available() and buffer.is_pinned():
        torch.accelerator.synchronize()


def overwrite(buffer: torch.Tensor, value: int) -> None:
    """Fill a uint8 buffer with a value; returns once it is there, not when the work is queued."""
    buffer.fill_(value)
    synchronize(buffer.device)


def _runtime(device: torch.device) -> Any:
    """Return torch's module for a kind of device: ``torch.cuda``, or ``torch.npu``, which torch_npu adds.

    The calls made of it have the same names in both. Those of ``torch.npu`` have not been run.

    Raises:
        ConfigurationError: torch has none of that kind.
    """
    module = getattr(torch, device.type, None)
    if module is None:
        raise ConfigurationError(
            f"torch {torch.__version__} knows no {device.type} device: is its plug-in here?"
        )
    return module
