"""How much memory a worker has: what the size of the transfer buckets is computed from."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import psutil
import torch

from weightsync.errors import ConfigurationError, MissingDependencyError

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def total_memory_bytes(device: str) -> int:
    """Return the bytes of memory behind a device.

    Args:
        device: ``"cuda"`` (the current GPU), ``"cuda:N"``, likewise ``"npu"`` and ``"npu:N"``, or ``"cpu"``:
            the host's physical memory, or the limit of this process's control group (version 1 or 2) where
            that is smaller. ``"auto"`` means the current GPU where there is one, else the host: for plugins
            that do not say.

    Raises:
        ConfigurationError: another kind of device, or ``cuda`` or ``npu`` on a machine without it.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = device.partition(":")
    if kind == "cuda":
        return _accelerator_bytes(torch.cuda, device, index, what="CUDA GPU")
    if kind == "npu":
        return _accelerator_bytes(_import_npu(), device, index, what="Ascend NPU")
    if device == "cpu":
        return host_memory_bytes()
    raise ConfigurationError(
        f"device must be 'cpu', 'cuda', 'cuda:N', 'npu', 'npu:N' or 'auto', got {device!r}"
    )


def host_memory_bytes(cgroup_root: Path = _CGROUP_ROOT, own_cgroups: Path = _OWN_CGROUPS) -> int:
    """Return the smaller of physical memory and the control group's limit, in bytes."""
    return min([psutil.virtual_memory().total, *_cgroup_limits(cgroup_root, own_cgroups)])


def _accelerator_bytes(runtime: Any, device: str, index: str, *, what: str) -> int:
    """``runtime`` is ``torch.cuda``, or ``torch.npu``, which has the same calls and has not been run."""
    if not runtime.is_available():
        raise ConfigurationError(f"device is {device!r}, but this worker sees no {what}; set device: cpu")
    if index and not (index.isdecimal() and int(index) < runtime.device_count()):
        raise ConfigurationError(f"device is {device!r}, but there are {runtime.device_count()} of that kind")
    number = int(index) if index else runtime.current_device()
    return int(runtime.get_device_properties(number).total_memory)


def _import_npu() -> Any:
    try:
        return importlib.import_module("torch_npu").npu
    except ImportError as error:
        raise MissingDependencyError(
            f"device npu needs torch_npu, which does not import here ({error}): install Ascend's CANN and "
            f"the torch-npu release for torch {torch.__version__}"
        ) from error


def _cgroup_limits(root: Path, own: Path) -> Iterator[int]:
    """Yield every limit on the way from this process's groups up to the root: any of them may bind."""
    if not own.is_file():
        return
    for line in own.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _limits_upwards(root, path, "memory.max")
        elif "memory" in controllers.split(","):
            yield from _limits_upwards(root / "memory", path, "memory.limit_in_bytes")


def _limits_upwards(root: Path, path: str, file_name: str) -> Iterator[int]:
    group = PurePosixPath(path.lstrip("/"))
    for folder in (group, *group.parents):
        file = root / folder / file_name
        # Inside a container the host's path may not exist below the mount; its own root then has the limit.
        text = file.read_text().strip() if ".." not in folder.parts and file.is_file() else "max"
        if text.isdecimal():
            yield int(text)
