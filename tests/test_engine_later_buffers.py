"""NIXL buffers that are registered after the metadata exchange, against an agent that is played."""

from __future__ import annotations

import pytest

from weightsync.engines.nixl_memory import MemoryRegion
from weightsync.engines.nixl_peers import LaterBuffer, NixlPeers
from weightsync.engines.transport import Peer
from weightsync.errors import LifecycleError, ProtocolError, TransportError
from weightsync.topology import RankId

POLICY = RankId("policy", 0)
REGION = MemoryRegion(8192, 1 << 20, 0, "DRAM")


class PlayedAgent:
    """Refuses another key for an address that it knows, as NIXL does over RDMA."""

    def __init__(self) -> None:
        self.known: dict[str, bytes] = {}
        self.calls: list[str] = []

    def add_peer(self, metadata: bytes) -> str:
        text = metadata.decode()
        self.calls.append(f"add {text}")
        name, _, key = text.partition(":")
        if key and self.known.setdefault("key", key.encode()) != key.encode():
            raise TransportError("NIXL_ERR_NOT_ALLOWED")
        return name

    def remove_peer(self, name: str) -> None:
        self.calls.append(f"remove {name}")
        self.known.clear()


@pytest.fixture
def agent() -> PlayedAgent:
    return PlayedAgent()


@pytest.fixture
def peers(agent) -> NixlPeers:
    peers = NixlPeers(agent, "UCX")
    slots = [[4096, 1 << 20, 0, "DRAM"]]
    peers.meet(
        [Peer(POLICY, {"agent": "a", "backend": "UCX", "metadata": b"a", "slots": slots})],
    )
    agent.calls.clear()
    return peers


def told(key: bytes, region: MemoryRegion = REGION) -> LaterBuffer:
    return LaterBuffer.of(region, key)


def test_a_buffer_is_learnt_once(agent, peers):
    for _ in range(3):
        assert peers.learn_buffer(POLICY, told(b"a:1")) == REGION
    assert agent.calls == ["add a:1"]


def test_another_buffer_at_the_same_address_makes_a_new_connection(agent, peers):
    peers.learn_buffer(POLICY, told(b"a:1"))
    assert peers.learn_buffer(POLICY, told(b"a:2")) == REGION
    assert agent.calls == ["add a:1", "add a:2", "remove a", "add a", "add a:2"]


def test_a_dropped_connection_forgets_its_buffers(agent, peers):
    peers.learn_buffer(POLICY, told(b"a:1"))
    peers.break_off(POLICY)
    peers.drop_broken()
    with pytest.raises(LifecycleError, match="no open refit"):
        peers.learn_buffer(POLICY, told(b"a:1"))
    peers.reconnect()
    peers.learn_buffer(POLICY, told(b"a:1"))
    assert agent.calls == ["add a:1", "remove a", "add a", "add a:1"]


def test_a_buffer_of_another_agent_is_an_error(peers):
    with pytest.raises(ProtocolError, match="another NIXL agent than its own"):
        peers.learn_buffer(POLICY, told(b"b:1"))


def test_a_kind_of_memory_that_there_is_not(peers):
    with pytest.raises(ProtocolError, match="names a buffer that cannot be"):
        peers.learn_buffer(POLICY, told(b"a:1", MemoryRegion(8192, 4096, 0, "DISK")))
