"""The lifecycle of a refit, over scripted workers: order, deadlines, failures, error texts."""

from __future__ import annotations

import json
import threading
import time
from itertools import pairwise

import pytest

from tests.scripted_workers import (
    GIB,
    CallLog,
    RestartingRank,
    ScriptedEngineHost,
    ScriptedPolicyWorker,
    figures,
    raising,
    sleeping,
)
from weightsync.cluster.base import lost_outcome
from weightsync.cluster.local import LocalPolicyGroup, LocalRolloutGroup
from weightsync.config import load_refit_config
from weightsync.errors import (
    ConfigurationError,
    DeadlineError,
    LifecycleError,
    ManifestError,
    PeerAbortedError,
    PeerLostError,
    RefitError,
)
from weightsync.synchronizer import CheckpointEngineWeightSynchronizer

UPDATE = "update_weights_from_checkpoint_engine"
SEND = "send_weights_via_checkpoint_engine"
LIFECYCLE = {"connect_s": 2.0, "stall_s": 1.0, "total_s": 5.0, "silence_s": 0.4}


def configuration(release=False, ratio=0.05, topology="auto", **lifecycle):
    return {
        "policy": {
            "generation": {
                "refit_transport": "nixl",
                "refit_cfg": {
                    "nixl": {
                        "device": "cpu",
                        "topology": topology,
                        "update_weights_bucket_memory_ratio": ratio,
                        "release_after_refit": release,
                    }
                },
                "refit_lifecycle": LIFECYCLE | lifecycle,
            }
        }
    }


class Job:
    """Two policy workers, two engine hosts of one and two ranks, and a synchronizer over them."""

    def __init__(self, sizes=(1, 2), policy_world=3, connected=True, policy_group=LocalPolicyGroup, **config):
        self.log = CallLog()
        self.policy = [ScriptedPolicyWorker(rank, log=self.log) for rank in range(policy_world)]
        self.hosts = [
            ScriptedEngineHost(size, log=self.log, name=f"host {index}") for index, size in enumerate(sizes)
        ]
        self.synchronizer = CheckpointEngineWeightSynchronizer(
            policy_group(self.policy), LocalRolloutGroup(self.hosts), configuration(**config), progress=False
        )
        if connected:
            self.synchronizer.init_communicator()
            self.log.clear()

    @property
    def states(self):
        return [rank for host in self.hosts for rank in host.ranks]

    def fail(self, **lifecycle):
        started = time.monotonic()
        with pytest.raises(RefitError) as caught:
            self.synchronizer.sync_weights()
        self.took_s = time.monotonic() - started
        return caught.value

    def steps_of(self, who):
        return self.log.methods(who)


REFIT_AT_A_HOST = [
    "pause", "release_kv_cache", "open_refit", UPDATE,
    "commit_refit", "reset_caches", "publish_version", "resume",
]  # fmt: skip


# A refit that works.


def test_a_topology_that_does_not_fit_is_refused_before_a_worker_is_called():
    job = Job(topology="pairs", policy_world=2, sizes=(1, 2), connected=False)
    with pytest.raises(ConfigurationError, match=r"2 policy and 3 rollout workers.*write topology: auto"):
        job.synchronizer.init_communicator()
    assert set(job.log.methods()) <= {"describe", "assign_ranks"}


def test_the_report_says_which_topology_was_chosen_and_why():
    report = Job().synchronizer.sync_weights()
    assert report.transport == "nixl"
    assert report.topology.startswith("pairs: 3 policy to 3 rollout (auto: every rollout rank")
    assert report.to_dict()["topology"] == report.topology


def test_the_steps_of_a_refit_come_in_order():
    job = Job()
    report = job.synchronizer.sync_weights()
    assert job.steps_of("host 0") == job.steps_of("host 1") == REFIT_AT_A_HOST
    for rank in range(3):
        assert job.steps_of(f"policy {rank}") == ["open_refit", SEND]
    assert report.version == report.epoch == 1
    assert [state.version for state in job.states] == [1, 1, 1]
    whole = job.log.methods()
    last = {step: len(whole) - 1 - whole[::-1].index(step) for step in REFIT_AT_A_HOST}
    first = {step: whole.index(step) for step in REFIT_AT_A_HOST}
    for earlier, later in pairwise(REFIT_AT_A_HOST):
        assert last[earlier] < first[later], f"{later} began before {earlier} was done everywhere"


def test_arguments_reach_the_workers():
    job = Job(in_flight="wait")
    job.synchronizer.sync_weights(40)
    assert job.log.kwargs("host 0", "pause") == [{"in_flight": "wait"}]
    assert job.log.kwargs("host 1", "open_refit") == [{"epoch": 1, "version": 40}]
    assert job.log.kwargs("policy 2", "open_refit") == [{"epoch": 1, "version": 40}]
    assert job.log.kwargs("host 1", "commit_refit") == [{"version": 40}]
    assert job.log.kwargs("host 1", "publish_version") == [{"version": 40}]


def test_sending_and_receiving_run_at_once():
    job = Job(sizes=(1,), policy_world=1)
    meeting = threading.Barrier(2, timeout=3)

    def meet(kwargs):
        meeting.wait()
        return figures(total=0.1)

    job.policy[0].script[SEND] = meet
    job.hosts[0].script[UPDATE] = meet
    assert job.synchronizer.sync_weights().version == 1


