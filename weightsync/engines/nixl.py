"""The NIXL checkpoint engine: receivers read the senders' buckets one-sidedly.

A sender fills a registered buffer and names it on the control channel; the receiver reads it into a
registered buffer of its own and says so. NIXL moves the bytes with what it finds between the two: RDMA,
CUDA IPC, a copy by the kernel within one host, or TCP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from weightsync.control import Bucket
from weightsync.engines.bucketed import BucketedCheckpointEngine
from weightsync.engines.buffers import allocate_bucket, require_device
from weightsync.engines.nixl_agent import MemoryRegion, NixlAgent, ProgressTicker, backend_params
from weightsync.engines.nixl_pool import borrow_agent, preinit_nixl_agent, return_agent
from weightsync.engines.transport import SLOTS, BucketTransport
from weightsync.errors import ConfigurationError, LifecycleError, ProtocolError, TransportError

__all__ = ["NIXLCheckpointEngine", "preinit_nixl_agent"]

_DRAIN_S = 0.02


class NixlTransport(BucketTransport):
    """Buckets through NIXL reads.

    A connection to a peer that lives is kept for as long as that peer is the same, over sessions and over a
    release of the buffers: UCX does not close the socket of a connection that is dropped and made again.

    Args:
        device: of the transfer buffers.
        backend_name: NIXL backend.
        params: the backend's parameters, strings.
    """

    def __init__(self, device: torch.device, backend_name: str, params: Mapping[str, str]) -> None:
        self._device = device
        self._backend_name = backend_name
        self._params = params
        self._agent: NixlAgent | None = borrow_agent(backend_name, params)
        self._ticker = ProgressTicker(self._agent, device)
        self._buffers: list[torch.Tensor] = []
        self._registrations: list[Any] = []
        self._peer: _Peer | None = None
        self._connected: str | None = None
        """Name of the agent that NIXL holds a connection to."""
        self._known: bytes | None = None
        """The metadata that it holds of that agent."""
        self._broken = False

    def allocate(self, bucket_size: int) -> list[torch.Tensor]:
        """Make and register two buffers."""
        agent = self._require_agent()
        buffers = [allocate_bucket(bucket_size, self._device) for _ in range(SLOTS)]
        for buffer in buffers:
            # One by one, so that what a failure leaves behind is known to `release`.
            self._registrations.append(agent.register(buffer))
            self._buffers.append(buffer)
        return list(self._buffers)

    def describe(self) -> dict[str, Any]:
        """Return the agent's metadata and the buffers' addresses."""
        agent = self._require_agent()
        return {
            "agent": agent.name,
            "backend": self._backend_name,
            "metadata": agent.metadata(),
            "slots": [MemoryRegion.of(buffer).to_list() for buffer in self._buffers],
        }

    def connect(self, peer: dict[str, Any]) -> None:
        """Take the peer's metadata; the connection is made by the first read.

        Raises:
            ConfigurationError: the peer uses another NIXL backend, or its metadata are damaged.
        """
        if peer.get("backend") != self._backend_name:
            raise ConfigurationError(
                f"the peer uses NIXL backend {peer.get('backend')}, this worker {self._backend_name}: "
                f"set backend_name alike on both sides"
            )
        self.disconnect()
        try:
            self._peer = _Peer.read(peer)
            self._connect(self._peer)
        except (TypeError, ValueError, TransportError) as error:
            self._peer = None
            raise ConfigurationError(f"the peer's NIXL metadata are damaged: {error}") from error

    def open(self, *, sending: bool) -> None:
        """Connect again, if the last refit broke the connection."""
        if self._peer is None:
            raise LifecycleError("NIXL has no peer: join the process group first")
        if self._connected is None:
            self._connect(self._peer)
        if sending:
            self._ticker.start()

    def publish(self, slot: int, nbytes: int) -> bytes:
        """Nothing to do: the receiver reads the buffer where it is."""
        return b""

    def fetch(self, bucket: Bucket, slot: int, *, timeout_s: float, check: Callable[[], None]) -> None:
        """Read a bucket from the sender's buffer into a local one."""
        if self._peer is None or self._connected is None:
            raise LifecycleError("NIXL has no open refit")
        if bucket.slot >= len(self._peer.slots):
            raise ProtocolError(f"the sender named buffer {bucket.slot}, it has {len(self._peer.slots)}")
        source = self._peer.slots[bucket.slot]
        if bucket.nbytes > source.nbytes:
            raise ProtocolError(f"bucket {bucket.seq} is larger than the sender's buffer")
        try:
            self._require_agent().read(
                self._connected,
                source=source,
                target=MemoryRegion.of(self._buffers[slot]),
                nbytes=bucket.nbytes,
                timeout_s=timeout_s,
                check=check,
            )
        except BaseException:
            # What is under way may still arrive, into a buffer that is the next refit's by then.
            self._broken = True
            raise

    def shut(self) -> None:
        """Stop answering the peer; a connection that a read has broken is dropped."""
        self._ticker.stop()
        if self._broken:
            self._drop_connection()

    def disconnect(self) -> None:
        """Leave the peer; the connection waits for its return."""
        self._ticker.stop()
        self._peer = None

    def release(self) -> None:
        """Disconnect, deregister and free the buffers; agent and connection stay."""
        self.disconnect()
        if self._agent is None or not self._registrations:
            return
        # A read that its initiator gave up may still be on its way here, and is served from these buffers.
        self._agent.progress_for(_DRAIN_S)
        while self._registrations:
            self._agent.deregister(self._registrations.pop())
        self._buffers = []

    def close(self) -> None:
        """Release, drop the connection, and give the agent back to the process."""
        try:
            self.release()
        finally:
            self._drop_connection()
        agent, self._agent = self._agent, None
        if agent is not None:
            return_agent(agent, self._backend_name, self._params)

    def _connect(self, peer: _Peer) -> None:
        if self._connected not in {None, peer.agent}:
            self._drop_connection()
        self._connected, self._known = self._learn(peer), peer.metadata
        if self._connected != peer.agent:
            self._drop_connection()
            raise ValueError("they are another agent's")

    def _learn(self, peer: _Peer) -> str:
        agent = self._require_agent()
        try:
            return agent.add_peer(peer.metadata)
        except TransportError:
            if self._known in {None, peer.metadata}:
                raise
        # NIXL refuses an address whose key has changed: a buffer that was registered anew for RDMA. Only then
        # is the connection given up: without RDMA new buffers are accepted, and each new connection costs a
        # socket that UCX does not close.
        self._drop_connection()
        return agent.add_peer(peer.metadata)

    def _drop_connection(self) -> None:
        if self._connected is not None and self._agent is not None:
            self._agent.remove_peer(self._connected)
        self._connected, self._known, self._broken = None, None, False

    def _require_agent(self) -> NixlAgent:
        if self._agent is None:
            raise LifecycleError("this NIXL transport is closed")
        return self._agent


