"""Workers of this process: ranks, threads, and what becomes of their failures."""

from __future__ import annotations

import gc
import sys
import threading
import time

import pytest

from tests.scripted_workers import (
    CallLog,
    ScriptedEngineHost,
    ScriptedPolicyWorker,
    figures,
    raising,
    sleeping,
)
from weightsync.cluster.base import gather
from weightsync.cluster.local import LocalPolicyGroup, LocalRolloutGroup
from weightsync.cluster.units import UnitCall
from weightsync.errors import (
    ConfigurationError,
    DeadlineError,
    ManifestError,
    MissingDependencyError,
    ProtocolError,
)
from weightsync.topology import RankId


def ask(call, timeout_s=5.0, grace_s=5.0):
    return gather("test", [call], timeout_s=timeout_s, grace_s=grace_s)


@pytest.mark.parametrize("sizes", [(1,), (2,), (1, 1, 1), (2, 1, 4), (4, 4)])
def test_rollout_ranks_are_unique_and_contiguous_whatever_the_engines_are(sizes):
    hosts = [ScriptedEngineHost(size) for size in sizes]
    group = LocalRolloutGroup(hosts)
    assert group.world_size == sum(sizes)
    assert group.rank_prefixes == tuple(sum(sizes[:index]) for index in range(len(sizes)))
    assert [host.prefix for host in hosts] == list(group.rank_prefixes)
    answers = ask(group.submit("prepare_checkpoint_engine"))
    assert list(answers.of("rollout")) == list(range(sum(sizes)))
    assert list(answers.of("rollout").values()) == [f"local {n}" for size in sizes for n in range(size)]


def test_ranks_are_the_same_after_the_hosts_know_them():
    group = LocalRolloutGroup([ScriptedEngineHost(2), ScriptedEngineHost(2)])
    prefixes = [{"rank_prefix": prefix} for prefix in group.rank_prefixes]
    ask(group.submit("init_checkpoint_engine_process_group", {"metadata": []}, each=prefixes))
    answers = ask(group.submit("prepare_checkpoint_engine"))
    assert answers.of("rollout") == {0: "local 0", 1: "local 1", 2: "local 0", 3: "local 1"}


def test_a_host_that_had_other_ranks_in_an_earlier_group_is_renumbered():
    survivor, other, newcomer = ScriptedEngineHost(2), ScriptedEngineHost(2), ScriptedEngineHost(1)
    group = LocalRolloutGroup([other, survivor])
    prefixes = [{"rank_prefix": prefix} for prefix in group.rank_prefixes]
    ask(group.submit("init_checkpoint_engine_process_group", {"metadata": []}, each=prefixes))
    survivor.script["prepare_checkpoint_engine", 1] = raising(ManifestError("no"))
    answers = ask(LocalRolloutGroup([newcomer, survivor]).submit("prepare_checkpoint_engine"))
    assert answers.of("rollout") == {0: "local 0", 1: "local 0"}
    assert [failure.who for failure in answers.failures] == [RankId("rollout", 2)]
    assert answers.failures[0].record.context.rank == 2


def test_ranks_are_right_after_a_connection_that_failed_on_some_of_them():
    hosts = [ScriptedEngineHost(1), ScriptedEngineHost(2)]
    group = LocalRolloutGroup(hosts)
    hosts[1].ranks[0].prefix = 1
    answers = ask(group.submit("prepare_checkpoint_engine"))
    assert answers.of("rollout") == {0: "local 0", 1: "local 0", 2: "local 1"}


def test_control_gives_one_outcome_for_each_host():
    group = LocalRolloutGroup([ScriptedEngineHost(2), ScriptedEngineHost(3)])
    assert ask(group.control("pause", {"in_flight": "keep"})).of("rollout") == {0: None, 2: None}
    assert ask(group.control("resume", only={2})).of("rollout") == {2: None}


