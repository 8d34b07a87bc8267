"""The IPC engine between processes: topologies, losses, and what is left of them."""

from __future__ import annotations

import asyncio
import signal
import time

import psutil
import pytest
import torch

from tests.own_files import left_by_tests
from weightsync.testing.crew import ProcessCrew, Setup, ThreadCrew
from weightsync.testing.oracle import check
from weightsync.testing.ranks import ProcessRank, preload
from weightsync.testing.shared_files import shared_files
from weightsync.testing.suite import Suite
from weightsync.testing.work import HOLD, MIDDLE, Plan

pytestmark = pytest.mark.slow

preload(["weightsync.engines.ipc"])

MIB = 1 << 20
SETTINGS = {
    "device": "cpu", "bind_host": "127.0.0.1", "connect_s": 5.0, "stall_s": 5.0, "silence_s": 1.5,
}  # fmt: skip


def setup_of(topology: str, **settings) -> Setup:
    return Setup("ipc", {**SETTINGS, "topology": topology, **settings}, MIB, bound_s=20.0, step_s=10.0)


def crew_of(world: tuple[int, int], topology: str, **settings) -> ProcessCrew:
    return ProcessCrew(world, setup_of(topology, **settings))


@pytest.fixture(autouse=True)
def no_files():
    """Nothing is left in /dev/shm, whoever was killed."""
    before = shared_files()
    yield
    assert left_by_tests(before) == []


@pytest.mark.parametrize(
    ("world", "topology"),
    [((1, 3), "star"), ((2, 4), "stripes"), ((3, 2), "pairs")],
    ids=lambda value: value if isinstance(value, str) else f"{value[0]} to {value[1]}",
)
def test_every_topology(world, topology):
    with crew_of(world, topology, poison_released=True) as crew:
        crew.join()
        crew.works(Plan("mixed", seed=1, in_step=True, watched=True))
        crew.works(Plan("plain", seed=2, manifest=True), {("rollout", 1): Plan("plain", seed=2, pace_s=0.02)})
        crew.rejoin()
        crew.works(Plan("mixed", seed=3))


@pytest.mark.parametrize(
    ("world", "topology", "losses"),
    [
        ((1, 2), "star", [("policy", signal.SIGKILL), ("rollout", signal.SIGKILL)]),
        ((1, 2), "star", [("policy", signal.SIGSTOP), ("rollout", signal.SIGSTOP)]),
        ((2, 2), "stripes", [("policy", signal.SIGKILL)]),
    ],
    ids=["killed", "stopped", "one of two owners killed"],
)
def test_a_loss_in_the_middle_and_the_refit_after_it(world, topology, losses):
    with crew_of(world, topology) as crew:
        crew.join()
        for side, how in losses:
            lost = (crew.policy if side == "policy" else crew.rollout)[-1]
            crew.begin(Plan(), {(side, lost.rank): Plan(fault=HOLD, place=MIDDLE)})
            lost.wait_until_held(20.0)
            lost.signal(how)
            outcomes = crew.outcomes(without=lost)
            if side == "rollout":  # the other one has all that it needs, and may be done
                outcomes = [outcome for outcome in outcomes if not outcome.done]
                assert outcomes[0].who == "policy rank 0"
            Suite.require_failed(crew, outcomes)
            lost.end()
            crew.replace(lost)
            crew.recovers()


def figures(rank: ProcessRank) -> dict[str, int]:
    process = psutil.Process(rank.process.pid)
    with open(f"/proc/{process.pid}/maps") as maps:
        mapped = sum("/memfd:weightsync-" in line for line in maps)
    return {
        "rss": process.memory_info().rss,
        "fds": process.num_fds(),
        "threads": process.num_threads(),
        "mapped": mapped,
    }


def test_fifty_refits_leave_nothing_behind():
    with crew_of((1, 2), "star") as crew:
        crew.join()
        for seed in range(10):
            crew.works(Plan("plain", seed=seed % 2))
        before = [figures(rank) for rank in crew.ranks]
        for seed in range(50):
            if seed % 10 == 9:
                crew.rejoin()
            crew.works(Plan("plain", seed=seed % 2))
        time.sleep(0.2)
        after = [figures(rank) for rank in crew.ranks]
    for rank, was, now in zip(crew.ranks, before, after, strict=True):
        check(now["rss"] - was["rss"] < 16 * MIB, f"{rank.who}: {was} became {now}")
        # A sender has its own two buffers; a receiver two untouched ones, and the sender's two.
        assert (was["mapped"], now["mapped"]) == ((2, 2) if rank.side == "policy" else (4, 4))
        for what in ("fds", "threads"):
            check(abs(now[what] - was[what]) <= 2, f"{rank.who}: {was} became {now}")


def test_memory_is_given_back_after_each_refit_where_that_is_configured():
    with crew_of((1, 2), "star", release_after_refit=True) as crew:
        crew.join()
        for seed in range(3):
            crew.works(Plan("plain", seed=seed))
            assert all(figures(rank)["mapped"] for rank in crew.ranks)
            crew.all("finalize")
            assert [figures(rank)["mapped"] for rank in crew.ranks] == [0, 0, 0]
            crew.join()


# Whoever keeps tensors for longer than it may.


def test_released_buckets_are_poisoned_for_all_and_by_the_sender_alone():
    """A receiver that is done early must not spoil what another one still loads; late readers find NaN."""
    with ThreadCrew((1, 2), setup_of("star", poison_released=True)) as crew:
        crew.join()
        crew.works(Plan("plain", seed=1), {("rollout", 0): Plan("plain", seed=1, pace_s=0.05)})
        kept: list[torch.Tensor] = []
        engines = [crew.policy[0].engine, *(rank.engine for rank in crew.rollout)]

        async def keep(engine):
            async for batch in engine.receive_weight_batches():
                kept.extend(tensor for _, tensor in batch)

        async def refit():
            weights = ((f"layer.{i}", torch.full((100_000,), i, dtype=torch.uint8)) for i in range(3))
            await asyncio.gather(engines[0].send_weights(weights), *map(keep, engines[1:]))

        asyncio.run(asyncio.wait_for(refit(), 20))
        assert [tensor.unique().tolist() for tensor in kept] == [[0xFF]] * 6
