"""``on_failure: continue``: an engine that fails is left out, fenced and reported; the others serve."""

from __future__ import annotations

import json
import threading

import pytest

from tests.scripted_workers import figures, raising
from tests.test_synchronizer import SEND, UPDATE, Job
from weightsync.cluster.base import driver_failure
from weightsync.errors import (
    DeadlineError,
    ManifestError,
    PeerAbortedError,
    PeerLostError,
    RefitError,
    WeightSyncError,
)
from weightsync.lifecycle.blame import ranks_to_blame
from weightsync.topology import RankId

GO_ON = {"on_failure": "continue", "topology": "star"}


def once(act):
    """Script a method that acts the first time, and then does what transfers do."""
    calls = []

    def method(kwargs):
        calls.append(kwargs)
        return act(kwargs) if len(calls) == 1 else figures(total=0.1)

    return method


def states(report):
    return {each.rank: (each.record.kind if each.record else None, each.version) for each in report.failed}


def test_an_engine_that_fails_in_the_transfer_is_left_out_and_the_others_get_it_at_once():
    job = Job(sizes=(1, 2, 1), **GO_ON)
    job.synchronizer.sync_weights()
    job.log.clear()
    job.hosts[1].script[UPDATE, 1] = raising(ValueError("out of memory"))
    aborted = once(raising(PeerAbortedError("rollout rank 2 failed", peer="rollout rank 2")))
    job.policy[0].script[SEND] = aborted
    job.hosts[0].script[UPDATE] = once(
        raising(PeerAbortedError("policy rank 0 failed", peer="policy rank 0"))
    )
    report = job.synchronizer.sync_weights()
    assert (report.version, report.epoch, report.ok) == (2, 3, (0, 3))
    assert states(report) == {1: (None, None), 2: ("ValueError", None)}
    assert [state.version for state in job.states] == [2, None, None, 2]
    assert all(state.fenced for state in job.states[1:3])
    assert job.log.kwargs("policy 0", "open_refit") == [
        {"epoch": 2, "version": 2}, {"epoch": 3, "version": 2, "receivers": [0, 3]},
    ]  # fmt: skip
    assert job.log.count("open_refit", "host 1") == 1
    for host in ("host 0", "host 1", "host 2"):
        assert job.log.count("reset_caches", host) == job.log.count("resume", host) == 1
        assert job.log.count("pause", host) == 1
    assert job.log.count("publish_version", "host 1") == job.log.count("commit_refit", "host 1") == 0
    assert "WITHOUT rollout rank 1, fenced" in str(report)
    assert "rollout rank 2 (ValueError: out of memory), fenced, serving nothing" in str(report)
    assert json.loads(json.dumps(report.to_dict()))["failed"][1]["error"]["kind"] == "ValueError"
    assert job.synchronizer.weight_version == 2
    assert not job.synchronizer.is_stale

    job.hosts[1].script.clear()
    job.log.clear()
    report = job.synchronizer.sync_weights()
    assert (report.version, report.epoch, report.failed) == (3, 4, ())
    assert [state.version for state in job.states] == [3] * 4
    assert job.log.count("prepare_checkpoint_engine", "host 1") == 1


@pytest.mark.parametrize(
    ("method", "version", "resets"),
    [
        ("pause", 1, 0),
        ("release_kv_cache", 1, 0),
        ("open_refit", 1, 0),
        (UPDATE, None, 1),
        ("commit_refit", None, 1),
        ("reset_caches", None, 1),
        ("publish_version", 2, 1),
        ("resume", 2, 1),
    ],
)
def test_one_engine_that_fails_in_any_phase_does_not_keep_the_others_from_the_version(
    method, version, resets
):
    job = Job(sizes=(1, 1, 1), **GO_ON)
    job.synchronizer.sync_weights()
    job.log.clear()
    job.hosts[1].script[method] = raising(ValueError("broken"))
    report = job.synchronizer.sync_weights()
    assert report.ok == (0, 2)
    assert states(report) == {1: ("ValueError", version)}
    assert [job.states[rank].version for rank in (0, 2)] == [2, 2]
    for host in ("host 0", "host 2"):
        assert job.steps_of(host)[-4:] == ["commit_refit", "reset_caches", "publish_version", "resume"]
        assert job.log.count("resume", host) == job.log.count("reset_caches", host) == 1
    assert job.log.count("reset_caches", "host 1") == resets
    held = method == "reset_caches"
    assert job.log.count("resume", "host 1") == (0 if held else 4 if method == "resume" else 1)
    assert ("paused with version 2, serving nothing" in report.failed[0].state) == held
    assert job.synchronizer.weight_version == 2
    job.hosts[1].script.clear()
    assert job.synchronizer.sync_weights().ok == (0, 1, 2)
    assert [state.version for state in job.states] == [3, 3, 3]


