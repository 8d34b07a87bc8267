"""``verify_live``: a running group against its policy, tensor by tensor."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from tests.test_synchronizer_nixl import Trainer, model, step
from weightsync.cluster.local import LocalPolicyGroup, LocalRolloutGroup
from weightsync.errors import WeightSyncError
from weightsync.rollout.module import ModuleRolloutWorker
from weightsync.synchronizer import CheckpointEngineWeightSynchronizer
from weightsync.verification.compare import Comparison
from weightsync.verification.live import verify_live


class Job:
    def __init__(self):
        self.trained = model(0)
        self.hosts = [ModuleRolloutWorker(model(9)) for _ in range(2)]
        self.policy = LocalPolicyGroup([Trainer(self.trained, rank) for rank in range(2)])
        self.rollout = LocalRolloutGroup(self.hosts)
        scope = {"device": "cpu", "update_weights_bucket_memory_ratio": 0.0001}
        generation = {"refit_transport": "ipc", "refit_cfg": {"ipc": scope}}
        self.synchronizer = CheckpointEngineWeightSynchronizer(
            self.policy, self.rollout, {"policy": {"generation": generation}}, progress=False
        )
        self.synchronizer.init_communicator()

    def verify(self, **options):
        return verify_live(self.policy, self.rollout, timeout_s=20, **options)


@pytest.fixture
def job():
    made = Job()
    yield made
    made.synchronizer.shutdown()
    made.policy.close()
    made.rollout.close()


def test_a_running_group_is_compared_with_its_policy(job):
    job.synchronizer.sync_weights()
    report = job.verify()
    assert report.passed
    assert report.is_proven
    assert [(each.rank, each.version, each.equal, each.arrived) for each in report.ranks] == [
        (0, 1, 4, True), (1, 1, 4, True),
    ]  # fmt: skip
    status = job.synchronizer.rollout_status()
    assert {each.served_digest for each in status.values()} == {report.policy_digest}
    assert {each.stream_digest for each in status.values()} == {report.policy_digest}

    with torch.no_grad():  # one bit of one served parameter
        job.hosts[1].model[1].bias.view(torch.int32)[17] ^= 1
    report = job.verify()
    assert not report.passed
    assert report.ranks[0].passed
    assert report.ranks[1].different == ("1.bias",)
    assert report.ranks[1].arrived
    assert "1 DIFFERENT: '1.bias'" in str(report)
    assert json.loads(json.dumps(report.to_dict()))["ranks"][1]["different"] == ["1.bias"]

    step(job.trained)
    report = job.verify()
    assert [each.different for each in report.ranks] == [("0.weight",), ("0.weight", "1.bias")]
    assert [each.arrived for each in report.ranks] == [False, False]


def test_ranks_that_do_not_serve_or_serve_other_versions_do_not_pass(job):
    job.synchronizer.sync_weights()
    receiver = job.hosts[1]._endpoint.receiver
    receiver.version = 7
    report = job.verify()
    assert all(each.passed for each in report.ranks)
    assert not report.passed
    receiver.discard("asleep")
    report = job.verify()
    assert "it does not serve: asleep" in str(report)
    assert not report.passed


def test_log_probabilities_are_asked_for_and_count(job):
    job.synchronizer.sync_weights()
    assert job.verify(compare=lambda: Comparison(4, 4, 0.0, 1e-4)).passed
    report = job.verify(compare=lambda: Comparison(4, 3, 0.0, 1e-4))
    assert not report.passed
    assert "3 of 4 tokens equal" in str(report)


def test_a_policy_that_cannot_say_what_it_would_send_is_an_error(job):
    job.synchronizer.sync_weights()
    job.policy._units[1].worker.broken = True
    with pytest.raises(WeightSyncError, match="no weights yet"):
        job.verify()


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.ray
@pytest.mark.nixl
@pytest.mark.timeout(200)
def test_the_command_compares_a_running_vllm():
    command = [sys.executable, "-m", "weightsync", "verify", "--live", "--model", "dense", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)["dense"]
    (refitted,), (changed,) = found["after_refit"]["ranks"], found["after_change"]["ranks"]
    assert refitted["passed"]
    assert refitted["arrived"] is True
    assert refitted["different"] == []
    assert refitted["equal"] + len(refitted["unread"]) == 25
    assert found["after_refit"]["comparison"]["agrees"]
    assert not changed["passed"]
    assert changed["arrived"] is False
    assert not found["after_change"]["comparison"]["agrees"]
