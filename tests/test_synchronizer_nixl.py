"""The synchronizer over real parts: policy mixin, NIXL engine and module receiver, all in this process."""

from __future__ import annotations

import time

import pytest
import torch

pytest.importorskip("nixl")

from tests.test_synchronizer import configuration
from weightsync.cluster.local import LocalPolicyGroup, LocalRolloutGroup
from weightsync.errors import RefitError
from weightsync.policy import PolicyCheckpointEngineMixin, weight_stream_from
from weightsync.rollout.module import ModuleRolloutWorker
from weightsync.synchronizer import CheckpointEngineWeightSynchronizer

pytestmark = [pytest.mark.slow, pytest.mark.nixl]


class Trainer(PolicyCheckpointEngineMixin):
    def __init__(self, model, rank):
        self.model = model
        self.rank = rank
        self.break_at = None
        self.broken = False

    def weight_stream(self):
        if self.broken:
            raise ValueError("no weights yet")
        return self._stream() if self.break_at is not None else weight_stream_from(self.model)

    def _stream(self):
        for number, item in enumerate(weight_stream_from(self.model)):
            if number == self.break_at:
                raise ValueError("gather failed")
            yield item


def model(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(300, 1000), torch.nn.Linear(1000, 2000))


def step(trained):
    with torch.no_grad():
        trained[0].weight.add_(1.0)


def same(first, second):
    pairs = zip(first.state_dict().items(), second.state_dict().items(), strict=True)
    return all(name == other and torch.equal(value, wanted) for (name, value), (other, wanted) in pairs)


@pytest.mark.parametrize("release", [False, True])
def test_refits_arrive_a_broken_one_is_reported_and_the_next_one_arrives(release):
    trained, served = model(0), [model(1), model(2)]
    trainers = [Trainer(trained, rank) for rank in range(2)]
    hosts = [ModuleRolloutWorker(each) for each in served]
    config = configuration(release=release, ratio=0.0001, connect_s=20.0, total_s=30.0, silence_s=3.0)
    groups = LocalPolicyGroup(trainers), LocalRolloutGroup(hosts)
    with CheckpointEngineWeightSynchronizer(*groups, config, progress=False) as synchronizer:
        synchronizer.init_communicator()
        for version in (1, 2):
            step(trained)
            report = synchronizer.sync_weights(version)
            assert all(same(trained, each) for each in served)
            assert (report.tensors, report.bytes) == (4, 2 * 9_212_000)

        trainers[1].break_at = 2
        started = time.monotonic()
        with pytest.raises(RefitError) as caught:
            synchronizer.sync_weights(3)
        assert time.monotonic() - started < 10
        assert (caught.value.context.side, caught.value.context.rank) == ("policy", 1)
        assert "ValueError: gather failed" in str(caught.value)
        assert "call sync_weights again" in str(caught.value)
        assert synchronizer.weight_version == 2

        trainers[1].break_at = None
        step(trained)
        assert synchronizer.sync_weights(3).epoch == 4
        assert all(same(trained, each) for each in served)
        assert [host.refit_control("describe")["value"]["world_size"] for host in hosts] == [1, 1]
    assert not synchronizer.is_stale


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_send_that_fails_before_it_begins_ends_the_refit_at_once_and_the_next_one_arrives(world_size):
    trained, served = model(0), [model(1 + rank) for rank in range(world_size)]
    trainers = [Trainer(trained, rank) for rank in range(world_size)]
    config = configuration(ratio=0.0001, connect_s=60.0, stall_s=60.0, total_s=120.0, silence_s=5.0)
    groups = LocalPolicyGroup(trainers), LocalRolloutGroup([ModuleRolloutWorker(each) for each in served])
    with CheckpointEngineWeightSynchronizer(*groups, config, progress=False) as synchronizer:
        synchronizer.init_communicator()
        for version in (1, 3):
            trainers[-1].broken = True
            started = time.monotonic()
            with pytest.raises(RefitError) as caught:
                synchronizer.sync_weights(version)
            assert time.monotonic() - started < 5
            assert (caught.value.context.side, caught.value.context.rank) == ("policy", world_size - 1)
            assert "ValueError: no weights yet" in str(caught.value)
            assert "replace" not in str(caught.value)

            trainers[-1].broken = False
            step(trained)
            assert synchronizer.sync_weights(version + 1).version == version + 1
            assert all(same(trained, each) for each in served)