def test_versions_and_staleness():
    job = Job()
    synchronizer = job.synchronizer
    assert synchronizer.is_stale
    assert synchronizer.weight_version is None
    assert synchronizer.sync_weights().version == 1
    assert not synchronizer.is_stale
    assert synchronizer.sync_weights(7).version == 7
    assert synchronizer.sync_weights().version == 8
    assert synchronizer.weight_version == 8
    synchronizer.mark_stale()
    assert synchronizer.is_stale
    assert synchronizer.sync_weights().epoch == 4
    assert not synchronizer.is_stale


def test_a_change_during_a_refit_leaves_it_stale():
    job = Job()
    job.hosts[0].script["publish_version"] = lambda kwargs: job.synchronizer.mark_stale()
    job.synchronizer.sync_weights()
    assert job.synchronizer.weight_version == 1
    assert job.synchronizer.is_stale


@pytest.mark.parametrize("version", [5, 4, 0])
def test_a_version_that_does_not_follow_is_refused_before_anything_happens(version):
    job = Job()
    job.synchronizer.sync_weights(5)
    job.log.clear()
    with pytest.raises(LifecycleError, match="does not follow version 5"):
        job.synchronizer.sync_weights(version)
    assert job.log.entries == []
    assert not job.synchronizer.is_stale


@pytest.mark.parametrize("version", [-1, True, 1.5, "2"])
def test_a_version_is_a_whole_number(version):
    with pytest.raises(ConfigurationError, match="whole number"):
        Job().synchronizer.sync_weights(version)


def test_versions_go_on_from_what_the_engines_already_serve():
    job = Job(connected=False)
    job.hosts[1].ranks[1].version = 41
    job.synchronizer.init_communicator()
    assert job.synchronizer.sync_weights().version == 42


def test_the_report():
    job = Job()
    slow = figures(receive=0.5, load=8.0, total=8.5) | {"tensors": 9, "batches": 4}
    job.hosts[1].script[UPDATE, 1] = lambda kwargs: slow
    report = job.synchronizer.sync_weights()
    assert (report.tensors, report.bytes, report.batches) == (9, 9000, 4)
    assert [(each.side, each.rank) for each in report.policy] == [("policy", rank) for rank in range(3)]
    assert [each.rank for each in report.rollout] == [0, 1, 2]
    assert str(report.slowest) == "rollout rank 2: 8.50 s (load 8.00 s)"
    assert list(report.seconds) == [
        "pause", "release", "open", "transfer", "commit", "reset", "publish", "resume", "total",
    ]  # fmt: skip
    assert report.seconds["total"] >= sum(
        taken for phase, taken in report.seconds.items() if phase != "total"
    )
    assert report.gb_per_s == pytest.approx(9000 / 1e9 / report.seconds["transfer"])
    assert json.loads(json.dumps(report.to_dict()))["slowest"]["rank"] == 2
    text = str(report)
    assert "\n" not in text
    assert text.startswith("refit 1 to version 1: 9 tensors, 9000 bytes in ")
    assert "slowest rollout rank 2: 8.50 s (load 8.00 s)" in text


# Connecting.


def test_connecting_hands_all_metadata_to_everyone_in_rank_order():
    job = Job(connected=False)
    job.policy[1].script["prepare_checkpoint_engine"] = sleeping(0.1, "policy 1")
    job.hosts[0].script["prepare_checkpoint_engine"] = sleeping(0.1, "local 0")
    job.synchronizer.init_communicator()
    expected = {
        "train_world_size": 3,
        "rollout_world_size": 3,
        "metadata": ["policy 0", "policy 1", "policy 2", "local 0", "local 0", "local 1"],
    }
    connect = "init_checkpoint_engine_process_group"
    assert [job.log.kwargs(f"policy {rank}", connect) for rank in range(3)] == [[expected]] * 3
    assert job.log.kwargs("host 0", connect) == [expected | {"rank_prefix": 0}]
    assert job.log.kwargs("host 1", connect) == [expected | {"rank_prefix": 1}]


def test_the_smallest_worker_decides_the_bucket_size_once():
    job = Job(connected=False, ratio=0.1)
    job.hosts[1].script["checkpoint_engine_total_memory_bytes"] = lambda kwargs: 123 << 20
    job.synchronizer.init_communicator()
    assert job.synchronizer.bucket_size_bytes == 12 << 20
    (arguments,) = job.log.kwargs("policy 0", "init_checkpoint_engine")
    assert (arguments["backend"], arguments["bucket_size_bytes"]) == ("nixl", 12 << 20)
    assert arguments["engine_kwargs"]["device"] == "cpu"
    assert job.log.kwargs("host 0", "checkpoint_engine_total_memory_bytes") == [{"device": "cpu"}]
    job.synchronizer.shutdown()
    job.hosts[1].script["checkpoint_engine_total_memory_bytes"] = lambda kwargs: GIB
    job.synchronizer.init_communicator()
    assert job.synchronizer.bucket_size_bytes == 12 << 20


def test_a_bucket_below_a_mebibyte_is_refused():
    job = Job(connected=False)
    job.policy[0].script["checkpoint_engine_total_memory_bytes"] = lambda kwargs: 10 << 20
    with pytest.raises(ConfigurationError, match="less than 1 MiB"):
        job.synchronizer.init_communicator()
    with pytest.raises(LifecycleError, match=r"call init_communicator\(\) first"):
        job.synchronizer.sync_weights()


