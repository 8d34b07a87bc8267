"""A hundred thousand broken frames, at the decoder and at an engine: refused, counted, and served on."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import tracemalloc
from collections import Counter

import msgspec
import psutil
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.control_support import FAST, RawClient, background, wait_until
from tests.engine_crew import Crew, assert_same, some_weights
from tests.frame_corpus import MESSAGES, NONCE, bombs, frames_of, mutated
from weightsync.control import PROTOCOL_VERSION, Bucket, ControlHub, Hello, Manifest, Ready, Release, Welcome
from weightsync.control import core as control_core
from weightsync.control.addresses import Endpoint
from weightsync.control.frames import (
    MAX_HEADER_BYTES,
    Header,
    MalformedFrameError,
    decode_frame,
    encode_header,
    encode_message,
)
from weightsync.control.messages import MAX_ENTRIES
from weightsync.errors import ConfigurationError, ProtocolError
from weightsync.tensors import TensorSpec

CORPUS = 100_000
THROWN = 5_000
ROUNDS = 5
MIB = 1 << 20
SESSION = "ab" * 16
HEADER = encode_header(Header(PROTOCOL_VERSION, SESSION, 1, NONCE, 1))


def verdict(parts) -> str:
    try:
        frame = decode_frame(parts)
    except MalformedFrameError:
        return "refused"
    return "foreign" if frame.message is None else "handled"


def test_every_frame_of_the_corpus_is_refused_or_handled_and_nothing_is_kept():
    frames = frames_of(SESSION, NONCE)
    assert [verdict(parts) for parts in frames] == ["handled"] * len(MESSAGES)
    process = psutil.Process()
    Counter(map(verdict, mutated(frames, 2_000, seed=1)))
    before, threads = process.memory_info().rss, threading.active_count()
    verdicts = Counter(map(verdict, mutated(frames, CORPUS)))
    assert verdicts.total() == CORPUS
    assert verdicts["refused"] > CORPUS // 2
    assert verdicts["handled"] > CORPUS // 20  # mixtures and harmless changes: the corpus is not mere noise
    assert verdicts["foreign"] > 0
    assert process.memory_info().rss - before < 8 * MIB
    assert threading.active_count() == threads


def test_a_length_that_is_only_claimed_allocates_nothing():
    tracemalloc.start()
    try:
        for parts in bombs(frames_of(SESSION, NONCE)):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            assert verdict(parts) == "refused", parts
            assert tracemalloc.get_traced_memory()[1] - before < 64 << 10, parts
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "shape",
    [(2**60,), (2**31, 2**31), (2**32, 2**32), (0, 2**62), (2**63,), (-1,), (1,) * 65, (3,) * 64],
    ids=str,
)
def test_a_shape_that_no_memory_has_room_for_is_refused(shape):
    spec = [f"w{len(shape)}", list(shape), "float32"]
    manifest = {"type": "Manifest", "tensors": [spec], "digest_kind": "xxh3-64"}
    bucket = {"type": "Bucket", "seq": 0, "slot": 0, "nbytes": 1, "chunks": [[spec, 0, 1, 0, 0, 0]]}
    for message in (manifest, bucket):
        with pytest.raises(MalformedFrameError):
            decode_frame([HEADER, packed(message)])


def packed(message) -> bytes:
    return msgspec.msgpack.encode(message)


def test_more_entries_than_a_peer_takes_are_refused_there_and_never_leave_here():
    spec = TensorSpec("", (), "int8")
    most = Manifest((spec,) * MAX_ENTRIES, "off")
    assert decode_frame([HEADER, *encode_message(most)]).message == most
    more = {"type": "Manifest", "tensors": [["", [], "int8"]] * (MAX_ENTRIES + 1), "digest_kind": "off"}
    with pytest.raises(MalformedFrameError, match="length <="):
        decode_frame([HEADER, packed(more)])
    with pytest.raises(ConfigurationError, match="a peer takes 1048576"):
        encode_message(Manifest((spec,) * (MAX_ENTRIES + 1), "off"))


def test_a_header_is_short():
    long = Header(PROTOCOL_VERSION, "a" * MAX_HEADER_BYTES, 1, NONCE, 1)
    with pytest.raises(MalformedFrameError, match="a header of"):
        decode_frame([encode_header(long), *encode_message(Release(1))])


leaves = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=9), inner, max_size=6),
)


@pytest.mark.slow
@settings(max_examples=200)
@given(st.data())
def test_any_value_in_place_of_any_field_is_refused_or_is_that_field(data):
    """Messages that are well-formed msgpack with the right keys, and with whatever else in them."""
    message = data.draw(st.sampled_from(MESSAGES))
    tree = msgspec.msgpack.decode(encode_message(message)[0])
    for key in data.draw(st.lists(st.sampled_from(sorted(tree)), min_size=1, max_size=3)):
        tree[key] = data.draw(trees)
    header = data.draw(st.just(HEADER) | st.lists(leaves, max_size=7).map(msgspec.msgpack.encode))
    parts = [header, msgspec.msgpack.encode(tree), *data.draw(st.lists(st.binary(max_size=20), max_size=2))]
    assert verdict(parts) in {"refused", "handled", "foreign"}


# At the socket of an engine.


class Intruder(RawClient):
    """A client whose key an engine's hub accepts, as a worker's that has gone wrong."""

    def __init__(self, hub) -> None:
        self.hub = hub
        super().__init__(hub.card(), name="gone wrong")

    def dial(self):
        self.link = self.hub.accept(self.card())
        super().dial()

    def begin(self, epoch: int = 1) -> bytes:
        waiting = background(self.link.begin, epoch=epoch)
        self.send(Hello(PROTOCOL_VERSION, self.target["session"], epoch, NONCE, self.name), epoch=epoch)
        while not isinstance(message := decode_frame(self.socket.recv_multipart()).message, Welcome):
            pass
        self.send(Ready(message.nonce), epoch=epoch)
        assert waiting.result(5) == (epoch, None)
        return message.nonce


@pytest.mark.nixl
def test_a_worker_serves_on_after_all_that_an_intruder_with_a_key_and_one_without_throw_at_it():
    sent = some_weights()
    with Crew() as crew:
        assert_same(crew.refit(sent)[0], sent)
        hub = crew.policy[0]._session._hub
        process = psutil.Process()
        with RawClient(hub.card()) as stranger:
            before, threads = None, threading.active_count()
            for epoch in range(1, ROUNDS + 1):
                with Intruder(hub) as intruder:
                    throw(hub, intruder, stranger, epoch)
                before = before or process.memory_info().rss
            knock(hub)
            counted = Counter(hub.counters)
            assert counted["malformed"] > THROWN // 2, counted
            assert counted["unauthenticated"] >= 1, counted
            assert counted["replayed"] > 0, counted
            assert counted["internal"] == 0, counted
            assert process.memory_info().rss - before < 48 * MIB
            assert threading.active_count() <= threads
        weights = some_weights(seed=5)
        assert_same(crew.refit(weights)[0], weights)
        assert crew.policy[0]._session._hub is hub


def throw(hub, intruder, stranger, epoch: int) -> None:
    """Begin a refit as a worker does, then throw frames of that very refit."""
    token, session = intruder.begin(epoch), intruder.target["session"]
    numbered = (frames_of(session, token, epoch=epoch, number=n) for n in range(1, 200, 4))
    frames = [frame for frames in numbered for frame in frames]
    for parts in mutated([*frames, *bombs(frames)], THROWN // ROUNDS, seed=epoch):
        intruder.raw(parts or [b""])
        with contextlib.suppress(zmq.Again):  # its queue is full: nothing of it is ever taken
            stranger.socket.send_multipart(parts or [b""], zmq.NOBLOCK)
    wait_until(lambda: settled(hub), seconds=10)
    drain(intruder)
    intruder.link.close()


def drain(client) -> None:
    """Take what the hub has answered, so that it waits nowhere."""
    while client.socket.poll(0):
        client.socket.recv_multipart()


def knock(hub) -> None:
    """Connect without a word of the protocol, and with far too many bytes of it."""
    endpoint = Endpoint.parse(hub.card()["address"])
    for noise in (b"", b"\x00" * 64, b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection((endpoint.host, endpoint.port), timeout=2) as connection:
            connection.sendall(noise)


def settled(hub) -> bool:
    seen = dict(hub.counters)
    time.sleep(0.1)
    return dict(hub.counters) == seen


def test_a_stranger_that_announces_a_huge_command_is_hung_up_on():
    """ZMTP's greeting, then a command of 2**60 bytes: before any key was asked for."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
    with ControlHub("policy 0", bind_host="127.0.0.1", deadlines=FAST) as hub:
        endpoint = Endpoint.parse(hub.card()["address"])
        process = psutil.Process()
        before = process.memory_info().vms
        with socket.create_connection((endpoint.host, endpoint.port), timeout=2) as connection:
            connection.sendall(greeting + b"\x06" + (2**60).to_bytes(8, "big") + b"x" * 100)
            connection.settimeout(5)
            received = b""
            while chunk := hear(connection):
                received += chunk
            assert len(received) <= 64 + 100
        assert process.memory_info().vms - before < 64 * MIB
        with Intruder(hub) as peer:
            peer.begin()  # the others are served on


