"""Whatever fails, wherever, before or after it took effect: no engine stays paused, caches are reset once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.test_rollout_hosts import FakeLLM
from tests.test_synchronizer_nixl import Trainer, model, same, step
from weightsync.cluster.local import LocalPolicyGroup, LocalRolloutGroup
from weightsync.errors import ErrorRecord, LifecycleError, RefitError, WorkerFencedError
from weightsync.outcomes import Outcome
from weightsync.rollout.endpoint import RolloutEndpoint
from weightsync.rollout.module import ModuleLoader, ModuleRolloutWorker
from weightsync.rollout.vllm import host as vllm_host
from weightsync.rollout.vllm import memory
from weightsync.rollout.vllm.host import VllmEngineHost
from weightsync.synchronizer import CheckpointEngineWeightSynchronizer

UPDATE = "update_weights_from_checkpoint_engine"
STAGE = "stage_weights_from_checkpoint_engine"
CONTROLS = ("pause", "release_kv_cache", "reset_caches", "publish_version", "resume")
STEPS = {
    "in_place": (*CONTROLS, "open_refit", UPDATE, "commit_refit"),
    "staged": (*CONTROLS, "open_refit", STAGE, "load_staged_weights", "commit_refit"),
}


class StubLLM(FakeLLM):
    """vLLM's rules about pausing and caches, around a module of one rank."""

    def __init__(self, served):
        super().__init__()
        self.endpoint = RolloutEndpoint(0, lambda: ModuleLoader(served))
        self.resets = 0
        engine = self.llm_engine
        engine.reset_encoder_cache = self.count
        self.llm_engine = SimpleNamespace(**vars(engine))

    def count(self):
        self.resets += 1

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        return [self.endpoint.call(*args)]

    def reset_prefix_cache(self):
        return True

    def reset_mm_cache(self):
        return None


class StubHost(VllmEngineHost):
    def __init__(self, seed):
        self.model = model(seed)
        super().__init__(llm=StubLLM(self.model))

    @property
    def resets(self):
        return self.llm.resets


class ModuleHost(ModuleRolloutWorker):
    def __init__(self, seed):
        super().__init__(model(seed))
        self.resets = 0

    def control_reset_caches(self):
        self.resets += 1


class Breaking:
    """A host of which one call fails once, before or after it has done what it was asked."""

    def __init__(self, host):
        self.host = host
        self.point = self.when = None

    def checkpoint_engine_rpc(self, method, kwargs=None):
        return self._run(method, lambda: self.host.checkpoint_engine_rpc(method, kwargs), as_list=True)

    def refit_control(self, action, kwargs=None):
        return self._run(action, lambda: self.host.refit_control(action, kwargs), as_list=False)

    def _run(self, name, call, *, as_list):
        if name != self.point:
            return call()
        self.point = None
        if self.when == "after":
            call()
        elif name in (UPDATE, STAGE):  # what a worker does that fails before it begins
            self.host_engine.abort_refit(ValueError("broken"))
        outcome = Outcome(0, error=ErrorRecord.from_exception(ValueError("broken"))).to_dict()
        return [outcome] if as_list else outcome

    @property
    def host_engine(self):
        endpoint = self.host.llm.endpoint if isinstance(self.host, StubHost) else self.host._endpoint
        return endpoint.receiver.engine


class Job:
    def __init__(self, kind, commit):
        self.trained = model(0)
        self.hosts = [kind(9), kind(8)]
        self.broken = Breaking(self.hosts[1])
        self.policy = LocalPolicyGroup([Trainer(self.trained, 0)])
        self.rollout = LocalRolloutGroup([self.hosts[0], self.broken])
        generation = {
            "refit_transport": "ipc",
            "refit_cfg": {"ipc": {"device": "cpu", "topology": "star",
                                  "update_weights_bucket_memory_ratio": 0.0005}},
            "refit_lifecycle": {"commit": commit, "connect_s": 5, "stall_s": 5, "total_s": 20,
                                "silence_s": 2},
        }  # fmt: skip
        self.synchronizer = CheckpointEngineWeightSynchronizer(
            self.policy, self.rollout, {"policy": {"generation": generation}}, progress=False
        )
        self.synchronizer.init_communicator()

    def sync(self):
        step(self.trained)
        before = [host.resets for host in self.hosts]
        try:
            self.synchronizer.sync_weights()
        finally:
            self.resets = [host.resets - was for host, was in zip(self.hosts, before, strict=True)]

    def state(self, host):
        try:
            host.require_serving()
        except WorkerFencedError:
            return "fenced"
        except LifecycleError:
            return "paused"
        return "serving"

    def close(self):
        self.synchronizer.shutdown()
        self.policy.close()
        self.rollout.close()


@pytest.fixture(scope="module", params=["module", "vllm"])
def kind(request):
    return {"module": ModuleHost, "vllm": StubHost}[request.param]


@pytest.fixture(scope="module", params=["in_place", "staged"])
def commit(request):
    return request.param


@pytest.fixture(scope="module")
def job(kind, commit):
    # vLLM gives caches back on a GPU only.
    patch = pytest.MonkeyPatch()
    for module in (vllm_host, memory):
        patch.setattr(module, "is_cpu_platform", lambda: False)
    made = Job(kind, commit)
    yield made
    made.close()
    patch.undo()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_failure_at_any_step_leaves_no_engine_paused_and_resets_caches_at_most_once(job, commit, when):
    for point in STEPS[commit]:
        job.sync()
        assert job.resets == [1, 1]
        old = [state.version for state in job.synchronizer.rollout_status(digests=False).values()]
        job.broken.point, job.broken.when = point, when
        if point == "resume":
            job.sync()  # a resume is tried twice
        else:
            with pytest.raises(RefitError, match="broken"):
                job.sync()
        assert job.broken.point is None, point
        states = [job.state(host) for host in job.hosts]
        held = point == "reset_caches"
        assert states[0] != "paused", point
        assert states[1] == "paused" if held else states[1] != "paused", point
        now = [state.version for state in job.synchronizer.rollout_status(digests=False).values()]
        written = [int(version != was) for version, was in zip(now, old, strict=True)]
        if held and when == "before":
            written[1] = 0  # that was the reset that failed
        assert job.resets == written, point
        if commit == "staged" and point in ("open_refit", STAGE, "pause", "release_kv_cache"):
            assert (states, now) == (["serving"] * 2, old), point
        job.sync()
        assert [job.state(host) for host in job.hosts] == ["serving"] * 2, point
        assert all(same(host.model, job.trained) for host in job.hosts)