@pytest.mark.parametrize(
    ("method", "phase"),
    [
        ("checkpoint_engine_total_memory_bytes", "capacity"),
        ("init_checkpoint_engine", "init"),
        ("prepare_checkpoint_engine", "prepare"),
        ("init_checkpoint_engine_process_group", "connect"),
        ("refit_status", "status"),
    ],
)
def test_a_failure_while_connecting_closes_what_was_made_and_can_be_tried_again(method, phase):
    job = Job(connected=False)
    job.hosts[1].script[method, 1] = raising(ConfigurationError("3 policy ranks cannot feed 4"))
    with pytest.raises(RefitError) as caught:
        job.synchronizer.init_communicator()
    assert str(caught.value).startswith(f"init_communicator failed in phase {method} at rollout rank 2: ")
    assert "3 policy ranks cannot feed 4" in str(caught.value)
    assert isinstance(caught.value.__cause__, ConfigurationError)
    assert job.log.count("close_checkpoint_engine") == 3 + 2
    job.hosts[1].script.clear()
    job.synchronizer.init_communicator()
    assert job.synchronizer.sync_weights().version == 1


def test_connecting_twice_is_refused():
    with pytest.raises(LifecycleError, match=r"already connected; call shutdown\(\) first"):
        Job().synchronizer.init_communicator()


def test_engines_that_release_their_buffers_are_connected_again_before_the_next_refit():
    job = Job(release=True)
    job.synchronizer.sync_weights()
    assert job.steps_of("host 0") == [*REFIT_AT_A_HOST[:-1], "finalize_checkpoint_engine", "resume"]
    assert job.steps_of("policy 0") == ["open_refit", SEND, "finalize_checkpoint_engine"]
    job.log.clear()
    report = job.synchronizer.sync_weights()
    again = ["prepare_checkpoint_engine", "init_checkpoint_engine_process_group"]
    assert job.steps_of("policy 0")[1:3] == again
    assert job.steps_of("host 0")[1:4] == [*again, "pause"]
    assert "connect" in report.seconds


def test_engines_that_keep_their_buffers_are_connected_once():
    job = Job()
    for _ in range(3):
        job.synchronizer.sync_weights()
    assert job.log.count("prepare_checkpoint_engine") == job.log.count("finalize_checkpoint_engine") == 0


# Calls out of order.


def test_a_refit_before_init_is_refused():
    job = Job(connected=False)
    job.log.clear()
    with pytest.raises(LifecycleError, match=r"call init_communicator\(\) first"):
        job.synchronizer.sync_weights()
    assert job.log.entries == []


def test_two_refits_at_once_are_refused():
    job = Job()
    inside, go_on = threading.Event(), threading.Event()

    def wait(kwargs):
        inside.set()
        go_on.wait(4)
        return figures(total=0.0)

    job.policy[0].script[SEND] = wait
    reports = []
    thread = threading.Thread(target=lambda: reports.append(job.synchronizer.sync_weights()))
    thread.start()
    assert inside.wait(4)
    with pytest.raises(LifecycleError, match="another call of this synchronizer is running"):
        job.synchronizer.sync_weights()
    with pytest.raises(LifecycleError, match="another call"):
        job.synchronizer.init_communicator()
    go_on.set()
    thread.join(5)
    assert [report.version for report in reports] == [1]
    assert job.log.count(UPDATE) == 2


def test_shutdown_finalizes_and_closes_once_and_a_refit_after_it_is_refused():
    job = Job()
    job.synchronizer.shutdown()
    job.synchronizer.shutdown()
    for who in ("policy 0", "policy 2", "host 0", "host 1"):
        assert job.steps_of(who) == ["finalize_checkpoint_engine", "close_checkpoint_engine"]
    with pytest.raises(LifecycleError, match="shut down"):
        job.synchronizer.sync_weights()
    job.synchronizer.init_communicator()
    assert job.synchronizer.sync_weights().version == 1


def test_shutdown_waits_for_the_refit_of_another_thread():
    job = Job()
    inside = threading.Event()

    def slow(kwargs):
        inside.set()
        time.sleep(0.3)
        return figures(total=0.3)

    job.policy[0].script[SEND] = slow
    reports = []
    thread = threading.Thread(target=lambda: reports.append(job.synchronizer.sync_weights()))
    thread.start()
    assert inside.wait(4)
    job.synchronizer.shutdown()
    thread.join(5)
    assert len(reports) == 1
    assert job.steps_of("policy 0")[-2:] == ["finalize_checkpoint_engine", "close_checkpoint_engine"]


def test_a_context_manager_shuts_down():
    job = Job()
    with pytest.raises(ZeroDivisionError), job.synchronizer:
        1 / 0
    assert job.log.count("close_checkpoint_engine") == 3 + 2


def test_shutdown_logs_what_could_not_be_closed(caplog):
    job = Job()
    job.hosts[0].script["close_checkpoint_engine"] = raising(OSError("socket gone"))
    job.synchronizer.shutdown()
    assert "rollout rank 0: OSError: socket gone" in caplog.text


# Failures. Each phase, then who is blamed.


