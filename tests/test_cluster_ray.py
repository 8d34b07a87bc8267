"""Ray actors as workers: ranks over several engines, and actors that are killed or stopped."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

os.environ["RAY_AUTH_MODE"] = "disabled"
ray = pytest.importorskip("ray")

from tests.scripted_workers import ScriptedEngineHost, ScriptedPolicyWorker, raising, sleeping  # noqa: E402
from tests.test_synchronizer import SEND, UPDATE, configuration  # noqa: E402
from weightsync.cluster.base import gather  # noqa: E402
from weightsync.cluster.ray import RayPolicyGroup, RayRolloutGroup  # noqa: E402
from weightsync.errors import (  # noqa: E402
    ConfigurationError,
    DeadlineError,
    ManifestError,
    PeerLostError,
    RefitError,
)
from weightsync.synchronizer import CheckpointEngineWeightSynchronizer  # noqa: E402
from weightsync.topology import RankId  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.ray]


class AsyncEngineHost(ScriptedEngineHost):
    """A host around an asynchronous engine."""

    async def checkpoint_engine_rpc_async(self, checkpoint_method, method_kwargs=None):
        return self.checkpoint_engine_rpc(checkpoint_method, method_kwargs)


PolicyActor = ray.remote(num_cpus=0)(ScriptedPolicyWorker)
HostActor = ray.remote(num_cpus=0)(ScriptedEngineHost)
AsyncHostActor = ray.remote(num_cpus=0)(AsyncEngineHost)


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=200 << 20, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def make():
    """Make actors; they are killed at the end, stopped ones too."""
    actors, pids = [], []

    def start(actor_class, *args):
        actor = actor_class.remote(*args)
        actors.append(actor)
        pids.append(ray.get(actor.pid.remote(), timeout=60))
        return actor

    yield start
    for actor in actors:
        ray.kill(actor)
    for pid in pids:
        if _alive(pid):
            os.kill(pid, signal.SIGCONT)


def _alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def synchronizer(policy, hosts, **lifecycle):
    made = CheckpointEngineWeightSynchronizer(
        RayPolicyGroup(policy), RayRolloutGroup(hosts), configuration(**lifecycle), progress=False
    )
    made.init_communicator()
    return made


def pid_of(actor):
    return ray.get(actor.pid.remote(), timeout=10)


def calls_of(actor):
    return ray.get(actor.calls.remote(), timeout=10)


def fail(made):
    started = time.monotonic()
    with pytest.raises(RefitError) as caught:
        made.sync_weights()
    return caught.value, time.monotonic() - started


def kill_myself(kwargs):
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)


def stop_myself(kwargs):
    os.kill(os.getpid(), signal.SIGSTOP)


def die_in(method, local_rank=0, how=kill_myself):
    return {(method, local_rank): how} if method == UPDATE else {method: how}


def test_refits_over_three_hosts_whose_local_ranks_collide(make):
    policy = [make(PolicyActor, rank) for rank in range(2)]
    hosts = [make(HostActor, 2), make(AsyncHostActor, 1), make(HostActor, 3)]
    group = RayRolloutGroup(hosts)
    assert group.world_size == 6
    assert group.rank_prefixes == (0, 2, 3)
    answers = gather("test", [group.submit("prepare_checkpoint_engine")], timeout_s=10, grace_s=1)
    assert list(answers.of("rollout").items()) == list(
        enumerate(["local 0", "local 1", "local 0", "local 0", "local 1", "local 2"])
    )
    with synchronizer(policy, hosts) as made:
        reports = [made.sync_weights() for _ in range(3)]
        assert [report.version for report in reports] == [1, 2, 3]
        assert [each.rank for each in reports[-1].rollout] == list(range(6))
        assert not made.is_stale
    for actor in (*policy, *hosts):
        assert calls_of(actor)[-2:] == ["finalize_checkpoint_engine", "close_checkpoint_engine"]
    assert [calls_of(host).count("reset_caches") for host in hosts] == [3, 3, 3]


def test_an_error_in_an_actor_names_its_global_rank_and_the_next_refit_works(make):
    policy = [make(PolicyActor, rank) for rank in range(2)]
    once = {"left": 1}

    def fail_once(kwargs):
        if once["left"]:
            once["left"] -= 1
            raise ManifestError("shapes differ", tensor="layers.0.w")
        return {"bytes": 0, "tensors": 0, "batches": 0, "seconds": {}}

    hosts = [make(HostActor, 2), make(HostActor, 2, {(UPDATE, 1): fail_once})]
    made = synchronizer(policy, hosts)
    error, _ = fail(made)
    assert "at rollout rank 3: ManifestError: shapes differ" in str(error)
    assert (error.context.rank, error.context.tensor) == (3, "layers.0.w")
    assert isinstance(error.__cause__, ManifestError)
    assert made.sync_weights().epoch == 2
    made.shutdown()


@pytest.mark.parametrize("method", [UPDATE, "commit_refit", "pause"])
def test_a_killed_host_is_named_in_bounded_time_and_remembered(make, method):
    policy = [make(PolicyActor, rank) for rank in range(2)]
    script = die_in(method)
    hosts = [make(HostActor, 1), make(HostActor, 2, script), make(HostActor, 1)]
    made = synchronizer(policy, hosts, total_s=60.0, silence_s=5.0)
    error, took_s = fail(made)
    assert took_s < 10
    assert (error.context.side, error.context.rank) == ("rollout", 1)
    assert isinstance(error.__cause__, PeerLostError)
    assert "must be replaced" in str(error)
    assert "replace rollout ranks 1, 2 (the worker is dead)" in str(error)
    assert error.serving[1] is None
    assert "resume" in calls_of(hosts[0])
    assert calls_of(hosts[2])[-1] == "resume"
    again, took_s = fail(made)
    assert took_s < 2
    assert "replace rollout ranks 1, 2" in str(again)
    started = time.monotonic()
    made.shutdown()
    assert time.monotonic() - started < 5
    assert calls_of(policy[0])[-1] == calls_of(hosts[0])[-1] == "close_checkpoint_engine"

    survivors = synchronizer(policy, [hosts[2], make(HostActor, 2), hosts[0]])
    assert survivors.sync_weights(10).version == 10
    survivors.shutdown()


def test_a_killed_policy_actor_is_named(make):
    policy = [make(PolicyActor, 0), make(PolicyActor, 1, {SEND: kill_myself})]
    hosts = [make(HostActor, 1)]
    made = synchronizer(policy, hosts, total_s=60.0, silence_s=5.0)
    error, took_s = fail(made)
    assert took_s < 10
    assert (error.context.side, error.context.rank) == ("policy", 1)
    assert "rollout rank 0 fenced" in str(error)
    made.shutdown()


def test_an_actor_killed_between_refits_is_named(make):
    policy = [make(PolicyActor, 0)]
    hosts = [make(HostActor, 1), make(HostActor, 1)]
    made = synchronizer(policy, hosts, total_s=60.0)
    made.sync_weights()
    os.kill(pid_of(hosts[1]), signal.SIGKILL)
    error, took_s = fail(made)
    assert took_s < 10
    assert "rollout rank 1" in str(error)
    assert error.serving == {0: 1, 1: None}
    made.shutdown()


def test_a_stopped_actor_ends_the_refit_within_its_total_and_may_come_back(make):
    policy = [make(PolicyActor, 0)]
    hosts = [make(HostActor, 1), make(HostActor, 1, die_in(UPDATE, how=stop_myself))]
    made = synchronizer(policy, hosts, total_s=4.0, silence_s=0.8)
    stopped = pid_of(hosts[1])
    error, took_s = fail(made)
    assert took_s < 4.0
    assert "phase transfer at rollout rank 1: DeadlineError" in str(error)
    assert "rollout rank 1 unknown (no answer)" in str(error)
    assert isinstance(error.__cause__, DeadlineError)
    assert calls_of(hosts[0])[-1] == "resume"
    error, took_s = fail(made)
    assert took_s < 2
    assert "still busy" in str(error)
    started = time.monotonic()
    made.shutdown()
    assert time.monotonic() - started < 3
    os.kill(stopped, signal.SIGCONT)
    assert calls_of(hosts[1])[-1] == "close_checkpoint_engine"
    assert "fence_refit" in calls_of(hosts[1])


def test_what_an_actor_raises_past_the_protocol_is_reported(make):
    class Raising:
        def checkpoint_engine_rpc(self, checkpoint_method, method_kwargs=None):
            raise ManifestError("unexpected", tensor="w")

        def pid(self):
            return os.getpid()

    group = RayPolicyGroup([make(ray.remote(num_cpus=0)(Raising))])
    answers = gather("test", [group.submit("open_refit")], timeout_s=10, grace_s=1)
    (failure,) = answers.failures
    assert (failure.who, failure.how) == (RankId("policy", 0), "reported")
    assert (failure.record.kind, failure.record.context.tensor) == ("ManifestError", "w")
    assert "Raising.checkpoint_engine_rpc" in failure.record.traceback


def test_arguments_that_cannot_travel_are_reported(make):
    group = RayPolicyGroup([make(PolicyActor, 0)])
    call = group.submit("open_refit", {"lock": threading.Lock()})
    (failure,) = gather("test", [call], timeout_s=10, grace_s=1).failures
    assert failure.record.kind == "TypeError"
    assert "serialize" in failure.record.message


def test_hosts_that_do_not_start_are_named(make):
    class Failing(ScriptedEngineHost):
        def __init__(self):
            raise RuntimeError("no memory for the model")

    failing = ray.remote(num_cpus=0)(Failing).remote()
    with pytest.raises(PeerLostError, match="engine host 1: its Ray actor is dead") as caught:
        RayRolloutGroup([make(HostActor, 1), failing])
    assert "no memory for the model" in str(caught.value)
    slow = make(HostActor, 1, {"describe": sleeping(3)})
    with pytest.raises(DeadlineError, match=r"engine host 0: no answer within 0\.5 s"):
        RayRolloutGroup([slow], startup_s=0.5)
    unwell = make(HostActor, 1, {"describe": raising(ValueError("unwell"))})
    with pytest.raises(Exception, match="engine host 0: unwell"):
        RayRolloutGroup([unwell])


def test_actors_without_the_methods_are_refused(make):
    policy = make(PolicyActor, 0)
    with pytest.raises(ConfigurationError, match="'refit_control'"):
        RayRolloutGroup([policy])
    with pytest.raises(ConfigurationError, match="at least one worker"):
        RayPolicyGroup([])
