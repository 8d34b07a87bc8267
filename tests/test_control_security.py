"""Strangers, replays and malformed frames: dropped, counted, and without effect on an open refit."""

import socket
import time
from dataclasses import replace

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.control_support import FAST, RawClient, background, begin, hubs, open_pair, wait_until
from weightsync.control import (
    PROTOCOL_VERSION,
    Abort,
    Bucket,
    Bye,
    Complete,
    ControlHub,
    Heartbeat,
    Hello,
    Manifest,
    Ready,
    Release,
    Welcome,
)
from weightsync.control.addresses import Endpoint
from weightsync.control.frames import Header, decode_frame, encode_header, encode_message
from weightsync.control.messages import NONCE_BYTES
from weightsync.errors import DeadlineError, PeerAbortedError
from weightsync.tensors import TensorSpec

NONCE = bytes(range(NONCE_BYTES))


class RawPeer(RawClient):
    """A raw client whose key the server accepts, and which may take the handshake's steps one by one."""

    def __init__(self, hub, **kwargs):
        self.hub = hub
        super().__init__(hub.card(), **kwargs)

    def dial(self):
        self.link = self.hub.accept(self.card())
        super().dial()

    def hello(self, nonce=NONCE, epoch=1, session=None, **fields):
        self.send(
            Hello(PROTOCOL_VERSION, session or self.target["session"], epoch, nonce, self.name, **fields),
            epoch=epoch,
        )

    def hear(self, kind):
        while True:
            frame = decode_frame(self.socket.recv_multipart())
            if isinstance(frame.message, kind):
                return frame

    def begin(self, epoch=1):
        """Shake hands; the token of the refit."""
        waiting = background(self.link.begin, epoch=epoch)
        self.hello(epoch=epoch)
        token = self.hear(Welcome).message.nonce
        self.send(Ready(token), epoch=epoch)
        assert waiting.result(5) == (epoch, None)
        return token


@pytest.fixture
def hub():
    with ControlHub("policy 0", bind_host="127.0.0.1", deadlines=FAST) as hub:
        yield hub


@pytest.fixture
def raw(hub):
    with RawPeer(hub) as peer:
        yield peer


def counted(hub, **expected):
    """Wait until the counters say so; nothing else may have been counted."""
    wait_until(lambda: all(hub.counters[name] >= n for name, n in expected.items()))
    assert dict(hub.counters) == expected


def test_a_raw_peer_that_keeps_to_the_protocol_is_served(raw, hub):
    token = raw.begin()
    raw.send(Release(3), epoch=1, token=token, number=1)
    assert raw.link.receive(Release, phase="x") == Release(3)
    assert dict(hub.counters) == {}


def test_a_key_that_was_not_handed_out_is_refused_and_counted(hub):
    with RawClient(hub.card()) as stranger:
        stranger.send(Hello(PROTOCOL_VERSION, hub.card()["session"], 1, NONCE, "stranger"))
        wait_until(lambda: hub.counters["unauthenticated"] == 1)
        stranger.socket.rcvtimeo = 200
        with pytest.raises(zmq.Again):
            stranger.socket.recv()


def test_a_key_is_refused_again_once_its_link_is_closed(hub):
    keys = zmq.curve_keypair()
    with RawPeer(hub, keys=keys) as raw:
        raw.begin()
        raw.link.close()
        raw.send(Heartbeat(""), epoch=1)
        wait_until(lambda: hub.counters["unauthenticated"] == 1)
    with RawClient(hub.card(), keys=keys):
        wait_until(lambda: hub.counters["unauthenticated"] == 2)


