"""The seam to the Mooncake package: a TransferEngine, its memory, its reads. Nothing else imports it.

Mooncake names an engine by the address of its handshake port, its session. What does not suit a refit is kept
away from it here:

- The first word to a peer that is stopped waits for a minute. So each read has a thread of its own, and the
  first one from a peer is of a byte that nobody needs.
- A read cannot be cancelled. But once its engine is gone nothing writes into its buffer any more.
- An engine takes a second to end, with Python's lock held. So those that are in order are kept for the next
  user in their process.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from weightsync.control.addresses import bracketed, is_ipv6
from weightsync.engines.buffers import bind_thread
from weightsync.engines.pool import Pool
from weightsync.engines.waiting import await_ended
from weightsync.errors import ConfigurationError, DeadlineError, MissingDependencyError, TransportError

PROTOCOLS = ("tcp", "rdma")

_NO_SERVER = "P2PHANDSHAKE"
_PENDING, _DONE = (0, -2), 1
"""Of `transfer_check_status`: -2 is a time-out that Mooncake only remarks on."""
_CHECK_S = 0.02
_MIN_POLL_S, _MAX_POLL_S = 0.0002, 0.02
_environment_lock = threading.Lock()


def import_mooncake(host: str = "127.0.0.1", protocol: str = "tcp") -> Any:
    """Return the module with Mooncake's TransferEngine; arguments as for `MooncakeSession`.

    Raises:
        MissingDependencyError: Mooncake is not installed, or one of its libraries cannot be loaded.
    """
    try:
        with _environment(_variables(host, protocol)):
            from mooncake import engine
    except ImportError as error:
        system = "install Debian's libibverbs1 (apt-get install libibverbs1)"
        fix = system if "libibverbs" in str(error) else "pip install 'weightsync[mooncake]'"
        raise MissingDependencyError(
            f"refit_transport mooncake needs the Mooncake transfer engine: {fix} ({error})"
        ) from error
    return engine


class MooncakeSession:
    """One TransferEngine with the memory that peers may read from it.

    Args:
        host: address of this host, as peers reach it. Mooncake listens on every interface.
        protocol: one of `PROTOCOLS`.
        device_name: RDMA devices to use, names with commas between them; empty: all.
    """

    def __init__(self, host: str, protocol: str, device_name: str) -> None:
        api = import_mooncake(host, protocol)
        with _environment(_variables(host, protocol)):
            if protocol == "rdma":
                _require_rdma(api, device_name)
            self._engine: Any = api.TransferEngine()
            code = self._engine.initialize(host, _NO_SERVER, protocol, device_name)
        if code != 0:
            raise ConfigurationError(
                f"Mooncake could not start with protocol {protocol} on {host} (code {code}); "
                f"it says why on stderr"
            )
        self.name = f"{bracketed(host)}:{self._engine.get_rpc_port()}"
        """By which peers reach it."""
        self.on_gpu = bool(getattr(api, "SUPPORT_CUDA", True) or getattr(api, "SUPPORT_HIP", False))
        """Whether this build of Mooncake moves GPU memory."""
        self._failed = False
        self._registered: list[torch.Tensor] = []
        self._met: set[str] = set()
        self._given_up: _Read | None = None
        self._byte = torch.zeros(1, dtype=torch.uint8)
        _require(self._engine.register_memory(self._byte.data_ptr(), 1), "register memory")

    @property
    def is_spoiled(self) -> bool:
        """Whether a read failed, or was given up and goes on. `end` the session, and take another one.

        The engine may look for a peer where it no longer is, or write into a buffer when nobody expects it.
        """
        read = self._given_up
        return self._failed or not (read is None or (read.ended.is_set() and read.failure is None))

    def register(self, buffer: torch.Tensor) -> None:
        """Let peers read a contiguous buffer.

        Raises:
            TransportError: Mooncake refuses.
        """
        nbytes = buffer.numel() * buffer.element_size()
        code = self._engine.register_memory(buffer.data_ptr(), nbytes)
        _require(code, f"register {nbytes} bytes on {buffer.device}")
        self._registered.append(buffer)

    def unregister_all(self) -> None:
        """Undo every `register`.

        Raises:
            TransportError: Mooncake refuses; the other buffers are unregistered all the same.
        """
        buffers, self._registered = self._registered, []
        codes = [self._engine.unregister_memory(buffer.data_ptr()) for buffer in buffers]
        for code in codes:
            _require(code, "unregister a buffer")

    def read(
        self, session: str, address: int, target: torch.Tensor, *, timeout_s: float, check: Callable[[], None]
    ) -> str | None:
        """Fill a local buffer from a peer's memory; returns when all is here, or else why Mooncake failed.

        Args:
            session: the peer's `name`.
            address: of the first byte, in the peer's process.
            target: contiguous, registered.
            timeout_s: seconds after which the read is given up.
            check: called while waiting; raises to give up early.

        Raises:
            DeadlineError: it did not end in time.
        """
        targets = [target] if session in self._met else [self._byte, target]
        read = _Read(self._engine, session, address, targets)
        read.start()
        size = target.numel() * target.element_size()
        try:
            await_ended(
                lambda: read.ended.wait(_CHECK_S),
                timeout_s=timeout_s,
                check=check,
                what=f"a read of {size} bytes from {session}",
                pauses_s=(0.0, 0.0),
            )
        except BaseException:
            self._given_up = read
            raise
        if read.failure is None:
            self._met.add(session)
        else:
            self._failed = True
        return read.failure

    def end(self, *, timeout_s: float, check: Callable[[], None]) -> None:
        """End the engine; nothing is read from or written into this process's memory through it after that.

        Raises:
            DeadlineError: a read that was given up can still write into its buffer; it may be tried again.
        """
        self._failed = True
        if self._engine is not None:
            for buffer in self._registered:
                self._engine.unregister_memory(buffer.data_ptr())
            self._registered, self._engine = [], None
        if self._given_up is not None:
            self._given_up.leave(timeout_s, check)


class _Read(threading.Thread):
    """Reads from one address into one buffer after another. Keeps engine and buffers alive meanwhile."""

    def __init__(self, engine: Any, session: str, address: int, targets: Sequence[torch.Tensor]) -> None:
        super().__init__(name="weightsync-mooncake-read", daemon=True)
        self._engine = engine
        self._session = session
        self._address = address
        self._targets = targets
        self._last = False
        """Whether it has come to the last buffer, the one that matters."""
        self._left = threading.Event()
        self.ended = threading.Event()
        self.failure: str | None = None
        """Why it failed, once it has."""

    def leave(self, timeout_s: float, check: Callable[[], None]) -> None:
        """Wait until the last buffer is no longer written to, by an engine of which nothing else is left.

        Raises:
            DeadlineError: Mooncake does not return from its start.
        """
        self._left.set()
        deadline = time.monotonic() + timeout_s
        while self._last and self.is_alive():
            if time.monotonic() > deadline:
                raise DeadlineError(f"a read that an earlier refit gave up goes on after {timeout_s:g} s")
            check()
            self.join(_CHECK_S)

    def run(self) -> None:
        """Read. Whatever happens is told in `failure`."""
        try:
            bind_thread(self._targets[-1].device)
            for target in self._targets:
                self._last = target is self._targets[-1]
                # Asked after that is said, so that `leave` never overlooks a read that is about to start.
                if self.failure is None and not self._left.is_set():
                    self.failure = self._read(target)
        except Exception as error:  # noqa: BLE001 - told to the one who waits
            self.failure = f"Mooncake raised {error!r}"
        finally:
            self.ended.set()
            self._engine = None  # one that was left ends here

    def _read(self, target: torch.Tensor) -> str | None:
        size = target.numel() * target.element_size()
        batch = self._engine.batch_transfer_async_read(
            self._session, [target.data_ptr()], [self._address], [size]
        )
        if batch == 0:
            return f"Mooncake could not reach {self._session}"
        started = time.monotonic()
        while (status := self._engine.transfer_check_status(batch)) in _PENDING:
            if self._left.is_set():
                return "it was given up"
            # Often at first, so that a short read is not held up; rarely in a long one.
            time.sleep(min(max((time.monotonic() - started) / 50, _MIN_POLL_S), _MAX_POLL_S))
        return None if status == _DONE else f"Mooncake failed to read {size} bytes from {self._session}"


def _require(code: int, what: str) -> None:
    if code != 0:
        raise TransportError(f"Mooncake refused to {what} (code {code})")


def _variables(host: str, protocol: str) -> dict[str, str]:
    """Return what Mooncake takes from the environment alone, most of it when it is imported, once for all."""
    variables = {"MC_LOG_LEVEL": "ERROR"}
    if is_ipv6(host):
        variables["MC_USE_IPV6"] = "1"
    if protocol == "tcp":
        # Otherwise it takes RDMA wherever there is a device, whatever protocol was named.
        variables["MC_FORCE_TCP"] = "1"
    return variables


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, but those that are set already, for a while."""
    with _environment_lock:
        added = [name for name in variables if name not in os.environ]
        os.environ.update({name: variables[name] for name in added})
        try:
            yield
        finally:
            for name in added:
                del os.environ[name]


def _require_rdma(api: Any, device_name: str) -> None:
    # Without a device Mooncake would silently take TCP.
    if "MC_FORCE_TCP" in os.environ:
        raise ConfigurationError("protocol: rdma, and MC_FORCE_TCP is set: unset it, or write protocol: tcp")
    devices = json.loads(api.TransferEngine().get_local_topology(device_name) or "{}")
    if not any(names for kinds in devices.values() for names in kinds):
        named = f"an RDMA device named {device_name}" if device_name else "an RDMA device"
        raise ConfigurationError(f"protocol: rdma needs {named}, and there is none: write protocol: tcp")


_POOL: Pool[MooncakeSession] = Pool()


def borrow_session(host: str, protocol: str, device_name: str) -> MooncakeSession:
    """Take an idle session of this process, or make one."""
    key = (host, protocol, device_name)
    return _POOL.take(key, lambda: MooncakeSession(host, protocol, device_name))


def return_session(session: MooncakeSession, host: str, protocol: str, device_name: str) -> None:
    """Give a session that is in order, and has no memory, back for the next engine of this process."""
    _POOL.give((host, protocol, device_name), session)
