"""The NIXL transport against an agent that is played: connections kept, given up, and made again."""

from __future__ import annotations

import pytest
import torch

from weightsync.engines import nixl
from weightsync.engines.nixl import NixlTransport
from weightsync.engines.transport import Peer, Place
from weightsync.errors import ConfigurationError, TransportError
from weightsync.topology import RankId

SLOT = [4096, 1 << 20, 0, "DRAM"]


class PlayedAgent:
    """Knows one key for each peer, as NIXL does over RDMA, and refuses another one."""

    def __init__(self) -> None:
        self.name = "own"
        self.keys: dict[str, bytes] = {}
        self.calls: list[tuple[str, str]] = []

    def add_peer(self, metadata: bytes) -> str:
        name, key = metadata.decode().split(":")
        self.calls.append(("add", metadata.decode()))
        if key == "damaged" or self.keys.setdefault(name, key.encode()) != key.encode():
            raise TransportError("NIXL_ERR_NOT_ALLOWED")
        return name

    def remove_peer(self, name: str) -> None:
        self.calls.append(("remove", name))
        self.keys.pop(name, None)


@pytest.fixture
def agent(monkeypatch) -> PlayedAgent:
    agent = PlayedAgent()
    monkeypatch.setattr(nixl, "borrow_agent", lambda *_: agent)
    return agent


@pytest.fixture
def transport(agent) -> NixlTransport:
    return NixlTransport(torch.device("cpu"), "UCX", {})


def place(*metadata: str) -> Place:
    """A rollout rank that reads from as many policy ranks as there are metadata."""

    def described(text: str) -> dict:
        agent = text.partition(":")[0]
        return {"agent": agent, "backend": "UCX", "metadata": text.encode(), "slots": [SLOT, SLOT]}

    sources = tuple(Peer(RankId("policy", rank), described(text)) for rank, text in enumerate(metadata))
    return Place(RankId("rollout", 0), len(metadata), 1, sources, ())


def reopen(transport: NixlTransport) -> None:
    transport.open(sending=False, timeout_s=1, check=lambda: None)


def test_the_same_metadata_keep_the_connection(transport, agent):
    for _ in range(3):
        transport.connect(place("a:key 1"))
        reopen(transport)
        transport.disconnect()
    assert agent.calls == [("add", "a:key 1")] * 3


def test_metadata_with_another_key_for_the_same_address_make_a_new_connection(transport, agent):
    transport.connect(place("a:key 1"))
    transport.disconnect()
    transport.connect(place("a:key 2"))
    reopen(transport)
    assert agent.calls[1:] == [("add", "a:key 2"), ("remove", "a"), ("add", "a:key 2")]
    assert agent.keys == {"a": b"key 2"}
    transport.disconnect()
    transport.connect(place("a:key 2"))
    assert agent.calls[4:] == [("add", "a:key 2")]


def test_another_peer_makes_a_new_connection(transport, agent):
    transport.connect(place("a:key 1"))
    transport.connect(place("b:key 1"))
    assert agent.calls[1:] == [("remove", "a"), ("add", "b:key 1")]


def test_metadata_that_are_refused_still_are_an_error(transport, agent):
    with pytest.raises(ConfigurationError, match="NOT_ALLOWED"):
        transport.connect(place("a:damaged"))
    transport.connect(place("a:key 1"))
    with pytest.raises(ConfigurationError, match="NOT_ALLOWED"):
        transport.connect(place("a:damaged"))
    transport.connect(place("a:key 3"))
    assert agent.keys == {"a": b"key 3"}


def test_several_sources_have_a_connection_each_and_only_the_broken_one_is_made_again(transport, agent):
    transport.connect(place("a:key 1", "b:key 1"))
    assert agent.calls == [("add", "a:key 1"), ("add", "b:key 1")]
    transport._peers.break_off(RankId("policy", 1))
    transport.shut()
    reopen(transport)
    assert agent.calls[2:] == [("remove", "b"), ("add", "b:key 1")]
    transport.connect(place("b:key 1"))
    assert agent.calls[4:] == [("remove", "a"), ("add", "b:key 1")]