@pytest.mark.parametrize("mechanism", ["null", "plain", "bytes"])
def test_connections_without_curve_are_refused(hub, mechanism):
    endpoint = Endpoint.parse(hub.card()["address"])
    if mechanism == "bytes":
        with socket.create_connection((endpoint.host, endpoint.port), timeout=2) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n" * 20)
            connection.settimeout(2)
            try:
                while connection.recv(4096):
                    pass
            except ConnectionResetError:
                pass
        assert hub._loop._thread.is_alive()
        return
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        if mechanism == "plain":
            dealer.plain_username, dealer.plain_password = b"admin", b"admin"
        dealer.connect(str(endpoint))
        dealer.send_multipart([b"x", b"y"])
        # Whichever side notices the mismatch first hangs up.
        wait_until(lambda: hub.counters["unauthenticated"] + hub.counters["broken_handshake"] >= 1)


def test_a_peer_cannot_speak_for_another(hub):
    with RawPeer(hub, name="honest") as honest, RawPeer(hub, name="liar") as liar:
        token = honest.begin()
        # Even with the other's token: frames belong to the link of the key that they came under.
        liar.send(Release(9), epoch=1, token=token, number=1)
        liar.send(Abort.of(ValueError("x")), epoch=1, token=token, number=2)
        wait_until(lambda: hub.counters["foreign_epoch"] == 2)
        honest.link.check()
        assert not honest.link._refit.inbox


def test_frames_of_another_session_epoch_or_handshake_are_dropped(raw, hub):
    token = raw.begin(epoch=7)
    raw.send(Release(1), epoch=7, token=token, number=1, session="cd" * 16)
    raw.send(Release(2), epoch=6, token=token, number=1)
    raw.send(Release(3), epoch=7, token=NONCE, number=1)
    raw.send(Release(4), epoch=7, token=b"", number=1)
    raw.send(Abort.of(ValueError("x")), epoch=6, token=NONCE, number=1)
    raw.send(Release(5), epoch=7, token=token, number=1)
    assert raw.link.receive(Release, phase="x") == Release(5)
    counted(hub, foreign_session=1, foreign_epoch=2, foreign_token=2)


def test_frames_of_the_refit_before_are_late(raw, hub):
    token = raw.begin(epoch=1)
    raw.link.end()
    raw.send(Complete(), epoch=1, token=token, number=1)
    counted(hub, late=1)
    raw.begin(epoch=2)
    raw.send(Complete(), epoch=1, token=token, number=2)
    counted(hub, late=2)
    assert not raw.link._refit.inbox


def test_a_replayed_frame_is_dropped(raw, hub):
    token = raw.begin()
    for number in (1, 1, 2, 1, 2, 3):
        raw.send(Release(number), epoch=1, token=token, number=number)
    assert [raw.link.receive(Release, phase="x").seq for _ in range(3)] == [1, 2, 3]
    counted(hub, replayed=3)
    assert not raw.link._refit.inbox


def test_a_replayed_handshake_opens_nothing(raw, hub):
    token = raw.begin(epoch=1)
    raw.link.end()
    waiting = background(raw.link.begin, epoch=1, connect_s=1)
    time.sleep(0.1)
    raw.send(Ready(token), epoch=1)
    refusal = raw.hear(Bye)
    while refusal.message.reason != "had given up waiting for the handshake":
        refusal = raw.hear(Bye)
    assert refusal.header.token == token
    with pytest.raises(DeadlineError):
        waiting.result(5)
    assert hub.counters["stale"] == 1


def test_a_ready_left_from_a_failed_attempt_completes_nothing(raw, hub):
    waiting = background(raw.link.begin, epoch=1, connect_s=0.3)
    raw.hello(epoch=1)
    older = raw.hear(Welcome).message
    with pytest.raises(DeadlineError):
        waiting.result(5)
    waiting = background(raw.link.begin, epoch=2, connect_s=0.5)
    wait_until(lambda: raw.link._attempt is not None and raw.link._attempt.started)
    raw.send(Ready(older.nonce), epoch=1)
    assert raw.hear(Bye).header.token == older.nonce
    with pytest.raises(DeadlineError):
        waiting.result(5)


