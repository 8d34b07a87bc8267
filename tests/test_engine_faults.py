"""Peers that are killed or stopped: the survivor is told who and where, in time, and refits again."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from tests.engine_crew import MIB, assert_same, collect, make_engine, plain, some_weights
from tests.engine_processes import QUICK, Processes, Remote, stop_forkserver
from tests.own_files import left_by_tests
from weightsync.errors import ErrorRecord
from weightsync.testing.shared_files import shared_files

pytestmark = [pytest.mark.slow, pytest.mark.nixl, pytest.mark.timeout(120)]

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
TCP = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
SOON_S = {KILL: 2.0, STOP: QUICK["silence_s"] + 2.0}
TYPED = {"PeerLostError", "DeadlineError", "PeerAbortedError"}


@pytest.fixture(scope="module", autouse=True)
def forkserver():
    yield
    stop_forkserver()


def restart(crew: Processes, victim: Remote) -> None:
    """Replace a dead or stopped process; the others keep their engines."""
    victim.close()
    side = crew.policy if victim.role == "policy" else crew.rollout
    side[victim.rank] = Remote(victim.role, victim.rank)
    crew.join()


@pytest.fixture(scope="module")
def survivors():
    """One process a side that outlives every test of this module."""
    workers = {role: Remote(role) for role in ("policy", "rollout")}
    yield workers
    for worker in workers.values():
        worker.close()


def pair_with(survivors, victim: str) -> tuple[Processes, Remote, Remote]:
    """Join a fresh victim with the survivor of the other side."""
    crew = Processes.__new__(Processes)
    fresh, other = Remote(victim), survivors["rollout" if victim == "policy" else "policy"]
    crew.policy, crew.rollout = ([fresh], [other]) if victim == "policy" else ([other], [fresh])
    crew.join()
    return crew, fresh, other


@pytest.mark.parametrize("phase", ["before the handshake", "inside", "after the last bucket"])
@pytest.mark.parametrize("victim", ["policy", "rollout"])
@pytest.mark.parametrize("fault", [KILL, STOP], ids=["SIGKILL", "SIGSTOP"])
def test_a_peer_dies_or_stops(survivors, fault, victim, phase):
    crew, lost, other = pair_with(survivors, victim)
    assert crew.refit(seed=1) == ["done", "done"]
    try:
        if phase == "before the handshake":
            lost.signal(fault)
            started = time.monotonic()
            other.start("refit")
            outcome, bound = other.result(), QUICK["connect_s"] + 1.5
        else:
            started = strike(lost, other, fault, phase)
            outcome, bound = other.result(), SOON_S[fault]
        assert time.monotonic() - started < bound
        if (phase, victim) == ("after the last bucket", "policy") and outcome == "done":
            outcome = None  # it had everything, checked, and the sender's word that this was all
        if outcome is not None:
            assert isinstance(outcome, ErrorRecord)
            assert outcome.kind in TYPED
            assert outcome.context.peer == f"{victim} rank 0"
            assert outcome.context.phase
            assert outcome.context.side == ("rollout" if victim == "policy" else "policy")
            if phase == "inside":
                assert outcome.kind == "PeerLostError"
                assert outcome.context.bytes_done > 0
    finally:
        restart(crew, lost)
    for seed in (5, 6):
        assert crew.refit(seed=seed, manifest=True) == ["done", "done"]
    getattr(crew, victim)[0].close()


def strike(lost: Remote, other: Remote, fault: signal.Signals, phase: str) -> float:
    """Signal ``lost`` at that place of a refit; returns when."""
    if phase == "inside":
        lost.start("refit", hold_at=7 if lost.role == "policy" else 1)
        other.start("refit")
        lost.wait_until_held()
        time.sleep(0.2)
        lost.signal(fault)
        return time.monotonic()
    if lost.role == "rollout":
        lost.start("refit", hold_at="last")
        other.start("refit")
        lost.wait_until_held()
        time.sleep(0.2)
        lost.signal(fault)
        return time.monotonic()
    lost.start("refit")
    other.start("refit", hold_at="last")
    other.wait_until_held()
    time.sleep(0.2)
    lost.signal(fault)
    time.sleep(0.2)
    other.go_on()
    return time.monotonic()


@pytest.mark.parametrize("victim", ["policy", "rollout"])
def test_a_peer_that_was_stopped_and_goes_on_takes_part_in_the_next_refit(victim):
    with Processes(1, 1) as crew:
        stopped = getattr(crew, victim)[0]
        other = crew.rollout[0] if victim == "policy" else crew.policy[0]
        stopped.start("refit", hold_at=7 if victim == "policy" else 1)
        other.start("refit")
        stopped.wait_until_held()
        stopped.signal(STOP)
        outcome = other.result()
        assert outcome.kind == "PeerLostError"
        assert "stopped or unreachable" in outcome.message
        stopped.signal(signal.SIGCONT)
        stopped.go_on()
        assert stopped.result().kind in TYPED
        for seed in (1, 2):
            assert crew.refit(seed=seed) == ["done", "done"]


@pytest.mark.parametrize("interrupted", ["policy", "rollout"])
def test_an_interrupt_from_the_keyboard_ends_a_refit(interrupted):
    with Processes(1, 1) as crew:
        other = crew.rollout[0] if interrupted == "policy" else crew.policy[0]
        if interrupted == "policy":  # it waits for a buffer, its peer for a word from here
            crew.policy[0].start("refit", count=40)
            crew.rollout[0].start("refit", count=40, hold_at=1)
            crew.rollout[0].wait_until_held()
        else:
            crew.policy[0].start("refit", hold_at=7)
            crew.rollout[0].start("refit")
            crew.policy[0].wait_until_held()
        time.sleep(0.2)
        getattr(crew, interrupted)[0].signal(signal.SIGINT)
        assert getattr(crew, interrupted)[0].result(5).kind == "KeyboardInterrupt"
        other.go_on()
        assert other.result(5).kind == "PeerAbortedError"
        assert crew.refit(seed=4) == ["done", "done"]


@pytest.mark.parametrize("fault", [KILL, STOP], ids=["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("rank", [0, 2])
def test_one_of_three_policy_ranks_is_lost(rank, fault):
    with Processes(3, 1) as crew:
        lost = crew.policy[rank]
        for worker in crew.all:
            worker.start("refit", **({"hold_at": 7} if worker is lost else {}))
        lost.wait_until_held()
        time.sleep(0.2)
        lost.signal(fault)
        started = time.monotonic()
        outcomes = {(w.role, w.rank): w.result() for w in crew.all if w is not lost}
        assert time.monotonic() - started < SOON_S[fault] + 2
        for outcome in outcomes.values():
            assert isinstance(outcome, ErrorRecord)
            assert outcome.kind in TYPED
        texts = " ".join(map(str, outcomes.values()))
        assert f"policy rank {rank} was lost" in texts
        restart(crew, lost)
        assert crew.refit(seed=3) == ["done"] * 4


def strike_over_tcp(crew: Processes, lost: Remote, fault: signal.Signals) -> float:
    """Signal ``lost`` in the middle of a stream of large buckets; returns when."""
    crew.policy[0].start("refit", count=48, nbytes=8 * MIB)
    crew.rollout[0].start("refit", count=48, nbytes=8 * MIB, hold_at=1)
    crew.rollout[0].wait_until_held()
    crew.rollout[0].go_on()
    time.sleep(0.1)
    lost.signal(fault)
    return time.monotonic()


@pytest.mark.parametrize("victim", ["policy", "rollout"])
def test_a_peer_dies_over_tcp(victim):
    """Reads are served by the sender's process there, so that its death is met inside a read."""
    with Processes(1, 1, env=TCP, bucket_size=16 * MIB) as crew:
        assert crew.refit(timeout_s=60, seed=1) == ["done", "done"]
        lost = getattr(crew, victim)[0]
        other = crew.rollout[0] if victim == "policy" else crew.policy[0]
        started = strike_over_tcp(crew, lost, KILL)
        outcome = other.result()
        assert time.monotonic() - started < SOON_S[KILL]
        assert outcome.kind == "PeerLostError"
        assert outcome.context.peer == f"{victim} rank 0"
        assert outcome.context.bytes_done > 0
        lost.close()
        getattr(crew, victim)[0] = Remote(victim, env=TCP, bucket_size=16 * MIB)
        crew.join()
        assert crew.refit(timeout_s=60, seed=2) == ["done", "done"]


