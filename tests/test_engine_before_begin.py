"""A side that fails before its engine has begun tells the peers that wait for it; the next refit works."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from tests.engine_crew import Crew, assert_same, collect, plain, some_weights
from weightsync.errors import DeadlineError, PeerAbortedError

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(60)]

PATIENT = {"connect_s": 20.0}


def fails_before(crew: Crew, failing, *, epoch: int = 1, comes_after_s: float = 0.2) -> list:
    """Every engine but one begins a refit; that one aborts it. Returns the others' outcomes."""
    crew.open(epoch, epoch)

    async def attempt():
        others = [e.send_weights(plain(some_weights())) for e in crew.policy if e is not failing]
        others += [collect(engine) for engine in crew.rollout if engine is not failing]
        work = asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(comes_after_s)
        await asyncio.to_thread(failing.abort_refit, ValueError("no stream today"))
        return await work

    started = time.monotonic()
    outcomes = asyncio.run(asyncio.wait_for(attempt(), 20))
    assert time.monotonic() - started < comes_after_s + 2
    return outcomes


def works_at_once(crew: Crew, epoch: int) -> None:
    crew.open(epoch, epoch)
    sent = some_weights(seed=epoch)
    started = time.monotonic()
    for received in crew.refit(sent):
        assert_same(received, sent)
    assert time.monotonic() - started < 4


def assert_told(outcomes: list) -> None:
    for outcome in outcomes:
        assert isinstance(outcome, PeerAbortedError), outcome
        assert "no stream today" in str(outcome)


@pytest.mark.parametrize("comes_after_s", [0.0, 0.4])
@pytest.mark.parametrize("side", ["policy", "rollout"])
def test_one_side_of_a_pair_fails_before_it_begins(side, comes_after_s):
    with Crew(1, 1, **PATIENT) as crew:
        failing = crew.pair[side == "rollout"]
        outcomes = fails_before(crew, failing, comes_after_s=comes_after_s)
        assert_told(outcomes)
        assert outcomes[0].remote.kind == "ValueError"
        works_at_once(crew, 2)


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_a_policy_rank_fails_before_it_begins_and_all_ranks_hear_it(failing):
    with Crew(2, 2, **PATIENT) as crew:
        assert_told(fails_before(crew, crew.policy[failing]))
        works_at_once(crew, 2)
    with Crew(2, 1, **PATIENT) as crew:
        assert_told(fails_before(crew, crew.policy[failing]))
        works_at_once(crew, 2)


def test_a_policy_rank_that_misses_another_tells_its_receiver():
    with Crew(2, 2, connect_s=1.0) as crew:
        hub = crew.rollout[0]._session._hub
        hub.deadlines = replace(hub.deadlines, connect_s=20.0)
        crew.open(1, 1)

        async def without_rank_1():
            work = [crew.policy[0].send_weights(plain(some_weights())), collect(crew.rollout[0])]
            return await asyncio.gather(*work, return_exceptions=True)

        sender, receiver = asyncio.run(without_rank_1())
        assert isinstance(sender, DeadlineError)
        assert sender.context.peer == "policy rank 1"
        assert isinstance(receiver, PeerAbortedError)
        assert "policy rank 1 did not begin" in str(receiver)
        works_at_once(crew, 2)


@pytest.mark.slow
def test_a_peer_of_another_epoch_is_not_told():
    with Crew(1, 1, connect_s=2.5) as crew:
        policy, rollout = crew.pair
        policy.open_refit(epoch=4, version=4)
        rollout.open_refit(epoch=5, version=5)

        async def attempt():
            receiving = asyncio.ensure_future(collect(rollout))
            await asyncio.sleep(0.2)
            await asyncio.to_thread(policy.abort_refit, ValueError("another refit's trouble"))
            return (await asyncio.gather(receiving, return_exceptions=True))[0]

        assert isinstance(asyncio.run(attempt()), DeadlineError)
        works_at_once(crew, 6)


def test_an_abort_without_waiting_peers_or_an_opened_refit_returns_soon():
    with Crew(2, 1, **PATIENT) as crew:
        started = time.monotonic()
        crew.policy[0].abort_refit(ValueError("nothing was opened"))
        assert time.monotonic() - started < 0.2
        crew.open(1, 1)
        crew.policy[0].abort_refit(ValueError("nobody waits"))
        crew.policy[0].abort_refit(ValueError("said already"))
        assert time.monotonic() - started < 1.6
        works_at_once(crew, 2)
