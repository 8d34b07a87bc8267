"""The seam to the NIXL package: agents, memory, reads. Nothing else imports it.

An agent runs without NIXL's progress thread, which would keep a core busy; the side that is read from
calls `progress` instead (see `ProgressTicker`).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weightsync.engines.buffers import bind_thread
from weightsync.engines.waiting import await_ended
from weightsync.errors import (
    ConfigurationError,
    DeadlineError,
    LifecycleError,
    MissingDependencyError,
    PeerLostError,
    TransportError,
)

_POLL_S = 0.0005
_TICK_S = 0.001
_JOIN_S = 5.0
_MEMORY_KINDS = ("DRAM", "VRAM")
_MOST_THREADS = 4
_PIECES_A_THREAD = 8

Descriptions = npt.NDArray[np.uint64]
"""Address, bytes and device index of pieces of memory, shape ``(pieces, 3)``."""


def import_nixl() -> Any:
    """Return NIXL's Python module.

    Raises:
        MissingDependencyError: NIXL is not installed, or one of its libraries cannot be loaded.
    """
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    try:
        from nixl import _api
    except ImportError as error:
        raise MissingDependencyError(
            f"refit_transport nixl needs the NIXL package: pip install 'weightsync[nixl]' ({error})"
        ) from error
    return _api


@dataclass(frozen=True)
class MemoryRegion:
    """A registered buffer as a peer addresses it: first byte, length, device index and memory kind."""

    address: int
    nbytes: int
    device_index: int
    kind: str
    """``"DRAM"`` or ``"VRAM"``."""

    @classmethod
    def of(cls, buffer: torch.Tensor) -> MemoryRegion:
        """Describe a contiguous buffer."""
        kind = "VRAM" if buffer.device.type == "cuda" else "DRAM"
        return cls(buffer.data_ptr(), buffer.numel() * buffer.element_size(), buffer.device.index or 0, kind)

    @classmethod
    def from_list(cls, data: list[Any]) -> MemoryRegion:
        """Read a peer's `to_list`.

        Raises:
            ValueError: it is none.
        """
        kinds = (int, int, int, str)
        if len(data) != len(kinds) or not all(map(isinstance, data, kinds)) or data[3] not in _MEMORY_KINDS:
            raise ValueError(f"{data!r:.80} does not describe a buffer")
        address, nbytes, device_index = data[:3]
        if min(address, nbytes, device_index) < 0 or max(address + nbytes, device_index) >= 2**63:
            raise ValueError(f"no buffer can be at {data!r:.80}")
        return cls(*data)

    def to_list(self) -> list[Any]:
        """Return plain data for the metadata exchange."""
        return [self.address, self.nbytes, self.device_index, self.kind]

    def part(self, nbytes: int) -> list[tuple[int, int, int]]:
        """Return NIXL's description of the first ``nbytes`` bytes."""
        return [(self.address, nbytes, self.device_index)]