@pytest.mark.parametrize(
    ("method", "phase", "began"),
    [
        ("pause", "pause", False),
        ("release_kv_cache", "release_kv_cache", False),
        ("open_refit", "open_refit", False),
        (UPDATE, UPDATE, True),
        ("commit_refit", "commit_refit", True),
        ("reset_caches", "reset_caches", True),
        ("publish_version", "publish_version", True),
    ],
)
def test_a_failure_in_any_phase_is_one_error_and_requests_resume(method, phase, began):
    job = Job()
    job.synchronizer.sync_weights()
    job.log.clear()
    job.hosts[1].script[method] = raising(ValueError("broken"))
    error = job.fail()
    assert f"refit 2 to version 2 failed in phase {phase} at rollout rank 1: ValueError: broken" in str(error)
    assert str(error.__cause__).startswith("ValueError: broken")
    assert (error.context.side, error.context.rank, error.context.phase) == ("rollout", 1, phase)
    assert "raise error" in "".join(error.__cause__.__notes__)
    for host in ("host 0", "host 1"):
        resumes = 0 if (host, method) == ("host 1", "reset_caches") else 1
        assert job.log.count("resume", host) == resumes
        assert job.steps_of(host)[-1] == "resume" or not resumes
        assert job.log.count("reset_caches", host) == (1 if began else 0)
    assert job.log.count("publish_version", "host 0") == (1 if method == "publish_version" else 0)
    assert job.synchronizer.weight_version == 1
    assert job.synchronizer.is_stale
    job.hosts[1].script.clear()
    report = job.synchronizer.sync_weights()
    assert report.epoch == 3
    assert not job.synchronizer.is_stale
    assert [state.version for state in job.states] == [report.version] * 3


def test_before_any_write_nothing_is_fenced_and_everyone_serves_on():
    job = Job()
    job.synchronizer.sync_weights()
    job.log.clear()
    job.policy[1].script["open_refit"] = raising(ValueError("no"))
    error = job.fail()
    assert job.log.count("fence_refit") == job.log.count(UPDATE) == job.log.count("commit_refit") == 0
    assert error.serving == {0: 1, 1: 1, 2: 1}
    assert "Now: rollout ranks 0, 1, 2 serving version 1. What to do: call sync_weights again" in str(error)


def test_after_a_broken_transfer_written_ranks_are_fenced_and_clean_ones_serve_on():
    job = Job()
    job.synchronizer.sync_weights()
    job.log.clear()
    job.policy[0].script[SEND] = raising(ManifestError("not finite", tensor="layers.3.w"))
    aborted = raising(PeerAbortedError("policy rank 0 failed", peer="policy 0"))
    job.states[0].update_weights_from_checkpoint_engine = lambda: aborted({})  # before its first write
    error = job.fail()
    assert "at policy rank 0: ManifestError: not finite" in str(error)
    assert error.context.tensor == "layers.3.w"
    assert isinstance(error.__cause__, ManifestError)
    assert "Also failed: rollout rank 0 (PeerAbortedError: policy rank 0 failed)" in str(error)
    assert error.serving == {0: 1, 1: None, 2: None}
    assert "Now: rollout rank 0 serving version 1; rollout ranks 1, 2 fenced" in str(error)
    assert "policy rank 0" in job.states[1].fenced
    assert job.log.count("commit_refit") == job.log.count("publish_version") == 0
    assert job.log.count("fence_refit", "host 0") == job.log.count("fence_refit", "host 1") == 1


def test_after_a_broken_transfer_the_engines_are_connected_again():
    job = Job()
    job.policy[0].script[SEND] = raising(ValueError("no"))
    job.fail()
    job.policy[0].script.clear()
    job.log.clear()
    job.synchronizer.sync_weights()
    assert job.steps_of("policy 0")[:3] == [
        "finalize_checkpoint_engine", "prepare_checkpoint_engine", "init_checkpoint_engine_process_group",
    ]  # fmt: skip
    job.log.clear()
    job.synchronizer.sync_weights()
    assert job.steps_of("policy 0") == ["open_refit", SEND]


def test_a_worker_that_was_started_anew_gets_an_engine_again():
    job = Job(connected=False)
    job.hosts[1].ranks[1] = RestartingRank(1)
    job.synchronizer.init_communicator()
    job.synchronizer.sync_weights(6)
    job.states[2].restart()
    error = job.fail()
    assert "at rollout rank 2: LifecycleError: init_checkpoint_engine comes first" in str(error)
    assert error.serving == {0: 6, 1: 6, 2: None}
    assert "rollout rank 2 serving the starting weights" in str(error)
    assert "What to do: call sync_weights again" in str(error)
    job.log.clear()
    assert job.synchronizer.sync_weights().version == 7
    assert [state.version for state in job.states] == [7, 7, 7]
    assert job.steps_of("policy 0")[:4] == [
        "finalize_checkpoint_engine", "init_checkpoint_engine",
        "prepare_checkpoint_engine", "init_checkpoint_engine_process_group",
    ]  # fmt: skip
    job.log.clear()
    job.synchronizer.sync_weights()
    assert job.log.count("init_checkpoint_engine") == job.log.count("prepare_checkpoint_engine") == 0