def test_an_engine_that_cannot_release_its_buffers_is_left_out_and_serves_what_it_has_committed():
    job = Job(sizes=(1, 1), **GO_ON, release=True)
    job.hosts[1].script["finalize_checkpoint_engine"] = raising(ValueError("still in use"))
    report = job.synchronizer.sync_weights()
    assert (report.version, report.ok) == (1, (0,))
    assert states(report) == {1: ("ValueError", 1)}
    assert job.log.count("resume", "host 1") == 1
    job.hosts[1].script.clear()
    assert job.synchronizer.sync_weights().ok == (0, 1)


def test_an_engine_that_cannot_connect_again_is_left_out_before_anybody_is_paused():
    job = Job(sizes=(1, 1), **GO_ON, release=True)
    job.synchronizer.sync_weights()
    job.log.clear()
    job.hosts[1].script["prepare_checkpoint_engine"] = raising(ValueError("no memory"))
    report = job.synchronizer.sync_weights()
    assert (report.version, report.ok) == (2, (0,))
    assert states(report) == {1: ("ValueError", 1)}
    assert job.log.count("pause", "host 1") == job.log.count("open_refit", "host 1") == 0
    assert job.log.kwargs("host 0", "open_refit") == [{"epoch": 2, "version": 2, "receivers": [0]}]
    job.hosts[1].script.clear()
    assert job.synchronizer.sync_weights().ok == (0, 1)


@pytest.mark.slow
def test_an_engine_that_hangs_between_two_refits_is_left_out_in_time():
    job = Job(sizes=(1, 1), **GO_ON, release=True, total_s=20.0, stall_s=0.5)
    job.synchronizer.sync_weights()
    wake = threading.Event()
    job.hosts[1].script["finalize_checkpoint_engine"] = lambda kwargs: wake.wait(20)
    assert job.synchronizer.sync_weights().ok == (0,)
    wake.set()


def test_by_default_one_failure_fails_all():
    job = Job(sizes=(1, 1), topology="star")
    job.hosts[1].script["commit_refit"] = raising(ValueError("broken"))
    with pytest.raises(RefitError):
        job.synchronizer.sync_weights()
    assert job.synchronizer.weight_version is None


@pytest.mark.parametrize("method", ["open_refit", SEND])
def test_a_failure_of_the_policy_always_fails(method):
    job = Job(sizes=(1, 1), **GO_ON)
    job.policy[1].script[method] = raising(ManifestError("not finite"))
    error = job.fail()
    assert (error.context.side, error.context.rank) == ("policy", 1)
    assert job.log.count(UPDATE, "host 0") == (1 if method == SEND else 0)


def test_when_no_engine_is_left_the_refit_fails_and_names_them_all():
    job = Job(sizes=(1, 1), **GO_ON)
    job.hosts[0].script[UPDATE] = raising(ValueError("first"))
    job.hosts[1].script["commit_refit"] = raising(ValueError("second"))
    error = job.fail()
    assert {(each.context.rank, each.message) for each in error.failures} == {(0, "first"), (1, "second")}
    assert error.serving == {0: None, 1: None}
    assert job.log.count("resume", "host 0") == job.log.count("resume", "host 1") == 1
    assert job.synchronizer.is_stale


def test_a_second_engine_that_fails_in_the_repeat_is_left_out_too():
    job = Job(sizes=(1, 1, 1), **GO_ON)
    job.hosts[0].script[UPDATE] = raising(ValueError("first"))
    calls = []

    def second(kwargs):
        calls.append(kwargs)
        if len(calls) == 1:
            raise PeerAbortedError("rollout rank 0 failed")
        raise ValueError("second")

    job.hosts[1].script[UPDATE] = second
    report = job.synchronizer.sync_weights()
    assert (report.epoch, report.ok) == (3, (2,))
    assert states(report) == {0: ("ValueError", None), 1: ("ValueError", None)}


@pytest.mark.slow
def test_an_engine_that_hangs_is_left_out_as_long_as_it_does():
    job = Job(sizes=(1, 1), **GO_ON, total_s=30.0, connect_s=0.3)
    wake = threading.Event()
    job.hosts[0].script[UPDATE] = lambda kwargs: wake.wait(20) and figures(total=1.0)
    job.policy[0].script[SEND] = once(raising(PeerLostError("silent for 0.4 s", peer="rollout rank 0")))
    report = job.synchronizer.sync_weights()
    assert report.ok == (1,)
    assert states(report) == {0: ("DeadlineError", None)}
    assert report.failed[0].state == "unknown (no answer)"
    report = job.synchronizer.sync_weights()  # it still hangs: the others do not wait for it again
    assert (report.version, report.ok, report.failed) == (2, (1,), ())
    job.policy[0].script[SEND] = raising(ValueError("no weights"))
    assert "no weights" in str(job.fail())
    assert job.took_s < 3
    wake.set()
    job.hosts[0].script.clear()
    job.policy[0].script.clear()
    assert job.synchronizer.sync_weights().ok == (0, 1)
    assert [state.version for state in job.states] == [3, 3]


