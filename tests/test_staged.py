"""``commit: staged``: an update waits in host memory, is complete, and only then are requests paused."""

from __future__ import annotations

import json
import threading

import pytest
import torch

from tests.rollout_engines import RecordingEngine
from tests.scripted_workers import raising
from tests.test_synchronizer import SEND, Job
from weightsync.errors import (
    ConfigurationError,
    DigestError,
    IncompleteStreamError,
    LifecycleError,
    ManifestError,
    WorkerFencedError,
)
from weightsync.rollout.module import ModuleLoader, named_state
from weightsync.rollout.receiver import RefitReceiver
from weightsync.rollout.staging import StagedWeights
from weightsync.tensors import TensorSpec, WeightManifest

STAGE = "stage_weights_from_checkpoint_engine"
STAGED = {"commit": "staged", "topology": "star"}
STEPS = [
    "open_refit", STAGE, "pause", "release_kv_cache", "load_staged_weights",
    "commit_refit", "reset_caches", "publish_version", "resume",
]  # fmt: skip


# The order of the steps, and who serves what.


def test_the_pause_comes_after_the_transfer():
    job = Job(**STAGED)
    report = job.synchronizer.sync_weights()
    assert job.steps_of("host 0") == job.steps_of("host 1") == STEPS
    assert (report.commit, report.staged_bytes) == ("staged", 9000)
    assert 0 < report.paused_s < report.seconds["total"]
    assert list(report.seconds)[:5] == ["open", "transfer", "pause", "release", "load"]
    assert report.rollout[0].seconds["load"] == 0.2
    assert "paused " in str(report)
    assert json.loads(json.dumps(report.to_dict()))["staged_bytes"] == 9000


@pytest.mark.parametrize("side", ["policy", "rollout"])
def test_a_failure_before_the_load_pauses_nobody_and_the_old_version_serves(side):
    job = Job(**STAGED)
    job.synchronizer.sync_weights()
    job.log.clear()
    if side == "policy":
        job.policy[0].script[SEND] = raising(ValueError("gather failed"))
    else:
        job.hosts[1].script[STAGE] = raising(DigestError("bytes arrived changed"))
    error = job.fail()
    assert error.serving == {0: 1, 1: 1, 2: 1}
    assert not {"pause", "reset_caches", "resume", "load_staged_weights"} & set(job.log.methods())
    assert not any(state.staged for state in job.states)
    job.policy[0].script.clear()
    job.hosts[1].script.clear()
    assert job.synchronizer.sync_weights().version == 2


@pytest.mark.parametrize("method", ["pause", "release_kv_cache"])
def test_a_failure_between_pause_and_load_resumes_the_old_version(method):
    job = Job(**STAGED)
    job.synchronizer.sync_weights()
    job.log.clear()
    job.hosts[1].script[method] = raising(ValueError("broken"))
    assert job.fail().serving == {0: 1, 1: 1, 2: 1}
    assert job.log.count("resume", "host 0") == job.log.count("resume", "host 1") == 1
    assert job.log.count("reset_caches") == 0


def test_a_failed_load_fences_who_was_written_to():
    job = Job(**STAGED)
    job.synchronizer.sync_weights()
    job.log.clear()
    job.hosts[1].script["load_staged_weights"] = raising(ValueError("broken"))
    assert set(job.fail().serving.values()) == {None}
    assert job.log.count("reset_caches", "host 0") == job.log.count("resume", "host 0") == 1


def test_with_continue_a_failed_load_costs_its_own_engine_only():
    job = Job(sizes=(1, 1), **STAGED, on_failure="continue")
    job.synchronizer.sync_weights()
    job.hosts[1].script["load_staged_weights"] = raising(ValueError("broken"))
    report = job.synchronizer.sync_weights()
    assert report.ok == (0,)
    assert [(each.rank, each.version) for each in report.failed] == [(1, None)]
    job.hosts[1].script = {STAGE: raising(ValueError("no memory"))}
    kept = job.states[1]
    kept.version, kept.fenced, kept.dirty = 1, None, False  # as one that had kept the old version
    report = job.synchronizer.sync_weights()
    assert [(each.rank, each.version) for each in report.failed] == [(1, 1)]