@pytest.mark.parametrize("release", [False, True])
def test_a_worker_that_was_started_anew_while_a_connection_was_due_gets_an_engine_too(release):
    job = Job(connected=False, release=release)
    job.hosts[0].ranks[0] = RestartingRank(0)
    job.synchronizer.init_communicator()
    if release:
        job.synchronizer.sync_weights()
    else:
        job.policy[0].script[SEND] = raising(ValueError("no"))
        job.fail()
        job.policy[0].script.clear()
    job.states[0].restart()
    assert "phase prepare_checkpoint_engine at rollout rank 0: LifecycleError" in str(job.fail())
    version = job.synchronizer.sync_weights().version
    assert [state.version for state in job.states] == [version] * 3


def test_a_half_committed_refit_says_who_serves_what_and_its_version_is_used_up():
    job = Job()
    job.synchronizer.sync_weights()
    job.hosts[1].script["commit_refit", 0] = raising(ValueError("no"))
    error = job.fail()
    assert error.serving == {0: 2, 1: None, 2: 2}
    assert "rollout ranks 0, 2 serving version 2; rollout rank 1 fenced" in str(error)
    assert job.synchronizer.weight_version == 1
    job.hosts[1].script.clear()
    with pytest.raises(LifecycleError, match="does not follow version 2"):
        job.synchronizer.sync_weights(2)
    assert job.synchronizer.sync_weights().version == 3
    assert [state.version for state in job.states] == [3, 3, 3]


def test_a_commit_of_another_version_is_a_failure():
    job = Job()
    job.hosts[0].script["commit_refit"] = lambda kwargs: 99
    error = job.fail()
    assert "phase commit at rollout rank 0: ProtocolError: it serves 99 after the commit" in str(error)


def test_malformed_figures_are_a_failure_before_the_commit():
    job = Job()
    job.policy[2].script[SEND] = lambda kwargs: {"bytes": 1}
    error = job.fail()
    assert "at policy rank 2: ProtocolError: malformed figures: {'bytes': 1}" in str(error)
    assert job.log.count("commit_refit") == 0


@pytest.mark.parametrize("action", ["pause", "release_kv_cache", "reset_caches", "publish_version", "resume"])
def test_an_action_that_returns_false_is_a_failure(action):
    job = Job()
    job.hosts[1].script[action] = lambda kwargs: False
    error = job.fail()
    assert f"at rollout rank 1: WeightSyncError: {action} returned False" in str(error)
    assert job.synchronizer.is_stale


@pytest.mark.parametrize("broken", [raising(ValueError("blocks in use")), lambda kwargs: False])
@pytest.mark.parametrize("commits", [True, False])
def test_a_host_whose_caches_were_not_reset_stays_paused_until_they_are(broken, commits):
    job = Job()
    job.synchronizer.sync_weights()
    job.log.clear()
    job.hosts[1].script["reset_caches"] = broken
    if not commits:
        job.policy[0].script[SEND] = raising(OSError("no gather"))
    error = job.fail()
    assert job.log.count("reset_caches", "host 1") == 1
    assert (job.log.count("resume", "host 0"), job.log.count("resume", "host 1")) == (1, 0)
    if commits:
        assert "rollout rank 0 serving version 2; rollout ranks 1, 2 paused with version 2, serving" in str(
            error
        )
        assert error.serving == {0: 2, 1: None, 2: None}
    assert "call sync_weights again" in str(error)

    # A refit that fails before its own reset does not let it resume either.
    job.policy[0].script["open_refit"] = raising(OSError("no room"))
    error = job.fail()
    assert (job.log.count("resume", "host 0"), job.log.count("resume", "host 1")) == (2, 0)
    if commits:
        assert "rollout ranks 1, 2 paused with version 2, serving nothing until a refit has reset" in str(
            error
        )

    job.policy[0].script.clear()
    job.hosts[1].script.clear()
    assert job.synchronizer.sync_weights().rollout[2].rank == 2
    assert (job.log.count("resume", "host 0"), job.log.count("resume", "host 1")) == (3, 1)


def test_when_no_caches_were_reset_nothing_resumes():
    job = Job()
    for host in job.hosts:
        host.script["reset_caches"] = raising(ValueError("blocks in use"))
    assert job.fail().serving == {0: None, 1: None, 2: None}
    assert job.log.count("resume") == 0


def test_an_interrupted_reset_is_done_again_before_requests_resume(monkeypatch):
    job = Job()
    interrupts = iter([True])

    def interrupted(phase, heard, awaited):
        if phase == "reset" and next(interrupts, False):
            raise KeyboardInterrupt

    monkeypatch.setattr(job.synchronizer._crew, "_listener", interrupted)
    with pytest.raises(KeyboardInterrupt):
        job.synchronizer.sync_weights()
    assert job.log.count("reset_caches", "host 1") == 2
    assert job.log.count("resume", "host 1") == 1


def test_a_version_that_only_some_engines_report_is_said():
    job = Job()
    job.hosts[1].script["publish_version"] = raising(ValueError("no such metric"))
    error = job.fail()
    assert (
        "All ranks hold version 1, but only the engine of rollout rank 0 reports it; that of rollout rank 1 "
        "may still report an earlier one" in str(error)
    )
    assert error.serving == {0: 1, 1: 1, 2: 1}
    assert job.log.count("resume", "host 0") == job.log.count("resume", "host 1") == 1