@dataclass(frozen=True)
class _Peer:
    """What a peer's `NixlTransport.describe` says."""

    agent: str
    metadata: bytes
    slots: list[MemoryRegion]

    @classmethod
    def read(cls, data: dict[str, Any]) -> _Peer:
        absent = [name for name in ("agent", "metadata", "slots") if name not in data]
        if absent:
            raise ValueError(f"they lack {', '.join(absent)}")
        return cls(
            str(data["agent"]),
            bytes(data["metadata"]),
            [MemoryRegion.from_list(slot) for slot in data["slots"]],
        )


class NIXLCheckpointEngine(BucketedCheckpointEngine):
    """Policy rank *i* to rollout rank *i* through NIXL, staged in two registered buffers on each side.

    Args:
        bucket_size: bytes of each of the two transfer buffers, at least 1 MiB.
        device: ``"cuda"`` or ``"cpu"``: where the buffers are.
        backend_name: NIXL backend.
        backend_init_params: its parameters; values are turned into strings. For UCX,
            ``ucx_error_handling_mode: peer`` is the default, so that a lost peer is an error, not a hang.
        release_after_refit: free the buffers in `finalize`; the next `prepare` makes new ones.
        shard_expert_weights: must be false in this version.
        common: keywords of `BucketedCheckpointEngine`.
    """

    transport_name = "nixl"

    def __init__(
        self,
        bucket_size: int,
        *,
        device: str = "cuda",
        backend_name: str = "UCX",
        backend_init_params: Mapping[str, Any] | None = None,
        release_after_refit: bool = False,
        shard_expert_weights: bool = False,
        connect_s: float = 60.0,
        stall_s: float = 300.0,
        total_s: float = 3600.0,
        silence_s: float = 15.0,
        verify: str = "full",
        poison_released: bool = False,
        bind_host: str | None = None,
        advertise_host: str | None = None,
    ) -> None:
        super().__init__(
            bucket_size,
            connect_s=connect_s,
            stall_s=stall_s,
            total_s=total_s,
            silence_s=silence_s,
            verify=verify,
            poison_released=poison_released,
            bind_host=bind_host,
            advertise_host=advertise_host,
        )
        if shard_expert_weights:
            raise ConfigurationError("shard_expert_weights is not available in this version: set it to false")
        self._device = require_device(device)
        self._backend_name = backend_name
        self._params = backend_params(backend_name, backend_init_params)
        self._release_after_refit = release_after_refit

    def make_transport(self) -> BucketTransport:
        """Borrow the process's NIXL agent."""
        return NixlTransport(self._device, self._backend_name, self._params)

    def _after_refit(self) -> None:
        """With ``release_after_refit``, drop the peers and free the buffers."""
        if self._release_after_refit:
            self._release()
