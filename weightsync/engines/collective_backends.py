"""The libraries that a collective transport may broadcast with, each behind the same four calls.

Every group is built directly and belongs to weightsync alone: torch's default process group, which the
training framework has for itself, is neither used nor touched.
"""

from __future__ import annotations

import importlib
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from weightsync.engines.buffers import allocate_bucket, bind_thread, require_device
from weightsync.engines.transport import SLOTS
from weightsync.errors import ConfigurationError, MissingDependencyError

_environment = threading.Lock()
_SOURCE_LINE = re.compile(r"^\[[^\]]*\]\s*")


class CollectiveBackend(ABC):
    """One library, on one device of this process. Made where the engine is configured: it refuses there."""

    name: str
    device: torch.device

    @abstractmethod
    def __init__(self, device: str | None = None) -> None:
        """Take a device of the library's kind.

        Raises:
            ConfigurationError: ``device`` names another kind, or there is none here.
            MissingDependencyError: the library is not installed.
        """

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return a transfer buffer that the library can broadcast, flat uint8."""
        return allocate_bucket(nbytes, self.device)

    def bind_thread(self) -> None:
        """Make the device the current one of this thread."""
        bind_thread(self.device)

    @abstractmethod
    def make_group(self, store: Store, rank: int, size: int, *, host: str, timeout_s: float) -> Any:
        """Join a new process group; waits for all of its ranks, up to ``timeout_s`` seconds.

        Args:
            store: where the ranks find each other.
            rank: of this process in the group.
            size: of the group.
            host: address of this host that the library may bind.
            timeout_s: seconds that joining may take.

        Raises:
            RuntimeError: the group did not come about.
        """

    @abstractmethod
    def failure_of(self, work: Any) -> str | None:
        """Return why an operation that has ended failed; `None` if it did not."""

    def abort(self, group: Any) -> None:
        """End what is under way in a group, as far as the library can."""
        group.abort()


class GlooBackend(CollectiveBackend):
    """Gloo, over TCP between buffers in host memory.

    Gloo cannot end an operation whose peer does not answer before that operation's own time-out. It is left
    to itself then, together with its buffer.
    """

    name = "gloo"

    def __init__(self, device: str | None = None) -> None:
        if device not in {None, "cpu"}:
            raise ConfigurationError(
                f"gloo broadcasts from host memory, got device: {device}: write device: cpu, "
                f"or refit_transport: nccl to broadcast between GPUs"
            )
        if not dist.is_gloo_available():
            raise MissingDependencyError(
                "this build of torch has no gloo: install one that has, or use another refit_transport"
            )
        self.device = torch.device("cpu")

    def make_group(self, store: Store, rank: int, size: int, *, host: str, timeout_s: float) -> Any:
        """Connect to all ranks, from a socket bound to ``host``: gloo's own choice is the host's name."""
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = SLOTS
        return gloo(store, rank, size, options)

    def failure_of(self, work: Any) -> str | None:
        """Return gloo's own text, without its source line and its advice."""
        try:
            work.wait()
        except RuntimeError as error:
            return _SOURCE_LINE.sub("", str(error)).partition(". This is typically")[0]
        return None

    def abort(self, group: Any) -> None:
        """Nothing: gloo's abort does not end what waits for a peer."""


class NCCLBackend(CollectiveBackend):
    """NCCL, between buffers in GPU memory. Written to torch's interface; it has not been run."""

    name = "nccl"

    def __init__(self, device: str | None = None) -> None:
        if device not in {None, "cuda"}:
            raise ConfigurationError(
                f"nccl broadcasts between GPUs, got device: {device}: write device: cuda, "
                f"or refit_transport: gloo to broadcast from host memory"
            )
        if not dist.is_nccl_available():
            raise MissingDependencyError(
                "this build of torch has no NCCL: install a CUDA build of it, or write refit_transport: gloo"
            )
        self.device = require_device("cuda")

    def make_group(self, store: Store, rank: int, size: int, *, host: str, timeout_s: float) -> Any:
        """Join; the interface is NCCL's own choice (``NCCL_SOCKET_IFNAME``), not ``host``."""
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timedelta(seconds=timeout_s)
        # By default torch ends the whole process when a peer of a group is lost. 2: only the communicator.
        with _setting("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"):
            return nccl(store, rank, size, options)

    def failure_of(self, work: Any) -> str | None:
        """Return what the communicator has run into: waiting for ended work does not raise it."""
        error = work.exception()
        return None if error is None else str(error).partition("\n")[0]


class HCCLBackend(CollectiveBackend):
    """HCCL, between buffers in NPU memory. Written to torch_npu's interface; it has not been run."""

    name = "hccl"

    def __init__(self, device: str | None = None) -> None:
        if device not in {None, "npu"}:
            raise ConfigurationError(
                f"hccl broadcasts between Ascend NPUs, got device: {device}: write device: npu, "
                f"or refit_transport: gloo to broadcast from host memory"
            )
        try:
            self._npu: Any = importlib.import_module("torch_npu")
        except ImportError as error:
            raise MissingDependencyError(
                f"hccl needs torch_npu, which does not import here ({error}): install Ascend's CANN and the "
                f"torch-npu release for torch {torch.__version__}, or write refit_transport: gloo"
            ) from error
        if not self._npu.npu.is_available():
            raise ConfigurationError("hccl needs an NPU that torch_npu can use; none is visible here")
        self.device = torch.device("npu", self._npu.npu.current_device())

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return a buffer of torch_npu's allocator."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def bind_thread(self) -> None:
        """Make the NPU the current one of this thread."""
        self._npu.npu.set_device(self.device)

    def make_group(self, store: Store, rank: int, size: int, *, host: str, timeout_s: float) -> Any:
        """Join; the interface is HCCL's own choice (``HCCL_SOCKET_IFNAME``), not ``host``."""
        hccl = importlib.import_module("torch_npu._C._distributed_c10d").ProcessGroupHCCL
        return hccl(store, rank, size, timedelta(seconds=timeout_s))

    def failure_of(self, work: Any) -> str | None:
        """Return what the communicator has run into."""
        error = work.exception()
        return None if error is None else str(error).partition("\n")[0]

    def abort(self, group: Any) -> None:
        """End the communicator."""
        group.abort_hccl_comm("weightsync gave the group up")


@contextmanager
def _setting(name: str, value: str) -> Iterator[None]:
    """Have an environment variable, which torch reads when a group is built."""
    with _environment:
        before = os.environ.get(name)
        os.environ[name] = value
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before
