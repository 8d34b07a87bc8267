"""The NIXL checkpoint engine: receivers read the senders' buckets one-sidedly.

A sender fills a registered buffer and names it on the control channel; the receiver reads it into a
registered buffer of its own and says so. NIXL moves the bytes with what it finds between the two: RDMA,
CUDA IPC, a copy by the kernel within one host, or TCP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


class NixlTransport(BucketTransport):
    """Buckets through NIXL reads.

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
        self._ticker = ProgressTicker(self._agent)
        self._buffers: list[torch.Tensor] = []
        self._registrations: list[Any] = []
        self._peer_metadata: bytes | None = None
        self._peer_name: str | None = None
        self._peer_regions: list[MemoryRegion] = []

    def allocate(self, bucket_size: int) -> list[torch.Tensor]:
        """Make and register two buffers."""
        if self._agent is None:
            self._agent = borrow_agent(self._backend_name, self._params)
            self._ticker = ProgressTicker(self._agent)
        buffers = [allocate_bucket(bucket_size, self._device) for _ in range(SLOTS)]
        for buffer in buffers:
            # One by one, so that what a failure leaves behind is known to `release`.
            self._registrations.append(self._agent.register(buffer))
            self._buffers.append(buffer)
        return self._buffers

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
        """Take the peer's metadata; the connection is made by the first refit.

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
            self._peer_regions = [MemoryRegion.from_list(slot) for slot in peer["slots"]]
            self._peer_metadata = bytes(peer["metadata"])
            self._peer_name = self._require_agent().add_peer(self._peer_metadata)
        except (KeyError, TypeError, ValueError, TransportError) as error:
            self.disconnect()
            raise ConfigurationError(f"the peer's NIXL metadata are damaged: {error}") from error

    def open(self, *, sending: bool) -> None:
        """Load the peer's metadata again, if the last refit dropped the connection."""
        agent = self._require_agent()
        if self._peer_metadata is None:
            raise LifecycleError("NIXL has no peer: join the process group first")
        if self._peer_name is None:
            self._peer_name = agent.add_peer(self._peer_metadata)
        if sending:
            self._ticker.start()

    def publish(self, slot: int, nbytes: int) -> bytes:
        """Nothing to do: the receiver reads the buffer where it is."""
        return b""

    def fetch(self, bucket: Bucket, slot: int, *, timeout_s: float, check: Callable[[], None]) -> None:
        """Read a bucket from the sender's buffer into a local one."""
        if self._peer_name is None:
            raise LifecycleError("NIXL has no open refit")
        if bucket.slot >= len(self._peer_regions):
            raise ProtocolError(f"the sender named buffer {bucket.slot}, it has {len(self._peer_regions)}")
        source = self._peer_regions[bucket.slot]
        if bucket.nbytes > source.nbytes:
            raise ProtocolError(f"bucket {bucket.seq} is larger than the sender's buffer")
        self._require_agent().read(
            self._peer_name,
            source=source,
            target=MemoryRegion.of(self._buffers[slot]),
            nbytes=bucket.nbytes,
            timeout_s=timeout_s,
            check=check,
        )

    def shut(self, *, failed: bool) -> None:
        """Stop answering the peer; a connection that may be broken is dropped."""
        self._ticker.stop()
        if failed:
            self._drop_connection()

    def _drop_connection(self) -> None:
        """Keep the peer's metadata, so that the next refit connects anew."""
        if self._peer_name is not None and self._agent is not None:
            self._agent.remove_peer(self._peer_name)
        self._peer_name = None

    def disconnect(self) -> None:
        """Forget the peer."""
        self._ticker.stop()
        self._drop_connection()
        self._peer_metadata, self._peer_regions = None, []

    def release(self) -> None:
        """Disconnect, deregister and free the buffers; the agent stays with the process."""
        self.disconnect()
        agent, self._agent = self._agent, None
        if agent is None:
            return
        while self._registrations:
            agent.deregister(self._registrations.pop())
        self._buffers = []
        return_agent(agent, self._backend_name, self._params)

    def _require_agent(self) -> NixlAgent:
        if self._agent is None:
            raise LifecycleError("NIXL buffers were released: call prepare() again")
        return self._agent


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
