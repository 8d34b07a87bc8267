"""Versions and digests of every rank, at any time; versions that only ever grow."""

from __future__ import annotations

import pytest
import torch

from tests.scripted_workers import raising
from tests.test_staged import Net, make
from tests.test_synchronizer import SEND, Job
from weightsync.digests import WeightDigest
from weightsync.errors import LifecycleError
from weightsync.outcomes import Outcome
from weightsync.policy import PolicyCheckpointEngineMixin, weight_stream_from
from weightsync.rollout.module import named_state


def test_every_rank_says_what_it_serves():
    job = Job()
    job.synchronizer.sync_weights(5)
    job.hosts[1].script["weight_digest", 1] = raising(OSError("no memory"))
    status = job.synchronizer.rollout_status()
    assert [(each.version, each.highest, each.served_digest) for each in status.values()] == [
        (5, 5, "served 5"), (5, 5, "served 5"), (None, None, None),
    ]  # fmt: skip
    assert not status[2].reached
    assert "OSError: no memory" in status[2].error
    plain = job.synchronizer.rollout_status(digests=False)
    assert [each.version for each in plain.values()] == [5, 5, 5]
    assert plain[0].to_dict()["served_digest"] is None


def test_a_new_driver_goes_on_from_versions_that_fenced_ranks_have_served():
    job = Job()
    job.synchronizer.sync_weights(40)
    job.policy[0].script[SEND] = raising(ValueError("gather failed"))
    job.fail()
    assert [state.version for state in job.states] == [None] * 3
    job.policy[0].script.clear()
    job.synchronizer.shutdown()
    again = Job(connected=False)
    again.hosts[0].ranks[0].highest = 40
    again.synchronizer.init_communicator()
    with pytest.raises(LifecycleError, match="does not follow version 40"):
        again.synchronizer.sync_weights(7)
    assert again.synchronizer.sync_weights().version == 41


def test_a_rank_refuses_versions_older_than_what_it_has_ever_served():
    engine, _, receiver = make()
    receiver.receive(7)
    receiver.commit(7)
    engine.fail_after = 1
    with pytest.raises(Exception, match="changed"):
        receiver.receive(8)
    engine.fail_after = None
    assert receiver.status() == {"version": None, "highest": 7, "dirty": True, "fenced": receiver.fenced}
    with pytest.raises(LifecycleError, match=r"version 6 is older than version 7.*versions must increase"):
        receiver.receive(6)
    receiver.receive(7)  # nothing is served: the same version may come once more
    receiver.commit(7)


def test_a_module_digests_to_what_the_stream_and_the_policy_did():
    _, served, receiver = make()
    receiver.receive(1)
    assert receiver.stream_digest is None
    receiver.commit(1)
    stream = receiver.stream_digest.total()
    assert (
        stream == WeightDigest.of(named_state(served)).total() == WeightDigest.of(named_state(Net(2))).total()
    )

    class Trainer(PolicyCheckpointEngineMixin):
        rank, hooks = 0, 0

        def weight_stream(self):
            return weight_stream_from(Net(2))

        def prepare_weight_send(self):
            self.hooks += 1

        def finish_weight_send(self):
            self.hooks += 10

    trainer = Trainer()
    answer = Outcome.from_dict(trainer.checkpoint_engine_rpc("weight_digest", {"tensors": True})).value
    assert (answer["total"], answer["count"], trainer.hooks) == (stream, 4, 11)
    assert WeightDigest.from_dict(answer).total() == stream
    other = Outcome.from_dict(trainer.checkpoint_engine_rpc("weight_digest", {"kind": "fold-64"})).value
    assert other["total"].startswith("fold-64:")
    with torch.no_grad():
        served.one.weight.view(-1)[3] += 1e-3
    assert WeightDigest.of(named_state(served)).total() != stream


def test_a_digest_knows_names_shapes_dtypes_and_bytes_but_not_the_order_of_arrival():
    base = [("a", torch.arange(6.0).view(2, 3)), ("b", torch.ones(3)), ("c", torch.empty(0, 4))]
    same = WeightDigest.of(reversed(base)).total()
    assert same == WeightDigest.of(base).total()
    others = [
        [("a", base[1][1]), ("b", base[0][1]), base[2]],
        [("a", base[0][1].view(3, 2)), *base[1:]],
        [("a", base[0][1].view(torch.int32)), *base[1:]],
        [("x", base[0][1]), *base[1:]],
        [("a", base[0][1].flip(0)), *base[1:]],
        [base[0], base[1], ("c", torch.empty(4, 0))],
        base[:2],
    ]
    assert len({same, *(WeightDigest.of(other).total() for other in others)}) == 8
