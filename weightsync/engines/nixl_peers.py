"""The peers that a NIXL agent reads from, and its connections to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from weightsync.engines.descriptions import require_alike
from weightsync.engines.nixl_agent import NixlAgent
from weightsync.engines.nixl_memory import MemoryRegion
from weightsync.engines.transport import Peer
from weightsync.errors import ConfigurationError, LifecycleError, ProtocolError, TransportError
from weightsync.topology import RankId


@dataclass(frozen=True)
class NixlPeer:
    """What a peer's `NixlTransport.describe` says."""

    agent: str
    metadata: bytes
    slots: list[MemoryRegion]

    @classmethod
    def read(cls, data: dict[str, Any]) -> NixlPeer:
        """Take a description apart.

        Raises:
            TypeError, ValueError: it is damaged.
        """
        absent = [name for name in ("agent", "metadata", "slots") if name not in data]
        if absent:
            raise ValueError(f"they lack {', '.join(absent)}")
        return cls(
            str(data["agent"]),
            bytes(data["metadata"]),
            [MemoryRegion.from_list(slot) for slot in data["slots"]],
        )


class LaterBuffer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A buffer that was registered after its owner was described: where it is, and NIXL's key to it."""

    region: tuple[int, int, int, str]
    metadata: bytes

    @classmethod
    def of(cls, region: MemoryRegion, metadata: bytes) -> LaterBuffer:
        """Describe a buffer; ``metadata`` are `NixlAgent.metadata_of` it."""
        return cls((region.address, region.nbytes, region.device_index, region.kind), metadata)


class NixlPeers:
    """Peers by rank, and connections by agent.

    A connection to a peer that lives is kept for as long as that peer is the same, over sessions and over a
    release of the buffers: UCX does not close the socket of a connection that is dropped and made again.

    Args:
        agent: whose connections they are.
        backend_name: NIXL backend, which peers must use, too.
    """

    def __init__(self, agent: NixlAgent, backend_name: str) -> None:
        self._agent = agent
        self._backend_name = backend_name
        self._peers: dict[RankId, NixlPeer] = {}
        self._known: dict[str, bytes] = {}
        """The metadata that NIXL holds of each agent that it is connected to."""
        self._broken: set[str] = set()
        self._later: dict[str, dict[int, bytes]] = {}
        """Of each agent: the keys of the buffers that it has registered since it was met, by address."""

    def meet(self, peers: Sequence[Peer]) -> None:
        """Take other peers in place of the present ones; connections to agents that are not among them end.

        Raises:
            ConfigurationError: a peer uses another NIXL backend, or its metadata are damaged.
        """
        self.leave()
        for peer in peers:
            self._peers[peer.who] = self._read(peer)
        wanted = {peer.agent for peer in self._peers.values()}
        for agent in [agent for agent in self._known if agent not in wanted]:
            self._drop(agent)
        for who, known in self._peers.items():
            try:
                self._connect(known)
            except (ValueError, TransportError) as error:
                self._peers = {}
                raise ConfigurationError(f"the NIXL metadata of {who} are damaged: {error}") from error

    def reconnect(self) -> None:
        """Connect to the peers whose connection was dropped.

        Raises:
            TransportError: NIXL refuses it.
        """
        for peer in self._peers.values():
            if peer.agent not in self._known:
                self._connect(peer)

    def connected(self, who: RankId) -> NixlPeer:
        """Return a peer that there is a connection to.

        Raises:
            LifecycleError: there is none.
        """
        peer = self._peers.get(who)
        if peer is None or peer.agent not in self._known:
            raise LifecycleError(f"NIXL has no open refit with {who}")
        return peer

    def learn_buffer(self, who: RankId, buffer: LaterBuffer) -> MemoryRegion:
        """Return where a peer's buffer is that it has registered since it was met.

        Raises:
            LifecycleError: there is no connection to that peer.
            ProtocolError: what it says of the buffer is damaged.
            TransportError: NIXL refuses it.
        """
        peer = self.connected(who)
        try:
            region = MemoryRegion.from_list(list(buffer.region))
        except ValueError as error:
            raise ProtocolError(f"{who} names a buffer that cannot be: {error}") from error
        if self._later.get(peer.agent, {}).get(region.address) != buffer.metadata:
            try:
                named = self._agent.add_peer(buffer.metadata)
            except TransportError:
                # As in `_learn`: another buffer at the same address.
                self._drop(peer.agent)
                self._connect(peer)
                named = self._agent.add_peer(buffer.metadata)
            if named != peer.agent:
                self._drop(named)
                raise ProtocolError(f"{who} told of a buffer of another NIXL agent than its own")
            self._later.setdefault(peer.agent, {})[region.address] = buffer.metadata
        return region

    def knows(self, who: RankId, metadata: bytes) -> bool:
        """Whether these are the metadata that NIXL holds of a peer.

        Raises:
            LifecycleError: there is no connection to that peer.
        """
        return self._known[self.connected(who).agent] == metadata

    def refresh(self, who: RankId, metadata: bytes) -> None:
        """Learn what a peer has registered since it was met.

        Raises:
            LifecycleError: there is no connection to that peer.
            ProtocolError: the metadata are another agent's.
            TransportError: NIXL refuses them.
        """
        peer = self.connected(who)
        try:
            named = self._agent.add_peer(metadata)
        except TransportError:
            self._drop(peer.agent)  # as in `_learn`: another buffer at the same address
            named = self._agent.add_peer(metadata)
        if named != peer.agent:
            self._drop(named)
            raise ProtocolError(f"{who} told of the memory of another NIXL agent than its own")
        self._known[peer.agent] = metadata

    def break_off(self, who: RankId) -> None:
        """Drop the connection to a peer at the end of this refit."""
        self._broken.add(self._peers[who].agent)

    @property
    def any_broken(self) -> bool:
        """Whether `drop_broken` will drop any."""
        return bool(self._broken)

    def drop_broken(self) -> None:
        """Drop the connections that were broken off."""
        for agent in list(self._broken):
            self._drop(agent)

    def leave(self) -> None:
        """Forget the peers; the connections wait for their return."""
        self._peers = {}

    def drop_all(self) -> None:
        """Forget the peers, and drop all connections."""
        self.leave()
        for agent in list(self._known):
            self._drop(agent)

    def _read(self, peer: Peer) -> NixlPeer:
        require_alike(peer, "backend_name", peer.transport.get("backend"), self._backend_name)
        try:
            return NixlPeer.read(peer.transport)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"the NIXL metadata of {peer.who} are damaged: {error}") from error

    def _connect(self, peer: NixlPeer) -> None:
        named = self._learn(peer)
        if named != peer.agent:
            self._agent.remove_peer(named)
            raise ValueError("they are another agent's")
        self._known[peer.agent] = peer.metadata

    def _learn(self, peer: NixlPeer) -> str:
        try:
            return self._agent.add_peer(peer.metadata)
        except TransportError:
            if self._known.get(peer.agent) in {None, peer.metadata}:
                raise
        # NIXL refuses an address whose key has changed: a buffer that was registered anew for RDMA. Only then
        # is the connection given up: without RDMA new buffers are accepted, and each new connection costs a
        # socket that UCX does not close.
        self._drop(peer.agent)
        return self._agent.add_peer(peer.metadata)

    def _drop(self, agent: str) -> None:
        if self._known.pop(agent, None) is not None:
            self._agent.remove_peer(agent)
        self._broken.discard(agent)
        self._later.pop(agent, None)