def test_a_failed_resume_after_everything_else_says_that_the_version_is_served():
    job = Job()
    job.hosts[0].script["resume"] = raising(ValueError("scheduler is gone"))
    error = job.fail()
    assert "failed in phase resume at rollout rank 0: ValueError: scheduler is gone" in str(error)
    assert error.serving == {0: 1, 1: 1, 2: 1}
    assert job.synchronizer.weight_version == 1
    assert job.synchronizer.is_stale


def test_first_hand_errors_come_before_what_peers_say_about_them():
    job = Job()
    job.policy[0].script[SEND] = raising(PeerAbortedError("rollout rank 0 failed", peer="rollout 0"))
    job.policy[1].script[SEND] = raising(PeerLostError("no heartbeat", peer="rollout 1"))

    def late(kwargs):
        time.sleep(0.2)
        raise KeyError("loader")

    job.hosts[0].script[UPDATE] = late
    error = job.fail()
    assert [record.kind for record in error.failures] == ["KeyError", "PeerLostError", "PeerAbortedError"]
    assert (error.context.side, error.context.rank) == ("rollout", 0)


def test_a_rank_that_cannot_say_what_it_serves_is_suspected():
    job = Job()
    job.hosts[0].script[UPDATE] = job.hosts[0].script["refit_status"] = raising(OSError("engine core died"))
    error = job.fail()
    assert "rollout rank 0 unknown (no answer)" in str(error)
    assert "call sync_weights again; if rollout rank 0 cannot answer then either, replace it" in str(error)


class Watcher:
    def __init__(self):
        self.seen = []

    def begin(self, title):
        self.seen.append(title)

    def update(self, phase, heard, awaited):
        if self.seen[-1] != phase:
            self.seen.append(phase)

    def end(self):
        self.seen.append("end")


def test_progress_follows_every_phase_and_ends_also_after_a_failure():
    watcher = Watcher()
    workers, hosts = [ScriptedPolicyWorker(0)], [ScriptedEngineHost()]
    synchronizer = CheckpointEngineWeightSynchronizer(
        LocalPolicyGroup(workers), LocalRolloutGroup(hosts), configuration(), progress=watcher
    )
    synchronizer.init_communicator()
    assert watcher.seen == [
        "init_communicator", "capacity", "init", "prepare", "connect", "status", "end",
    ]  # fmt: skip
    watcher.seen.clear()
    hosts[0].script["commit_refit"] = raising(ValueError("no"))
    with pytest.raises(RefitError):
        synchronizer.sync_weights(5)
    assert watcher.seen == [
        "refit 1 to version 5", "pause", "release", "open", "transfer", "commit",
        "fence", "status", "reset", "resume", "end",
    ]  # fmt: skip


def test_every_failed_rank_is_listed_once_and_long_lists_are_cut():
    job = Job(sizes=(8,), policy_world=8)
    job.hosts[0].script[UPDATE] = raising(ValueError("x" * 500))
    job.hosts[0].script["fence_refit"] = raising(ValueError("not now"))
    error = job.fail()
    assert [record.context.rank for record in error.failures] == list(range(8))
    assert "and 3 more" in str(error)
    assert "partly written and not fenced, must not serve" in str(error)


# Deadlines, and workers that do not answer.


@pytest.mark.slow
def test_a_silent_worker_ends_the_refit_within_its_total():
    job = Job(total_s=2.0, connect_s=1.0)
    wake = threading.Event()
    job.hosts[0].script[UPDATE] = lambda kwargs: wake.wait(20)
    error = job.fail()
    assert 1.0 < job.took_s < 2.0
    assert "failed in phase transfer at rollout rank 0: DeadlineError: no answer within" in str(error)
    assert isinstance(error.__cause__, DeadlineError)
    assert "restart or replace rollout rank 0 (has not answered)" in str(error)
    assert error.serving == {0: None, 1: None, 2: None}
    assert "rollout rank 0 unknown (no answer); rollout ranks 1, 2 fenced" in str(error)
    assert job.steps_of("host 1")[-1] == "resume"

    started = time.monotonic()
    error = job.fail()
    assert time.monotonic() - started < 1.5
    assert "refit 2 to version 1 failed in phase check at rollout rank 0" in str(error)
    assert "still busy" in str(error)

    wake.set()
    job.hosts[0].script.clear()
    assert job.synchronizer.sync_weights().epoch == 3
    assert [state.version for state in job.states] == [1, 1, 1]


@pytest.mark.slow
def test_after_one_failure_silent_ranks_get_a_short_grace_and_a_peer_that_hangs_is_not_blamed_first():
    job = Job(total_s=60.0, connect_s=0.5)
    wake = threading.Event()
    job.hosts[1].script[UPDATE] = lambda kwargs: wake.wait(20)
    job.policy[0].script[SEND] = raising(ValueError("gather failed"))
    error = job.fail()
    wake.set()
    assert job.took_s < 6.0
    assert [record.kind for record in error.failures] == ["ValueError", "DeadlineError", "DeadlineError"]
    assert "restart or replace rollout ranks 1, 2" in str(error)


