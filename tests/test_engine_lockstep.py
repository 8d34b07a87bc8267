"""Policy ranks in step: a rank that counts differently breaks the refit off."""

from __future__ import annotations

import asyncio

import pytest

from weightsync.control import Gate, Go
from weightsync.engines.lockstep import make_lockstep
from weightsync.engines.waiting import Budget, Waiter
from weightsync.errors import ProtocolError


class PlayedLink:
    """Gives what it is told to; keeps what is sent."""

    peer = "policy rank 7"

    def __init__(self, *messages) -> None:
        self._messages = list(messages)
        self.sent: list = []

    def receive(self, kind, *, phase, timeout_s):
        message = self._messages.pop(0)
        assert isinstance(message, kind)
        return message

    def send(self, message) -> None:
        self.sent.append(message)

    def abort(self, error) -> None:
        self.sent.append(error)


@pytest.fixture
def waiter():
    waiter = Waiter()
    yield waiter
    waiter.close()


def stepped(rank: int, link: PlayedLink, waiter: Waiter, steps: int) -> None:
    lockstep = make_lockstep(rank, [link], waiter, Budget(10.0), 5.0)

    async def walk():
        for _ in range(steps):
            await lockstep.step()

    asyncio.run(walk())


def test_leader_and_follower_count_alike(waiter):
    leader_s = PlayedLink(Gate(0, finished=False), Gate(1, finished=False))
    stepped(0, leader_s, waiter, 2)
    assert leader_s.sent == [Go(0), Go(1)]
    follower_s = PlayedLink(Go(0), Go(1))
    stepped(1, follower_s, waiter, 2)
    assert follower_s.sent == [Gate(0, finished=False), Gate(1, finished=False)]


def test_a_follower_at_another_step_is_refused_and_told(waiter):
    link = PlayedLink(Gate(0, finished=False), Gate(2, finished=True))
    with pytest.raises(ProtocolError, match="policy rank 7 is at step 2, this rank at step 1") as caught:
        stepped(0, link, waiter, 2)
    assert caught.value.context.peer == "policy rank 7"
    assert link.sent == [Go(0), caught.value]


def test_a_leader_at_another_step_is_refused(waiter):
    with pytest.raises(ProtocolError, match="policy rank 7 is at step 0, this rank at step 1"):
        stepped(1, PlayedLink(Go(0), Go(0)), waiter, 2)
