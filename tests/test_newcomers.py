"""Workers that come when the policy has moved on: kimi's policy ranks give them what they hold."""

from __future__ import annotations

import copy

import pytest

pytest.importorskip("nixl")

from tests.local_job import WAITS
from tests.test_synchronizer_nixl import Trainer, model, same, step
from weightsync.cluster.local import LocalPolicyGroup, LocalRolloutGroup
from weightsync.errors import RefitError, WorkerFencedError
from weightsync.rollout.module import ModuleLoader, ModuleRolloutWorker
from weightsync.synchronizer import CheckpointEngineWeightSynchronizer

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(120)]

KIMI = "kimi_ckpt_engine"


class CountingTrainer(Trainer):
    """Counts how often its weights are asked for."""

    streams = 0

    def weight_stream(self):
        self.streams += 1
        return super().weight_stream()


class FailingLoader(ModuleLoader):
    """Fails once it has loaded everything, the first time."""

    broken = True

    def finish(self):
        if self.broken:
            self.broken = False
            raise ValueError("cannot finish")
        super().finish()


class Job:
    """Two trainers, one host, a synchronizer that has refitted once; then the policy moves on."""

    def __init__(self, transport=KIMI, *, moves_by=None, policy_world=2, **lifecycle):
        scope = {"device": "cpu", "update_weights_bucket_memory_ratio": 0.0001}
        scope |= {"transport": moves_by} if moves_by else {}
        generation = {
            "refit_transport": transport,
            "refit_cfg": {transport: scope},
            "refit_lifecycle": {**WAITS, **lifecycle},
        }
        self.trained = model(0)
        self.trainers = [CountingTrainer(self.trained, rank) for rank in range(policy_world)]
        self.hosts = [ModuleRolloutWorker(model(9))]
        self.policy, self.rollout = LocalPolicyGroup(self.trainers), LocalRolloutGroup(self.hosts)
        self.synchronizer = CheckpointEngineWeightSynchronizer(
            self.policy, self.rollout, {"policy": {"generation": generation}}, progress=False
        )
        self.synchronizer.init_communicator()
        self.synchronizer.sync_weights(3)
        self.old = copy.deepcopy(self.trained)
        self.train()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.synchronizer.shutdown()
        self.policy.close()
        self.rollout.close()

    def train(self):
        step(self.trained)
        self.synchronizer.mark_stale()

    def newcomer(self):
        self.hosts.append(ModuleRolloutWorker(model(len(self.hosts))))
        return self.hosts[-1]

    def failing_newcomer(self):
        host = self.newcomer()
        host._endpoint._make_loader = lambda: FailingLoader(host.model)
        return host

    def holds(self, host, version, weights):
        host.require_serving()
        return host.published_version == version and same(host.model, weights)


@pytest.mark.parametrize("moves_by", ["ipc", "nixl"])
@pytest.mark.parametrize("commit", ["in_place", "staged"])
def test_newcomers_get_the_version_that_is_held_and_then_take_part(moves_by, commit):
    with Job(moves_by=moves_by, commit=commit) as job:
        asked = [trainer.streams for trainer in job.trainers]
        first, second = job.newcomer(), job.newcomer()
        report = job.synchronizer.add_rollout(first, second)
        assert (report.version, report.transport, report.topology) == (3, KIMI, "held by the policy")
        assert [figures.rank for figures in report.rollout] == [1, 2]
        assert report.policy == ()
        assert job.holds(first, 3, job.old)
        assert job.holds(second, 3, job.old)
        assert [trainer.streams for trainer in job.trainers] == asked
        assert job.synchronizer.is_stale
        status = job.synchronizer.rollout_status()
        assert len({each.served_digest for each in status.values()}) == 1
        assert job.synchronizer.sync_weights().version == 4
        assert all(job.holds(host, 4, job.trained) for host in job.hosts)


def test_one_that_takes_the_place_of_another():
    with Job(moves_by="ipc") as job:
        job.synchronizer.add_rollout(job.newcomer())
        del job.hosts[0]
        report = job.synchronizer.replace_rollout(0, job.newcomer())
        assert [figures.rank for figures in report.rollout] == [0]
        assert job.holds(job.hosts[1], 3, job.old)
        job.train()
        job.synchronizer.sync_weights()
        assert all(job.holds(host, 4, job.trained) for host in job.hosts)


def test_after_a_policy_worker_was_replaced_nothing_is_held_and_they_wait(caplog):
    with Job(moves_by="ipc") as job:
        job.trainers[1] = CountingTrainer(job.trained, 1)
        job.synchronizer.replace_policy(1, job.trainers[1])
        new = job.newcomer()
        assert job.synchronizer.add_rollout(new) is None
        assert "wait for the next refit" in caplog.text
        assert new.published_version is None
        job.synchronizer.sync_weights()
        assert all(job.holds(host, 4, job.trained) for host in job.hosts)


def test_after_a_failed_refit_they_wait():
    with Job(moves_by="ipc") as job:
        job.trainers[0].broken = True
        with pytest.raises(Exception, match="no weights yet"):
            job.synchronizer.sync_weights()
        job.trainers[0].broken = False
        assert job.synchronizer.add_rollout(job.newcomer()) is None
        report = job.synchronizer.sync_weights()
        assert all(job.holds(host, report.version, job.trained) for host in job.hosts)


@pytest.mark.parametrize("transport", ["nixl", "gloo"])
def test_other_engines_have_nothing_for_them(transport):
    with Job(transport) as job:
        new = job.newcomer()
        assert job.synchronizer.add_rollout(new) is None
        assert new.published_version is None
        job.synchronizer.sync_weights()
        assert all(job.holds(host, 4, job.trained) for host in job.hosts)


def test_a_newcomer_that_cannot_load_what_is_held_joins_without_a_version():
    with Job(moves_by="ipc") as job:
        wrong = ModuleRolloutWorker(model(9)[:1])
        assert job.synchronizer.add_rollout(wrong) is None
        assert wrong.published_version is None
        job.synchronizer.remove_rollout(1)
        job.synchronizer.sync_weights()
        assert all(job.holds(host, 4, job.trained) for host in job.hosts)


def test_a_newcomer_that_fails_half_way_is_fenced_until_the_next_refit():
    with Job(moves_by="ipc") as job:
        new = job.failing_newcomer()
        with pytest.raises(RefitError, match="rollout rank 1: ValueError: cannot finish") as caught:
            job.synchronizer.add_rollout(new)
        assert caught.value.serving == {1: None}
        with pytest.raises(WorkerFencedError):
            new.require_serving()
        assert job.holds(job.hosts[0], 3, job.old)
        report = job.synchronizer.sync_weights()
        assert all(job.holds(host, report.version, job.trained) for host in job.hosts)


def test_with_continue_the_others_get_it():
    with Job(moves_by="ipc", on_failure="continue") as job:
        failing, fine = job.failing_newcomer(), job.newcomer()
        report = job.synchronizer.add_rollout(failing, fine)
        assert [left.rank for left in report.failed] == [1]
        assert report.ok == (2,)
        assert job.holds(fine, 3, job.old)
        with pytest.raises(WorkerFencedError):
            failing.require_serving()
        report = job.synchronizer.sync_weights()
        assert all(job.holds(host, report.version, job.trained) for host in job.hosts)
