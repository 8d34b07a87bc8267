"""Two hubs in one process: handshakes, messages, deadlines, aborts, closing."""

import gc
import os
import threading
import time

import pytest

from tests.control_support import FAST, background, begin, hubs, links, open_pair, wait_until
from weightsync.control import (
    PROTOCOL_VERSION,
    Bucket,
    ChunkEntry,
    Complete,
    ControlHub,
    Deadlines,
    Done,
    Heartbeat,
    Manifest,
    Message,
    Release,
)
from weightsync.errors import (
    ConfigurationError,
    DeadlineError,
    DigestError,
    LifecycleError,
    ManifestError,
    PeerAbortedError,
    PeerLostError,
    ProtocolError,
)
from weightsync.tensors import TensorSpec


def test_either_side_may_begin_first():
    with links() as (server, client):
        waiting = background(server.begin, epoch=1, version=7)
        time.sleep(0.2)
        assert client.begin(epoch=1) == (1, 7)
        assert waiting.result(5) == (1, 7)
        server.end(), client.end()
        waiting = background(client.begin, epoch=2, version=8)
        time.sleep(0.2)
        started = time.monotonic()
        assert server.begin(epoch=2) == (2, 8)
        assert time.monotonic() - started < 0.3
        assert waiting.result(5) == (2, 8)


def test_epochs_are_taken_over_or_counted_on():
    with links() as (server, client):
        for ours, theirs, agreed in [
            (5, None, 5),
            (None, None, 6),
            (None, 9, 9),
            (9, 9, 9),
            (None, None, 10),
        ]:
            waiting = background(server.begin, epoch=ours)
            assert client.begin(epoch=theirs) == (agreed, None)
            assert waiting.result(5) == (agreed, None)
            server.end(), client.end()


def test_many_refits_on_one_link():
    with links() as (server, client):
        for epoch in range(1, 101):
            begin(server, client, epoch)
            server.send(Bucket(epoch, 0, 1, ()))
            assert client.receive(Bucket, phase="load").seq == epoch
            client.send(Complete())
            client.end()
            server.receive(Complete, phase="load")
            server.end()
        assert server._host.counters["stale"] == client._host.counters["stale"] == 0


def test_different_epochs_end_in_deadlines_that_name_both():
    with links() as (server, client):
        waiting = background(server.begin, epoch=1, connect_s=1)
        with pytest.raises(DeadlineError, match="did not begin epoch 2 within 1 s: it is at epoch 1"):
            client.begin(epoch=2, connect_s=1)
        with pytest.raises(
            DeadlineError, match="did not begin epoch 1 within 1 s: it said hello for epoch 2"
        ):
            waiting.result(5)
        assert server._host.counters["foreign_epoch"] > 0
        begin(server, client, 3)


def test_different_versions_of_the_weights_are_refused_on_both_sides():
    with links() as (server, client):
        waiting = background(server.begin, epoch=1, version=4)
        with pytest.raises(ProtocolError, match=r"version 4 .* this side version 5"):
            client.begin(epoch=1, version=5)
        with pytest.raises(ProtocolError, match=r"version 5 .* this side version 4"):
            waiting.result(5)
        begin(server, client, 2, version=6)


@pytest.mark.parametrize("first", ["server", "client"])
def test_another_protocol_version_is_refused_on_both_sides_at_once(first):
    newer = PROTOCOL_VERSION + 1
    with hubs() as (a, b):
        b.protocol = newer
        server, client = a.accept(b.card()), b.connect(a.card())
        sides = [server, client] if first == "server" else [client, server]
        started = time.monotonic()
        waiting = background(sides[0].begin, epoch=1)
        time.sleep(0.3)
        other = background(sides[1].begin, epoch=1)
        errors = dict(
            zip(["server", "client"] if first == "server" else ["client", "server"], [waiting, other])
        )
        with pytest.raises(
            ProtocolError, match=f"speaks version {newer} .* this side version {PROTOCOL_VERSION}"
        ):
            errors["server"].result(3)
        with pytest.raises(
            ProtocolError, match=f"speaks version {PROTOCOL_VERSION} .* this side version {newer}"
        ):
            errors["client"].result(3)
        assert time.monotonic() - started < 2
        b.protocol = PROTOCOL_VERSION
        begin(server, client, 2)


