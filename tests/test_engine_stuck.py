"""Transfers that do not return, and clean-up that fails: every wait ends, and nothing is used again."""

from __future__ import annotations

import asyncio
import logging
import threading
import time

import pytest
import torch

from tests.control_support import background
from tests.engine_crew import Crew, assert_same, collect, make_engine, plain, run, some_weights
from weightsync.engines import nixl_ticker, pump
from weightsync.engines.nixl import NixlTransport
from weightsync.engines.nixl_agent import NixlAgent
from weightsync.engines.nixl_ticker import ProgressTicker
from weightsync.errors import DeadlineError, PeerAbortedError, TransportError

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(60)]


class Hang(threading.Event):
    """Set, it lets those go on that it holds."""

    def __init__(self):
        super().__init__()
        self.began = threading.Event()

    def hold(self):
        self.began.set()
        self.wait(30)


@pytest.fixture
def hang(monkeypatch):
    """Reads that hang until the event is set."""
    go_on = Hang()
    monkeypatch.setattr(NixlTransport, "fetch", lambda *_, **__: go_on.hold())
    monkeypatch.setattr(pump, "_JOIN_S", 0.3)
    monkeypatch.setattr(pump, "_MARGIN_S", 0.2)
    yield go_on
    go_on.set()


@pytest.fixture
def stuck(hang):
    """A crew whose receiver hangs in a read, its refit's outcomes, and the event that lets the read go on."""
    crew = Crew(stall_s=0.5)
    outcomes = crew.attempt([plain(some_weights())])
    yield crew, outcomes, hang
    crew.__exit__()


@pytest.mark.slow
def test_a_read_that_never_returns_ends_the_refit_with_both_reasons(stuck):
    _, (sender, received), _ = stuck
    assert isinstance(sender, TransportError)
    assert isinstance(received, DeadlineError)
    assert "a transfer did not end within 0.3 s" in str(received)
    first = received.__context__
    assert isinstance(first, DeadlineError)
    assert "nothing was brought in within 1.2 s" in str(first)
    for error in (received, first):
        assert error.context.peer == "policy rank 0"
        assert error.context.phase == "receive"


@pytest.mark.slow
def test_the_reason_of_a_failed_sender_is_heard_although_a_read_never_returns(hang):
    def broken():
        yield from some_weights(count=5)
        assert hang.began.wait(10)
        raise ValueError("the stream broke")

    with Crew(stall_s=60) as crew:
        started = time.monotonic()
        receiving = background(run, collect(crew.rollout[0]))  # the stream holds the sender's event loop
        with pytest.raises(ValueError, match="the stream broke"):
            run(crew.policy[0].send_weights(broken()))
        received = receiving.exception(20)
        assert time.monotonic() - started < 4
    assert "a transfer did not end within 0.3 s" in str(received)
    assert isinstance(received.__context__, PeerAbortedError)
    assert "the stream broke" in str(received.__context__)


@pytest.mark.slow
@pytest.mark.parametrize("returns", [False, True])
def test_buffers_of_a_stuck_transfer_are_not_used_again(stuck, returns):
    crew, _, hang = stuck
    if returns:
        hang.set()
        crew.rollout[0]._memory._stuck._inlet._pump._thread.join(10)
    for call in (
        crew.rollout[0].prepare,
        lambda: run(collect(crew.rollout[0])),
    ):
        with pytest.raises(TransportError, match="close this engine, make and prepare a new one"):
            call()


@pytest.mark.slow
def test_a_stuck_engine_closes_and_keeps_its_buffers_until_the_transfer_ends(stuck, caplog, monkeypatch):
    crew, _, hang = stuck
    engine = crew.rollout[0]
    deregistered = []
    monkeypatch.setattr(NixlAgent, "deregister", lambda _, handle: deregistered.append(handle))
    started = time.monotonic()
    with caplog.at_level(logging.WARNING):
        engine.close()
    assert time.monotonic() - started < 5
    assert "its buffers are kept" in caplog.text
    assert deregistered == []
    assert engine._memory.buffers
    hang.set()
    engine._memory._stuck._inlet._pump._thread.join(10)
    engine.close()
    assert len(deregistered) == 2
    assert engine._memory.buffers == []


@pytest.mark.slow
def test_new_engines_refit_after_a_stuck_one(stuck, monkeypatch):
    monkeypatch.undo()
    with Crew() as crew:
        sent = some_weights()
        assert_same(crew.refit(sent)[0], sent)


def test_a_progress_thread_that_hangs_is_given_up(monkeypatch):
    go_on = threading.Event()

    class Agent:
        def progress(self):
            go_on.wait(30)

    monkeypatch.setattr(nixl_ticker, "_JOIN_S", 0.2)
    ticker = ProgressTicker(Agent(), torch.device("cpu"))
    ticker.start()
    time.sleep(0.1)
    for call in (ticker.stop, ticker.start, ticker.stop):
        with pytest.raises(DeadlineError, match="NIXL did not return"):
            call()
    go_on.set()
    ticker.stop()
    ticker.start()
    ticker.stop()


def test_close_closes_everything_although_releasing_fails(monkeypatch):
    engine = make_engine()
    engine.prepare()
    transport, waiter = engine._memory._transport, engine._waiter
    session = engine._session
    asyncio.run(waiter.run(lambda: None))
    fail = [True]
    release = NixlTransport.release

    def fails_once(transport):
        if fail.pop():
            fail.append(False)
            raise TransportError("deregistration failed")
        fail.append(False)
        release(transport)

    monkeypatch.setattr(NixlTransport, "release", fails_once)
    with pytest.raises(TransportError, match="deregistration failed"):
        engine.close()
    assert transport._agent is None
    assert waiter._pool._shutdown
    assert session._hub._closed