def hear(connection) -> bytes:
    try:
        return connection.recv(4096)
    except ConnectionResetError:
        return b""


def test_every_socket_that_peers_reach_has_its_limits(monkeypatch):
    made = []
    real = zmq.Context.socket

    def socket_of(context, kind, **kwargs):
        made.append(real(context, kind, **kwargs))
        return made[-1]

    monkeypatch.setattr(zmq.Context, "socket", socket_of)
    with (
        ControlHub("policy 0", bind_host="127.0.0.1", deadlines=FAST, max_frame_bytes=1 << 20) as server,
        ControlHub("rollout 0", bind_host="127.0.0.1", deadlines=FAST, max_frame_bytes=1 << 20) as client,
    ):
        waiting = background(server.accept(client.card()).begin, epoch=1)
        client.connect(server.card()).begin(epoch=1)
        waiting.result(5)
        outward = [each for each in made if each.type in {zmq.ROUTER, zmq.DEALER}]
        assert sorted(each.type for each in outward) == sorted([zmq.ROUTER, zmq.ROUTER, zmq.DEALER])
        for each in outward:
            assert each.mechanism == zmq.CURVE
            assert 1 << 20 <= each.maxmsgsize <= (1 << 20) + 4096
            assert 0 < each.rcvhwm <= 64
            assert each.linger == 300
            assert 0 < each.handshake_ivl <= 30_000


