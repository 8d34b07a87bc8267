"""Whole refits over Ray and NIXL in which an actor is killed or stopped, or a stream or a loader raises.

Each ends in one error, in bounded time, that names the actor; new groups with a replacement then refit.
"""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

pytest.importorskip("nixl")
pytest.importorskip("ray")

from tests.own_files import left_by_tests
from tests.refit_fault_actors import FaultyPolicy, FaultyRollout, digest_of, make_model
from tests.test_synchronizer import configuration
from weightsync.capacity import total_memory_bytes
from weightsync.cluster.private_ray import private_ray
from weightsync.cluster.ray import RayPolicyGroup, RayRolloutGroup
from weightsync.config import load_refit_config
from weightsync.errors import LifecycleError, RefitError, WorkerFencedError
from weightsync.report import RefitReport
from weightsync.synchronizer import CheckpointEngineWeightSynchronizer
from weightsync.testing.shared_files import shared_files

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.nixl]

TOTAL_S = 25.0
SILENCE_S = 2.0
# Buckets of 1 MiB, whatever memory this machine has: a layer takes two.
SMALLEST = 1.5 * (1 << 20) / total_memory_bytes("cpu")
CONFIG = load_refit_config(
    configuration(ratio=SMALLEST, connect_s=5.0, stall_s=5.0, silence_s=SILENCE_S, total_s=TOTAL_S)
)
GOES_ON = load_refit_config(
    configuration(
        ratio=SMALLEST,
        connect_s=5.0,
        stall_s=5.0,
        silence_s=SILENCE_S,
        total_s=TOTAL_S,
        on_failure="continue",
    )
)
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
POINTS = {  # what an armed actor calls the moment, by side
    "middle": {"policy": "middle", "rollout": "middle"},
    "end": {"policy": "end", "rollout": "end"},
    "answer": {"policy": "finish", "rollout": "commit"},
}


class Pool:
    """Actors of one Ray: those in use, and how to replace one."""

    def __init__(self, ray):
        self.ray = ray
        self.policy = []
        self.rollout = []
        self.pids = {}

    def fill(self, policy, rollout):
        """Have at least so many actors; starts them at once and waits for all."""
        make = self.ray.remote(num_cpus=0)
        fresh = [(self.policy, make(FaultyPolicy).remote(rank, CONFIG)) for rank in
                 range(len(self.policy), policy)]  # fmt: skip
        fresh += [(self.rollout, make(FaultyRollout).remote()) for _ in range(len(self.rollout), rollout)]
        for place, actor in fresh:
            place.append(actor)
            self.learn(actor)

    def replace(self, side, rank):
        """Kill an actor, stopped or not, and put a new one in its place."""
        place = getattr(self, side)
        with suppress(ProcessLookupError):
            os.kill(self.pids[place[rank]], KILL)
        make = self.ray.remote(num_cpus=0)
        place[rank] = (
            make(FaultyPolicy).remote(rank, CONFIG) if side == "policy" else make(FaultyRollout).remote()
        )
        self.learn(place[rank])

    def learn(self, actor):
        self.pids[actor] = self.get(actor.pid.remote())

    def get(self, reference, timeout=60):
        return self.ray.get(reference, timeout=timeout)

    def train(self, seed, actors=None):
        """Give every policy actor the weights of a seed; return the digest that must be served."""
        self.get([actor.train.remote(seed) for actor in actors or self.policy])
        return digest_of(make_model(seed))

    def served(self, worker):
        """What a rollout actor serves: a digest, or the name of the error with which it refuses."""
        try:
            return self.get(worker.served.remote(), timeout=10)
        except WorkerFencedError:
            return "fenced"
        except LifecycleError:
            return "paused"


@pytest.fixture(scope="module")
def pool():
    with private_ray(4, python_path=Path(__file__).parent.parent, log_to_driver=False) as ray:
        yield Pool(ray)


@contextmanager
def synchronizer(pool, world, config=CONFIG):
    policy, rollout = world
    pool.fill(policy, rollout)
    groups = RayPolicyGroup(pool.policy[:policy]), RayRolloutGroup(pool.rollout[:rollout])
    made = CheckpointEngineWeightSynchronizer(*groups, config, progress=False)
    try:
        made.init_communicator()
        yield made
    finally:
        made.shutdown()


