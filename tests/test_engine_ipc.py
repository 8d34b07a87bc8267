"""The IPC transport alone, as the pipeline calls it."""

from __future__ import annotations

import multiprocessing
import os

import msgspec
import pytest
import torch

from tests.engine_crew import MIB, noise
from tests.own_files import left_by_tests
from weightsync.control import Bucket
from weightsync.engines.ipc import IpcTransport
from weightsync.engines.transport import SLOTS, Peer, Place
from weightsync.errors import ConfigurationError, LifecycleError, PeerLostError, ProtocolError
from weightsync.testing.shared_files import shared_files
from weightsync.topology import RankId

CONTEXT = multiprocessing.get_context("forkserver")
SIZE = 3 * MIB
POLICY, ROLLOUT = RankId("policy", 0), RankId("rollout", 0)
CPU = torch.device("cpu")
WAIT = {"timeout_s": 5.0, "check": lambda: None}


def place(who: RankId, *, sources=(), targets=()) -> Place:
    worlds = {"train_world_size": 1, "rollout_world_size": 1, "receivers": (0,)}
    return Place(who, sources=tuple(sources), targets=tuple(targets), **worlds)


def bucket(slot: int, nbytes: int = SIZE, payload: bytes = b"") -> Bucket:
    return Bucket(seq=7, slot=slot, nbytes=nbytes, chunks=(), payload=payload)


def from_policy(description: dict) -> Place:
    return place(ROLLOUT, sources=[Peer(POLICY, description)])


@pytest.fixture
def sender():
    transport = IpcTransport(CPU)
    transport.allocate(SIZE)
    yield transport
    transport.close()


@pytest.fixture
def receiver():
    transport = IpcTransport(CPU)
    transport.allocate(SIZE)
    yield transport
    transport.close()


def fds() -> int:
    return len(os.listdir("/proc/self/fd"))


# In one process.


def test_a_description_is_plain_data(sender):
    description = sender.describe()
    assert msgspec.json.decode(msgspec.json.encode(description)) == description
    assert len(description["slots"]) == SLOTS


def test_a_bucket_is_the_sender_s_own_memory(sender, receiver):
    buffers = sender.allocate(SIZE)
    receiver.connect(from_policy(sender.describe()))
    sender.connect(place(POLICY, targets=[Peer(ROLLOUT, receiver.describe())]))
    receiver.open(sending=False, **WAIT)
    sender.open(sending=True, **WAIT)
    for slot in (0, 1, 0):
        data = noise(SIZE, slot)
        buffers[slot].copy_(data)
        assert sender.publish(slot, SIZE - 5) == b""
        seen = receiver.fetch(POLICY, bucket(slot, SIZE - 5), 1 - slot, **WAIT)
        assert torch.equal(seen, data[:-5])
        buffers[slot][0] += 1
        assert seen[0] == buffers[slot][0]
        sender.settle(slot, **WAIT)


def test_a_receiver_s_buffers_take_no_memory_and_a_sender_s_are_there_once_it_sends(sender):
    def pages():
        slots = sender.describe()["slots"]
        return [os.stat(f"/proc/self/fd/{slot['fd']}").st_blocks * 512 >= SIZE for slot in slots]

    sender.open(sending=False, **WAIT)
    assert pages() == [False, False]
    sender.open(sending=True, **WAIT)
    assert pages() == [True, True]


def test_more_buffers_are_found_by_their_payload(sender, receiver):
    receiver.connect(from_policy(sender.describe()))
    more = [sender.extend() for _ in range(3)]
    for i, buffer in enumerate(more):
        buffer.fill_(i + 1)
    for _ in range(2):
        for i in range(3):
            payload = sender.publish(SLOTS + i, SIZE)
            seen = receiver.fetch(POLICY, bucket(SLOTS + i, payload=payload), 0, **WAIT)
            assert seen.unique().tolist() == [i + 1]
    assert len(receiver._mapped) == 5
    assert len(sender.describe()["slots"]) == SLOTS
    receiver.connect(from_policy(sender.describe()))
    assert len(receiver._mapped) == SLOTS


def test_mappings_stay_for_the_same_buffers_and_go_with_others(sender, receiver):
    receiver.connect(from_policy(sender.describe()))
    mapped = dict(receiver._mapped)
    receiver.disconnect()
    receiver.connect(from_policy(sender.describe()))
    assert receiver._mapped == mapped
    sender.release()
    sender.allocate(SIZE)
    receiver.connect(from_policy(sender.describe()))
    assert not receiver._mapped.keys() & mapped.keys()
    assert len(receiver._mapped) == SLOTS
    receiver.release()
    assert receiver._mapped == {}