class NixlRead:
    """A prepared read; see `Reading`."""

    def __init__(self, agent: NixlAgent, handle: Any) -> None:
        self._agent = agent
        self._handle: Any = handle
        self._state = "DONE"

    def start(self) -> None:
        """Begin to read.

        Raises:
            LifecycleError: it was released.
            PeerLostError, TransportError: NIXL refuses it.
        """
        self._state = self._agent.start(self._held())

    def has_ended(self) -> bool:
        """Whether everything is here.

        Raises:
            PeerLostError, TransportError: it failed.
        """
        if self._state == "PROC":
            self._state = self._agent.state(self._held())
        if self._state not in {"PROC", "DONE"}:
            raise TransportError(f"NIXL ended a read in state {self._state}")
        return self._state == "DONE"

    def release(self) -> None:
        """Let go of it, also in the middle. Idempotent."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._agent.release(handle)

    @property
    def is_released(self) -> bool:
        """Whether it can be started no more."""
        return self._handle is None

    def _held(self) -> Any:
        if self._handle is None:
            raise LifecycleError("this read was released: its connection was dropped")
        return self._handle


class NixlAgent:
    """One NIXL agent with one backend. Every call is serialised: NIXL agents are not thread-safe."""

    def __init__(self, backend_name: str, init_params: Mapping[str, str]) -> None:
        api = import_nixl()
        self.name = f"preinit-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self._errors = _NixlErrors.load()
        self._lock = threading.Lock()
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
        try:
            self._agent = api.nixl_agent(self.name, config)
            self._agent.create_backend(backend_name, dict(init_params))
        except self._errors.any as error:
            raise ConfigurationError(
                f"NIXL could not make its {backend_name} backend with {dict(init_params)}: {error}; "
                f"check backend_name and backend_init_params"
            ) from error

    def register(self, buffer: torch.Tensor) -> Any:
        """Register a contiguous buffer; returns the handle for `deregister`."""
        with self._lock:
            handle = self._agent.register_memory([buffer])
        if handle is None:
            raise TransportError("NIXL refused to register a transfer buffer")
        return handle

    def register_all(self, buffers: Sequence[torch.Tensor]) -> Any:
        """Register contiguous tensors of one device, none empty; returns one handle for `deregister`."""
        with self._lock:
            handle = self._agent.register_memory(list(buffers))
        if handle is None:
            raise TransportError(f"NIXL refused to register {len(buffers)} tensors")
        return handle

    def deregister(self, handle: Any) -> None:
        """Undo `register`."""
        with self._lock:
            self._agent.deregister_memory(handle)

    def metadata(self) -> bytes:
        """Return what a peer needs to reach this agent and the memory registered up to now."""
        with self._lock:
            return bytes(self._agent.get_agent_metadata())

    def metadata_of(self, handle: Any) -> bytes:
        """Return what a peer that knows this agent needs besides to reach one buffer, by its handle."""
        with self._lock:
            return bytes(self._agent.get_partial_agent_metadata(handle))

    def add_peer(self, metadata: bytes) -> str:
        """Learn a peer from its `metadata`, or more of it from its `metadata_of`; returns its name.

        Raises:
            TransportError: the metadata are not NIXL's, or of another version.
        """
        with self._lock:
            try:
                name = self._agent.add_remote_agent(metadata)
            except self._errors.any as error:
                raise TransportError(f"NIXL did not accept the peer's metadata: {error}") from error
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove_peer(self, name: str) -> None:
        """Forget a peer and drop its connection; unknown peers are ignored."""
        # A peer that is already gone is what was asked for.
        with self._lock, contextlib.suppress(*self._errors.any):
            self._agent.remove_remote_agent(name)

    def progress(self) -> None:
        """Let NIXL answer its peers: connection set-up, and reads that the target has to serve.

        A connection that broke is no error here: the control channel tells of the peer's end.
        """
        with self._lock, contextlib.suppress(*self._errors.any):
            self._agent.get_new_notifs()

    def progress_for(self, seconds: float) -> None:
        """Call `progress` for a while."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.progress()
            time.sleep(_TICK_S)

    def read(
        self,
        peer: str,
        *,
        source: MemoryRegion,
        target: MemoryRegion,
        nbytes: int,
        timeout_s: float,
        check: Callable[[], None],
    ) -> None:
        """Copy the first ``nbytes`` bytes of a peer's buffer into a local one; returns when they are here.

        Args:
            peer: name from `add_peer`.
            source: the peer's buffer.
            target: the local buffer.
            nbytes: at least 1.
            timeout_s: seconds after which the transfer is given up.
            check: called while waiting; raises to give up early (the peer aborted or was lost).

        Raises:
            PeerLostError: the peer is gone.
            DeadlineError: the transfer did not end in time.
            TransportError: NIXL refused or failed the transfer.
        """
        try:
            handle = self._start_read(peer, source, target, nbytes)
            try:
                self._await_read(handle, nbytes, timeout_s, check)
            finally:
                with self._lock:
                    handle.release()
        except self._errors.disconnected as error:
            raise PeerLostError(f"NIXL lost the connection: {error}") from error
        except self._errors.any as error:
            raise TransportError(f"NIXL could not read {nbytes} bytes: {error}") from error

    def prepare_read(
        self, peer: str, source: Descriptions, target: Descriptions, kinds: tuple[str, str]
    ) -> NixlRead:
        """Prepare a read of many pieces of a peer's memory, to be started as often as is wanted.

        Args:
            peer: name from `add_peer`.
            source: address, bytes and device index of each piece, shape ``(pieces, 3)``.
            target: likewise where it goes.
            kinds: of memory, of source and target.

        Raises:
            TransportError: NIXL refuses it: a piece is not in registered memory.
        """
        with self._lock:
            try:
                local = self._agent.get_xfer_descs(target, mem_type=kinds[1])
                remote = self._agent.get_xfer_descs(source, mem_type=kinds[0])
                handle = self._agent.initialize_xfer("READ", local, remote, peer)
            except self._errors.any as error:
                raise TransportError(f"NIXL cannot read {len(source)} pieces: {error}") from error
        return NixlRead(self, handle)

    def start(self, handle: Any) -> str:
        """Start a prepared transfer; returns NIXL's state."""
        return self._ask(lambda: self._agent.transfer(handle))

    def state(self, handle: Any) -> str:
        """Return NIXL's state of a started transfer."""
        return self._ask(lambda: self._agent.check_xfer_state(handle))

    def release(self, handle: Any) -> None:
        """Let go of a prepared transfer."""
        # One whose peer was dropped is gone with it.
        with self._lock, contextlib.suppress(*self._errors.any):
            handle.release()

    def _ask(self, call: Callable[[], Any]) -> str:
        try:
            with self._lock:
                return str(call())
        except self._errors.disconnected as error:
            raise PeerLostError(f"NIXL lost the connection: {error}") from error
        except self._errors.any as error:
            raise TransportError(f"NIXL could not read: {error}") from error

    def _start_read(self, peer: str, source: MemoryRegion, target: MemoryRegion, nbytes: int) -> Any:
        with self._lock:
            local = self._agent.get_xfer_descs(target.part(nbytes), mem_type=target.kind)
            remote = self._agent.get_xfer_descs(source.part(nbytes), mem_type=source.kind)
            return self._agent.initialize_xfer("READ", local, remote, peer)

    def _await_read(self, handle: Any, nbytes: int, timeout_s: float, check: Callable[[], None]) -> None:
        with self._lock:
            state = self._agent.transfer(handle)

        def has_ended() -> bool:
            nonlocal state
            if state == "PROC":
                with self._lock:
                    state = self._agent.check_xfer_state(handle)
            return bool(state != "PROC")

        what = f"a read of {nbytes} bytes"
        await_ended(has_ended, timeout_s=timeout_s, check=check, what=what, pauses_s=(_POLL_S, _POLL_S))
        if state != "DONE":
            raise TransportError(f"NIXL ended a read of {nbytes} bytes in state {state}")


