"""Memory that other processes of this host may map: made, found, mapped, given back.

The memory is an anonymous file (a memfd): it has no name in any directory, so the kernel frees it with the
last process that holds it, however that process ends. Peers reach it through ``/proc/<pid>/fd/<fd>``.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import socket
import weakref
from pathlib import Path

import msgspec
import torch

from weightsync.errors import ConfigurationError, LifecycleError, PeerLostError, TransportError

_HUGE = 2 << 20
"""Bytes of a huge page; where they are larger, small ones are used."""
_NOEXEC_SEAL = 0x8
_POPULATE_WRITE = 23
_COLLAPSE = 25
_FIXED = 0x10
_PROT_NONE = 0
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_INSTEAD = "write refit_transport: nixl"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Home(msgspec.Struct, frozen=True):
    """Where a process is, as far as it decides who can map its memory."""

    host: str
    """Name of the host, for messages."""
    boot: str
    """Id of the running kernel: the same in all containers of a host."""
    pid_namespace: str
    uid: int

    @classmethod
    def here(cls) -> Home:
        """Return this process's."""
        return cls(
            host=socket.gethostname(),
            boot=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            pid_namespace=os.readlink("/proc/self/ns/pid"),
            uid=os.geteuid(),
        )

    def require_common(self, peer: Home, peer_name: str) -> None:
        """Check that a peer is where process ids mean the same.

        Raises:
            ConfigurationError: it is on another host, or in another container.
        """
        if peer.boot != self.boot:
            raise ConfigurationError(
                f"shared memory needs all workers on one host: {peer_name} is on {peer.host!r}, this worker "
                f"on {self.host!r}; {_INSTEAD}"
            )
        if peer.pid_namespace != self.pid_namespace:
            raise ConfigurationError(
                f"shared memory needs all workers in one PID namespace: {peer_name} is in "
                f"{peer.pid_namespace}, this worker in {self.pid_namespace}; let the containers share their "
                f"process ids, or {_INSTEAD}"
            )


class Address(msgspec.Struct, frozen=True, tag="memory", forbid_unknown_fields=True):
    """Where a `SharedBlock` is found. The token is part of its name, so that no other is taken for it."""

    pid: int
    fd: int
    nbytes: int
    token: str


