"""What the control channel drops is said, once a refit."""

from __future__ import annotations

import logging

import pytest

from tests.engine_crew import Crew, assert_same, some_weights
from weightsync.errors import DeadlineError

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(60)]

ROOM = "weightsync.engines.session"


def said(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == ROOM and r.levelno == logging.WARNING]


def test_a_refit_without_drops_says_nothing(caplog):
    with Crew(2, 1) as crew, caplog.at_level(logging.WARNING):
        crew.refit(some_weights())
        assert said(caplog) == []


def test_drops_are_said_once_at_the_end_of_the_refit_that_saw_them(caplog):
    with Crew(1, 1) as crew, caplog.at_level(logging.WARNING):
        for what, times in (("malformed", 1), ("foreign_epoch", 3)):
            for _ in range(times):
                crew.rollout[0]._session._hub.count(what)
        sent = some_weights()
        assert_same(crew.refit(sent)[0], sent)
        assert said(caplog) == [
            "rollout rank 0: the control channel dropped messages: 3 foreign_epoch, 1 malformed"
        ]
        crew.refit(sent)
        crew.policy[0]._session._hub.count("replayed")
        crew.refit(sent)
        assert said(caplog)[1:] == ["policy rank 0: the control channel dropped messages: 1 replayed"]


def test_a_refit_that_failed_says_them_too(caplog):
    with Crew(1, 1, connect_s=1.0) as crew, caplog.at_level(logging.WARNING):
        crew.policy[0].open_refit(epoch=4, version=4)
        crew.rollout[0].open_refit(epoch=5, version=5)
        outcomes = crew.attempt([iter(some_weights())])
        assert all(isinstance(outcome, DeadlineError) for outcome in outcomes)
        assert {line.partition(":")[0] for line in said(caplog)} == {"policy rank 0", "rollout rank 0"}
        assert all("foreign_epoch" in line for line in said(caplog))


def test_messages_that_cross_the_end_of_their_refit_are_no_warning(caplog):
    with Crew(1, 1) as crew, caplog.at_level(logging.DEBUG):
        crew.policy[0]._session._hub.count("late")
        crew.refit(some_weights())
        assert said(caplog) == []
        assert "1 late" in caplog.text
