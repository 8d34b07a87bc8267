"""Refits in which policy and engine share a process: modules, and vLLM in a process and in a Ray actor."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from weightsync.cluster.base import ColocatedGroup
from weightsync.cluster.local import LocalPolicyGroup, LocalRolloutGroup, local_colocated_groups
from weightsync.config import load_refit_config
from weightsync.errors import ConfigurationError, RefitError, WorkerFencedError
from weightsync.policy import (
    AsyncColocatedWorkerMixin,
    ColocatedWorkerMixin,
    PolicyCheckpointEngineMixin,
    weight_stream_from,
)
from weightsync.rollout.endpoint import RolloutEndpoint
from weightsync.rollout.module import ModuleLoader, ModuleRolloutWorker
from weightsync.synchronizer import CheckpointEngineWeightSynchronizer

ROOT = Path(__file__).parent.parent
ORDER = [
    "pause", "resume_weights", "release_kv_cache", "transfer", "commit_refit", "offload_policy",
    "resume_kv_cache", "reset_caches", "publish_version", "resume",
]  # fmt: skip


def configuration(**lifecycle):
    generation = {
        "backend": "vllm",
        "colocated": {"enabled": True},
        "refit_transport": None,
        "refit_cfg": {
            "naive": {"device": "cpu", "bind_host": "127.0.0.1", "update_weights_bucket_memory_ratio": 1e-4}
        },
        "refit_lifecycle": {"connect_s": 5.0, "stall_s": 5.0, "total_s": 20.0, "silence_s": 2.0, **lifecycle},
    }
    return load_refit_config({"policy": {"generation": generation}})


def model(seed):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(300, 1000), torch.nn.Linear(1000, 1500))


def same(first, second):
    pairs = zip(first.state_dict().items(), second.state_dict().items(), strict=True)
    return all(name == other and torch.equal(value, wanted) for (name, value), (other, wanted) in pairs)


class Worker(ColocatedWorkerMixin):
    def __init__(self, rank, trained=None, host=None):
        self.rank = rank
        self.model = trained or model(0)
        self.engine_host = host or ModuleRolloutWorker(model(10 + rank))
        self.break_at = None
        self.broken_offload = False

    def weight_stream(self):
        if self.break_at is None:
            return weight_stream_from(self.model)
        return self.breaking()

    def breaking(self):
        for number, item in enumerate(weight_stream_from(self.model)):
            if number == self.break_at:
                raise ValueError("gather failed")
            yield item

    def offload_policy(self):
        if self.broken_offload:
            raise RuntimeError("no host memory left")

    def step(self):
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(1.0)


@pytest.fixture
def crew(request):
    size = getattr(request, "param", 2)
    trained = model(0)
    workers = [Worker(rank, trained) for rank in range(size)]
    with CheckpointEngineWeightSynchronizer(
        *local_colocated_groups(workers), configuration(), progress=False
    ) as synchronizer:
        synchronizer.init_communicator()
        yield workers, synchronizer


@pytest.mark.parametrize("crew", [1, 3], indirect=True)
def test_refits_arrive_in_the_order_of_a_colocated_one(crew):
    workers, synchronizer = crew
    assert synchronizer.is_stale
    for version in (1, 2):
        workers[0].step()
        synchronizer.mark_stale()
        report = synchronizer.sync_weights()
        assert (report.version, report.tensors, len(report.policy)) == (version, 4, len(workers))
        assert report.bytes == len(workers) * sum(p.nbytes for p in workers[0].model.parameters())
        assert not synchronizer.is_stale
        phases = ["pause", "wake", "release", "open", "transfer", "commit", "offload", "wake_cache", "reset"]
        assert list(report.seconds)[:-3] == phases
        for worker in workers:
            assert worker.refit_steps() == ORDER
            worker.engine_host.require_serving()
            assert worker.engine_host.published_version == version
            assert same(worker.model, worker.engine_host.model)
    workers[0].step()
    assert not same(workers[0].model, workers[0].engine_host.model)


def test_the_groups_share_their_workers(crew):
    workers, _ = crew
    policy, rollout = local_colocated_groups(workers)
    assert isinstance(rollout, ColocatedGroup)
    assert not isinstance(LocalRolloutGroup([ModuleRolloutWorker(model(1))]), ColocatedGroup)
    assert (policy.world_size, rollout.world_size, rollout.rank_prefixes) == (2, 2, (0, 1))
    with pytest.raises(ConfigurationError, match="has no method"):
        local_colocated_groups([ModuleRolloutWorker(model(1))])


def test_colocated_workers_are_fixed_and_stay_as_they_are(crew):
    workers, synchronizer = crew
    synchronizer.sync_weights()
    for change in (
        lambda: synchronizer.add_rollout(Worker(2)),
        lambda: synchronizer.replace_rollout(0, Worker(0)),
        lambda: synchronizer.remove_rollout(0),
        lambda: synchronizer.replace_policy(0, Worker(0)),
    ):
        with pytest.raises(ConfigurationError, match="has fixed workers"):
            change()
    assert synchronizer.sync_weights().version == 2
    assert all(worker.refit_steps() == ORDER for worker in workers)


def test_a_stream_that_raises_fences_what_was_written_and_the_next_refit_arrives(crew):
    workers, synchronizer = crew
    synchronizer.sync_weights()
    workers[1].break_at = 3
    workers[0].step()
    started = time.monotonic()
    with pytest.raises(RefitError) as caught:
        synchronizer.sync_weights()
    assert time.monotonic() - started < 5
    assert (caught.value.context.side, caught.value.context.rank) == ("policy", 1)
    assert "ValueError: gather failed" in str(caught.value)
    assert caught.value.serving == {0: None, 1: None}
    for worker in workers:
        assert worker.refit_steps() == [
            "pause", "resume_weights", "release_kv_cache", "transfer failed", "fence_refit", "reset_caches",
            "offload_policy", "resume",
        ]  # fmt: skip
        with pytest.raises(WorkerFencedError):
            worker.engine_host.require_serving()
    workers[1].break_at = None
    assert synchronizer.sync_weights().version == 2
    assert all(same(worker.model, worker.engine_host.model) for worker in workers)


def test_a_stream_that_does_not_fit_leaves_the_old_version(crew):
    workers, synchronizer = crew
    synchronizer.sync_weights()
    before = {name: value.clone() for name, value in workers[0].engine_host.model.state_dict().items()}
    good = workers[0].model
    for worker in workers:
        worker.model = torch.nn.Sequential(torch.nn.Linear(300, 1000), torch.nn.Linear(1000, 1501))
    with pytest.raises(RefitError, match="where the module has") as caught:
        synchronizer.sync_weights()
    assert caught.value.serving == {0: 1, 1: 1}
    for worker in workers:
        worker.engine_host.require_serving()
        after = worker.engine_host.model.state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        worker.model = good
    assert synchronizer.sync_weights().version == 2


def test_an_offload_that_raises_fails_the_refit_after_the_commit(crew):
    workers, synchronizer = crew
    workers[0].broken_offload = True
    with pytest.raises(RefitError, match="no host memory left") as caught:
        synchronizer.sync_weights()
    assert caught.value.context.phase == "offload_policy"
    assert caught.value.serving == {0: 1, 1: 1}
    assert synchronizer.weight_version is None
    assert workers[0].refit_steps() == [*ORDER[:5], "offload_policy failed", "reset_caches", "resume"]
    workers[0].engine_host.require_serving()
    workers[0].broken_offload = False
    assert synchronizer.sync_weights().version == 2


@pytest.mark.parametrize("action", ["pause", "resume_weights", "resume_kv_cache", "reset_caches", "resume"])
def test_an_engine_that_fails_at_a_step_is_resumed_all_the_same(action):
    class Host(ModuleRolloutWorker):
        fails = True

        def refit_control(self, called, kwargs=None):
            outcome = super().refit_control(called, kwargs)
            if called == action and self.fails:
                error = {"kind": "RuntimeError", "message": "out of memory", "traceback": "", "context": {}}
                return {"rank": outcome["rank"], "error": error}
            return outcome

    worker = Worker(0, host=Host(model(5)))
    with CheckpointEngineWeightSynchronizer(
        *local_colocated_groups([worker]), configuration(), progress=False
    ) as synchronizer:
        synchronizer.init_communicator()
        with pytest.raises(RefitError, match="out of memory"):
            synchronizer.sync_weights()
        steps = worker.refit_steps()
        if action == "reset_caches":  # of other weights than it holds: it stays paused
            assert "resume" not in steps
        else:
            assert steps[-1] == ("resume failed" if action == "resume" else "resume")
        written = action in ("resume_kv_cache", "reset_caches", "resume")
        assert same(worker.model, worker.engine_host.model) == written
        worker.engine_host.fails = False
        synchronizer.sync_weights()
        assert worker.refit_steps() == ORDER
        worker.engine_host.require_serving()


def test_a_worker_that_answers_nonsense():
    class Odd(Worker):
        def colocated_rpc(self, method, kwargs=None):
            return 5 if method == "refit_colocated" else super().colocated_rpc(method, kwargs)

    with CheckpointEngineWeightSynchronizer(
        *local_colocated_groups([Odd(0)]), configuration(), progress=False
    ) as synchronizer:
        synchronizer.init_communicator()
        with pytest.raises(RefitError, match="no outcome: 5") as caught:
            synchronizer.sync_weights()
        assert len(caught.value.failures) == 2


class AsyncWorker(AsyncColocatedWorkerMixin):
    def __init__(self, rank, host):
        self.rank = rank
        self.model = model(0)
        self.engine_host = host
        self.offloads = 0

    def weight_stream(self):
        return weight_stream_from(self.model)

    def offload_policy(self):
        self.offloads += 1


class OnALoop:
    """Calls an async worker as Ray does: every call on the one event loop of its actor."""

    def __init__(self, worker):
        self.worker = worker
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(20)

    def checkpoint_engine_rpc(self, *arguments):
        return self.call(self.worker.checkpoint_engine_rpc(*arguments))

    def colocated_rpc(self, *arguments):
        return self.call(self.worker.colocated_rpc(*arguments))

    def refit_control(self, *arguments):
        return self.call(self.worker.refit_control(*arguments))


class BlockingHost(ModuleRolloutWorker):
    """Has no asynchronous entry, as a host around a synchronous engine."""

    checkpoint_engine_rpc_async = None


@pytest.mark.parametrize("host", [ModuleRolloutWorker, BlockingHost])
def test_workers_that_run_on_an_event_loop(host):
    workers = [AsyncWorker(rank, host(model(1 + rank))) for rank in range(2)]
    groups = local_colocated_groups([OnALoop(worker) for worker in workers])
    with CheckpointEngineWeightSynchronizer(*groups, configuration(), progress=False) as synchronizer:
        synchronizer.init_communicator()
        for _ in range(2):
            synchronizer.sync_weights()
        for worker in workers:
            assert worker.refit_steps() == ORDER
            assert worker.offloads == 2
            assert same(worker.model, worker.engine_host.model)
            worker.weight_stream = lambda: iter(())
        with pytest.raises(RefitError, match="'tuple_iterator' object has no attribute"):
            synchronizer.sync_weights()
        for worker in workers:
            worker.engine_host.require_serving()


def test_separate_workers_of_one_process_need_no_special_group():
    class Trainer(PolicyCheckpointEngineMixin):
        def __init__(self, rank, trained):
            self.rank, self.model = rank, trained

        def weight_stream(self):
            return weight_stream_from(self.model)

    trained = model(0)
    hosts = [ModuleRolloutWorker(model(1 + rank)) for rank in range(2)]
    groups = LocalPolicyGroup([Trainer(rank, trained) for rank in range(2)]), LocalRolloutGroup(hosts)
    with CheckpointEngineWeightSynchronizer(*groups, configuration(), progress=False) as synchronizer:
        synchronizer.init_communicator()
        assert synchronizer.sync_weights().tensors == 4
    assert all(same(trained, host.model) for host in hosts)


def test_an_engine_that_sleeps_for_good_is_fenced_until_a_refit():
    host = ModuleRolloutWorker(model(1))
    worker = Worker(0, host=host)
    call = {"reason": "its weights were given up to sleep"}
    assert "error" not in host.checkpoint_engine_rpc("discard_weights", call)[0]
    assert host.checkpoint_engine_rpc("refit_status")[0]["value"]["fenced"] == call["reason"]
    with CheckpointEngineWeightSynchronizer(
        *local_colocated_groups([worker]), configuration(), progress=False
    ) as synchronizer:
        synchronizer.init_communicator()
        for version in (1, 2):
            with pytest.raises(WorkerFencedError, match="given up to sleep"):
                host.require_serving()
            assert synchronizer.sync_weights().version == version
            host.require_serving()
            host.checkpoint_engine_rpc("discard_weights", call)


# Real vLLM on the CPU: each engine in a process of its own, which the policy shares.


def environment():
    """Few threads, so that the tests of a small machine do not starve each other."""
    return {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR"}


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_in_the_policys_process_serves_the_policys_weights(tmp_path):
    pytest.importorskip("transformers")
    command = [sys.executable, "-m", "tests.colocated_vllm", str(tmp_path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    with subprocess.Popen(
        command, env={**os.environ, **environment()}, start_new_session=True, **pipes
    ) as process:
        try:
            out, err = process.communicate(timeout=200)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    results = [line for line in out.splitlines() if line.startswith("RESULT ")]
    assert results, f"{out[-2000:]}\n{err[-4000:]}"
    seen = json.loads(results[0].removeprefix("RESULT "))
    started, *refitted = seen["gaps"]
    assert started > 0.1
    assert len(refitted) == 3
    assert max(refitted) < 1e-4
    assert (seen["steps"], seen["version"]) == (ORDER, "2")
    assert (seen["tensors"], seen["batches"]) == (25, 2)
    assert "ValueError: gather failed" in seen["error"]
    assert "does not serve" in seen["fenced"]
    assert (seen["sleeps"], seen["asleep"], seen["awake"]) == (False, True, True)
    assert seen["offloaded"] == 4


@pytest.fixture(scope="module")
def cluster():
    os.environ["RAY_AUTH_MODE"] = "disabled"
    ray = pytest.importorskip("ray")
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 << 20,
        log_to_driver=False,
        runtime_env={"env_vars": environment()},
    )
    yield ray
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.vllm
def test_vllm_in_a_policy_actor_serves_the_policys_weights(cluster, tmp_path):
    pytest.importorskip("transformers")
    from tests.colocated_vllm import CONFIG, TinyWorker
    from weightsync.cluster.ray import ray_colocated_groups

    def get(reference):
        return cluster.get(reference, timeout=120)

    actor = cluster.remote(num_cpus=1)(TinyWorker).remote(str(tmp_path))
    groups = ray_colocated_groups([actor])
    assert get(actor.gap.remote()) > 0.1
    with CheckpointEngineWeightSynchronizer(*groups, CONFIG, progress=False) as synchronizer:
        synchronizer.init_communicator()
        for seed in (1, 2):
            get(actor.change.remote(seed))
            report = synchronizer.sync_weights()
            assert (report.tensors, report.batches) == (25, 2)
            assert get(actor.gap.remote()) < 1e-4
        assert get(actor.refit_steps.remote()) == ORDER
        get(actor.set_breaking.remote(True))
        with pytest.raises(RefitError, match="gather failed") as caught:
            synchronizer.sync_weights()
        assert caught.value.serving == {0: None}
        get(actor.set_breaking.remote(False))
        get(actor.change.remote(3))
        assert synchronizer.sync_weights().version == 3
        assert get(actor.gap.remote()) < 1e-4
        os.kill(get(actor.pid.remote()), signal.SIGKILL)
        with pytest.raises(RefitError, match="What to do: replace rollout rank 0"):
            synchronizer.sync_weights()


class ModuleActor:
    """A worker around a module; made in the actor, since it holds threads."""

    def __init__(self, rank):
        self.worker = Worker(rank)

    def checkpoint_engine_rpc(self, method, kwargs=None):
        return self.worker.checkpoint_engine_rpc(method, kwargs)

    def colocated_rpc(self, method, kwargs=None):
        return self.worker.colocated_rpc(method, kwargs)

    def refit_control(self, action, kwargs=None):
        return self.worker.refit_control(action, kwargs)

    def break_at(self, item):
        self.worker.break_at = item

    def is_same(self):
        return same(self.worker.model, self.worker.engine_host.model)


@pytest.mark.slow
@pytest.mark.ray
def test_actors_whose_policy_ranks_keep_in_step(cluster):
    from weightsync.cluster.ray import RayPolicyGroup, RayRolloutGroup, ray_colocated_groups

    actors = [cluster.remote(num_cpus=0)(ModuleActor).remote(rank) for rank in range(2)]
    groups = ray_colocated_groups(actors)
    with CheckpointEngineWeightSynchronizer(*groups, configuration(), progress=False) as synchronizer:
        synchronizer.init_communicator()
        synchronizer.sync_weights()
        assert cluster.get([actor.is_same.remote() for actor in actors], timeout=30) == [True, True]
        cluster.get(actors[1].break_at.remote(2), timeout=30)
        with pytest.raises(RefitError, match="gather failed") as caught:
            synchronizer.sync_weights()
        assert (caught.value.context.side, caught.value.context.rank) == ("policy", 1)
        heard = {(record.context.side, record.context.rank) for record in caught.value.failures}
        assert heard == {("policy", 0), ("policy", 1), ("rollout", 0), ("rollout", 1)}
        cluster.get(actors[1].break_at.remote(None), timeout=30)
        assert synchronizer.sync_weights().version == 2

    trainer, engine = (cluster.remote(num_cpus=0)(kind).remote() for kind in (Trainer, Engine))
    apart = RayPolicyGroup([trainer]), RayRolloutGroup([engine])
    separate = CheckpointEngineWeightSynchronizer(*apart, configuration(), progress=False)
    with pytest.raises(RefitError, match="write refit_transport: ipc for processes of one host, or nixl"):
        separate.init_communicator()


class GatheringActor(ModuleActor):
    """Makes every weight in a collective of all policy ranks that soon gives up."""

    def join(self, store):
        timeout = timedelta(seconds=1.5)
        dist.init_process_group("gloo", f"file://{store}", timeout, 2, self.worker.rank)
        self.worker.weight_stream = self.gather
        self.worker.engine_host.model = self.model = torch.nn.ModuleList(
            torch.nn.Linear(500, 1000) for _ in range(3)
        )
        self.worker.engine_host = SlowWorker(self.model)

    def gather(self):
        for name, tensor in self.model.state_dict().items():
            gathered = torch.ones_like(tensor)
            dist.all_reduce(gathered)
            yield name, gathered

    def load_slowly(self, seconds, fail):
        self.worker.engine_host.seconds, self.worker.engine_host.fail = seconds, fail

    def gathered(self):
        return all(bool((tensor == 2).all()) for tensor in self.model.state_dict().values())


class SlowWorker(ModuleRolloutWorker):
    """Takes its time to load a batch, or fails at it."""

    seconds, fail = 0.0, False

    def __init__(self, module):
        super().__init__(module)
        loader = ModuleLoader(module)
        load = loader.load

        def slow(batch):
            time.sleep(self.seconds)
            if self.fail:
                raise ValueError("the load failed")
            load(batch)

        loader.load = slow
        self._endpoint = RolloutEndpoint(0, lambda: loader)


@pytest.mark.slow
@pytest.mark.ray
def test_no_policy_rank_is_left_in_a_collective(cluster, tmp_path):
    """A batch takes longer to load than a collective may; then one rank cannot load at all."""
    from weightsync.cluster.ray import ray_colocated_groups

    actors = [cluster.remote(num_cpus=0)(GatheringActor).remote(rank) for rank in range(2)]
    cluster.get([actor.join.remote(str(tmp_path / "store")) for actor in actors], timeout=60)
    groups = ray_colocated_groups(actors)
    with CheckpointEngineWeightSynchronizer(*groups, configuration(), progress=False) as synchronizer:
        synchronizer.init_communicator()
        cluster.get(actors[0].load_slowly.remote(2.0, False), timeout=30)
        report = synchronizer.sync_weights()
        assert report.batches > 1
        assert report.seconds["transfer"] > 4
        assert cluster.get([actor.gathered.remote() for actor in actors], timeout=30) == [True, True]
        cluster.get(actors[0].load_slowly.remote(0.0, True), timeout=30)
        with pytest.raises(RefitError, match="the load failed") as caught:
            synchronizer.sync_weights()
        assert (caught.value.context.side, caught.value.context.rank) == ("rollout", 0)
        assert not any("gloo" in record.message.lower() for record in caught.value.failures)
        cluster.get(actors[0].load_slowly.remote(0.0, False), timeout=30)
        assert synchronizer.sync_weights().version == 2


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.vllm
def test_the_demo_with_a_sharded_policy_and_an_engine_in_each_of_its_ranks(tmp_path):
    command = [sys.executable, "-m", "weightsync", "demo", "--config", "colocated-qwen3.yaml", "--steps", "3"]
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "out")],
        cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr[-3000:]  # so few steps do not raise the reward
    steps = json.loads((tmp_path / "out" / "result.json").read_text())["steps"]
    assert [(step["policy_version"], step["rollout_version"]) for step in steps] == [(0, 0), (1, 1), (2, 2)]
    assert max(step["difference"] for step in steps) < 1e-4
    assert all(step["refit_bytes"] > 3_000_000 for step in steps)


class Trainer(PolicyCheckpointEngineMixin):
    rank = 0


class Engine(ModuleRolloutWorker):
    def __init__(self):
        super().__init__(model(1))