def test_each_worker_gets_its_own_arguments():
    log = CallLog()
    group = LocalPolicyGroup([ScriptedPolicyWorker(rank, log=log) for rank in range(2)])
    ask(group.submit("open_refit", {"epoch": 1}, each=[{"version": 5}, {"version": 6}]))
    assert log.kwargs("policy 0", "open_refit") == [{"epoch": 1, "version": 5}]
    assert log.kwargs("policy 1", "open_refit") == [{"epoch": 1, "version": 6}]
    with pytest.raises(ConfigurationError, match="1 argument sets for 2 policy workers"):
        group.submit("open_refit", each=[{}])


def test_workers_run_at_once_and_each_in_a_thread_of_its_own():
    barrier = threading.Barrier(3, timeout=5)
    seen: dict[int, set[int]] = {0: set(), 1: set(), 2: set()}

    def meet(rank):
        def method(kwargs):
            seen[rank].add(threading.get_ident())
            barrier.wait()
            return figures(total=0.0)

        return method

    group = LocalPolicyGroup(
        [ScriptedPolicyWorker(rank, {"send_weights_via_checkpoint_engine": meet(rank)}) for rank in range(3)]
    )
    for _ in range(3):
        assert len(ask(group.submit("send_weights_via_checkpoint_engine")).values) == 3
    assert [len(threads) for threads in seen.values()] == [1, 1, 1]
    assert len(set.union(*seen.values())) == 3


def test_calls_to_one_worker_run_one_after_the_other():
    worker = ScriptedPolicyWorker(0, {"open_refit": sleeping(0.2, "slow")})
    group = LocalPolicyGroup([worker])
    first = group.submit("open_refit")
    second = group.submit("prepare_checkpoint_engine")
    assert second.poll(0.0) == []
    assert first.outstanding == second.outstanding == {0}
    assert ask(second).of("policy") == {0: "policy 0"}
    assert [outcome.value for outcome in first.poll(0.0)] == ["slow"]
    assert first.poll(1.0) == []


def test_what_a_worker_raises_past_the_protocol_becomes_an_outcome():
    class Broken:
        def checkpoint_engine_rpc(self, checkpoint_method, method_kwargs=None):
            raise ManifestError("broken", tensor="w")

    answers = ask(LocalPolicyGroup([ScriptedPolicyWorker(0), Broken()]).submit("prepare_checkpoint_engine"))
    assert answers.of("policy") == {0: "policy 0"}
    (failure,) = answers.failures
    assert (failure.who, failure.how) == (RankId("policy", 1), "reported")
    assert failure.record.kind == "ManifestError"
    assert failure.record.context.tensor == "w"
    assert "raise ManifestError" in failure.record.traceback


@pytest.mark.parametrize(
    "answer",
    [None, 7, "no", {}, {"value": 1}, {"rank": "0"}, [], [{"rank": 0}, {"rank": 1}], [{"rank": 5}, 1]],
)
def test_a_malformed_answer_is_a_protocol_error(answer):
    class Odd:
        def checkpoint_engine_rpc(self, checkpoint_method, method_kwargs=None):
            return answer

    (failure,) = ask(LocalPolicyGroup([Odd()]).submit("prepare_checkpoint_engine")).failures
    assert failure.record.kind == ProtocolError.__name__
    assert failure.who == RankId("policy", 0)


def test_policy_workers_out_of_order_are_refused():
    group = LocalPolicyGroup([ScriptedPolicyWorker(1), ScriptedPolicyWorker(0)])
    failures = ask(group.submit("prepare_checkpoint_engine")).failures
    assert {failure.who.rank for failure in failures} == {0, 1}
    assert "list workers in rank order" in failures[0].record.message


