"""The Mooncake transport alone, as the pipeline calls it, and the session that it sits on."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import weakref
from types import SimpleNamespace

import msgspec
import pytest
import torch

from tests.engine_crew import MIB, noise
from tests.engine_processes import stop_forkserver
from tests.mooncake_support import real_mooncake
from weightsync.control import Bucket
from weightsync.engines import mooncake, mooncake_session
from weightsync.engines.mooncake import MooncakeCheckpointEngine, MooncakeTransport
from weightsync.engines.mooncake_session import MooncakeSession, import_mooncake
from weightsync.engines.transport import SLOTS, Peer, Place
from weightsync.errors import (
    ConfigurationError,
    DeadlineError,
    LifecycleError,
    MissingDependencyError,
    PeerLostError,
    ProtocolError,
    TransportError,
)
from weightsync.topology import RankId

FORKS = multiprocessing.get_context("forkserver")
SIZE = 3 * MIB
SELF, POLICY, OTHER = RankId("rollout", 0), RankId("policy", 0), RankId("policy", 1)
SETTINGS = {"host": "127.0.0.1", "protocol": "tcp", "device_name": ""}
THREAD = "weightsync-mooncake-read"


def make_transport(**changes) -> MooncakeTransport:
    return MooncakeTransport(torch.device("cpu"), **{**SETTINGS, **changes})


@contextlib.contextmanager
def allocated(**changes):
    transport = make_transport(**changes)
    try:
        buffers = transport.allocate(SIZE)
        yield transport, buffers
    finally:
        transport.close()


def place(*sources: tuple[RankId, dict]) -> Place:
    return Place(SELF, 2, 1, tuple(Peer(who, transport) for who, transport in sources), ())


def bucket(payload: bytes, nbytes: int = SIZE, seq: int = 7) -> Bucket:
    return Bucket(seq=seq, slot=0, nbytes=nbytes, chunks=(), payload=payload)


def silent() -> None:
    """A control channel that knows of nothing bad."""


def fetch(transport, payload, *, source=POLICY, slot=0, timeout_s=5.0, check=silent, nbytes=SIZE):
    return transport.fetch(source, bucket(payload, nbytes), slot, timeout_s=timeout_s, check=check)


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


def wait_for_readers() -> None:
    end = time.monotonic() + 10
    while readers():
        assert time.monotonic() < end
        time.sleep(0.05)


def location(session: str = "host:1", address: int = 4096) -> bytes:
    return msgspec.msgpack.encode([session, address])


def session_of(transport) -> str:
    return msgspec.msgpack.decode(transport.publish(0, 1))[0]


def serve(pipe) -> None:
    """A sender in a process of its own: publishes `noise(SIZE, slot)` in each buffer."""
    transport = make_transport()
    for slot, buffer in enumerate(transport.allocate(SIZE)):
        buffer.copy_(noise(SIZE, slot))
    pipe.send((transport.describe(), [transport.publish(slot, SIZE) for slot in range(SLOTS)]))
    with contextlib.suppress(EOFError):
        pipe.recv()
    os._exit(0)


class Sender:
    def __init__(self) -> None:
        self.pipe, far = FORKS.Pipe()
        self.process = FORKS.Process(target=serve, args=(far,), daemon=True)
        self.process.start()
        far.close()
        assert self.pipe.poll(60)
        self.description, self.payloads = self.pipe.recv()

    def signal(self, what: signal.Signals) -> None:
        os.kill(self.process.pid, what)

    def end(self) -> None:
        self.process.kill()
        self.process.join(10)


@pytest.fixture(scope="module")
def forks():
    FORKS.set_forkserver_preload(["weightsync.engines.mooncake", "tests.engine_processes"])
    yield
    stop_forkserver()


@pytest.fixture
def sender(forks):
    sender = Sender()
    yield sender
    sender.end()


@pytest.fixture
def receiver():
    with allocated() as (transport, _):
        yield transport


# Two processes, the real engine.


@real_mooncake
@pytest.mark.slow
def test_buckets_of_another_process_arrive_and_are_forwarded_from_where_they_are(sender, receiver):
    receiver.connect(place((POLICY, sender.description)))
    receiver.open(sending=True, timeout_s=1.0, check=silent)
    for seed in (1, 0):
        got = fetch(receiver, sender.payloads[seed], slot=seed)
        assert torch.equal(got, noise(SIZE, seed))
    part = fetch(receiver, sender.payloads[0], nbytes=1000)
    assert torch.equal(part, noise(SIZE, 0)[:1000])
    with allocated() as (last, _):
        last.connect(place((SELF, receiver.describe())))
        got = fetch(last, receiver.publish(1, SIZE), source=SELF)
        assert torch.equal(got, noise(SIZE, 1))


@real_mooncake
@pytest.mark.slow
def test_a_killed_sender_is_an_error_that_names_it_and_its_successor_is_read(sender, receiver):
    receiver.connect(place((POLICY, sender.description)))
    fetch(receiver, sender.payloads[0])
    sender.end()
    started = time.monotonic()
    with pytest.raises(TransportError, match="Mooncake") as caught:
        fetch(receiver, sender.payloads[0])
    assert time.monotonic() - started < 3
    assert (caught.value.context.peer, caught.value.context.bucket) == ("policy rank 0", 7)

    def lost() -> None:
        raise PeerLostError("its process ended", peer="policy rank 0")

    with pytest.raises(PeerLostError, match="its process ended"):
        fetch(receiver, sender.payloads[0], check=lost)
    receiver.shut()
    receiver.disconnect()
    successor = Sender()
    try:
        receiver.connect(place((POLICY, successor.description)))
        receiver.open(sending=False, timeout_s=1.0, check=silent)
        assert torch.equal(fetch(receiver, successor.payloads[1]), noise(SIZE, 1))
    finally:
        successor.end()


@real_mooncake
@pytest.mark.slow
@pytest.mark.parametrize("met", [True, False], ids=["in a read", "at the first word"])
def test_a_stopped_sender_holds_nobody_up_and_its_late_bytes_meet_no_later_refit(sender, receiver, met):
    if met:
        fetch(receiver, sender.payloads[0])
    sender.signal(signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(DeadlineError, match=r"3145728 bytes from 127.* did not end within 0\.3 s") as caught:
        fetch(receiver, sender.payloads[0], timeout_s=0.3)
    assert time.monotonic() - started < 1.5
    assert (caught.value.context.peer, caught.value.context.bucket) == ("policy rank 0", 7)
    receiver.shut()
    marked = noise(SIZE, 9)
    receiver.open(sending=True, timeout_s=3.0, check=silent)
    assert time.monotonic() - started < 4
    with allocated() as (successor, buffers):
        buffers[0].copy_(marked)
        assert torch.equal(fetch(receiver, successor.publish(0, SIZE)), marked)
        sender.signal(signal.SIGCONT)
        wait_for_readers()
        assert torch.equal(fetch(successor, receiver.publish(0, SIZE), slot=1), marked)
    assert torch.equal(fetch(receiver, sender.payloads[1], slot=1), noise(SIZE, 1))


@real_mooncake
@pytest.mark.slow
def test_buffers_are_freed_while_a_stopped_sender_owes_bytes(sender):
    with allocated() as (receiver, _):
        fetch(receiver, sender.payloads[0])
        sender.signal(signal.SIGSTOP)
        with pytest.raises(DeadlineError):
            fetch(receiver, sender.payloads[0], timeout_s=0.2)
        started = time.monotonic()
        receiver.release()
        assert time.monotonic() - started < 3
        receiver.allocate(SIZE)
        sender.signal(signal.SIGCONT)
        receiver.open(sending=False, timeout_s=1.0, check=silent)
        assert torch.equal(fetch(receiver, sender.payloads[1]), noise(SIZE, 1))
    wait_for_readers()


@pytest.mark.slow
@real_mooncake
def test_two_senders_are_told_apart():
    with allocated() as (one, ones), allocated() as (two, twos), allocated() as (receiver, _):
        ones[0].fill_(1)
        twos[1].fill_(2)
        receiver.connect(place((POLICY, one.describe()), (OTHER, two.describe())))
        receiver.open(sending=False, timeout_s=1.0, check=silent)
        assert fetch(receiver, one.publish(0, SIZE)).eq(1).all()
        assert fetch(receiver, two.publish(1, SIZE), source=OTHER, slot=1).eq(2).all()
        more = two.extend().fill_(3)
        assert more.numel() == SIZE
        assert fetch(receiver, two.publish(2, SIZE), source=OTHER, slot=1).eq(3).all()
        with pytest.raises(TransportError, match="failed to read"):
            fetch(receiver, location(session_of(one), 64))


@real_mooncake
def test_a_session_is_kept_for_the_next_engine_of_the_process():
    with allocated() as (first, _):
        name = session_of(first)
        first.release()
        first.release()
        assert first.allocate(SIZE)[0].numel() == SIZE
        assert session_of(first) == name
        with allocated() as (second, _):
            assert session_of(second) != name
    with allocated() as (_, _), allocated() as (_, _):
        pass
    with allocated() as (one, _), allocated() as (two, _):
        assert name in {session_of(one), session_of(two)}


@real_mooncake
@pytest.mark.parametrize("device_name", ["", "mlx5_9"])
def test_rdma_without_a_device_is_refused(device_name):
    if os.path.isdir("/sys/class/infiniband") and os.listdir("/sys/class/infiniband") and not device_name:
        pytest.skip("there is an RDMA device here")
    with pytest.raises(ConfigurationError, match=f"protocol: rdma needs an RDMA device.*{device_name}.*tcp"):
        make_transport(protocol="rdma", device_name=device_name).allocate(SIZE)


@real_mooncake
def test_this_build_does_not_move_gpu_memory():
    if import_mooncake().SUPPORT_CUDA:
        pytest.skip("this build of Mooncake does")
    transport = MooncakeTransport(torch.device("cuda", 0), **SETTINGS)
    with pytest.raises(ConfigurationError, match="install mooncake-transfer-engine in place of"):
        transport.allocate(SIZE)
    transport.close()


# One process, a played engine.


class Played:
    """What the played engines do, and what was asked of them."""

    def __init__(self) -> None:
        self.engines: list[PlayedEngine] = []
        self.code = 0
        self.refuse_after = 99
        self.batch, self.statuses = 5, [1]
        self.environment: dict[str, str] = {}
        self.reading = threading.Event()

    def make(self) -> PlayedEngine:
        self.engines.append(PlayedEngine(self))
        return self.engines[-1]

    @property
    def registered(self) -> list[int]:
        """Of all engines, but for the byte that each one has for itself."""
        return [address for engine in self.engines for address, nbytes in engine.registered if nbytes > 1]


class PlayedEngine:
    def __init__(self, played: Played) -> None:
        self.played = played
        self.registered: list[tuple[int, int]] = []
        self.reads: list[tuple] = []

    def initialize(self, *_: str) -> int:
        self.played.environment = dict(os.environ)
        return self.played.code

    def get_rpc_port(self) -> int:
        return 15000 + len(self.played.engines)

    def get_local_topology(self, _: str) -> str:
        return '{"cpu:0": [["mlx5_0"], []]}'

    def register_memory(self, address: int, nbytes: int) -> int:
        if len(self.registered) > self.played.refuse_after:
            return -7
        self.registered.append((address, nbytes))
        return 0

    def unregister_memory(self, address: int) -> int:
        (entry,) = [entry for entry in self.registered if entry[0] == address]
        self.registered.remove(entry)
        return 0

    def batch_transfer_async_read(self, session: str, local: list, remote: list, lengths: list) -> int:
        self.reads.append((session, *remote, *lengths))
        return self.played.batch

    def transfer_check_status(self, batch: int) -> int:
        assert batch == self.played.batch
        if self.reads[-1][-1] == 1:
            return 1
        statuses = self.played.statuses
        return statuses.pop(0) if len(statuses) > 1 else statuses[0]


@pytest.fixture
def played(monkeypatch) -> Played:
    played = Played()
    api = SimpleNamespace(TransferEngine=played.make, SUPPORT_CUDA=False)
    monkeypatch.setattr(mooncake_session, "import_mooncake", lambda *_: api)
    monkeypatch.setattr(mooncake_session, "_POOL", mooncake_session.Pool())
    return played


def test_the_first_word_to_a_peer_is_of_one_byte(played):
    with allocated() as (transport, _):
        for _ in range(2):
            fetch(transport, location())
        fetch(transport, location("host:2", 8), nbytes=100)
    first, second = ("host:1", 4096), ("host:2", 8)
    reads = [(*first, 1), (*first, SIZE), (*first, SIZE), (*second, 1), (*second, 100)]
    assert played.engines[0].reads == reads


def test_a_refused_registration_leaves_nothing_registered(played):
    played.refuse_after = 1
    with (
        pytest.raises(TransportError, match=r"refused to register 3145728 bytes on cpu \(code -7\)"),
        allocated(),
    ):
        pass
    assert (len(played.engines[0].registered), played.registered) == (1, [])


@pytest.mark.parametrize(
    ("batch", "statuses", "reason"),
    [(0, [1], "could not reach host:1"), (5, [0, -2, 0, -1], "failed to read 3145728 bytes from host:1")],
)
def test_after_a_failed_read_another_session_is_taken(played, batch, statuses, reason):
    with allocated() as (transport, buffers):
        before = session_of(transport)
        played.batch, played.statuses = batch, statuses
        with pytest.raises(TransportError, match=reason) as caught:
            fetch(transport, location())
        assert (caught.value.context.peer, caught.value.context.bucket) == ("policy rank 0", 7)
        transport.shut()
        transport.open(sending=True, timeout_s=1.0, check=silent)
        assert session_of(transport) != before
        assert sorted(played.registered) == sorted(buffer.data_ptr() for buffer in buffers)
        played.batch, played.statuses = 5, [1]
        fetch(transport, location())
    assert played.registered == []


def test_a_read_that_is_given_up_is_left_with_its_engine(played):
    played.statuses = [0]
    with allocated() as (transport, _):
        with pytest.raises(DeadlineError):
            fetch(transport, location(), timeout_s=0.05)
        engine = weakref.ref(played.engines.pop())
        assert len(readers()) == 1
        transport.open(sending=False, timeout_s=1.0, check=silent)
        assert not readers()
        assert engine() is None
        played.statuses = [1]
        fetch(transport, location())
    assert played.registered == []


def hang_up_on(nbytes: int, played: Played, monkeypatch) -> threading.Event:
    """Let Mooncake not return from reads of that size until the event; returns it."""
    go_on = threading.Event()
    start = PlayedEngine.batch_transfer_async_read

    def slow_start(engine: PlayedEngine, *arguments) -> int:
        batch = start(engine, *arguments)
        if engine.reads[-1][-1] == nbytes:
            played.reading.set()
            go_on.wait(10)
        return batch

    monkeypatch.setattr(PlayedEngine, "batch_transfer_async_read", slow_start)
    return go_on


def give_up(transport, played: Played) -> threading.Thread:
    """Give a read up as soon as Mooncake has been called; returns its thread."""

    def check() -> None:
        if played.reading.is_set():
            raise PeerLostError("its process ended")

    with pytest.raises(PeerLostError):
        fetch(transport, location(), check=check)
    (reader,) = readers()
    return reader


def test_a_read_that_was_given_up_and_ended_well_spoils_nothing(played, monkeypatch):
    go_on = hang_up_on(SIZE, played, monkeypatch)
    with allocated() as (transport, _):
        name = session_of(transport)
        give_up(transport, played)
        go_on.set()
        wait_for_readers()
        transport.open(sending=False, timeout_s=0.0, check=silent)
        assert session_of(transport) == name


def test_a_first_word_that_is_not_answered_is_left_alone_and_no_read_follows(played, monkeypatch):
    go_on = hang_up_on(1, played, monkeypatch)
    with allocated() as (transport, _):
        reader = give_up(transport, played)
        transport.open(sending=False, timeout_s=0.0, check=silent)
        assert reader.is_alive()
        go_on.set()
        wait_for_readers()
        assert played.engines[0].reads == [("host:1", 4096, 1)]
        fetch(transport, location())
    assert played.registered == []


def test_a_read_that_does_not_return_keeps_its_buffer_and_holds_the_next_refit_up(played, monkeypatch):
    go_on = hang_up_on(SIZE, played, monkeypatch)
    monkeypatch.setattr(mooncake, "_DRAIN_S", 0.1)
    with allocated() as (transport, buffers):
        reader = give_up(transport, played)
        with pytest.raises(DeadlineError, match=r"goes on after 0\.1 s"):
            transport.open(sending=False, timeout_s=0.1, check=silent)
        address = buffers[0].data_ptr()
        del buffers
    assert played.registered == []
    gc.collect()
    assert reader._targets[-1].data_ptr() == address
    go_on.set()
    wait_for_readers()


@pytest.mark.parametrize(("protocol", "forced"), [("tcp", "1"), ("rdma", None)])
def test_variables_are_set_for_mooncake_alone(played, monkeypatch, protocol, forced):
    for name in ("MC_FORCE_TCP", "MC_USE_IPV6"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MC_LOG_LEVEL", "INFO")
    before = dict(os.environ)
    session = MooncakeSession("::1" if protocol == "rdma" else "host", protocol, "")
    assert session.name == ("[::1]:15002" if protocol == "rdma" else "host:15001")
    assert dict(os.environ) == before
    seen = played.environment
    assert seen.get("MC_FORCE_TCP") == forced
    assert (seen["MC_LOG_LEVEL"], seen.get("MC_USE_IPV6")) == ("INFO", "1" if protocol == "rdma" else None)


def test_rdma_and_forced_tcp_contradict_each_other(played, monkeypatch):
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    with pytest.raises(ConfigurationError, match="MC_FORCE_TCP is set"):
        MooncakeSession("host", "rdma", "")


def test_an_engine_that_does_not_start_is_a_configuration_error(played):
    played.code = -1
    with pytest.raises(
        ConfigurationError, match=r"could not start with protocol tcp on 127.0.0.1 \(code -1\)"
    ):
        make_transport().allocate(SIZE)


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("libibverbs.so.1: cannot open shared object file", "apt-get install libibverbs1"),
        ("No module named 'mooncake'", r"pip install 'weightsync\[mooncake\]'"),
    ],
)
def test_what_is_missing_is_named(monkeypatch, text, fix):
    class Absent:
        def __getattr__(self, name: str):
            raise ImportError(text)

    monkeypatch.setitem(sys.modules, "mooncake", Absent())
    with pytest.raises(MissingDependencyError, match=f"{fix}.*{text}"):
        import_mooncake()


def test_a_peer_with_another_protocol_is_refused(played):
    with (
        allocated() as (transport, _),
        pytest.raises(ConfigurationError, match="policy rank 0 has protocol 'rdma', this worker 'tcp'"),
    ):
        transport.connect(place((POLICY, {"protocol": "rdma"})))


@pytest.mark.parametrize("payload", [b"", bytes(8), msgspec.msgpack.encode([1, "host:1"])])
def test_a_bucket_that_is_nowhere_is_a_protocol_error(played, payload):
    with allocated() as (transport, _), pytest.raises(ProtocolError, match="did not tell where it is"):
        fetch(transport, payload)


def test_without_buffers_nothing_is_published(played):
    with pytest.raises(LifecycleError, match="no buffers"):
        make_transport().publish(0, 1)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"protocol": "udp"}, "protocol must be 'tcp' or 'rdma', got 'udp'"),
        ({"device_name": "mlx5_0"}, "device_name names RDMA devices"),
        ({"device": "npu"}, "device must be"),
    ],
)
def test_settings_that_are_refused(settings, problem):
    with pytest.raises(ConfigurationError, match=problem):
        MooncakeCheckpointEngine(MIB, **{"device": "cpu", **settings})