def test_a_sender_stopped_over_tcp_is_given_up_inside_a_read():
    with Processes(1, 1, env=TCP, bucket_size=16 * MIB) as crew:
        started = strike_over_tcp(crew, crew.policy[0], STOP)
        outcome = crew.rollout[0].result()
        assert time.monotonic() - started < SOON_S[STOP]
        assert outcome.kind == "PeerLostError"
        crew.policy[0].signal(signal.SIGCONT)
        assert crew.policy[0].result().kind in TYPED
        for seed in (2, 3):
            assert crew.refit(timeout_s=60, seed=seed) == ["done", "done"]


def test_a_hundred_refits_leave_nothing_behind():
    with Processes(2, 1) as crew:
        first = repeated(crew, 20)
        shm = shared_files()
        last = repeated(crew, 100)
        assert left_by_tests(shm) == []
        for before, after in zip(first, last, strict=True):
            assert (after["fds"], after["sockets"]) == (before["fds"], before["sockets"])
            assert after["threads"] <= before["threads"]
            assert after["rss"] - before["rss"] < 24 * MIB


def repeated(crew: Processes, count: int) -> list[dict]:
    for worker in crew.all:
        worker.start("refits", count=count)
    return [worker.result(60) for worker in crew.all]


@pytest.mark.parametrize("release", [False, True], ids=["keeps buffers", "releases buffers"])
def test_failed_refits_and_new_sessions_leave_nothing_behind(release):
    with Processes(1, 1, release_after_refit=release) as crew:

        def round_of_failures() -> list[dict]:
            for _ in range(10):
                crew.policy[0].start("refit")
                crew.rollout[0].start("refit", fail_at=1)
                assert [w.result().kind for w in crew.all] == ["PeerAbortedError", "ValueError"]
            for _ in range(5):
                for worker in crew.all:
                    worker.call("finalize")
                crew.join()
                assert crew.refit() == ["done", "done"]
            time.sleep(0.5)
            return [worker.call("figures") for worker in crew.all]

        round_of_failures()
        first, last = round_of_failures(), round_of_failures()
        for before, after in zip(first, last, strict=True):
            assert after["threads"] == before["threads"]
            assert after["fds"] <= before["fds"]
            assert after["sockets"] <= before["sockets"]
            assert after["rss"] - before["rss"] < 24 * MIB