def test_a_peer_that_never_comes_is_a_deadline_with_its_address():
    with hubs() as (a, b):
        server, client = a.accept(b.card()), b.connect(a.card())
        with pytest.raises(DeadlineError, match=r"within 0\.2 s: nothing was heard") as caught:
            server.begin(epoch=1, connect_s=0.2)
        assert b.card()["address"] in str(caught.value)
        assert isinstance(caught.value, TimeoutError)
        begin(server, client)


def test_a_begin_that_failed_leaves_nothing_that_completes_a_later_one():
    with links() as (server, client):
        with pytest.raises(DeadlineError):
            client.begin(epoch=1, connect_s=0.3)
        # The hello of that attempt waits at the server; its welcome must find no taker.
        with pytest.raises(DeadlineError):
            server.begin(epoch=1, connect_s=0.3)
        begin(server, client, 1)


def test_a_client_whose_server_just_gave_up_is_told():
    with links() as (server, client):
        waiting = background(client.begin, epoch=1)
        time.sleep(0.2)
        for _ in range(20):
            try:
                server.begin(epoch=1, connect_s=0.0005)
            except DeadlineError:
                continue
            break
        waiting.result(5)
        if server._refit is None:
            with pytest.raises(PeerLostError, match="given up waiting"):
                client.receive(phase="manifest", timeout_s=3)


def test_messages_arrive_once_and_in_order():
    with open_pair() as (server, client):
        for i in range(1000):
            client.send(Release(i))
            server.send(Bucket(i, i % 2, 3, (), b"abc"))
        assert [server.receive(Release, phase="x").seq for _ in range(1000)] == list(range(1000))
        assert [client.receive(Bucket, phase="x").seq for _ in range(1000)] == list(range(1000))


@pytest.mark.parametrize("name", ["モデル.重み", "a\0b", "line\nbreak", "\U0001f600", "n" * 4096])
def test_any_tensor_name_travels(name):
    spec = TensorSpec(name, (2, 0), "bfloat16")
    manifest = Manifest((spec,), "xxh3-64")
    bucket = Bucket(0, 0, 0, (ChunkEntry(spec, 0, 0, 0, 2**64 - 1, 0),))
    with open_pair() as (server, client):
        server.send(manifest)
        server.send(bucket)
        assert client.receive(Manifest, phase="x") == manifest
        assert client.receive(Bucket, phase="x") == bucket


def test_a_host_that_does_not_resolve_is_a_deadline():
    with hubs() as (a, b):
        link = b.connect({**a.card(), "address": "tcp://no-such-host.invalid:5000"})
        with pytest.raises(DeadlineError, match=r"nothing was heard of it \(tcp://no-such-host"):
            link.begin(epoch=1, connect_s=0.3)
        assert b.counters["internal"] == 0


@pytest.mark.parametrize("name", ["", "x" * 201, "\udcff", None])
def test_a_name_must_be_sendable(name):
    with pytest.raises(ConfigurationError, match="1 to 200 characters"):
        ControlHub(name, bind_host="127.0.0.1")


def test_threads_may_send_on_one_link():
    with open_pair() as (server, client):
        threads = [
            threading.Thread(target=lambda t=t: [client.send(Bucket(i, t, 0, ())) for i in range(200)])
            for t in range(8)
        ]
        for thread in threads:
            thread.start()
        got = [server.receive(Bucket, phase="x") for _ in range(1600)]
        for thread in threads:
            thread.join()
        assert all([b.seq for b in got if b.slot == t] == list(range(200)) for t in range(8))
        assert not server._host.counters["replayed"]