@pytest.mark.slow
def test_who_still_waits_for_the_one_that_has_failed_is_not_left_out_with_it():
    job = Job(sizes=(1, 1), **GO_ON, total_s=30.0, connect_s=4.0)
    job.hosts[1].script[UPDATE] = raising(ValueError("broken"))
    gives_up = DeadlineError("rollout rank 1 did not begin epoch 1", peer="rollout rank 1")

    def waiting(kwargs):
        threading.Event().wait(2.5)  # longer than the time that failures have to be reported in
        raise gives_up

    for worker in job.policy:
        worker.script[SEND] = once(waiting)
    job.hosts[0].script[UPDATE] = once(waiting)
    report = job.synchronizer.sync_weights()
    assert report.ok == (0,)
    assert states(report) == {1: ("ValueError", None)}


@pytest.mark.slow
def test_an_engine_that_was_left_out_while_it_was_busy_is_resumed_if_it_ends_soon():
    job = Job(sizes=(1, 1), **GO_ON, total_s=30.0, connect_s=0.5)
    gives_up = DeadlineError("rollout rank 1 did not begin epoch 1", peer="rollout rank 1")
    job.policy[0].script[SEND] = once(raising(gives_up))
    job.hosts[1].script[UPDATE] = lambda kwargs: threading.Event().wait(2.8)
    report = job.synchronizer.sync_weights()
    assert report.ok == (0,)
    assert states(report) == {1: ("DeadlineError", None)}
    assert job.log.methods("host 1")[-1] == "resume"
    assert job.log.count("reset_caches", "host 1") == 1


@pytest.mark.slow
def test_a_slow_engine_is_not_given_up_because_another_has_failed():
    job = Job(sizes=(1, 1), **GO_ON, total_s=30.0, stall_s=10.0)
    job.hosts[1].script["commit_refit"] = raising(ValueError("broken"))
    slow = threading.Event()

    def commit(kwargs):
        slow.wait(2.0)  # longer than the time that failures have to be reported in
        job.states[0].version = kwargs["version"]
        return kwargs["version"]

    job.hosts[0].script["commit_refit"] = commit
    assert job.synchronizer.sync_weights().ok == (0,)


@pytest.mark.slow
def test_the_policy_that_does_not_end_its_transfer_fails_the_refit_in_time():
    job = Job(sizes=(1, 1), **GO_ON, total_s=4.0, connect_s=0.3)
    wake = threading.Event()
    job.hosts[1].script[UPDATE] = raising(ValueError("broken"))
    job.policy[2].script[SEND] = lambda kwargs: wake.wait(20)
    error = job.fail()
    wake.set()
    assert job.took_s < 4.0
    assert "policy rank 2" in str(error)


def fail(side, rank, kind, peer=None):
    failure = driver_failure(RankId(side, rank), "transfer", kind, "x")
    context = failure.record.context
    object.__setattr__(context, "peer", peer)
    how = "silent" if kind is DeadlineError and peer is None else "reported"
    object.__setattr__(failure, "how", how)
    return failure


BLAME = [
    ([fail("rollout", 1, ValueError)], {1}),
    ([fail("rollout", 1, ValueError), fail("policy", 0, PeerAbortedError, "rollout rank 1")], {1}),
    ([fail("policy", 0, PeerLostError, "rollout rank 2"), fail("rollout", 0, PeerAbortedError)], {2}),
    ([fail("rollout", 2, DeadlineError), fail("policy", 0, PeerLostError, "rollout rank 2")], {2}),
    ([fail("rollout", 3, PeerLostError, "rollout rank 2")], {2}),
    ([fail("rollout", 3, PeerLostError, "policy rank 0")], {3}),
    ([fail("rollout", 3, PeerLostError, "policy rank 0"), fail("policy", 0, ValueError)], set()),
    ([fail("policy", 1, PeerLostError, "policy rank 0")], set()),
    ([fail("policy", 1, DeadlineError)], set()),
    ([fail("policy", 1, WeightSyncError), fail("rollout", 0, ValueError)], set()),
]


@pytest.mark.parametrize(("failures", "blamed"), BLAME)
def test_who_is_to_blame(failures, blamed):
    assert ranks_to_blame(failures, []) == blamed
