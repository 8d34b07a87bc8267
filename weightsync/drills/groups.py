"""Worker groups over actors: how a drill's driver reaches its workers."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any

from weightsync.cluster.units import AnswerSource, HostGroup, RawAnswer, Request, UnitGroup
from weightsync.drills.actors import ActorLostError, Remote
from weightsync.errors import ErrorRecord

Filter = Callable[[Request], Request | None]
"""Looks at each call before it is made: returns it, another one, or `None` for a call that gets lost."""


class ProcessPolicyGroup(UnitGroup):
    """Policy workers in processes of their own.

    Args:
        workers: their connections, in rank order.
    """

    def __init__(self, workers: Sequence[Remote]) -> None:
        super().__init__("policy", workers, _Caller(_pass))


class ProcessRolloutGroup(HostGroup):
    """Engine hosts in processes of their own.

    Args:
        hosts: their connections, in the order of their ranks.
        passing: see `Filter`.
        startup_s: seconds for all hosts to describe themselves.
    """

    def __init__(self, hosts: Sequence[Remote], *, passing: Filter | None = None, startup_s: float) -> None:
        super().__init__(hosts, _Caller(passing or _pass), startup_s)


def _pass(request: Request) -> Request:
    return request


class _Caller:
    def __init__(self, passing: Filter) -> None:
        self._passing = passing

    def start(self, requests: Sequence[Request]) -> AnswerSource:
        futures: dict[int, Future[Any]] = {}
        for request in requests:
            passed = self._passing(request)
            if passed is None:
                futures[request.unit.index] = Future()
            else:
                remote: Remote = passed.unit.worker
                futures[passed.unit.index] = remote.call(passed.entry, passed.method, passed.kwargs)
        return _Answers(futures)


class _Answers:
    def __init__(self, futures: dict[int, Future[Any]]) -> None:
        self._futures = futures

    def take(self, timeout_s: float, awaited: Collection[int]) -> list[RawAnswer]:
        futures = {self._futures[index]: index for index in awaited}
        done, _ = concurrent.futures.wait(
            futures, timeout=timeout_s, return_when=concurrent.futures.FIRST_COMPLETED
        )
        return [_answer(futures[future], future) for future in done]


def _answer(index: int, future: Future[Any]) -> RawAnswer:
    error = future.exception(timeout=0)
    if error is None:
        return RawAnswer(index, value=future.result(timeout=0))
    if isinstance(error, ActorLostError):
        return RawAnswer(index, lost=f"its process is dead and must be replaced: {error}")
    return RawAnswer(index, error=ErrorRecord.from_exception(error))