def timed(call):
    started = time.monotonic()
    try:
        result = call()
    except Exception as error:  # noqa: BLE001 - looked at by the caller
        result = error
    return result, time.monotonic() - started


def fail_one(pool, world, side, rank, when, how):
    """Run the case; return what was seen, as plain data that a test asserts on."""
    rollout = world[1]
    seen = {}
    with synchronizer(pool, world) as made:
        old = pool.train(1)
        made.sync_weights()
        assert [pool.served(each) for each in pool.rollout[:rollout]] == [old] * rollout
        old_version = made.weight_version
        new = pool.train(2)
        victim = getattr(pool, side)[rank]
        if when == "before":
            os.kill(pool.pids[victim], how)
        else:
            pool.get(victim.arm.remote(POINTS[when][side], how))
        error, seen["took"] = timed(made.sync_weights)
        seen["error"] = error
        seen["published"] = made.weight_version == old_version
        others = [each for each in range(rollout) if (side, rank) != ("rollout", each)]
        told = getattr(error, "serving", {})
        known = {old_version: old, old_version + 1: new, None: "fenced"}
        seen["told"] = {each: known[told[each]] for each in others} if told else None
        seen["served"] = {each: pool.served(pool.rollout[each]) for each in others}
        seen["states"] = [{old: "old", new: "new"}.get(state, state) for state in seen["served"].values()]
        # A stopped actor may still be in a wait of its own: only after that must it be called a suspect.
        for _ in range(5):
            seen["again"], seen["again_took"] = timed(made.sync_weights)
            if "replace" in str(seen["again"]):
                break
        closed, seen["shutdown_took"] = timed(made.shutdown)
        seen["shutdown"] = closed
    pool.replace(side, rank)
    right = pool.train(3)
    started = time.monotonic()
    with synchronizer(pool, world) as made:
        for _ in range(2):
            made.sync_weights()
        seen["after"] = [pool.served(each) == right for each in pool.rollout[:rollout]]
    seen["after_took"] = time.monotonic() - started
    return seen


def advice(error):
    return str(error).split("What to do:")[1]


def check(seen, side, rank, how):
    error = seen["error"]
    assert isinstance(error, RefitError), error
    assert seen["took"] < TOTAL_S + 2
    assert (error.context.side, error.context.rank) == (side, rank), error
    assert f"{side} rank {rank}" in advice(error)
    if how == KILL:
        assert seen["took"] < 12
        assert f"replace {side} rank {rank} (the worker is dead)" in str(error)
    assert seen["told"] == seen["served"]
    assert seen["published"]
    assert isinstance(seen["again"], RefitError)
    assert (seen["again"].context.side, seen["again"].context.rank) == (side, rank)
    assert f"replace {side} rank {rank}" in advice(seen["again"])
    assert seen["again_took"] < 3
    assert seen["shutdown"] is None
    assert seen["shutdown_took"] < 2 * SILENCE_S + 3
    assert all(seen["after"])


ONE, TWO = (2, 1), (2, 2)
CASES = [
    (ONE, "policy", 0, "middle", KILL),
    pytest.param(ONE, "policy", 1, "middle", STOP, marks=pytest.mark.exhaustive),
    (ONE, "rollout", 0, "end", KILL),
    pytest.param(TWO, "policy", 1, "end", KILL, marks=pytest.mark.exhaustive),
    (TWO, "rollout", 1, "middle", STOP),
    pytest.param(TWO, "policy", 0, "before", STOP, marks=pytest.mark.exhaustive),
    (TWO, "rollout", 1, "answer", KILL),
]


@pytest.mark.parametrize(("world", "side", "rank", "when", "how"), CASES)
def test_a_lost_actor_is_named_and_can_be_replaced(pool, world, side, rank, when, how):
    check(fail_one(pool, world, side, rank, when, how), side, rank, how)