def test_nothing_is_open_after_close():
    before = fds()
    for _ in range(20):
        sender, receiver = IpcTransport(CPU), IpcTransport(CPU)
        sender.allocate(SIZE)
        receiver.connect(from_policy(sender.describe()))
        for transport in (sender, receiver):
            transport.close()
            transport.close()
    assert fds() == before


def test_what_cannot_be_fetched_says_why(sender, receiver):
    with pytest.raises(LifecycleError, match="not connected to policy rank 0"):
        receiver.fetch(POLICY, bucket(0), 0, **WAIT)
    receiver.connect(from_policy(sender.describe()))
    with pytest.raises(ProtocolError, match=f"bucket 7 has {SIZE + 1} bytes, and is larger than"):
        receiver.fetch(POLICY, bucket(0, SIZE + 1), 0, **WAIT)
    for payload in (b"", b"\x01", msgspec.msgpack.encode({"type": "memory", "pid": "x"})):
        with pytest.raises(ProtocolError, match="named buffer 2 and did not tell where it is"):
            receiver.fetch(POLICY, bucket(2, payload=payload), 0, **WAIT)
    with pytest.raises(LifecycleError, match="has no buffers"):
        IpcTransport(CPU).extend()


@pytest.mark.parametrize("side", ["sources", "targets"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"home": {"boot": "x", "host": "far"}}, "rank 0 is on 'far'"),
        ({"home": {"pid_namespace": "pid:[7]"}}, r"one PID namespace: .* pid:\[7\]"),
        ({"device": "cuda"}, "has device 'cuda', this worker 'cpu': set device alike"),
        ({"slots": [{"type": "memory", "pid": 1}]}, "misdescribed: .*fd"),
        ({"more": 1}, "misdescribed: .*more"),
    ],
    ids=["host", "container", "device", "slots", "unknown"],
)
def test_a_peer_that_cannot_be_reached_so_is_refused(sender, receiver, side, change, words):
    description = sender.describe()
    if "home" in change:
        change = {"home": {**description["home"], **change["home"]}}
    peer = Peer(POLICY, {**description, **change})
    with pytest.raises(ConfigurationError, match=words):
        receiver.connect(place(ROLLOUT, **{side: [peer]}))
    assert receiver._sources == {}


def test_a_source_that_is_gone_is_lost(sender, receiver):
    description = sender.describe()
    sender.release()
    with pytest.raises(PeerLostError, match="is gone") as caught:
        receiver.connect(from_policy(description))
    assert caught.value.context.peer == "policy rank 0"


# In two processes.


def send(pipe) -> None:
    """Be a sender: fill a slot with what is said, and tell how it was published."""
    transport = IpcTransport(CPU)
    buffers = transport.allocate(SIZE)
    pipe.send(transport.describe())
    transport.open(sending=True, **WAIT)
    while True:
        slot, seed = pipe.recv()
        if slot == len(buffers):
            buffers.append(transport.extend())
        buffers[slot].copy_(noise(SIZE, seed))
        pipe.send(transport.publish(slot, SIZE))


@pytest.mark.slow
def test_buckets_of_another_process_are_read_in_place_also_once_it_is_killed(receiver):
    pipe, far = CONTEXT.Pipe()
    process = CONTEXT.Process(target=send, args=(far,), daemon=True)
    process.start()
    far.close()

    def hear():
        assert pipe.poll(30)
        return pipe.recv()

    try:
        before = shared_files()
        receiver.connect(from_policy(hear()))
        open_fds = fds()
        for seed, slot in enumerate((0, 1, 0, 1, 2, 2)):
            pipe.send((slot, seed))
            seen = receiver.fetch(POLICY, bucket(slot, payload=hear()), 0, **WAIT)
            assert torch.equal(seen, noise(SIZE, seed))
        process.kill()
        process.join(10)
        assert torch.equal(seen, noise(SIZE, 5))
        assert torch.equal(receiver.fetch(POLICY, bucket(1), 0, **WAIT), noise(SIZE, 3))
        assert fds() == open_fds
        assert left_by_tests(before) == []
    finally:
        process.kill()
        pipe.close()