def test_an_unexpected_message_is_named():
    with open_pair() as (server, client):
        client.send(Release(3))
        with pytest.raises(
            ProtocolError, match=r"expected Done or Complete from rollout 0, got Release \(release of b"
        ):
            server.receive(Done, Complete, phase="drain")
        assert server._host.counters["unexpected"] == 1


def test_heartbeats_keep_a_peer_alive_but_are_no_progress():
    with open_pair(deadlines=Deadlines(silence_s=0.4, heartbeat_s=0.1)) as (server, client):
        server.send(Bucket(3, 0, 0, ()))
        client.receive(Bucket, phase="load")
        with pytest.raises(DeadlineError) as caught:
            client.receive(Bucket, phase="load", timeout_s=1)
        text = str(caught.value)
        assert "waited 1.0 s for Bucket from policy 0; last heard: bucket 3, 1.0 s ago; heartbeat 0." in text
        assert "at 'bucket 3'" in text
        assert "phase load" in text
        server.check()
        client.send(Complete())
        assert server.receive(Complete, phase="load") == Complete()


def test_the_whole_refit_has_a_deadline():
    limit = Deadlines(total_s=0.5, stall_s=10)
    with open_pair(deadlines=limit) as (server, client):
        with pytest.raises(DeadlineError) as caught:
            server.receive(phase="load")
        with pytest.raises(DeadlineError):
            client.check()
    assert "the refit may take 0.5 s; waiting for any message from rollout 0" in str(caught.value)


def failing():
    raise DigestError("bytes arrived changed", tensor="lm_head.weight", bucket=3)


@pytest.mark.parametrize("who", ["server", "client"])
def test_an_abort_reaches_the_peer_with_its_traceback(who):
    with open_pair() as (server, client):
        failed, other = (server, client) if who == "server" else (client, server)
        other.send(Release(0))
        waiting = background(other.receive, Bucket, phase="load")
        time.sleep(0.1)
        started = time.monotonic()
        try:
            failing()
        except DigestError as error:
            failed.abort(error)
        with pytest.raises(PeerAbortedError, match="DigestError: bytes arrived changed") as caught:
            waiting.result(1)
        assert time.monotonic() - started < 0.5
        assert caught.value.remote.kind == "DigestError"
        assert caught.value.remote.context.tensor == "lm_head.weight"
        assert "in failing" in caught.value.remote.traceback
        assert any("in failing" in note for note in caught.value.__notes__)
        for call in (
            other.check,
            lambda: other.receive(phase="x"),
            lambda: other.send(Release(1)),
        ):
            with pytest.raises(PeerAbortedError):
                call()
        with pytest.raises(LifecycleError, match="no refit is open"):
            failed.receive(phase="x")
        begin(server, client, 2)


def test_an_abort_overtakes_what_is_not_yet_read():
    with open_pair() as (server, client):
        for i in range(5):
            server.send(Bucket(i, 0, 0, ()))
        server.abort(ManifestError("no"))
        with pytest.raises(PeerAbortedError):
            client.receive(Bucket, phase="load")


def test_both_sides_may_abort_at_once():
    for epoch in range(1, 20):
        with open_pair() as (server, client):
            started = time.monotonic()
            other = background(server.abort, ValueError("a"))
            client.abort(ValueError("b"))
            other.result(2)
            assert time.monotonic() - started < 0.8
            begin(server, client, epoch + 1)


def test_an_abort_without_a_refit_does_nothing():
    with links() as (server, client):
        server.abort(ValueError("x"))
        client.end()
        begin(server, client)
        server.check()


def test_a_peer_that_ends_early_is_not_waited_for():
    with open_pair() as (server, client):
        client.send(Complete())
        client.end()
        server.check()
        assert server.receive(Complete, phase="load") == Complete()
        server.check()
        with pytest.raises(PeerLostError, match="left the refit before Release: it ended the refit"):
            server.receive(Release, phase="load", timeout_s=3)
        server.end()
        begin(server, client, 2)


