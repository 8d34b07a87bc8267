"""The NIXL checkpoint engine: receivers read the senders' buckets one-sidedly.

A sender fills a registered buffer and names it on the control channel; the receivers read it into a
registered buffer of their own and say so. NIXL moves the bytes with what it finds between the two: RDMA,
CUDA IPC, a copy by the kernel within one host, or TCP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from weightsync.control import Bucket
from weightsync.engines.buffers import require_device
from weightsync.engines.descriptions import read_payload, require_fits, write_payload
from weightsync.engines.nixl_agent import NixlAgent, NixlRead
from weightsync.engines.nixl_memory import Descriptions, MemoryRegion
from weightsync.engines.nixl_params import backend_params, reading_threads
from weightsync.engines.nixl_peers import LaterBuffer, NixlPeers
from weightsync.engines.nixl_pool import borrow_agent, preinit_nixl_agent, return_agent
from weightsync.engines.nixl_ticker import ProgressTicker
from weightsync.engines.regions.engine import RegionEngine
from weightsync.engines.regions.reading import Spans
from weightsync.engines.staged import StagedTransport
from weightsync.engines.transport import SLOTS, BucketTransport, Check, Place
from weightsync.errors import LifecycleError, ProtocolError
from weightsync.layout.regions import Ints
from weightsync.topology import RankId

__all__ = ["NIXLCheckpointEngine", "preinit_nixl_agent"]

_DRAIN_S = 0.02
_PIECE_BYTES = 4 << 20


class NixlTransport(StagedTransport):
    """Buckets through NIXL reads.

    Args:
        device: of the transfer buffers.
        backend_name: NIXL backend.
        params: the backend's parameters, strings.
    """

    def __init__(self, device: torch.device, backend_name: str, params: Mapping[str, str]) -> None:
        super().__init__(device)
        self._backend_name = backend_name
        self._params = params
        self._agent: NixlAgent | None = borrow_agent(backend_name, params)
        self._ticker = ProgressTicker(self._agent, device)
        self._peers = NixlPeers(self._agent, backend_name)
        self._was_open = False
        self._registrations: list[Any] = []
        self._lent: Any = None
        self._lent_memory: list[torch.Tensor] = []
        self._reads: list[NixlRead] = []

    def register(self, buffer: torch.Tensor) -> None:
        """Register it with the agent."""
        self._registrations.append(self._require_agent().register(buffer))

    def describe(self) -> dict[str, Any]:
        """Return the agent's metadata and the buffers' addresses."""
        agent = self._require_agent()
        return {
            "agent": agent.name,
            "backend": self._backend_name,
            "metadata": agent.metadata(),
            "slots": [MemoryRegion.of(buffer).to_list() for buffer in self._buffers[:SLOTS]],
        }

    def connect(self, place: Place) -> None:
        """Take the sources' metadata; a connection is made by the first read.

        Raises:
            ConfigurationError: a peer uses another NIXL backend, or its metadata are damaged.
        """
        self._require_agent()
        self._release_reads()
        self._peers.meet(place.sources)

    def open(self, *, sending: bool, timeout_s: float, check: Check) -> None:
        """Connect again where the last refit broke a connection; answer readers, if it sends."""
        self._require_agent()
        self._was_open = True
        self._peers.reconnect()
        if sending:
            self._ticker.start()

    def publish(self, slot: int, nbytes: int) -> bytes:
        """Nothing to do: the receivers read the buffer where it is. Tells where, of one made by `extend`."""
        if slot < SLOTS:
            return b""
        key = self._require_agent().metadata_of(self._registrations[slot])
        return write_payload(LaterBuffer.of(MemoryRegion.of(self._buffers[slot]), key))

    def fetch(
        self, source: RankId, bucket: Bucket, slot: int, *, timeout_s: float, check: Check
    ) -> torch.Tensor:
        """Read a bucket from the sender's buffer into a local one."""
        peer = self._peers.connected(source)
        if bucket.slot < len(peer.slots):
            region = peer.slots[bucket.slot]
        else:
            region = self._peers.learn_buffer(source, read_payload(bucket, LaterBuffer))
        require_fits(bucket, region.nbytes)
        target = self._buffers[slot]
        try:
            self._require_agent().read(
                peer.agent,
                source=region,
                target=MemoryRegion.of(target),
                nbytes=bucket.nbytes,
                timeout_s=timeout_s,
                check=check,
            )
        except BaseException:
            # What is under way may still arrive, into a buffer that is the next refit's by then.
            self._peers.break_off(source)
            raise
        return target[: bucket.nbytes]

    def lend(self, memory: Sequence[torch.Tensor]) -> None:
        """Register other memory beside the buffers, in place of what was lent before."""
        if [_span(each) for each in memory] == [_span(each) for each in self._lent_memory]:
            return
        self._release_reads()
        agent = self._require_agent()
        lent, self._lent = self._lent, None
        if lent is not None:
            agent.progress_for(_DRAIN_S)  # as in `release`
            agent.deregister(lent)
        self._lent_memory = []
        if memory:
            self._lent = agent.register_all(memory)
            # Kept: what is registered must not be freed, or other memory could come to be at its address.
            self._lent_memory = list(memory)

    def keys(self) -> bytes:
        """Return the agent's metadata: of all that is registered now."""
        return self._require_agent().metadata()

    def learn_keys(self, who: RankId, keys: bytes) -> None:
        """Learn what a peer has registered since it was met."""
        if not self._peers.knows(who, keys):
            self._release_reads()
            self._peers.refresh(who, keys)

    def buffer_of(self, who: RankId, slot: int) -> tuple[int, int]:
        """Return address and bytes of a peer's buffer.

        Raises:
            ProtocolError: it has none of that number.
        """
        slots = self._peers.connected(who).slots
        if slot >= len(slots):
            raise ProtocolError(f"{who} has no buffer {slot}")
        return slots[slot].address, slots[slot].nbytes

    def break_off(self, who: RankId) -> None:
        """Drop the connection to a peer at the end of this refit."""
        self._peers.break_off(who)

    def prepare_read(self, who: RankId, spans: Spans) -> NixlRead:
        """Prepare a read of a peer's lent memory, or of its buffers."""
        peer = self._peers.connected(who)
        if "num_threads" in self._params:
            spans = spans.cut(_PIECE_BYTES)  # NIXL divides pieces among its threads by number
        here, there = MemoryRegion.of(self._buffers[0]), peer.slots[0]
        source = _descriptions(spans.remote, spans.nbytes, there.device_index)
        target = _descriptions(spans.local, spans.nbytes, here.device_index)
        read = self._require_agent().prepare_read(peer.agent, source, target, (there.kind, here.kind))
        self._reads.append(read)
        return read

    def _release_reads(self) -> None:
        """Let go of prepared reads, which refer to connections and registrations that are about to go."""
        while self._reads:
            self._reads.pop().release()

    def shut(self) -> None:
        """Stop answering; a connection that a read has broken is dropped."""
        self._ticker.stop()
        if self._peers.any_broken:
            self._release_reads()
        self._peers.drop_broken()

    def disconnect(self) -> None:
        """Leave the peers; the connections wait for their return."""
        self._ticker.stop()
        self._release_reads()
        self._peers.leave()

    def release(self) -> None:
        """Disconnect, deregister and free the buffers; agent and connections stay."""
        self.disconnect()
        if self._agent is None:
            return
        self.lend(())
        if not self._registrations:
            return
        # A read that its initiator gave up may still be on its way here, and is served from these buffers.
        self._agent.progress_for(_DRAIN_S)
        while self._registrations:
            self._agent.deregister(self._registrations.pop())
        self._buffers = []

    def close(self) -> None:
        """Release and drop the connections; an agent that had none is given back to the process."""
        try:
            self.release()
        finally:
            self._peers.drop_all()
        agent, self._agent = self._agent, None
        # UCX closes the sockets of an agent's connections, its readers' too, only together with the agent.
        if agent is not None and not self._was_open:
            return_agent(agent, self._backend_name, self._params)

    def _require_agent(self) -> NixlAgent:
        if self._agent is None:
            raise LifecycleError("this NIXL transport is closed")
        return self._agent