@pytest.mark.parametrize(
    "description", [None, {}, {"world_size": 0}, {"world_size": "2"}, {"world_size": True}]
)
def test_a_host_that_cannot_describe_itself_is_refused(description):
    host = ScriptedEngineHost(1, {"describe": lambda kwargs: description})
    with pytest.raises(ProtocolError, match="engine host 1"):
        LocalRolloutGroup([ScriptedEngineHost(2), host])


def test_a_host_that_does_not_answer_in_time_is_named():
    hosts = [ScriptedEngineHost(1), ScriptedEngineHost(1, {"describe": sleeping(2)})]
    started = time.monotonic()
    with pytest.raises(DeadlineError, match=r"engine host 1: no answer within 0\.3 s"):
        LocalRolloutGroup(hosts, startup_s=0.3)
    assert time.monotonic() - started < 1.5


def test_objects_without_the_methods_and_empty_groups_are_refused():
    with pytest.raises(ConfigurationError, match="object has no method 'checkpoint_engine_rpc'"):
        LocalPolicyGroup([object()])
    with pytest.raises(ConfigurationError, match="'refit_control'"):
        LocalRolloutGroup([ScriptedPolicyWorker(0)])
    with pytest.raises(ConfigurationError, match="at least one worker"):
        LocalPolicyGroup([])


def test_after_a_failure_the_others_get_a_short_grace_only():
    group = LocalPolicyGroup(
        [
            ScriptedPolicyWorker(0, {"open_refit": raising(ValueError("bad"))}),
            ScriptedPolicyWorker(1, {"open_refit": sleeping(0.1, "late but in time")}),
            ScriptedPolicyWorker(2, {"open_refit": sleeping(3)}),
        ]
    )
    started = time.monotonic()
    answers = ask(group.submit("open_refit"), timeout_s=60, grace_s=0.5)
    assert 0.4 < time.monotonic() - started < 2
    assert answers.of("policy") == {1: "late but in time"}
    assert [(failure.who.rank, failure.how) for failure in answers.failures] == [
        (0, "reported"),
        (2, "silent"),
    ]
    assert "no answer within 0.5 s after policy rank 0 had failed" in answers.failures[1].record.message


def test_threads_end_with_the_group():
    before = set(threading.enumerate())
    group = LocalPolicyGroup([ScriptedPolicyWorker(rank) for rank in range(4)])
    gather("x", [group.submit("finalize_checkpoint_engine")], timeout_s=5, grace_s=5)
    mine = set(threading.enumerate()) - before
    assert len(mine) == 4
    group.close()
    with pytest.raises(ConfigurationError, match="closed"):
        group.submit("prepare_checkpoint_engine")
    before = set(threading.enumerate())
    dropped = LocalPolicyGroup([ScriptedPolicyWorker(0)])
    gather("x", [dropped.submit("finalize_checkpoint_engine")], timeout_s=5, grace_s=5)
    mine |= set(threading.enumerate()) - before
    assert len(mine) == 5
    del dropped
    gc.collect()
    for thread in mine:
        thread.join(5)
    assert not any(thread.is_alive() for thread in mine)


def test_ray_groups_without_ray_name_the_extra(monkeypatch):
    from weightsync.cluster.ray import RayPolicyGroup, RayRolloutGroup

    monkeypatch.setitem(sys.modules, "ray", None)
    for make in (RayPolicyGroup, RayRolloutGroup):
        with pytest.raises(MissingDependencyError, match=r"pip install 'weightsync\[ray\]'"):
            make([object()])


def test_an_answer_survives_an_interruption_while_it_is_taken(monkeypatch):
    call = LocalRolloutGroup([ScriptedEngineHost(1), ScriptedEngineHost(1)]).submit("refit_status")
    answers = []

    def interrupted(self, answer):
        answers.append(answer)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(UnitCall, "_outcomes", interrupted)
        call.poll(5.0)
    assert len(answers) == 1
    assert call.outstanding == {0, 1}
    heard = ask(call)
    assert sorted(heard.of("rollout")) == [0, 1]
    assert not call.outstanding
