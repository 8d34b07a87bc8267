"""The collective transport: its group, the agreement on it in each refit, what a lost broadcast leaves."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from tests.engine_crew import MIB, noise
from weightsync.control import Bucket
from weightsync.engines import collective_backends, collective_transport
from weightsync.engines.collective import (
    GlooCheckpointEngine,
    HCCLCheckpointEngine,
    NCCLCheckpointEngine,
)
from weightsync.engines.collective_backends import GlooBackend, HCCLBackend, NCCLBackend
from weightsync.engines.collective_meeting import Ask, Meeting, Plan
from weightsync.engines.collective_transport import CollectiveTransport
from weightsync.engines.transport import Peer, Place
from weightsync.errors import (
    ConfigurationError,
    DeadlineError,
    LifecycleError,
    MissingDependencyError,
    PeerLostError,
    ProtocolError,
    TransportError,
)
from weightsync.testing.crew import ProcessCrew, Setup
from weightsync.testing.work import Plan as RefitPlan
from weightsync.topology import RankId

pytestmark = pytest.mark.timeout(60)

SIZE = 2 * MIB
POLICY = RankId("policy", 0)
WAIT_S = 10.0


def fine() -> None:
    """Nobody has failed."""


class Star:
    """Transports of policy rank 0 and of rollout ranks, in this process; what they do at once, in threads."""

    def __init__(self, rollout: int = 3, **settings) -> None:
        common = {"bind_host": "127.0.0.1", "advertise_host": None, "rebuild_group": False, "limit_s": 30.0}
        self.all = [CollectiveTransport(GlooBackend(), **{**common, **settings}) for _ in range(rollout + 1)]
        self.buffers = [transport.allocate(SIZE) for transport in self.all]
        self.threads = ThreadPoolExecutor(rollout + 1)
        self.join()

    def __enter__(self) -> Star:
        return self

    def __exit__(self, *_: object) -> None:
        for transport in self.all:
            transport.close()
        self.threads.shutdown(wait=False)

    @property
    def sender(self) -> CollectiveTransport:
        return self.all[0]

    @property
    def states(self) -> list[str | None]:
        return [each._group.state if each._group is not None else None for each in self.all]

    def join(self) -> None:
        said = [transport.describe() for transport in self.all]
        ranks = [RankId("rollout", rank) for rank in range(len(self.all) - 1)]
        targets = tuple(Peer(rank, each) for rank, each in zip(ranks, said[1:], strict=True))
        self.sender.connect(Place(POLICY, 1, len(ranks), (), targets))
        for rank, transport in zip(ranks, self.all[1:], strict=True):
            transport.connect(Place(rank, 1, len(ranks), (Peer(POLICY, said[0]),), ()))

    def at_once(self, act, ranks=None) -> list:
        """Run ``act(rank)`` for all group ranks; returns what each returned, or raised."""
        chosen = range(len(self.all)) if ranks is None else ranks
        futures = [self.threads.submit(act, rank) for rank in chosen]
        return [future.exception(20) or future.result() for future in futures]

    def open(self, ranks=None, *, timeout_s: float = WAIT_S, check=fine) -> list:
        def act(rank: int) -> None:
            self.all[rank].open(sending=rank == 0, timeout_s=timeout_s, check=check)

        return self.at_once(act, ranks)

    def move(self, data: list[torch.Tensor], ranks=None) -> list:
        """Send buckets to all ranks, or let some of them stay away; returns what came."""

        def send() -> list[torch.Tensor]:
            for seq, bucket in enumerate(data):
                self.sender.settle(seq % 2, timeout_s=WAIT_S, check=fine)
                self.buffers[0][seq % 2][: bucket.numel()] = bucket
                assert self.sender.publish(seq % 2, bucket.numel()) == b""
            return data

        def receive(rank: int) -> list[torch.Tensor]:
            return [self.fetch(rank, seq, bucket.numel()).clone() for seq, bucket in enumerate(data)]

        return self.at_once(lambda rank: receive(rank) if rank else send(), ranks)

    def fetch(self, rank: int, seq: int, nbytes: int, *, timeout_s: float = WAIT_S, check=fine):
        bucket = Bucket(seq, seq % 2, nbytes, (), b"")
        return self.all[rank].fetch(POLICY, bucket, seq % 2, timeout_s=timeout_s, check=check)

    def shut(self) -> None:
        for transport in self.all:
            transport.shut()

    def refits(self, seed: int = 0) -> None:
        """Run a whole refit of five buckets; every byte must come to every rank."""
        data = [noise(SIZE - 1000 * i - seed, 10 * seed + i) for i in range(5)]
        assert self.open() == [None] * len(self.all)
        for came in self.move(data):
            assert len(came) == len(data), came
            assert all(torch.equal(got, sent) for got, sent in zip(came, data, strict=True))
        self.shut()


@pytest.fixture
def star():
    with Star() as star:
        yield star


def told() -> None:
    raise PeerLostError("rollout rank 1 is lost")


# Refits that end well.


@pytest.mark.parametrize("rollout", [1, 2, 4])
def test_every_byte_comes_to_every_rank_and_the_group_is_kept(rollout):
    with Star(rollout) as star:
        star.refits(0)
        labels = {state.partition("/")[0] for state in star.states}
        assert len(labels) == 1
        star.refits(1)
        assert {state.partition("/")[0] for state in star.states} == labels


def test_a_group_is_rebuilt_for_each_refit_on_request():
    with Star(2, rebuild_group=True) as star:
        seen = set()
        for seed in range(3):
            star.refits(seed)
            seen |= set(star.states)
        assert len(seen) == 3


def test_one_rank_that_rebuilds_is_enough():
    with Star(2) as star:
        star.all[1]._rebuild_group = True
        star.refits(0)
        before = star.states
        star.refits(1)
        assert len(set(star.states)) == 1
        assert set(star.states).isdisjoint(before)


def test_only_the_bytes_of_the_bucket_are_sent(star):
    for buffers in star.buffers:
        for buffer in buffers:
            buffer.fill_(7)
    star.open()
    star.move([noise(1000, 1)])
    for buffers in star.buffers[1:]:
        assert torch.equal(buffers[0][:1000], noise(1000, 1))
        assert bool((buffers[0][1000:] == 7).all())


def test_torch_s_default_group_is_not_touched(star, tmp_path):
    star.refits(0)
    assert not dist.is_initialized()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        star.refits(1)
        assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()


def test_others_after_joining_anew(star):
    star.refits(0)
    star.join()
    star.refits(1)


def test_a_policy_rank_that_only_keeps_in_step_is_in_no_group():
    transport = CollectiveTransport(
        GlooBackend(), bind_host="127.0.0.1", advertise_host=None, rebuild_group=False, limit_s=30.0
    )
    transport.allocate(MIB)
    port = transport.describe()["port"]
    transport.connect(Place(RankId("policy", 1), 2, 1, (), ()))
    transport.shut()
    with pytest.raises(LifecycleError, match="in no group"):
        transport.open(sending=False, timeout_s=1.0, check=fine)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1.0)
    transport.close()


# Groups that one rank has given up, and the others have not.


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_group_that_one_rank_has_lost_is_formed_anew_by_all(star, rank):
    star.refits(0)
    star.all[rank]._drop_group()
    star.refits(1)
    assert len(set(star.states)) == 1


def test_a_receiver_that_left_before_the_last_bucket_makes_a_new_group(star):
    star.open()
    data = [noise(1000, 1)]
    star.move(data)
    star.move(data, ranks=[0, 1, 3])
    star.shut()
    star.refits(1)


def test_a_rank_that_fails_to_open_is_met_again(star):
    started = time.monotonic()
    outcomes = star.open([0, 1, 3], timeout_s=1.0)
    assert time.monotonic() - started < 5
    for outcome in outcomes:
        assert isinstance(outcome, DeadlineError)
        assert "forming the gloo group of 4 ranks did not end within 1 s" in str(outcome)
    star.shut()
    star.refits(0)


def test_opening_ends_as_soon_as_a_peer_is_known_to_have_failed(star):
    started = time.monotonic()
    outcomes = star.open([0, 1], check=told)
    assert all(isinstance(outcome, PeerLostError) for outcome in outcomes)
    assert time.monotonic() - started < 2
    star.shut()
    star.refits(0)


@pytest.mark.slow
def test_a_store_that_is_gone_is_an_error(star, monkeypatch):
    monkeypatch.setattr(collective_transport, "_HEARSAY_S", 0.1)
    star.sender.disconnect()
    (outcome,) = star.open([1], timeout_s=3.0)
    assert isinstance(outcome, TransportError)
    star.join()
    star.refits(0)


# Broadcasts that do not end.


def test_a_fetch_ends_when_a_peer_is_known_to_have_failed_and_its_buffer_is_not_used_again(star):
    star.refits(0)
    star.open()
    lost = star.buffers[1][0]
    started = time.monotonic()
    with pytest.raises(PeerLostError, match="rollout rank 1 is lost"):
        star.fetch(1, 0, 1000, check=told)
    assert time.monotonic() - started < 1
    held = star.all[1]._broadcasts[0]
    star.shut()
    assert not held.has_ended
    star.refits(1)
    assert star.buffers[1][0] is not lost
    # The sender has left the old group, which ends what was under way in it.
    deadline = time.monotonic() + 5
    while not held.has_ended and time.monotonic() < deadline:
        time.sleep(0.01)
    assert held.has_ended
    assert held.failure


def test_a_fetch_and_a_settling_end_at_their_deadline(star):
    star.open()
    star.sender.publish(0, 1000)
    for call in (
        lambda: star.sender.settle(0, timeout_s=0.3, check=fine),
        lambda: star.fetch(3, 0, 1000, timeout_s=0.3),
    ):
        with pytest.raises(DeadlineError, match=r"a gloo broadcast did not end within 0\.3 s"):
            call()
    star.shut()
    star.refits(0)


def test_a_bucket_that_nobody_announced_is_missed_before_its_bytes_come_for_another(star):
    star.open()
    star.sender.publish(0, SIZE)
    with pytest.raises(ProtocolError, match="bucket 1 was announced where bucket 0 was due"):
        star.fetch(1, 1, 1000)  # so many bytes more would end this process
    star.shut()
    star.refits(0)


def test_publishing_never_waits_for_a_receiver(star):
    star.open()
    started = time.monotonic()
    star.sender.publish(0, SIZE)
    star.sender.publish(1, SIZE)
    assert time.monotonic() - started < 0.5
    star.shut()
    star.refits(0)


def test_a_rank_that_leaves_breaks_the_others_broadcasts(star, monkeypatch):
    monkeypatch.setattr(collective_transport, "_HEARSAY_S", 0.1)
    star.open()
    star.sender.publish(0, SIZE)
    star.all[2].shut()
    star.all[2].disconnect()
    with pytest.raises(TransportError, match="gloo: a broadcast failed: ") as caught:
        star.sender.settle(0, timeout_s=5.0, check=fine)
    assert not isinstance(caught.value, PeerLostError)
    assert "pair.cc" not in str(caught.value)


def test_what_the_control_channel_knows_of_a_broken_broadcast_is_raised(star):
    star.open()
    star.sender.publish(0, SIZE)
    since = time.monotonic()

    def told_late() -> None:
        if time.monotonic() - since > 0.5:
            told()

    star.all[2].disconnect()
    with pytest.raises(PeerLostError, match="rollout rank 1 is lost"):
        star.sender.settle(0, timeout_s=5.0, check=told_late)


def test_a_bucket_out_of_a_refit(star):
    with pytest.raises(LifecycleError, match="no refit is open"):
        star.sender.publish(0, 10)


def test_closing_gives_everything_back():
    import psutil

    with Star(2) as star:
        star.refits(0)
    process, before = psutil.Process(), threading.active_count()
    fds = process.num_fds()
    with Star(2) as star:
        star.refits(0)
        star.all[1].close()
    time.sleep(0.2)
    assert process.num_fds() <= fds
    assert threading.active_count() <= before


@pytest.mark.slow
def test_a_stopped_receiver_that_goes_on_later_disturbs_nobody():
    settings = {"device": "cpu", "bind_host": "127.0.0.1", "connect_s": 5.0, "stall_s": 5.0, "silence_s": 2.0}
    setup = Setup(engine="gloo", settings=settings, bucket_size=MIB, bound_s=20.0, step_s=10.0)
    with ProcessCrew((1, 3), setup) as crew:
        crew.join()
        crew.works(RefitPlan("plain", seed=1))
        victim = crew.rollout[0]
        crew.begin(
            RefitPlan("around the bucket", seed=2),
            {("rollout", 0): RefitPlan("around the bucket", 2, "first", "hold")},
        )
        victim.wait_until_held(10)
        victim.signal(signal.SIGSTOP)
        for outcome in crew.outcomes(without=victim):
            assert outcome.typed, outcome
        crew.replace(victim)
        crew.rejoin()
        crew.works(RefitPlan("plain", seed=3))
        victim.signal(signal.SIGCONT)
        victim.go_on()
        crew.works(RefitPlan("mixed", seed=4))
        late = victim.result(20)
        assert late.typed, late
        victim.end()


# The agreement, alone.


def agree(store, asks: dict[int, str | None], held: str | None) -> list[Plan]:
    """Let rank 0 and the ranks of ``asks`` meet; returns the plans, by rank."""

    def act(rank: int) -> Plan:
        held_there = asks[rank] if rank else held
        return Meeting(store, rank=rank, size=len(asks) + 1, held=held_there).agree(go_on)

    end = time.monotonic() + 5

    def go_on() -> None:
        if time.monotonic() > end:
            raise DeadlineError("they did not agree")

    with ThreadPoolExecutor(len(asks) + 1) as pool:
        return list(pool.map(act, range(len(asks) + 1)))


@pytest.mark.parametrize(
    ("held", "asks", "keep"),
    [
        ("a/5", {1: "a/5", 2: "a/5"}, True),
        ("a/5", {1: "a/5", 2: "a/4"}, False),
        ("a/5", {1: "a/5", 2: None}, False),
        (None, {1: "a/5", 2: "a/5"}, False),
        (None, {1: None, 2: None}, False),
    ],
)
def test_a_group_is_kept_if_all_hold_it_in_the_same_state(held, asks, keep):
    store = HashStore()
    names = set()
    for _ in range(3):
        plans = agree(store, asks, held)
        assert [plan.keep for plan in plans] == [keep] * 3
        assert len({plan.name for plan in plans}) == 1
        names.add(plans[0].name)
    assert len(names) == 3


def test_what_an_earlier_refit_left_in_the_store_is_not_taken_for_an_answer():
    store = HashStore()
    meeting = Meeting(store, rank=0, size=3, held=None)
    old = Ask("old", "a/5", accepted="old plan")
    meeting._write("ask/1", old)
    meeting._write("ask/2", old)
    meeting._write("plan", Plan("old plan", ["old", "old"], keep=True, go=True))
    assert not any(plan.keep for plan in agree(store, {1: None, 2: None}, None))


def test_a_damaged_store_is_an_error():
    store = HashStore()
    store.set("ask/1", "{}")
    with pytest.raises(ProtocolError, match="damaged 'ask/1'"):
        Meeting(store, rank=0, size=2, held=None).agree(fine)


# Settings.


@pytest.mark.parametrize(
    ("engine", "device", "says"),
    [
        (GlooCheckpointEngine, "cuda", "gloo broadcasts from host memory"),
        (NCCLCheckpointEngine, "cpu", "nccl broadcasts between GPUs"),
        (HCCLCheckpointEngine, "cuda", "hccl broadcasts between Ascend NPUs"),
    ],
)
def test_a_device_of_another_kind_is_refused(engine, device, says):
    with pytest.raises(ConfigurationError, match=f"{says}, got device: {device}: write device: "):
        engine(MIB, device=device)


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
def test_nccl_says_what_is_missing():
    with pytest.raises(MissingDependencyError, match="install a CUDA build"):
        NCCLCheckpointEngine(MIB)


def test_hccl_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(MissingDependencyError, match="hccl needs torch_npu"):
        HCCLCheckpointEngine(MIB)


def test_other_topologies_are_refused_with_the_reason():
    with pytest.raises(ConfigurationError, match="a broadcast has one sender, policy rank 0"):
        GlooCheckpointEngine(MIB, topology="pairs")
    engine = GlooCheckpointEngine(MIB, topology="auto", bind_host="127.0.0.1")
    assert engine.refuses(train_world_size=2, rollout_world_size=5) is None


def test_peers_that_use_another_library_are_refused(star):
    said = star.sender.describe()
    star.all[1].describe()
    with pytest.raises(ConfigurationError, match="policy rank 0 has refit_transport 'nccl', this"):
        star.all[1].connect(
            Place(RankId("rollout", 0), 1, 3, (Peer(POLICY, {**said, "backend": "nccl"}),), ())
        )
    star.all[1].describe()
    with pytest.raises(ConfigurationError, match=r"transport of policy rank 0 is misdescribed: .*host"):
        star.all[1].connect(Place(RankId("rollout", 0), 1, 3, (Peer(POLICY, {"backend": "gloo"}),), ()))


@pytest.mark.parametrize("hosts", [("localhost", None), ("0.0.0.0", "127.0.0.1"), ("*", "127.0.0.1")])
def test_hosts_by_name_and_for_every_interface(hosts):
    with Star(2, bind_host=hosts[0], advertise_host=hosts[1]) as star:
        star.refits(0)


def test_an_address_of_another_host_is_refused():
    transport = CollectiveTransport(
        GlooBackend(), bind_host="203.0.113.9", advertise_host=None, rebuild_group=False, limit_s=1.0
    )
    with pytest.raises(ConfigurationError, match=r"cannot listen on '203\.0\.113\.9'"):
        transport.describe()


# NCCL and HCCL against libraries that are played.


class PlayedGroup:
    """Records how it was made."""

    def __init__(self, *arguments) -> None:
        self.arguments = arguments
        self.error_handling = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING")
        self.aborted: list[tuple] = []

    class Options:
        _timeout = None

    def abort(self) -> None:
        self.aborted.append(())

    def abort_hccl_comm(self, why: str) -> None:
        self.aborted.append((why,))


class PlayedWork:
    def __init__(self, error: Exception | None) -> None:
        self.exception = lambda: error


def test_nccl_groups_do_not_end_the_process_when_a_peer_is_lost(monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", PlayedGroup, raising=False)
    monkeypatch.setattr(collective_backends, "require_device", lambda _: torch.device("cuda", 0))
    for before in (None, "1"):
        if before is not None:
            monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", before)
        backend = NCCLBackend()
        group = backend.make_group("store", 2, 4, host="10.0.0.1", timeout_s=7.0)
        assert group.error_handling == "2"
        assert os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == before
        assert group.arguments[:3] == ("store", 2, 4)
        assert group.arguments[3]._timeout == timedelta(seconds=7)
    backend.abort(group)
    assert group.aborted == [()]
    assert backend.failure_of(PlayedWork(None)) is None
    assert (
        backend.failure_of(PlayedWork(RuntimeError("remote process exited\nmore"))) == "remote process exited"
    )


def test_hccl_groups_come_from_torch_npu(monkeypatch):
    npu = ModuleType("torch_npu")
    current: list[torch.device] = []
    npu.npu = SimpleNamespace(is_available=lambda: True, current_device=lambda: 0, set_device=current.append)
    c10d = ModuleType("torch_npu._C._distributed_c10d")
    c10d.ProcessGroupHCCL = PlayedGroup
    monkeypatch.setitem(sys.modules, "torch_npu", npu)
    monkeypatch.setitem(sys.modules, "torch_npu._C", ModuleType("torch_npu._C"))
    monkeypatch.setitem(sys.modules, "torch_npu._C._distributed_c10d", c10d)
    monkeypatch.setattr(
        collective_backends.torch, "device", lambda kind, index=0: SimpleNamespace(type=kind, index=index)
    )
    backend = HCCLBackend()
    group = backend.make_group("store", 0, 2, host="10.0.0.1", timeout_s=7.0)
    assert group.arguments == ("store", 0, 2, timedelta(seconds=7))
    backend.bind_thread()
    assert current == [backend.device]
    backend.abort(group)
    assert group.aborted == [("weightsync gave the group up",)]
    npu.npu.is_available = lambda: False
    with pytest.raises(ConfigurationError, match="none is visible here"):
        HCCLBackend()
