"""Memory of a GPU that other processes of this host may map, through CUDA IPC as torch offers it.

Written from torch's sources (``torch/multiprocessing/reductions.py``, ``torch/csrc/StorageSharing.cpp``); it
has not run on a GPU yet. The calls are private to torch, and so are named here alone.

torch counts the readers of what it shares in a file of 80 KB in ``/dev/shm``, one a process, which remains
there when the process is killed.
"""

from __future__ import annotations

import os
import re
from typing import Any

import msgspec
import torch

from weightsync.errors import ConfigurationError, LifecycleError, PeerLostError

_COUNTER_NAME = re.compile(rb"/torch_\d+_\d+_\d+")
"""As torch names the shared memory with its counts of readers. No other name is opened for a peer."""


class Handle(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What torch tells of a shared storage, in its order, and takes to open it."""

    storage_device: int
    storage_handle: bytes
    storage_size_bytes: int
    storage_offset_bytes: int
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool

    def __post_init__(self) -> None:
        if not _COUNTER_NAME.fullmatch(self.ref_counter_handle):
            raise ValueError(f"{self.ref_counter_handle!r:.80} is no name that torch gives to shared memory")


class CudaAddress(msgspec.Struct, frozen=True, tag="cuda", forbid_unknown_fields=True):
    """Where a `CudaBlock` is found. ``gpu`` is the GPU's UUID: processes may count their GPUs differently."""

    pid: int
    gpu: str
    handle: Handle

    @property
    def nbytes(self) -> int:
        """Size."""
        return self.handle.storage_size_bytes

    @property
    def token(self) -> str:
        """Tells this block from every other one of its host."""
        return f"{self.handle.storage_handle.hex()}+{self.handle.storage_offset_bytes}"


class CudaBlock:
    """Memory on a GPU that others may map.

    It comes from torch's own allocator: only what ``cudaMalloc`` gave has a handle, and torch must know it.

    Args:
        nbytes: size, at least 1.
        device: a CUDA device.

    Attributes:
        tensor: the memory, flat uint8.
        address: where others find it.

    Raises:
        ConfigurationError: torch cannot share the memory of its allocator as that is configured.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
        try:
            handle = Handle(*_private(self.tensor.untyped_storage())._share_cuda_())
        except RuntimeError as error:
            raise ConfigurationError(
                f"torch cannot share memory of {device}: {error}; write device: cpu, or set "
                f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
            ) from error
        self.address = CudaAddress(os.getpid(), _uuid(device.index), handle)

    def touch(self) -> None:
        """Nothing to do: the memory of a GPU is there from the beginning."""

    def free(self) -> None:
        """Give the memory back; no peer reads it any more. Idempotent."""
        if self.tensor.numel():
            # torch counts the handle itself as a reader, and would keep the memory for it.
            handle, storage = self.address.handle, _private(torch.UntypedStorage)
            storage._release_ipc_counter(
                handle.ref_counter_handle, handle.ref_counter_offset, device=self.tensor.device
            )
        self.tensor = torch.empty(0, dtype=torch.uint8)


class MappedCudaBlock:
    """Another process's `CudaBlock`.

    Args:
        address: of the block.
        device: of this worker; needs access to the block's.
        owner: who has the block, for messages.

    Raises:
        ConfigurationError: this worker cannot reach the GPU that the block is on.
        PeerLostError: the block cannot be opened, for its process has died or freed it.
    """

    def __init__(self, address: CudaAddress, device: torch.device, owner: str) -> None:
        index = _reachable(address.gpu, device, owner)
        try:
            storage = _private(torch.UntypedStorage)._new_shared_cuda(
                index, *msgspec.structs.astuple(address.handle)[1:]
            )
        except RuntimeError as error:
            raise PeerLostError(
                f"the GPU memory of process {address.pid} cannot be opened: {error}", peer=owner
            ) from error
        self._tensor: torch.Tensor | None = torch.empty(
            0, dtype=torch.uint8, device=torch.device("cuda", index)
        ).set_(storage)

    def read(self) -> torch.Tensor:
        """Return the memory, flat uint8.

        Raises:
            LifecycleError: after `free`.
        """
        if self._tensor is None:
            raise LifecycleError("this memory was given back")
        return self._tensor

    def free(self) -> None:
        """Unmap it, once no tensor uses it."""
        self._tensor = None


def _reachable(gpu: str, device: torch.device, owner: str) -> int:
    """Return this process's number of a GPU."""
    indices = [index for index in range(torch.cuda.device_count()) if _uuid(index) == gpu]
    if not indices:
        raise ConfigurationError(
            f"CUDA IPC needs the sender's GPU to be visible: {owner} is on {gpu}, which this worker does not "
            f"see (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}); let it see both, or "
            f"write refit_transport: nixl"
        )
    if indices[0] != device.index and not torch.cuda.can_device_access_peer(device, indices[0]):
        raise ConfigurationError(
            f"CUDA IPC needs peer access: {device} of this worker cannot read {gpu}, where {owner} is; "
            f"write refit_transport: nixl"
        )
    return indices[0]


def _uuid(index: int | None) -> str:
    return str(torch.cuda.get_device_properties(index or 0).uuid)


def _private(storage: Any) -> Any:
    """Return it as what type checkers ask nothing about."""
    return storage
