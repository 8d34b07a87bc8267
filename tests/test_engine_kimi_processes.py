"""The parameter server in real processes: latecomers while the trainer computes, killed, stopped, many."""

from __future__ import annotations

import signal
import time

import pytest

from tests.engine_processes import stop_forkserver
from tests.late_processes import Group, Remote

pytestmark = pytest.mark.slow
MIB = 1 << 20


@pytest.fixture(scope="module", params=["ipc", pytest.param("nixl", marks=pytest.mark.nixl)])
def group(request):
    with Group(2, 1, transport=request.param) as group:
        group.refit(0)
        yield group
    stop_forkserver()


@pytest.fixture(autouse=True)
def whole(request):
    """After each test the group still refits."""
    group = request.getfixturevalue("group")
    yield
    for worker in group.late:
        worker.close()
    group.late.clear()
    group.refit(50)


@pytest.mark.parametrize("kind", ["sleep", "python"])
def test_the_trainer_computes_on_while_a_latecomer_is_served(group, kind):
    group.refit(1)
    late = group.latecomer()
    for worker in group.policy:
        worker.start("compute", kind=kind, seconds=2.0)
        assert worker.heard() == ("computing", None)
    assert late.call("receive", seed=1) is None
    assert not any(worker.has_spoken for worker in group.policy), "it was served after the computation"
    assert late.call("version") == group.epoch
    for worker in group.policy:
        assert 2.0 <= worker.result() < 4.0


def test_several_latecomers_at_once(group):
    group.refit(2)
    late = [group.latecomer() for _ in range(3)]
    for worker in late:
        worker.start("receive", seed=2)
    assert [worker.result() for worker in late] == [None] * 3


@pytest.mark.parametrize("place", ["first", "last"])
def test_a_latecomer_that_is_killed_half_way_makes_room_at_once(group, place):
    group.refit(3)
    killed, next_one = group.latecomer(), group.latecomer()
    killed.start("receive", seed=3, hold_at=place)
    assert killed.heard() == ("held", None)
    next_one.start("receive", seed=3)
    time.sleep(0.3)
    killed.signal(signal.SIGKILL)
    started = time.monotonic()
    assert next_one.result() is None
    assert time.monotonic() - started < 2.0


def test_a_latecomer_that_is_stopped_never_takes_garbage_for_weights(group):
    """It stands still with its last batch while a refit overwrites the buffers, and then runs on."""
    group.refit(4)
    late = group.latecomer()
    late.start("receive", seed=4, hold_at="last")
    assert late.heard() == ("held", None)
    late.go_on()  # waits in the pipe
    late.signal(signal.SIGSTOP)
    started = time.monotonic()
    group.refit(5)
    assert time.monotonic() - started < 8
    late.signal(signal.SIGCONT)
    outcome = late.result()
    assert outcome is not None, "it was told that version 4 is whole"
    assert outcome.kind in {"PeerAbortedError", "PeerLostError"}, outcome
    assert late.call("receive", seed=5) is None


def test_a_latecomer_in_the_middle_of_a_refit_waits_for_its_end(group):
    late = group.latecomer()
    group.begin(6, hold_at=6)
    for worker in group.policy:
        assert worker.heard() == ("held", None)
    late.start("receive", seed=6)
    time.sleep(0.7)
    for worker in group.policy:
        worker.go_on()
    group.end()
    assert late.result() is None
    assert late.call("version") == group.epoch


def test_a_worker_that_is_killed_is_replaced_without_the_trainer(group):
    """The rank of a rollout worker that was there before, in a new process."""
    group.refit(7)
    group.rollout[0].signal(signal.SIGKILL)
    new = Remote("rollout", 0, **group.settings)
    group.rollout[0].close()
    group.rollout[0] = new
    new.call("prepare")
    assert new.call("join_late", metadata=group.metadata[:2], **group.worlds) is None
    assert new.call("receive", seed=7) is None
    group.join()


def test_many_latecomers_leave_nothing_behind(group):
    group.refit(8)
    figures = []
    for count in (2, 4):
        for _ in range(count):
            late = group.latecomer()
            assert late.call("receive", seed=8) is None
            late.close()
        time.sleep(0.3)
        figures.append(group.policy[0].call("figures"))
    before, after = figures
    assert after["rss"] - before["rss"] < 4 * MIB
    assert after["fds"] - before["fds"] <= 1
    assert after["threads"] == before["threads"]
