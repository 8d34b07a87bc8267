"""Policy ranks whose every weight takes a collective: none is left in one, whatever the receivers do."""

from __future__ import annotations

import time

import pytest

from tests.engine_processes import Processes, stop_forkserver
from weightsync.errors import ErrorRecord

pytestmark = [pytest.mark.slow, pytest.mark.nixl, pytest.mark.timeout(120)]

RANKS = 4
GLOO_S = 2.0
"""A collective that waits longer fails: the ranks must wait for slow receivers outside of them."""


@pytest.fixture(scope="module")
def crew(tmp_path_factory):
    file = tmp_path_factory.mktemp("gloo") / "store"
    settings = {"gloo_file": file, "gloo_s": GLOO_S, "connect_s": 15.0, "stall_s": 15.0, "silence_s": 4.0}
    with Processes(RANKS, 2, **settings) as crew:
        yield crew
    stop_forkserver()


@pytest.fixture(autouse=True)
def works_afterwards(crew):
    yield
    assert all_reduced(crew)
    assert attempt(crew, seed=9) == ["done"] * (RANKS + 2)


def attempt(crew, *, special=None, timeout_s=40.0, **common) -> list:
    """Run one refit; ``special`` gives single workers further settings."""
    for worker in crew.all:
        gather = {"gather": True} if worker.role == "policy" else {}
        worker.start("refit", **common, **gather, **(special or {}).get((worker.role, worker.rank), {}))
    return [worker.result(timeout_s) for worker in crew.all]


def all_reduced(crew) -> bool:
    for worker in crew.policy:
        worker.start("collective")
    return [worker.result() for worker in crew.policy] == [sum(range(RANKS))] * RANKS


def test_a_slow_receiver(crew):
    """Its bucket takes longer than a collective may."""
    special = {("rollout", 0): {"pace_s": 0.7 * GLOO_S}}
    started = time.monotonic()
    assert attempt(crew, special=special, count=18) == ["done"] * (RANKS + 2)
    assert time.monotonic() - started > 2 * GLOO_S


@pytest.mark.parametrize("late", [("rollout", 0), ("rollout", 1), ("policy", 2), ("policy", 0)])
def test_a_rank_that_becomes_ready_late(crew, late):
    assert attempt(crew, special={late: {"delay_s": 1.5 * GLOO_S}}) == ["done"] * (RANKS + 2)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("at", [0, 2])
def test_a_receiver_that_raises(crew, rank, at):
    started = time.monotonic()
    outcomes = attempt(crew, special={("rollout", rank): {"fail_at": at}}, count=30)
    assert time.monotonic() - started < 8
    assert all(isinstance(outcome, ErrorRecord) for outcome in outcomes)
    failed = outcomes.pop(RANKS + rank)
    assert (failed.kind, failed.message) == ("ValueError", "the load failed")
    for outcome in outcomes:
        assert outcome.kind == "PeerAbortedError"
        assert "the load failed" in outcome.message


def test_a_policy_rank_that_raises_on_every_rank(crew):
    """As an error in the model does, at the same item everywhere."""
    special = {("policy", rank): {"fail_at": 7} for rank in range(RANKS)}
    outcomes = attempt(crew, special=special)
    assert [outcome.kind for outcome in outcomes[:RANKS]] == ["ValueError"] * RANKS
    assert [outcome.kind for outcome in outcomes[RANKS:]] == ["PeerAbortedError"] * 2


def test_a_packing_error_on_one_rank_is_held_back_until_the_bucket_is_full(crew):
    """The digests of rank 0 fail; the other ranks are in the collective of the next weight by then."""
    crew.policy[0].call("break_packing")
    outcomes = attempt(crew)
    assert outcomes[0].kind == "ZeroDivisionError"
    assert "tensor 'layer.2.weight'" in outcomes[0].traceback
    for outcome in outcomes[1:]:
        assert outcome.kind == "PeerAbortedError"
        assert "broken packing" in outcome.message
    crew.policy[0].call("mend_packing")
