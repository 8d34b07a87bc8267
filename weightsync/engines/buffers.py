"""The one place that allocates transfer buffers, and the one that waits for a device.

CPU buffers are page-locked where a GPU is present. CUDA buffers come from CuPy's memory pool where CuPy
is installed, since its blocks are not moved or split by torch's caching allocator, else from torch.
"""

from __future__ import annotations

import importlib.util

import torch
import torch.utils.dlpack

from weightsync.errors import ConfigurationError


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
    """Return an uninitialised transfer buffer, shape ``(nbytes,)``, uint8."""
    if device.type == "cpu":
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    if importlib.util.find_spec("cupy") is not None:
        return _allocate_with_cupy(nbytes, device)
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _allocate_with_cupy(nbytes: int, device: torch.device) -> torch.Tensor:
    import cupy

    with cupy.cuda.Device(device.index):
        block = cupy.empty(nbytes, dtype=cupy.uint8)
    # The DLPack capsule keeps the CuPy block alive for as long as the tensor lives.
    return torch.utils.dlpack.from_dlpack(block)


def synchronize(device: torch.device) -> None:
    """Wait until the work queued on a device is done; nothing to wait for on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