@pytest.mark.parametrize("point", ["first", "middle", "last", "end"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stream_that_raises_is_reported_and_the_next_refit_arrives(pool, point, rank):
    with synchronizer(pool, ONE) as made:
        old = pool.train(4)
        made.sync_weights()
        new = pool.train(5)
        pool.get(pool.policy[rank].arm.remote(point, ValueError("gather failed")))
        error, took = timed(made.sync_weights)
        assert isinstance(error, RefitError), error
        assert took < 5
        assert (error.context.side, error.context.rank) == ("policy", rank), error
        assert "ValueError: gather failed" in str(error)
        state = pool.served(pool.rollout[0])
        assert state == ("fenced" if error.serving[0] is None else old)
        made.sync_weights()
        assert pool.served(pool.rollout[0]) == new


@pytest.mark.parametrize("point", ["first", "middle", "end", "commit"])
def test_a_loader_that_raises_is_reported_and_the_next_refit_arrives(pool, point):
    with synchronizer(pool, TWO) as made:
        old = pool.train(4)
        made.sync_weights()
        assert [pool.served(each) for each in pool.rollout] == [old, old]
        new = pool.train(5)
        pool.get(pool.rollout[1].arm.remote(point, ValueError("loader broke")))
        error, took = timed(made.sync_weights)
        assert isinstance(error, RefitError), error
        assert took < 5
        assert (error.context.side, error.context.rank) == ("rollout", 1), error
        assert "ValueError: loader broke" in str(error)
        known = {made.weight_version: old, made.weight_version + 1: new, None: "fenced"}
        for rank, actor in enumerate(pool.rollout):
            assert pool.served(actor) == known[error.serving[rank]]
        assert error.serving[1] is None
        made.sync_weights()
        assert [pool.served(each) for each in pool.rollout] == [new, new]


@pytest.mark.parametrize("how", [KILL, STOP], ids=["killed", "stopped"])
def test_an_engine_that_is_lost_in_the_transfer_costs_its_own_version_only(pool, how):
    with synchronizer(pool, TWO, GOES_ON) as made:
        old = pool.train(1)
        made.sync_weights()
        assert [pool.served(each) for each in pool.rollout] == [old, old]

        new = pool.train(2)
        pool.get(pool.rollout[1].arm.remote("middle", how))
        started = time.monotonic()
        report = made.sync_weights()
        assert time.monotonic() - started < 20
        assert (report.ok, [each.rank for each in report.failed]) == ((0,), [1])
        assert report.failed[0].state == "unknown (no answer)"
        assert pool.served(pool.rollout[0]) == new

        newest = pool.train(3)
        started = time.monotonic()
        assert made.sync_weights().ok == (0,)
        assert time.monotonic() - started < 5
        assert pool.served(pool.rollout[0]) == newest

        pool.replace("rollout", 1)
        report = made.replace_rollout(1, pool.rollout[1])
        assert (report.version, report.ok) == (made.weight_version, (1,))
        assert [pool.served(each) for each in pool.rollout] == [newest, newest]
        last = pool.train(4)
        assert made.sync_weights().failed == ()
        assert [pool.served(each) for each in pool.rollout] == [last, last]


def test_two_refits_from_two_threads_are_one_refit_and_one_refusal(pool):
    with synchronizer(pool, TWO) as made:
        right = pool.train(6)
        with ThreadPoolExecutor(2) as threads:
            results = list(threads.map(lambda _: timed(made.sync_weights)[0], range(2)))
        refused = [each for each in results if isinstance(each, LifecycleError)]
        done = [each for each in results if isinstance(each, RefitReport)]
        assert len(done) + len(refused) == 2
        assert len(done) >= 1
        assert [pool.served(each) for each in pool.rollout] == [right, right]


def test_what_the_actors_hold_stays_the_same_over_many_refits_good_and_bad(pool):
    with synchronizer(pool, TWO) as made:
        actors = pool.policy + pool.rollout
        files = shared_files()
        for number in range(60):
            right = pool.train(number % 3)
            if number % 10 == 3:
                pool.get(pool.policy[number % 2].arm.remote("middle", ValueError("gather failed")))
                assert isinstance(timed(made.sync_weights)[0], RefitError)
            made.sync_weights()
            assert [pool.served(each) for each in pool.rollout] == [right, right]
            if number == 20:
                before = [pool.get(each.holdings.remote()) for each in actors]
        after = [pool.get(each.holdings.remote()) for each in actors]
        for was, now in zip(before, after, strict=True):
            assert now["fds"] <= was["fds"] + 1
            assert now["threads"] <= was["threads"] + 1
            assert now["rss_kib"] < was["rss_kib"] + 30_000
        assert left_by_tests(files) == []