def test_a_newer_hello_supersedes_an_older_one(raw, hub):
    waiting = background(raw.link.begin, epoch=1)
    raw.hello(nonce=NONCE)
    older = raw.hear(Welcome).message
    raw.hello(nonce=NONCE)
    assert raw.hear(Welcome).message == older
    raw.hello(nonce=bytes(NONCE_BYTES))
    newer = raw.hear(Welcome).message
    assert newer.nonce != older.nonce
    assert newer.echo == bytes(NONCE_BYTES)
    raw.send(Ready(older.nonce), epoch=1)
    wait_until(lambda: hub.counters["stale"] == 1)
    assert not waiting.done()
    raw.send(Ready(newer.nonce), epoch=1)
    waiting.result(5)


def test_a_hello_left_from_a_failed_attempt_completes_nothing(raw, hub):
    raw.hello(nonce=NONCE)
    with pytest.raises(DeadlineError):
        raw.link.begin(epoch=1, connect_s=0.3)
    assert raw.hear(Welcome).message.echo == NONCE


def test_a_hello_for_another_session_is_dropped(raw, hub):
    raw.send(Hello(PROTOCOL_VERSION, "cd" * 16, 1, NONCE, "x"), epoch=1)
    raw.send(Hello(PROTOCOL_VERSION, hub.card()["session"], 1, NONCE, "x"), epoch=1, session="cd" * 16)
    with pytest.raises(DeadlineError):
        raw.link.begin(epoch=1, connect_s=0.3)
    counted(hub, malformed=1, foreign_session=1)


def test_a_second_client_with_the_same_key_disturbs_nothing(raw, hub):
    token = raw.begin()
    with RawClient(hub.card(), keys=(raw.public, raw.secret)) as twin:
        twin.send(Hello(PROTOCOL_VERSION, hub.card()["session"], 1, bytes(NONCE_BYTES), "twin"), epoch=1)
        twin.send(Release(7), epoch=1, token=token, number=1)
        twin.send(Abort.of(ValueError("x")), epoch=1, token=token, number=2)
        counted(hub, unexpected=3)
    raw.send(Release(8), epoch=1, token=token, number=1)
    assert raw.link.receive(Release, phase="x") == Release(8)
    time.sleep(0.7)  # the twin's connection has closed meanwhile, and was not taken for the peer's
    raw.link.check()


def test_handshake_messages_inside_a_refit_do_not_reach_the_caller(raw, hub):
    token = raw.begin()
    raw.send(Welcome(PROTOCOL_VERSION, 1, None, NONCE, NONCE), epoch=1, token=token, number=1)
    raw.send(Ready(token), epoch=1)
    raw.send(Ready(NONCE), epoch=1)
    raw.send(Release(1), epoch=1, token=token, number=2)
    assert raw.link.receive(Release, phase="x") == Release(1)
    counted(hub, unexpected=1, replayed=1, stale=1)


def test_oversize_frames_are_dropped():
    with (
        ControlHub("small", bind_host="127.0.0.1", deadlines=FAST, max_frame_bytes=1000) as hub,
        RawPeer(hub) as raw,
    ):
        token = raw.begin()
        raw.send(Bucket(0, 0, 0, (), bytes(1001)), epoch=1, token=token, number=1)
        raw.send(Release(1), epoch=1, token=token, number=2)
        assert raw.link.receive(phase="x") == Release(1)
        counted(hub, oversize=1)


def test_a_frame_far_above_the_limit_costs_the_connection_and_no_memory():
    with (
        ControlHub("small", bind_host="127.0.0.1", deadlines=FAST, max_frame_bytes=1000) as hub,
        RawPeer(hub) as raw,
    ):
        token = raw.begin()
        raw.send(Bucket(0, 0, 0, (), bytes(1 << 20)), epoch=1, token=token, number=1)
        with pytest.raises(Exception, match="lost: its connection"):
            raw.link.receive(phase="x")