def test_a_closed_engine_leaves_its_process_clean():
    with Processes(1, 1) as crew:
        crew.refit()
        for worker in crew.all:
            figures = worker.call("close")
            assert figures["threads"] <= 4, figures


def test_a_survivor_in_this_process_refits_with_a_restarted_peer():
    """The same as above with the survivor's engine at hand: its metadata change, its buffers do not."""
    engine = make_engine(**QUICK)
    slots = []
    try:
        for seed in range(3):
            peer = Remote("rollout")
            metadata = [engine.prepare(), peer.prepare()]
            slots.append(metadata[0]["transport"]["slots"])
            worlds = {"train_world_size": 1, "rollout_world_size": 1, "metadata": metadata}
            engine.init_policy_process_group(worker_rank=0, **worlds)
            peer.call("join", train=1, rollout=1, metadata=metadata)
            peer.start("refit", seed=seed)
            asyncio.run(engine.send_weights(plain(some_weights(seed))))
            assert peer.result() == "done"
            peer.close()
        assert slots[0] == slots[1] == slots[2]
    finally:
        engine.close()


def test_two_engines_of_one_process_serve_two_peers():
    """As when a vLLM engine and a trainer share a process: sessions and agents do not mix."""
    peers = [Remote("policy"), Remote("policy")]
    engines = [make_engine(**QUICK), make_engine(**QUICK)]
    try:
        for engine, peer in zip(engines, peers, strict=True):
            metadata = [peer.prepare(), engine.prepare()]
            worlds = {"train_world_size": 1, "rollout_world_size": 1, "metadata": metadata}
            engine.init_rollout_process_group(rollout_rank=0, **worlds)
            peer.call("join", train=1, rollout=1, metadata=metadata)

        async def both():
            return await asyncio.gather(*map(collect, engines))

        for seed, peer in enumerate(peers):
            peer.start("refit", seed=seed)
        for seed, received in enumerate(asyncio.run(both())):
            assert_same(received, some_weights(seed))
        assert [peer.result() for peer in peers] == ["done", "done"]
    finally:
        for item in (*engines, *peers):
            item.close()