def test_peers_of_a_rank_that_failed_before_its_send_get_time_to_hear_of_it():
    job = Job(total_s=60.0, silence_s=0.1)
    job.policy[0].script[SEND] = raising(ValueError("cannot load the weights"))

    def told(kwargs):
        time.sleep(1.0)
        raise PeerAbortedError("policy rank 0 failed", peer="policy 0")

    job.hosts[0].script[UPDATE] = told
    error = job.fail()
    assert "at policy rank 0: ValueError: cannot load the weights" in str(error)
    assert [record.kind for record in error.failures] == ["ValueError", "PeerAbortedError"]
    job.hosts[0].script.clear()
    job.policy[0].script.clear()
    assert job.synchronizer.sync_weights().version == 1


@pytest.mark.slow
def test_a_rank_that_still_waits_for_its_peer_is_busy_but_no_suspect():
    job = Job(total_s=2.5, connect_s=30.0)
    wake = threading.Event()
    job.policy[0].script[SEND] = raising(ValueError("cannot load the weights"))
    job.hosts[1].script[UPDATE] = lambda kwargs: wake.wait(20)
    advice = "call sync_weights again; rollout ranks 1, 2 may be busy until its own deadline"
    for failed in ("phase send_weights_via_checkpoint_engine at policy rank 0", "still busy"):
        error = job.fail()
        assert failed in str(error)
        assert advice in str(error)
        assert "replace" not in str(error)
    wake.set()
    job.hosts[1].script.clear()
    job.policy[0].script.clear()
    assert job.synchronizer.sync_weights().version == 1


@pytest.mark.slow
def test_a_host_that_waits_for_a_lost_peer_is_resumed_once_it_has_given_up():
    job = Job(total_s=30.0, connect_s=8.0)
    job.policy[0].script[SEND] = raising(ValueError("cannot load the weights"))
    job.hosts[1].script[UPDATE] = lambda kwargs: threading.Event().wait(1.5)  # each of its two ranks
    error = job.fail()
    assert "policy rank 0" in str(error)
    assert 1.0 < job.took_s < 10
    for host in ("host 0", "host 1"):
        assert job.steps_of(host)[-1] == "resume"
        assert job.steps_of(host).count("reset_caches") == 1
    job.hosts[1].script.clear()
    job.policy[0].script.clear()
    assert job.synchronizer.sync_weights().version == 1


@pytest.mark.slow
def test_a_host_that_peers_have_waited_for_in_vain_is_resumed_once_it_has_given_up_too():
    job = Job(total_s=30.0, connect_s=0.5)
    late = DeadlineError("rollout rank 0 did not begin epoch 1", peer="rollout rank 0")
    job.policy[0].script[SEND] = raising(late)
    # Beyond its own deadline and the time that the others have to report: it tells whom it has not met.
    job.hosts[0].script[UPDATE] = lambda kwargs: threading.Event().wait(3.0)
    job.fail()
    for host in ("host 0", "host 1"):
        assert job.steps_of(host)[-1] == "resume"
        assert job.steps_of(host).count("reset_caches") == 1


@pytest.mark.slow
def test_hosts_are_resumed_as_they_give_up_and_no_lost_one_is_waited_for_to_the_end():
    job = Job(sizes=(1, 1), policy_world=2, total_s=60.0, connect_s=30.0)
    lost = PeerLostError("rollout rank 0 was lost", peer="rollout rank 0")
    job.policy[0].script[SEND] = raising(lost)
    job.policy[1].script[SEND] = raising(ValueError("cannot load the weights"))
    wake = threading.Event()
    resumed = []
    job.hosts[0].script[UPDATE] = lambda kwargs: wake.wait(20)
    job.hosts[1].script[UPDATE] = lambda kwargs: threading.Event().wait(2.0)
    job.hosts[1].script["resume"] = lambda kwargs: resumed.append(time.monotonic())
    started = time.monotonic()
    job.fail()
    assert job.took_s < 15
    assert resumed[-1] - started < 4
    wake.set()


@pytest.mark.slow
def test_after_an_interruption_between_two_calls_those_that_were_called_are_resumed(monkeypatch):
    job = Job(total_s=30.0, connect_s=8.0)
    submit = job.synchronizer._crew.policy.submit

    def interrupted(method, *arguments, **named):
        if method == SEND:
            raise KeyboardInterrupt
        return submit(method, *arguments, **named)

    monkeypatch.setattr(job.synchronizer._crew.policy, "submit", interrupted)
    for host in job.hosts:
        host.script[UPDATE] = lambda kwargs: threading.Event().wait(1.2)
    with pytest.raises(KeyboardInterrupt):
        job.synchronizer.sync_weights()
    monkeypatch.undo()
    for index, host in enumerate(job.hosts):
        host.script.clear()
        assert job.steps_of(f"host {index}")[-1] == "resume"
        assert job.steps_of(f"host {index}").count("reset_caches") == 1
    assert job.synchronizer.sync_weights().version == 1


@pytest.mark.slow
def test_a_hung_worker_is_blamed_before_the_peer_that_noticed():
    job = Job(total_s=60.0)
    wake = threading.Event()
    job.hosts[0].script[UPDATE] = lambda kwargs: wake.wait(20)
    job.policy[0].script[SEND] = raising(DeadlineError("no release for 1 s", peer="rollout 0"))
    error = job.fail()
    wake.set()
    assert (error.context.side, error.context.rank) == ("rollout", 0)
    assert "Also failed: policy rank 0 (DeadlineError: no release for 1 s)" in str(error)