@dataclass(frozen=True)
class _NixlErrors:
    """NIXL's exceptions: the one for a lost peer, and all of them."""

    disconnected: type[Exception]
    any: tuple[type[Exception], ...]

    @classmethod
    def load(cls) -> _NixlErrors:
        bindings = import_nixl().nixlBind
        known = tuple(
            value
            for name, value in vars(bindings).items()
            if name.startswith("nixl") and isinstance(value, type) and issubclass(value, Exception)
        )
        return cls(bindings.nixlRemoteDisconnectError, known)


class ProgressTicker:
    """Calls `NixlAgent.progress` every millisecond while open, from a thread of its own.

    ``device`` is that of the buffers which are read.
    """

    def __init__(self, agent: NixlAgent, device: torch.device) -> None:
        self._agent = agent
        self._device = device
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin ticking; no-op while it ticks.

        Raises:
            DeadlineError: the thread of an earlier `stop` still hangs in NIXL.
        """
        if self._stop.is_set():
            self.stop()
        if self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, name="weightsync-nixl-progress", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End ticking and wait for the thread.

        Raises:
            DeadlineError: it hangs in NIXL.
        """
        if self._thread is not None:
            self._stop.set()
            self._thread.join(_JOIN_S)
            if self._thread.is_alive():
                raise DeadlineError(
                    f"NIXL did not return within {_JOIN_S:g} s: close this engine and make a new one",
                    phase="progress",
                )
            self._thread = None

    def _run(self) -> None:
        bind_thread(self._device)
        while not self._stop.wait(_TICK_S):
            self._agent.progress()


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