class SharedBlock:
    """Memory of this process that others may map.

    No page of it exists before it is touched. It lives as long as its tensor.

    Args:
        nbytes: size, at least 1.

    Attributes:
        tensor: the memory, flat uint8.
        address: where others find it.
    """

    def __init__(self, nbytes: int) -> None:
        token = secrets.token_hex(16)
        self._fd: int | None = _create(_name(token))
        try:
            os.ftruncate(self._fd, nbytes)
            # What has been mapped cannot shrink, which would kill those that read it.
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
            self._at = _map(self._fd, nbytes, mmap.MAP_SHARED)
        except BaseException:
            self.free()
            raise
        self.tensor = _tensor_at(self._at, nbytes)
        self.address = Address(os.getpid(), self._fd, nbytes, token)
        self._touched = False

    def touch(self) -> None:
        """Make all pages exist, huge ones where the system has them. The contents stay. Idempotent.

        Raises:
            TransportError: there is not enough memory.
        """
        if self._touched or self._fd is None:
            return
        nbytes = self.address.nbytes
        _advise(self._at, nbytes, mmap.MADV_HUGEPAGE)
        # A huge page takes the place of small ones, of which there must be one at least.
        self.tensor[::_HUGE].add_(0)
        try:
            if not _advise(self._at, nbytes, _COLLAPSE):
                os.posix_fallocate(self._fd, 0, nbytes)
        except OSError as error:
            raise TransportError(f"no memory for a transfer buffer of {nbytes} bytes: {error}") from error
        _advise(self._at, nbytes, _POPULATE_WRITE)
        self._touched = True

    def free(self) -> None:
        """Let no new peer map the memory, and give it back once no tensor and no peer uses it. Idempotent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
        self.tensor = torch.empty(0, dtype=torch.uint8)


class MappedBlock:
    """Another process's `SharedBlock`. Stays valid when that process dies.

    Args:
        address: of the block.
        home: of the process that has it.
        owner: who that is, for messages.

    Raises:
        PeerLostError: there is no such block any more: its process has gone.
        ConfigurationError: this process may not map it.
    """

    def __init__(self, address: Address, home: Home, owner: str) -> None:
        fd = _open(address, home, owner)
        try:
            # Private: what a loader does to a tensor that it was given must not reach the owner's memory.
            self._at = _map(fd, address.nbytes, mmap.MAP_PRIVATE)
        finally:
            os.close(fd)
        self._nbytes = address.nbytes
        self._tensor = _tensor_at(self._at, address.nbytes)

    def read(self) -> torch.Tensor:
        """Return the memory as its owner has it now, flat uint8.

        Raises:
            LifecycleError: after `free`.
        """
        if not self._tensor.numel():
            raise LifecycleError("this memory was given back")
        _advise(self._at, self._nbytes, mmap.MADV_DONTNEED)  # drops pages that were written to here
        return self._tensor

    def free(self) -> None:
        """Unmap it, once no tensor uses it."""
        self._tensor = torch.empty(0, dtype=torch.uint8)


def _name(token: str) -> str:
    return f"weightsync-{token}"


def _create(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        try:
            return os.memfd_create(name, flags | _NOEXEC_SEAL)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        return os.memfd_create(name, flags)  # a kernel before 6.3
    except OSError as error:
        raise TransportError(f"cannot make shared memory for a transfer buffer: {error}") from error


def _open(address: Address, home: Home, owner: str) -> int:
    path = f"/proc/{address.pid}/fd/{address.fd}"
    gone = PeerLostError(f"the memory of process {address.pid} is gone: it died, or freed it", peer=owner)
    try:
        # Before it is opened, too: opening what has taken the number since may have effects, or wait.
        if not _is_block(path, address):
            raise gone
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        if os.geteuid() not in {home.uid, 0}:
            raise ConfigurationError(
                f"shared memory needs all workers under one user: {owner} runs as user {home.uid}, this "
                f"worker as {os.geteuid()}; {_INSTEAD}"
            ) from error
        if isinstance(error, PermissionError):
            raise ConfigurationError(
                f"this worker may not open the memory of {owner} (process {address.pid}): {error}; {_INSTEAD}"
            ) from error
        raise gone from error
    if not _is_block(f"/proc/self/fd/{fd}", address) or os.fstat(fd).st_size != address.nbytes:
        os.close(fd)
        raise gone
    return fd


def _is_block(path: str, address: Address) -> bool:
    return os.readlink(path) == f"/memfd:{_name(address.token)} (deleted)"


def _map(fd: int, nbytes: int, flags: int) -> int:
    """Map a file where huge pages fit; returns the address."""
    size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    room = _mmap(None, size + _HUGE, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    start = -(-room // _HUGE) * _HUGE
    try:
        _mmap(start, size, mmap.PROT_READ | mmap.PROT_WRITE, flags | _FIXED, fd)
    except BaseException:
        _libc.munmap(room, size + _HUGE)
        raise
    for begin, end in ((room, start), (start + size, room + size + _HUGE)):
        if begin < end:
            _libc.munmap(begin, end - begin)
    return start


def _mmap(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    mapped = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if mapped is None or mapped == ctypes.c_void_p(-1).value:
        raise TransportError(f"cannot map a transfer buffer: {os.strerror(ctypes.get_errno())}")
    return int(mapped)


def _tensor_at(address: int, nbytes: int) -> torch.Tensor:
    memory = (ctypes.c_char * nbytes).from_address(address)
    unmap = weakref.finalize(memory, _libc.munmap, address, nbytes)
    unmap.atexit = False  # a thread may still read it
    return torch.frombuffer(memory, dtype=torch.uint8)


def _advise(address: int, nbytes: int, advice: int) -> bool:
    return bool(_libc.madvise(address, nbytes, advice) == 0)
