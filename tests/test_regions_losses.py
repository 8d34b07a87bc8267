"""Ranks of a refit by regions that die, stop or fail, at every stage: errors in time, and a good refit."""

from __future__ import annotations

import signal
import time

import pytest

from tests.engine_processes import join_remotes
from tests.region_processes import STAGES, RegionRemote
from weightsync.errors import ErrorRecord

pytestmark = [pytest.mark.nixl, pytest.mark.slow]

WITHIN_S = 9.0
TYPED = {
    "DeadlineError",
    "PeerLostError",
    "PeerAbortedError",
    "TransportError",
    "DigestError",
    "ProtocolError",
}


def side_of(stage):
    return "policy" if STAGES[stage].startswith("sender") else "rollout"


class Job:
    """Two policy and two rollout ranks, joined."""

    def __init__(self) -> None:
        self.policy = [RegionRemote("policy", rank, (2, 2)) for rank in range(2)]
        self.rollout = [RegionRemote("rollout", rank, (2, 2)) for rank in range(2)]
        join_remotes(self.policy, self.rollout)
        self.seed = 0

    @property
    def all(self):
        return [*self.policy, *self.rollout]

    def victim(self, stage):
        return (self.policy if side_of(stage) == "policy" else self.rollout)[1]

    def begin(self, stage, *, fails=False):
        self.seed += 1
        for worker in self.all:
            mine = worker is self.victim(stage)
            worker.start("refit", seed=self.seed, **({"stage": stage, "fails": fails} if mine else {}))

    def others_fail(self, stage) -> None:
        """The ranks of the other side have typed errors; those beside the victim have, or are through."""
        started = time.monotonic()
        for worker in self.all:
            if worker is self.victim(stage):
                continue
            outcome = worker.result(WITHIN_S + 5)
            if isinstance(outcome, ErrorRecord):
                assert outcome.kind in TYPED, (stage, worker.role, outcome)
            else:
                # Only who has all, checked, and waits for nobody may be through.
                through = worker.role == side_of(stage) or "waits for its readers" in stage
                assert through, (stage, worker.role, worker.rank)
        assert time.monotonic() - started < WITHIN_S, stage

    def check_good_refit(self) -> None:
        self.seed += 1
        for worker in self.all:
            worker.start("refit", seed=self.seed)
        assert [worker.result() for worker in self.all] == ["done"] * 4

    def replace(self, stage) -> None:
        """Start another process in place of the victim; the others keep their engines as they are."""
        lost = self.victim(stage)
        lost.close()
        crew = self.policy if lost.role == "policy" else self.rollout
        crew[1] = new = RegionRemote(lost.role, 1, (2, 2))
        for worker in self.all:
            worker.start("prepare" if worker is new or lost.role == "policy" else "metadata")
        entries = [worker.result() for worker in self.all]
        for worker in self.all:
            command = "join" if worker is new or lost.role == "policy" else "update"
            worker.start(command, train=2, rollout=2, metadata=entries)
        assert [worker.result() for worker in self.all] == [None] * 4

    def close(self) -> None:
        for worker in self.all:
            worker.close()


@pytest.fixture
def job():
    made = Job()
    yield made
    made.close()


def test_a_rank_that_raises(job):
    job.check_good_refit()
    for stage in STAGES:
        job.begin(stage, fails=True)
        own = job.victim(stage).result()
        assert "broken in" in str(own.message), (stage, own)
        job.others_fail(stage)
        job.check_good_refit()


def test_a_rank_that_is_killed(job):
    for stage in STAGES:
        job.begin(stage)
        job.victim(stage).wait_until_held()
        job.victim(stage).signal(signal.SIGKILL)
        job.others_fail(stage)
        job.replace(stage)
        job.check_good_refit()


@pytest.mark.parametrize("stage", ["before it packs", "before it reads a bucket"])
def test_a_rank_that_is_stopped(job, stage):
    job.begin(stage)
    job.victim(stage).wait_until_held()
    job.victim(stage).signal(signal.SIGSTOP)
    job.others_fail(stage)
    job.victim(stage).signal(signal.SIGCONT)
    job.victim(stage).go_on()
    assert isinstance(job.victim(stage).result(), ErrorRecord)
    job.check_good_refit()


def test_who_is_late_is_named(job):
    """A rank that lives and does nothing: its readers say that it is the one they waited for."""
    stage = "before it packs"
    job.begin(stage)
    job.victim(stage).wait_until_held()
    outcomes = [worker.result(WITHIN_S + 5) for worker in job.rollout]
    late = [each for each in outcomes if each.kind == "DeadlineError"]
    assert late
    assert all(each.context.peer == "policy rank 1" for each in late), late
    job.victim(stage).go_on()
    assert isinstance(job.victim(stage).result(), ErrorRecord)
    assert isinstance(job.policy[0].result(), ErrorRecord)
    job.check_good_refit()
