"""Who and what does not belong here: each is refused, and counted under a name of its own."""

from __future__ import annotations

import asyncio
import tempfile
import threading

import psutil
import pytest

from tests import engine_crew
from tests.control_support import FAST, RawClient, background, begin, hubs, wait_until
from tests.engine_crew import Crew, assert_same, collect, some_weights, stream_of
from tests.frame_corpus import NONCE
from tests.own_files import left_by_tests
from weightsync.control import PROTOCOL_VERSION, ControlHub, Hello, Release
from weightsync.control.wires import ClientWire
from weightsync.engines.collective import GlooCheckpointEngine
from weightsync.engines.ipc import IPCCheckpointEngine
from weightsync.errors import ConfigurationError, DeadlineError
from weightsync.testing.shared_files import shared_files

ELSEWHERE = "127.0.0.2"
"""An address of this host that nothing takes by default."""


@pytest.fixture
def hub():
    with ControlHub("policy 0", bind_host="127.0.0.1", deadlines=FAST) as hub:
        yield hub


def test_a_foreign_key_is_unauthenticated(hub):
    with RawClient(hub.card()) as stranger:
        stranger.send(Hello(PROTOCOL_VERSION, hub.card()["session"], 1, NONCE, "stranger"), epoch=1)
        wait_until(lambda: hub.counters["unauthenticated"] >= 1)
    assert set(hub.counters) == {"unauthenticated"}


def test_a_second_job_on_this_host_that_knows_the_card_is_unauthenticated(hub):
    """Its own hub, complete and in good order, and every public thing of ours."""
    with hubs() as (ours, theirs):
        server, client = hub.accept(ours.card()), ours.connect(hub.card())
        begin(server, client)
        with pytest.raises(DeadlineError):
            theirs.connect(hub.card()).begin(epoch=1, connect_s=0.5)
        assert hub.counters["unauthenticated"] >= 1
        assert set(hub.counters) == {"unauthenticated"}
        client.send(Release(1))
        assert server.receive(Release, phase="x") == Release(1)


def test_a_card_of_an_earlier_session_at_the_same_port_opens_nothing(hub):
    """The port of a worker that is gone may be another's by now: it has another key."""
    with hubs() as (gone, client_hub):
        hub.accept(client_hub.card())
        stale = {**gone.card(), "address": hub.card()["address"]}
        with pytest.raises(DeadlineError):
            client_hub.connect(stale).begin(epoch=1, connect_s=0.5)
        wait_until(lambda: hub.counters["unauthenticated"] + hub.counters["broken_handshake"] >= 1)


def test_an_earlier_session_under_the_right_key_is_foreign(hub):
    with hubs() as (gone, client_hub):
        server = hub.accept(client_hub.card())
        stale = {**hub.card(), "session": gone.card()["session"]}
        with pytest.raises(DeadlineError):
            client_hub.connect(stale).begin(epoch=1, connect_s=0.7)
        assert hub.counters["foreign_session"] >= 1
        assert not server._waiting


@pytest.mark.parametrize("address", ["ipc:///tmp/stale.sock", "inproc://x", "/tmp/stale.sock", "file:///x"])
def test_there_is_no_address_but_tcp_so_no_socket_file_to_go_stale(hub, address):
    with hubs() as (peer, _):
        for meet in (hub.accept, hub.connect):
            with pytest.raises(ConfigurationError, match="is no control address"):
                meet({**peer.card(), "address": address})


ENGINES = {"gloo": GlooCheckpointEngine, "ipc": IPCCheckpointEngine}


@pytest.fixture(params=list(ENGINES))
def engines_of(request, monkeypatch):
    """Crews of another engine than NIXL, whose own sockets are UCX's business."""
    kind = ENGINES[request.param]

    def make(bucket_size=engine_crew.MIB, **settings):
        return kind(bucket_size, **{**engine_crew.FAST, "topology": "star", **settings})

    monkeypatch.setattr(engine_crew, "make_engine", make)


def listening() -> set[tuple[str, int]]:
    return {tuple(c.laddr) for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"}


def unix_sockets() -> set[str]:
    return {c.laddr for c in psutil.Process().net_connections("unix") if c.laddr}


@pytest.fixture
def own_directory(tmp_path, monkeypatch):
    """An empty one in which files are commonly left: the current one, and that of temporary files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_sockets_listen_where_they_are_told_to_and_leave_no_file(engines_of, own_directory):
    before, paths, there = listening(), unix_sockets(), shared_files()
    sent = some_weights(count=4)
    with Crew(1, 2, bind_host=ELSEWHERE) as crew:
        received = refit_in_threads(crew, sent)
        opened = listening() - before
        assert len(opened) >= 3
        assert {host for host, _ in opened} == {ELSEWHERE}
        assert unix_sockets() <= paths
        assert list(own_directory.iterdir()) == []
        assert left_by_tests(there) == []
    for each in received:
        assert_same(each, sent)
    assert listening() - before == set()


def refit_in_threads(crew, sent):
    """Each rank in a thread of its own: a collective's ranks wait for each other."""
    receiving = [background(asyncio.run, collect(engine)) for engine in crew.rollout]
    asyncio.run(crew.policy[0].send_weights(stream_of(sent)))
    return [each.result(20) for each in receiving]


@pytest.mark.nixl
def test_all_frames_of_earlier_refits_said_again_are_counted_and_change_nothing(monkeypatch):
    said, lock = [], threading.Lock()
    send = ClientWire.send

    def send_all_again(wire, parts):
        with lock:
            earlier = list(said)
            said.append(parts)
        sent = send(wire, parts)
        for old in earlier[-40:] if replaying else []:
            send(wire, old)
        return sent

    monkeypatch.setattr(ClientWire, "send", send_all_again)
    replaying = False
    with Crew() as crew:
        hub = crew.policy[0]._session._hub
        for epoch in range(1, 4):
            crew.open(epoch, epoch)
            weights = some_weights(seed=epoch)
            assert_same(crew.refit(weights)[0], weights)
            replaying = True
        counted = hub.counters
        assert counted["late"] > 0
        assert counted["foreign_epoch"] > 0
        assert counted["replayed"] > 0
        assert counted["stale"] > 0
        assert set(counted) <= {"late", "foreign_epoch", "replayed", "stale"}, counted
