"""Workers that come and go on a live synchronizer: real engines and modules, all in this process."""

from __future__ import annotations

import pytest

pytest.importorskip("nixl")

from tests.local_job import LocalJob
from tests.test_synchronizer_nixl import Trainer, model
from weightsync.errors import ConfigurationError, LifecycleError, RefitError, WorkerFencedError
from weightsync.rollout.module import ModuleRolloutWorker

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(120)]


@pytest.fixture
def job(request):
    with LocalJob(**getattr(request, "param", {})) as made:
        yield made


ALL = [
    {"transport": "nixl", "topology": "auto"},
    {"transport": "nixl", "topology": "ring"},
    {"transport": "nixl", "topology": "auto", "release_after_refit": True},
    {"transport": "gloo"},
    {"transport": "ipc", "topology": "auto"},
    {"transport": "kimi_ckpt_engine"},
]


@pytest.mark.parametrize("job", ALL, indirect=True, ids=lambda kw: "-".join(map(str, kw.values())))
def test_engines_come_and_go_and_newcomers_hold_the_version_at_once(job):
    job.synchronizer.sync_weights(3)
    report = job.add(2)
    assert (report.version, len(report.rollout)) == (3, 2)
    assert [figures.rank for figures in report.rollout] == [1, 2]
    assert job.all_serve(3)
    job.train()
    assert job.synchronizer.sync_weights().version == 4
    assert job.all_serve(4)
    job.remove(0)
    job.train()
    job.synchronizer.sync_weights()
    assert job.all_serve(5)
    job.remove(1)
    assert job.add(3).version == 5
    assert job.all_serve(5)
    job.train()
    job.synchronizer.sync_weights()
    assert len(job.hosts) == 4
    assert job.all_serve(6)


@pytest.mark.parametrize("job", [{"topology": "auto"}], indirect=True)
def test_a_newcomer_waits_where_the_policy_has_moved_on(job):
    assert job.add() is None
    job.synchronizer.sync_weights()
    assert job.all_serve(1)
    job.train()
    assert job.add() is None
    assert job.hosts[2].published_version is None
    job.synchronizer.sync_weights()
    assert job.all_serve(2)


@pytest.mark.parametrize("job", [{"topology": "auto", "rollout": 3}], indirect=True)
def test_workers_are_replaced_in_their_place(job):
    job.synchronizer.sync_weights()
    job.hosts[1] = job.make_host()
    report = job.synchronizer.replace_rollout(1, job.hosts[1])
    assert [figures.rank for figures in report.rollout] == [1]
    assert job.all_serve(1)
    job.trainers[1] = Trainer(job.trained, 1)
    job.synchronizer.replace_policy(1, job.trainers[1])
    job.train()
    job.synchronizer.sync_weights()
    assert job.all_serve(2)


@pytest.mark.parametrize("job", [{"topology": "pairs"}], indirect=True)
def test_what_cannot_be_is_refused_and_the_group_is_as_it_was(job):
    job.synchronizer.sync_weights()
    new = [job.make_host(), job.make_host()]
    with pytest.raises(ConfigurationError, match=r"2 policy and 3 rollout workers.*write topology: auto"):
        job.synchronizer.add_rollout(*new)
    with pytest.raises(ConfigurationError, match="no rollout worker begins at rank 7; they begin at 0"):
        job.synchronizer.remove_rollout(7)
    with pytest.raises(ConfigurationError, match="this is the last one"):
        job.synchronizer.remove_rollout(0)
    with pytest.raises(ConfigurationError, match="object has no method"):
        job.synchronizer.add_rollout(object())
    job.train()
    job.synchronizer.sync_weights()
    assert job.all_serve(2)
    job.add()
    assert job.all_serve(2)


@pytest.mark.parametrize("job", [{"topology": "auto"}], indirect=True)
def test_a_newcomer_that_fails_stays_out_or_without_a_version_and_the_others_serve(job):
    job.synchronizer.sync_weights()
    wrong = ModuleRolloutWorker(model(9)[:1])  # another architecture
    with pytest.raises(RefitError) as caught:
        job.synchronizer.add_rollout(wrong)
    assert "rollout rank 1" in str(caught.value)
    assert wrong.published_version is None
    assert job.all_serve(1)
    job.synchronizer.remove_rollout(1)
    job.train()
    job.synchronizer.sync_weights()
    assert job.all_serve(2)


def test_members_change_only_while_connected(job):
    job.synchronizer.shutdown()
    for call in (
        lambda: job.synchronizer.add_rollout(job.make_host()),
        lambda: job.synchronizer.remove_rollout(0),
        lambda: job.synchronizer.replace_rollout(0, job.make_host()),
        lambda: job.synchronizer.replace_policy(0, job.trainers[0]),
    ):
        with pytest.raises(LifecycleError, match="shut down"):
            call()


@pytest.mark.parametrize("transport", ["ipc", "nixl"])
def test_a_newcomer_that_waits_for_the_next_refit_does_not_serve(transport):
    with LocalJob(transport, topology="star") as job:
        job.sync()
        job.train()
        assert job.add() is None
        with pytest.raises(WorkerFencedError, match="has had none yet"):
            job.hosts[1].require_serving()
        assert job.serves(0, 1) is False  # the policy has moved on; it serves what it had
        job.hosts[0].require_serving()
        report = job.synchronizer.sync_weights()
        assert job.serves(0, report.version)
        assert job.serves(1, report.version)