def test_a_peer_that_closes_says_so():
    with hubs() as (a, b):
        server, client = a.accept(b.card()), b.connect(a.card())
        begin(server, client)
        client.send(Complete())
        b.close()
        wait_until(lambda: server._refit.peer_closed)
        server.check()
        assert server.receive(Complete, phase="load") == Complete()
        for call in (server.check, lambda: server.receive(phase="x", timeout_s=3)):
            with pytest.raises(PeerLostError, match="closed its control channel"):
                call()
        server.end()
        with pytest.raises(PeerLostError, match="connect to its new card"):
            server.begin(epoch=2)


def test_a_client_hears_that_the_servers_hub_closed():
    with hubs() as (a, b):
        server, client = a.accept(b.card()), b.connect(a.card())
        begin(server, client)
        server.end(), client.end()
        waiting = background(client.begin, epoch=2)
        time.sleep(0.1)
        a.close()
        with pytest.raises(PeerLostError, match="closed its control channel"):
            waiting.result(2)


def test_what_a_refit_leaves_unread_is_not_in_the_next():
    with links() as (server, client):
        begin(server, client, 1)
        for i in range(50):
            server.send(Bucket(i, 0, 0, ()))
        client.end(), server.end()
        begin(server, client, 2)
        server.send(Bucket(99, 0, 0, ()))
        assert client.receive(Bucket, phase="load").seq == 99


def test_calls_out_of_order():
    with links() as (server, client):
        for call in (lambda: server.send(Release(0)), lambda: server.receive(phase="x")):
            with pytest.raises(LifecycleError, match="no refit is open"):
                call()
        server.check()
        begin(server, client)
        with pytest.raises(LifecycleError, match="open"):
            server.begin(epoch=2)
        waiting = background(server.receive, phase="load")
        time.sleep(0.1)
        server.end()
        with pytest.raises(LifecycleError, match="ended while waiting"):
            waiting.result(1)


def test_two_begins_at_once_are_refused():
    with links() as (server, client):
        waiting = background(server.begin, epoch=1)
        wait_until(lambda: server._attempt is not None)
        with pytest.raises(LifecycleError):
            server.begin(epoch=1)
        client.begin(epoch=1)
        waiting.result(5)


def test_a_message_too_large_is_refused_where_it_is_sent():
    with open_pair(max_frame_bytes=1000) as (server, client):
        with pytest.raises(ConfigurationError, match="smaller buckets"):
            server.send(Bucket(0, 0, 2000, (), bytes(2000)))
        server.send(Bucket(0, 0, 900, (), bytes(900)))
        assert client.receive(Bucket, phase="load").payload == bytes(900)


def test_a_large_payload_arrives_whole():
    data = os.urandom(32 << 20)
    with open_pair() as (server, client):
        server.send(Bucket(0, 0, len(data), (), data))
        assert client.receive(Bucket, phase="load").payload == data


def test_hubs_on_the_default_interface_meet():
    with open_pair(host=None) as (server, client):
        server.send(Release(1))
        assert client.receive(Release, phase="x") == Release(1)


def test_ipv6_loopback():
    with open_pair(host="::1") as (server, client):
        assert server._host.card()["address"].startswith("tcp://[::1]:")
        server.send(Release(1))
        assert client.receive(Release, phase="x") == Release(1)


def test_a_closed_link_can_be_made_again():
    with hubs() as (a, b):
        for _ in range(3):
            server, client = a.accept(b.card()), b.connect(a.card())
            with pytest.raises(LifecycleError, match="accepted already"):
                a.accept(b.card())
            begin(server, client)
            client.close(), server.close()
            for link in (server, client):
                with pytest.raises(LifecycleError, match="was closed"):
                    link.begin(epoch=2)
                link.close()
            wait_until(lambda: not a._links and not b._links)