SAMPLES = [
    Manifest((TensorSpec("モデル", (2, 3), "bfloat16"),), "xxh3-64"),
    Bucket(1, 0, 5, (), b"12345"),
    Release(3),
    Abort.of(ValueError("x")),
    Heartbeat("x"),
    Hello(PROTOCOL_VERSION, "ab" * 16, 1, NONCE, "raw 0"),
    Ready(NONCE),
    Bye("x", True),
]


def test_hundreds_of_malformed_frames_leave_the_refit_as_it_was():
    patient = replace(FAST, silence_s=30)  # no frame of hundreds is a sign of life
    with ControlHub("policy 0", bind_host="127.0.0.1", deadlines=patient) as hub, RawPeer(hub) as raw:
        throw_malformed(raw, hub)


def throw_malformed(raw, hub):
    token = raw.begin()
    sent = [0]

    @settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def throw(data):
        message = data.draw(st.sampled_from(SAMPLES))
        parts = [
            encode_header(Header(PROTOCOL_VERSION, raw.target["session"], 1, bytes(NONCE_BYTES), 1)),
            *encode_message(message),
        ]
        index = data.draw(st.integers(0, len(parts) - 1))
        part = bytearray(parts[index])
        for _ in range(data.draw(st.integers(1, 4))):
            part[data.draw(st.integers(0, len(part) - 1))] = data.draw(st.integers(0, 255))
        parts[index] = bytes(part[: data.draw(st.integers(0, len(part)))])
        raw.raw(data.draw(st.sampled_from([parts, parts[:1], parts[1:], parts[::-1], [*parts, b""], [b""]])))
        sent[0] += 1

    throw()
    raw.send(Release(77), epoch=1, token=token, number=1)
    assert raw.link.receive(phase="x") == Release(77)
    raw.link.check()
    assert hub.counters["malformed"] > 100
    assert hub.counters["internal"] == 0
    assert sent[0] >= 400


def test_nothing_but_msgpack_is_ever_decoded(raw, hub):
    token = raw.begin()
    header = encode_header(Header(PROTOCOL_VERSION, raw.target["session"], 1, token, 1))
    raw.raw([header, b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94."])
    raw.raw([header, msgspec.msgpack.encode(msgspec.msgpack.Ext(5, b"x"))])
    counted(hub, malformed=2)


def test_malformed_frames_from_the_server_leave_the_client_as_it_was():
    with open_pair() as (server, client):
        wire = server._refit.wire
        server._host.submit(lambda: wire.send([b"\xc1", b"\xc1"]))
        server._host.submit(lambda: wire.send([b""]))
        server.send(Release(1))
        assert client.receive(phase="x") == Release(1)
        assert client._host.counters["malformed"] == 2


def test_a_stale_welcome_opens_nothing():
    with hubs() as (a, b):
        server, client = a.accept(b.card()), b.connect(a.card())
        begin(server, client, 1)
        wire, session = server._refit.wire, a.card()["session"]
        server.end(), client.end()
        waiting = background(client.begin, epoch=2, connect_s=1)
        time.sleep(0.1)
        header = encode_header(Header(PROTOCOL_VERSION, session, 2, b"", 0))
        stale = encode_message(Welcome(PROTOCOL_VERSION, 2, None, NONCE, NONCE))
        a.submit(lambda: wire.send([header, *stale]))
        wait_until(lambda: b.counters["stale"] == 1)
        assert not waiting.done()
        server.begin(epoch=2)
        waiting.result(5)


def test_an_impostor_server_is_not_believed(hub):
    """A client that is handed one hub's address with another's key never completes a handshake."""
    with hubs() as (other, client_hub):
        hub.accept(client_hub.card())
        mixed = {**hub.card(), "public_key": other.card()["public_key"]}
        with pytest.raises(DeadlineError):
            client_hub.connect(mixed).begin(epoch=1, connect_s=0.5)


def test_an_abort_is_acknowledged(raw, hub):
    token = raw.begin()
    raw.send(Abort.of(ValueError("no")), epoch=1, token=token, number=1)
    assert raw.hear(Bye).header.token == token
    with pytest.raises(PeerAbortedError):
        raw.link.check()
