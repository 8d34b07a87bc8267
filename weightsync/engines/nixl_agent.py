"""The seam to the NIXL package: agents, memory, reads. Nothing else imports it.

An agent runs without NIXL's progress thread, which would keep a core busy; the side that is read from
calls `progress` instead (see `nixl_ticker`).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from weightsync.engines.nixl_memory import Descriptions, MemoryRegion
from weightsync.engines.waiting import await_ended
from weightsync.errors import (
    ConfigurationError,
    LifecycleError,
    MissingDependencyError,
    PeerLostError,
    TransportError,
)

_POLL_S = 0.0005
_TICK_S = 0.001


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


def _apart(regions: Sequence[MemoryRegion]) -> list[MemoryRegion]:
    """Join regions that overlap: NIXL crashes when it is to let go of one that it was given twice at once."""
    joined: list[MemoryRegion] = []
    for region in sorted(regions, key=lambda each: (each.device_index, each.address)):
        last = joined[-1] if joined else region
        end = last.address + last.nbytes
        if joined and last.device_index == region.device_index and region.address < end:
            end = max(end, region.address + region.nbytes)
            joined[-1] = replace(last, nbytes=end - last.address)
        else:
            joined.append(region)
    return joined


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
        """Register a contiguous buffer; returns the handle for `deregister`.

        Raises:
            TransportError: NIXL refuses it.
        """
        return self.register_all([buffer])

    def register_all(self, buffers: Sequence[torch.Tensor]) -> Any:
        """Register contiguous tensors of one device, none empty; returns one handle for `deregister`.

        Tensors may share memory, as tied weights do.

        Raises:
            TransportError: NIXL refuses them.
        """
        regions = _apart([MemoryRegion.of(buffer) for buffer in buffers])
        found = [(region.address, region.nbytes, region.device_index, "") for region in regions]
        what = f"{len(found)} pieces of memory, {sum(region.nbytes for region in regions)} bytes"
        try:
            with self._lock:
                handle = self._agent.register_memory(found, mem_type=regions[0].kind)
        except self._errors.any as error:
            raise TransportError(f"NIXL could not register {what}: {error}") from error
        if handle is None:
            raise TransportError(f"NIXL refused to register {what}")
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