def test_hubs_may_link_both_ways():
    with hubs() as (a, b):
        one = a.accept(b.card()), b.connect(a.card())
        two = b.accept(a.card()), a.connect(b.card())
        begin(*one, 1)
        begin(*two, 5)
        one[0].send(Release(1)), two[0].send(Release(2))
        assert one[1].receive(phase="x") == Release(1)
        assert two[1].receive(phase="x") == Release(2)


def test_a_hub_serves_many_peers_and_keeps_them_apart():
    with ControlHub("hub", bind_host="127.0.0.1", deadlines=FAST) as hub:
        peers = [ControlHub(f"peer {i}", bind_host="127.0.0.1", deadlines=FAST) for i in range(5)]
        ends = [(hub.accept(p.card()), p.connect(hub.card())) for p in peers]
        for i, (server, client) in enumerate(ends):
            begin(server, client, i + 1)
        for i, (_, client) in enumerate(ends):
            client.send(Release(i))
        assert [s.receive(Release, phase="x").seq for s, _ in ends] == list(range(5))
        peers[2].close()
        with pytest.raises(PeerLostError):
            ends[2][0].receive(phase="x", timeout_s=3)
        for i in (0, 1, 3, 4):
            ends[i][0].check()
            ends[i][0].send(Heartbeat("still here"))
        for peer in peers:
            peer.close()


def test_closing_wakes_every_wait():
    with hubs() as (a, b):
        server, client = a.accept(b.card()), b.connect(a.card())
        begin(server, client)
        receiving = background(server.receive, phase="load")
        beginning = background(b.accept(a.card()).begin, epoch=1)
        time.sleep(0.1)
        started = time.monotonic()
        a.close(), b.close()
        assert time.monotonic() - started < 2
        for waiting in (receiving, beginning):
            with pytest.raises(LifecycleError, match="closed"):
                waiting.result(1)
        for call in (
            server.check,
            lambda: server.send(Release(0)),
            lambda: server.begin(epoch=2),
        ):
            with pytest.raises(LifecycleError, match="closed"):
                call()
        server.abort(ValueError("x")), server.end(), server.close()
        with pytest.raises(LifecycleError, match="closed"):
            a.accept(b.card())
        assert a.card()["name"] == "policy 0"


def descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_closing_twice_leaves_no_thread_and_no_descriptor():
    with open_pair():
        pass
    threads, before = set(threading.enumerate()), descriptors()
    for _ in range(10):
        with open_pair() as (server, client):
            server.send(Release(1))
            client.receive(phase="x")
            server._host.close()
            server._host.close()
    assert set(threading.enumerate()) <= threads
    wait_until(lambda: descriptors() <= before)


def test_a_hub_that_cannot_start_leaves_nothing():
    before, threads = descriptors(), threading.active_count()
    for _ in range(5):
        with pytest.raises(ConfigurationError):
            ControlHub("x", bind_host="203.0.113.77")
    assert descriptors() <= before
    assert threading.active_count() == threads


def test_fifty_hubs_at_once():
    made = [None] * 50

    def make(i):
        made[i] = ControlHub(f"hub {i}", bind_host="127.0.0.1", deadlines=FAST)

    for future in [background(make, i) for i in range(50)]:
        future.result(20)
    try:
        assert len({hub.card()["address"] for hub in made}) == 50
        assert len({hub.card()["public_key"] for hub in made}) == 50
        ends = [
            (made[i].accept(made[i + 1].card()), made[i + 1].connect(made[i].card())) for i in range(0, 50, 2)
        ]
        waiting = [background(end.begin, epoch=1) for pair in ends for end in pair]
        assert {future.result(20) for future in waiting} == {(1, None)}
    finally:
        for hub in made:
            hub.close()


def test_messages_are_described_for_error_texts():
    assert [m.describe() for m in (Bucket(3, 0, 0, ()), Complete(), Heartbeat(""))] == [
        "bucket 3", "complete", "heartbeat",
    ]  # fmt: skip
    assert issubclass(Bucket, Message)