@pytest.mark.parametrize("action", ["pause", "reset_caches", "publish_version", "resume"])
def test_a_host_that_hangs_in_a_control_action_is_named_in_time(action):
    job = Job(total_s=1.5, silence_s=0.3)
    wake = threading.Event()
    job.hosts[1].script[action] = lambda kwargs: wake.wait(20)
    error = job.fail()
    wake.set()
    assert job.took_s < 2.5
    assert (error.context.side, error.context.rank) == ("rollout", 1)
    assert job.steps_of("host 0")[-1] in ("resume", "refit_status")


@pytest.mark.slow
def test_hosts_that_hang_one_after_another_in_the_clean_up_do_not_exceed_the_total():
    job = Job(sizes=(1, 1, 1, 1, 1), total_s=2.5, silence_s=1.0)
    wake = threading.Event()
    hang = ["fence_refit", "refit_status", "reset_caches", "resume"]
    for host, method in zip(job.hosts, hang, strict=False):
        host.script[method] = lambda kwargs: wake.wait(20)
    job.policy[0].script[SEND] = lambda kwargs: wake.wait(20)
    job.fail()
    wake.set()
    assert 2.0 < job.took_s < 2.7
    assert job.steps_of("host 4")[-1] == "resume"


def test_shutdown_with_a_hung_worker_is_bounded():
    job = Job(total_s=1.0, silence_s=0.3)
    wake = threading.Event()
    job.policy[0].script[SEND] = lambda kwargs: wake.wait(20)
    job.fail()
    started = time.monotonic()
    job.synchronizer.shutdown()
    assert time.monotonic() - started < 1.0
    assert job.steps_of("policy 1")[-1] == "close_checkpoint_engine"
    wake.set()


def test_an_interrupt_fences_and_resumes(monkeypatch):
    job = Job()
    job.synchronizer.sync_weights()
    job.log.clear()

    def interrupted(phase, heard, awaited):
        if phase == "transfer":
            raise KeyboardInterrupt

    monkeypatch.setattr(job.synchronizer._crew, "_listener", interrupted)
    with pytest.raises(KeyboardInterrupt):
        job.synchronizer.sync_weights()
    monkeypatch.undo()
    assert job.log.count("commit_refit") == 0
    assert job.log.count("fence_refit", "host 0") == job.log.count("resume", "host 0") == 1
    assert job.synchronizer.is_stale
    assert job.synchronizer.sync_weights().version == 2


# Workers that die.


class MortalPolicyGroup(LocalPolicyGroup):
    """A group whose rank 1 can be dead: its calls end at once, as those to a dead actor do."""

    dead = False

    def submit(self, method, kwargs=None, *, each=None):
        call = super().submit(method, kwargs, each=each)
        return DeadRankCall(call) if self.dead else call


class DeadRankCall:
    side = "policy"

    def __init__(self, call):
        self._call = call
        self._told = False

    @property
    def outstanding(self):
        return self._call.outstanding - ({1} if self._told else set())

    @property
    def lost(self):
        return frozenset({1})

    def poll(self, timeout_s):
        outcomes = [outcome for outcome in self._call.poll(timeout_s) if outcome.rank != 1]
        if not self._told:
            self._told = True
            outcomes.append(
                lost_outcome("policy", 1, "its worker is dead and must be replaced: exit code -9")
            )
        return outcomes


def test_a_dead_worker_is_the_cause_and_remembered():
    job = Job(policy_group=MortalPolicyGroup)
    job.synchronizer.sync_weights()
    job.policy[2].script[SEND] = raising(ValueError("collective broke"))
    job.synchronizer._crew.policy.dead = True
    error = job.fail()
    assert "refit 2 to version 2 failed in phase open at policy rank 1: PeerLostError" in str(error)
    assert "exit code -9" in str(error)
    assert "replace policy rank 1 (the worker is dead), then shut this synchronizer down" in str(error)
    assert isinstance(error.__cause__, PeerLostError)
    assert error.serving == {0: 1, 1: 1, 2: 1}

    job.log.clear()
    error = job.fail()
    assert job.took_s < 0.5
    assert "refit 3 to version 2 failed" in str(error)
    assert "replace policy rank 1" in str(error)
    assert job.log.entries == []
    assert error.serving == {0: 1, 1: 1, 2: 1}

    started = time.monotonic()
    job.synchronizer.shutdown()
    job.synchronizer.shutdown()
    assert time.monotonic() - started < 1.0
    assert job.steps_of("policy 0") == ["finalize_checkpoint_engine", "close_checkpoint_engine"]


def test_the_configuration_may_be_loaded_already_or_wrong():
    policy, rollout = LocalPolicyGroup([ScriptedPolicyWorker(0)]), LocalRolloutGroup([ScriptedEngineHost()])
    config = load_refit_config(configuration())
    assert CheckpointEngineWeightSynchronizer(policy, rollout, config).config is config
    with pytest.raises(ConfigurationError):
        CheckpointEngineWeightSynchronizer(policy, rollout, {"policy": {"generation": {}}})


def test_many_refits_leave_no_threads():
    job = Job()
    job.synchronizer.sync_weights()
    before = set(threading.enumerate())
    for _ in range(50):
        job.synchronizer.sync_weights()
    assert set(threading.enumerate()) <= before
    assert job.synchronizer.weight_version == 51
