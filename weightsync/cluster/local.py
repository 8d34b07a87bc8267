"""Workers that are objects of this process: tests, one-process jobs, torchrun-like drivers.

Each worker is called in a thread of its own, always the same one, so that sending and receiving run at
once, and what a worker keeps by thread (a device, a socket) stays right. As with actors, the calls
to one worker run one after the other.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

from weightsync.cluster.colocated import COLOCATED_METHODS, ColocatedPolicyGroup, ColocatedRolloutGroup
from weightsync.cluster.units import AnswerSource, HostGroup, RawAnswer, Request, UnitGroup
from weightsync.errors import ConfigurationError, ErrorRecord

_Job = Callable[[], None]


class LocalPolicyGroup(UnitGroup):
    """Policy workers of this process.

    Args:
        workers: objects with ``checkpoint_engine_rpc(checkpoint_method, method_kwargs)``, in rank order.
    """

    def __init__(self, workers: Sequence[Any]) -> None:
        self._local = _LocalCaller()
        super().__init__("policy", workers, self._local)

    def _require_workers(self, workers: Sequence[Any]) -> None:
        _require_methods(workers, "checkpoint_engine_rpc")

    def close(self) -> None:
        """End the threads once their calls are done; also happens when the group is dropped."""
        self._local.close()


class LocalRolloutGroup(HostGroup):
    """Engine hosts of this process.

    Args:
        hosts: objects with ``checkpoint_engine_rpc`` and ``refit_control``, in the order of their ranks.
        startup_s: seconds for all hosts to describe themselves.
    """

    def __init__(self, hosts: Sequence[Any], *, startup_s: float = 60.0) -> None:
        self._local = _LocalCaller()
        super().__init__(hosts, self._local, startup_s)

    def _require_workers(self, workers: Sequence[Any]) -> None:
        _require_methods(workers, "checkpoint_engine_rpc", "refit_control")

    def close(self) -> None:
        """End the threads once their calls are done; also happens when the group is dropped."""
        self._local.close()


def local_colocated_groups(
    workers: Sequence[Any], *, startup_s: float = 60.0
) -> tuple[ColocatedPolicyGroup, ColocatedRolloutGroup]:
    """Return both groups of workers of this process that hold a policy rank and an inference engine each.

    Args:
        workers: objects with the methods of `ColocatedWorkerMixin`, in rank order.
        startup_s: seconds for all engines to describe themselves.
    """
    _require_methods(workers, *COLOCATED_METHODS)
    local = _LocalCaller()
    return ColocatedPolicyGroup(workers, local), ColocatedRolloutGroup(workers, local, startup_s)


def _require_methods(workers: Sequence[Any], *names: str) -> None:
    for worker in workers:
        missing = [name for name in names if not callable(getattr(worker, name, None))]
        if missing:
            raise ConfigurationError(f"{type(worker).__name__} has no method {missing[0]!r}")


class _LocalCaller:
    """One mailbox and one thread for each worker, made at its first call."""

    def __init__(self) -> None:
        self._mailboxes: dict[int, queue.SimpleQueue[_Job | None]] = {}
        self._finalizer = weakref.finalize(self, _end_threads, self._mailboxes)

    def start(self, requests: Sequence[Request]) -> AnswerSource:
        if not self._finalizer.alive:
            raise ConfigurationError("this worker group is closed")
        source = _LocalAnswers()
        for request in requests:
            self._mailbox(request.unit.index).put(lambda r=request: source.put(_answer(r)))  # type: ignore[misc]
        return source

    def _mailbox(self, index: int) -> queue.SimpleQueue[_Job | None]:
        mailbox = self._mailboxes.get(index)
        if mailbox is None:
            mailbox = self._mailboxes[index] = queue.SimpleQueue()
            name = f"weightsync-worker-{index}"
            # A daemon, so that a worker that never returns cannot keep the interpreter from ending.
            threading.Thread(target=_run_jobs, args=(mailbox,), name=name, daemon=True).start()
        return mailbox

    def close(self) -> None:
        self._finalizer()


def _run_jobs(mailbox: queue.SimpleQueue[_Job | None]) -> None:
    while (job := mailbox.get()) is not None:
        job()
        # Held until the next one, it could be the last reference to a worker, whose tensors would be freed in
        # this thread while the interpreter ends: torch aborts the process there.
        del job


def _end_threads(mailboxes: dict[int, queue.SimpleQueue[_Job | None]]) -> None:
    for mailbox in mailboxes.values():
        mailbox.put(None)


def _answer(request: Request) -> RawAnswer:
    try:
        call = getattr(request.unit.worker, request.entry)
        return RawAnswer(request.unit.index, value=call(request.method, request.kwargs))
    except BaseException as error:  # noqa: BLE001 - the thread's edge: what is not handed on is lost
        return RawAnswer(request.unit.index, error=ErrorRecord.from_exception(error))


class _LocalAnswers:
    def __init__(self) -> None:
        self._came: dict[int, RawAnswer] = {}
        self._news = threading.Condition()

    def put(self, answer: RawAnswer) -> None:
        with self._news:
            self._came[answer.index] = answer
            self._news.notify_all()

    def take(self, timeout_s: float, awaited: Collection[int]) -> list[RawAnswer]:
        with self._news:
            self._news.wait_for(lambda: self._came.keys() & awaited, timeout_s)
            return [answer for index, answer in self._came.items() if index in awaited]  # as they came