def _span(memory: torch.Tensor) -> tuple[int, int]:
    return memory.data_ptr(), memory.nbytes


def _descriptions(addresses: Ints, nbytes: Ints, device_index: int) -> Descriptions:
    found = np.empty((len(addresses), 3), np.uint64)
    found[:, 0], found[:, 1], found[:, 2] = addresses, nbytes, device_index
    return found


class NIXLCheckpointEngine(RegionEngine):
    """Through NIXL: regions from parameter to parameter, and the rest in two registered buffers on each side.

    Args:
        bucket_size: bytes of each of the two transfer buffers, at least 1 MiB.
        device: ``"cuda"`` or ``"cpu"``: where the buffers are.
        backend_name: NIXL backend.
        backend_init_params: its parameters; values are turned into strings. For UCX,
            ``ucx_error_handling_mode: peer`` is the default, so that a lost peer is an error, not a hang.
        common: keywords of `RegionEngine`.
    """

    transport_name = "nixl"
    topologies = ("pairs", "star", "ring", "tree", "stripes")

    def __init__(
        self,
        bucket_size: int,
        *,
        device: str = "cuda",
        backend_name: str = "UCX",
        backend_init_params: Mapping[str, Any] | None = None,
        **common: Any,
    ) -> None:
        super().__init__(bucket_size, **common)
        self._device = require_device(device)
        self._backend_name = backend_name
        threads = reading_threads(device, self.shard_weights)
        self._params = backend_params(backend_name, backend_init_params, threads=threads)

    def make_transport(self) -> BucketTransport:
        """Borrow the process's NIXL agent."""
        return NixlTransport(self._device, self._backend_name, self._params)