def test_messages_that_nobody_takes_end_the_refit_before_they_fill_the_memory(monkeypatch):
    monkeypatch.setattr(control_core, "MAX_QUEUED_FRAMES", 2)
    with (
        ControlHub("policy 0", bind_host="127.0.0.1", deadlines=FAST, max_frame_bytes=100_000) as hub,
        Intruder(hub) as intruder,
    ):
        token = intruder.begin()
        for number in range(1, 6):
            bucket = Bucket(number, 0, 0, (), bytes(60_000))
            intruder.send(bucket, epoch=1, token=token, number=number)
        wait_until(lambda: hub.counters["overflow"] >= 1)
        refit = intruder.link._refit
        assert refit.inbox_bytes <= 200_000
        taken = [intruder.link.receive(Bucket, phase="load").seq for _ in range(3)]
        assert taken == [1, 2, 3]
        with pytest.raises(ProtocolError, match=r"messages of 180.* bytes that nobody took, and more"):
            intruder.link.receive(Bucket, phase="load")
        assert refit.inbox_bytes == 0


def test_each_session_has_keys_of_its_own_and_tells_only_the_public_half():
    with ControlHub("a", bind_host="127.0.0.1") as one, ControlHub("a", bind_host="127.0.0.1") as other:
        assert one.card()["public_key"] != other.card()["public_key"]
        assert one.card()["session"] != other.card()["session"]
        assert one._keys[1].decode() not in str(one.card())


@pytest.mark.nixl
def test_each_prepare_begins_a_session_with_new_keys():
    with Crew() as crew:
        engine = crew.policy[0]
        seen = set()
        for _ in range(3):
            metadata = engine.prepare()
            seen.add((metadata["control"]["public_key"], metadata["control"]["session"]))
            assert engine._session._hub._keys[1].decode() not in repr(metadata)
        assert len({key for key, _ in seen}) == len({session for _, session in seen}) == 3