@pytest.mark.slow
def test_with_continue_an_engine_that_hangs_in_the_load_leaves_time_for_the_others():
    job = Job(sizes=(1, 1), **STAGED, on_failure="continue", stall_s=0.5, total_s=20.0)
    wake = threading.Event()
    job.hosts[1].script["load_staged_weights"] = lambda kwargs: wake.wait(20)
    report = job.synchronizer.sync_weights()
    wake.set()
    assert report.ok == (0,)
    assert report.seconds["load"] < 3


# One rank.


class Net(torch.nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.one = torch.nn.Linear(8, 4)
        self.two = torch.nn.Linear(4, 3)


def make(stream=None, **options):
    engine = RecordingEngine(128, **options)
    engine.stream = list(named_state(Net(2))) if stream is None else stream
    served = Net(1)
    return engine, served, RefitReceiver(engine, ModuleLoader(served), rank=3)


def equal(one, other):
    return all(torch.equal(a, b) for (_, a), (_, b) in zip(named_state(one), named_state(other), strict=True))


@pytest.mark.parametrize("announce", [True, False])
def test_a_staged_update_changes_nothing_until_it_is_loaded(announce):
    _, served, receiver = make(announce=announce)
    figures = receiver.receive(4, staged=True)
    assert figures["staged_bytes"] == figures["bytes"] == sum(t.nbytes for _, t in named_state(served))
    assert equal(served, Net(1))
    receiver.require_serving()
    with pytest.raises(LifecycleError, match="nothing was received"):
        receiver.commit(4)
    figures = receiver.load_staged()
    assert {"receive", "stage", "load", "total"} <= figures["seconds"].keys()
    with pytest.raises(WorkerFencedError):
        receiver.require_serving()
    assert receiver.commit(4) == 4
    assert equal(served, Net(2))
    with pytest.raises(LifecycleError, match="no staged update"):
        receiver.load_staged()


@pytest.mark.parametrize("announce", [True, False])
@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        (lambda stream: stream[:-1], ManifestError),
        (lambda stream: [*stream, ("unknown", torch.ones(2))], ManifestError),
        (lambda stream: [(name, tensor.double()) for name, tensor in stream], ManifestError),
    ],
)
def test_an_update_that_does_not_fit_is_refused_before_any_write(announce, spoil, kind):
    _, served, receiver = make(spoil(list(named_state(Net(2)))), announce=announce)
    with pytest.raises(kind):
        receiver.receive(1, staged=True)
    assert equal(served, Net(1))
    receiver.require_serving()
    with pytest.raises(LifecycleError, match="no staged update"):
        receiver.load_staged()


def test_a_stream_that_breaks_off_leaves_the_old_weights():
    engine, served, receiver = make()
    engine.fail_after = 1
    with pytest.raises(DigestError):
        receiver.receive(1, staged=True)
    engine.fail_after, engine.manifest = (
        None,
        WeightManifest((*(TensorSpec.of(*item) for item in engine.stream),)),
    )
    engine.stream = engine.stream[:-1]
    with pytest.raises(IncompleteStreamError):
        receiver.receive(1, staged=True)
    assert equal(served, Net(1))
    receiver.require_serving()


def test_a_fence_drops_what_is_staged_and_keeps_a_clean_rank_serving():
    _, served, receiver = make()
    receiver.receive(1, staged=True)
    receiver.fence("another rank failed")
    receiver.require_serving()
    with pytest.raises(LifecycleError, match="no staged update"):
        receiver.load_staged()
    assert equal(served, Net(1))


def test_a_failed_load_fences():
    _, served, receiver = make()
    receiver.receive(1, staged=True)
    served.two = torch.nn.Linear(4, 4)
    with pytest.raises(ManifestError):
        receiver.load_staged()
    assert receiver.fenced


def test_host_memory_is_bounded():
    batch = [("a", torch.ones(10)), ("b", torch.ones(3, dtype=torch.uint8))]
    waiting = StagedWeights(60)
    waiting.keep(batch)
    assert waiting.nbytes == 43
    with pytest.raises(ConfigurationError, match=r"needs 86 bytes of host memory.*60 are free"):
        waiting.keep(batch)
    with pytest.raises(ConfigurationError, match="commit: in_place"):
        waiting.require_room(WeightManifest((TensorSpec("a", (1 << 50,), "float32"),)))
    batch[0][1].zero_()
    (kept,) = waiting.take()
    assert kept[0][1].sum() == 10
    assert waiting.nbytes == 0
