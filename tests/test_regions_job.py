"""Whole jobs that refit by regions: real trainers, engines over NIXL and modules, all in this process."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("nixl")

from tests.local_job import LocalJob
from tests.test_synchronizer_nixl import Trainer, model
from weightsync.errors import ConfigurationError, ManifestError, RefitError
from weightsync.policy import weight_stream_from
from weightsync.rollout.module import ModuleRolloutWorker
from weightsync.tensors import WeightStream

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(120)]

BYTES = sum(weight.nbytes for weight in model(0).state_dict().values())
BY_REGIONS = "regions (shard_weights: {})"


class Plain(Trainer):
    """Says what comes, and not where it is."""

    def weight_stream(self):
        stream = weight_stream_from(self.model)
        return WeightStream(stream.manifest, stream)


def strided():
    """A module with one weight whose memory is not contiguous: regions cannot be written into it."""
    made = model(9)
    made[0].weight = torch.nn.Parameter(made[0].weight.detach().t().contiguous().t())
    return ModuleRolloutWorker(made)


@pytest.mark.slow
@pytest.mark.parametrize("verify", ["full", "off"])
@pytest.mark.parametrize("release", [False, True])
def test_refits_by_regions_arrive_in_place(verify, release):
    settings = {"shard_weights": "all", "release_after_refit": release, "topology": "auto"}
    with LocalJob(rollout=3, lifecycle={"verify": verify}, **settings) as job:
        for version in (1, 2, 3):
            report = job.sync()
            assert job.all_serve(version)
            assert report.topology == BY_REGIONS.format("all")
            assert report.copies == {"in_place": 3 * BYTES, "staged": 0, "whole": 0}
            assert report.bytes_by_rank == dict.fromkeys(range(3), BYTES)
            assert report.whole == {}


def test_with_a_staged_commit_what_is_served_is_not_written_into():
    with LocalJob(shard_weights="all", lifecycle={"commit": "staged"}) as job:
        report = job.sync()
        assert job.all_serve(1)
        assert report.copies == {"in_place": 0, "staged": BYTES, "whole": 0}


def test_a_parameter_that_is_not_plain_memory_is_staged():
    with LocalJob(shard_weights="all", make_host=strided) as job:
        report = job.sync()
        assert job.all_serve(1)
        assert report.copies["staged"] == job.trained[0].weight.nbytes
        assert report.copies["in_place"] == BYTES - report.copies["staged"]


def test_experts_of_a_model_that_has_none_is_all_of_it_whole():
    with LocalJob(shard_weights="experts", topology="auto") as job:
        report = job.sync()
        assert job.all_serve(1)
        assert set(report.whole) == set(job.trained.state_dict())
        assert report.copies.get("whole", report.bytes) == BYTES
        assert report.topology.startswith("regions (shard_weights: experts) + pairs: 2 policy to 1 rollout")


def test_a_stream_without_shards_goes_whole_with_auto_and_is_refused_with_all(monkeypatch):
    monkeypatch.setattr("tests.local_job.Trainer", Plain)
    with LocalJob(shard_weights="auto", topology="auto") as job:
        report = job.sync()
        assert job.all_serve(1)
        assert set(report.whole.values()) == {"the weight stream is a plain generator (policy rank 0)"}
    with pytest.raises(ConfigurationError, match="4 of 4 tensors cannot be moved by regions: "):
        LocalJob(shard_weights="all")


@pytest.mark.slow
def test_engines_come_and_go():
    with LocalJob(shard_weights="all", topology="auto") as job:
        job.sync()
        report = job.add(2)
        assert report.copies["in_place"] == 2 * BYTES
        assert report.topology == BY_REGIONS.format("all")
        assert job.all_serve(1)
        job.remove(0)
        job.sync()
        assert job.all_serve(2)
        job.hosts[1] = job.make_host()
        job.synchronizer.replace_rollout(1, job.hosts[1])
        job.trainers[1] = Trainer(job.trained, 1)
        job.synchronizer.replace_policy(1, job.trainers[1])
        job.sync()
        assert job.all_serve(3)
        stored = job.add()
        assert [figures.bytes for figures in stored.rollout] == [BYTES]


def test_after_a_failure_the_next_refit_arrives():
    with LocalJob(shard_weights="all", rollout=2, topology="auto") as job:
        job.sync()
        job.trainers[0].broken = True
        with pytest.raises(RefitError, match="policy rank 0: ValueError: no weights yet"):
            job.sync()
        job.trainers[0].broken = False
        report = job.sync()
        assert job.all_serve(report.version)


def test_a_model_that_changes_between_two_refits_needs_a_new_connection():
    with LocalJob(shard_weights="all") as job:
        job.sync()
        job.trained.append(torch.nn.Linear(1, 1))
        with pytest.raises(RefitError) as caught:
            job.sync()
        assert isinstance(caught.value.__cause__, ManifestError)
        assert "What to do: call shutdown() and init_communicator(), then sync_weights" in str(caught.value)
        job.trained.pop(2)
        job.synchronizer.shutdown()
        job.synchronizer.init_communicator()
        report = job.sync()
        assert job.all_serve(report.version)


def test_policy_ranks_of_different_models_are_found_out():
    with LocalJob(shard_weights="auto") as job:
        job.synchronizer.shutdown()
        job.trainers[1].model = torch.nn.Sequential(*model(0), torch.nn.Linear(1, 1))
        with pytest.raises(ManifestError, match="policy rank 1 would send other tensors than policy rank 0"):
            job.synchronizer.init_communicator()
