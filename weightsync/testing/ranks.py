"""Ranks in threads of this process, or in processes of their own, behind one interface.

Every wait is bounded.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, Protocol, cast

from weightsync.testing.oracle import ConformanceError, check
from weightsync.testing.work import EngineClass, RankWorker, make_engine

HOLD_S = 60.0
"""Seconds that a rank waits for the test's word before it gives up."""

_STARTING_S = 60.0
_ENDING_S = 10.0
_HELD = "held"
_FORKSERVER = multiprocessing.get_context("forkserver")


class Rank(Protocol):
    """One rank under test: runs the commands of `RankWorker`, one at a time."""

    side: str
    rank: int

    @property
    def who(self) -> str:
        """This rank, as messages name it."""

    def start(self, command: str, **arguments: Any) -> None:
        """Begin a command."""

    def result(self, timeout_s: float) -> Any:
        """Return the command's value, or raise what it raised.

        Raises:
            ConformanceError: it did not end in time.
        """

    def wait_until_held(self, timeout_s: float) -> None:
        """Wait until a refit has come to its ``"hold"``."""

    def go_on(self) -> None:
        """End that hold."""

    def end(self) -> None:
        """End the rank, whatever state it is in."""


class ThreadRank:
    """A rank in a thread of this process, with an event loop of its own for each refit.

    Args:
        side: ``"policy"`` or ``"rollout"``.
        rank: within its side.
        engine: the class under test.
        bucket_size: bytes.
        settings: keywords of its constructor.
        step: see `RankWorker`.
    """

    def __init__(
        self,
        side: str,
        rank: int,
        engine: EngineClass,
        bucket_size: int,
        settings: Mapping[str, Any],
        *,
        step: Callable[[], object],
    ) -> None:
        self.side, self.rank = side, rank
        self.engine = make_engine(engine, bucket_size, settings)
        self.worker = RankWorker(side, rank, self.engine, bucket_size, hold=self._hold, step=step)
        self._commands: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        self._held, self._go_on = threading.Event(), threading.Event()
        self._running = ""
        # A daemon: an engine that never returns must not keep the test run from ending.
        threading.Thread(target=self._serve, name=f"{side}-{rank}", daemon=True).start()

    @property
    def who(self) -> str:
        """See `Rank`."""
        return self.worker.who

    def start(self, command: str, **arguments: Any) -> None:
        """See `Rank`."""
        self._running = command
        method = getattr(self.worker, command)
        self._commands.put(lambda: method(**arguments))

    def result(self, timeout_s: float) -> Any:
        """See `Rank`."""
        try:
            raised, value = self._results.get(timeout=timeout_s)
        except queue.Empty:
            raise ConformanceError(
                f"{self._running} of {self.who} did not end within {timeout_s:g} s"
            ) from None
        self._running = ""
        if raised:
            raise value
        return value

    def wait_until_held(self, timeout_s: float) -> None:
        """See `Rank`."""
        check(self._held.wait(timeout_s), f"{self.who} did not come to its place within {timeout_s:g} s")
        self._held.clear()

    def go_on(self) -> None:
        """See `Rank`."""
        self._go_on.set()

    def end(self) -> None:
        """See `Rank`."""
        self._commands.put(None)
        self._go_on.set()

    def _hold(self) -> None:
        self._held.set()
        check(self._go_on.wait(HOLD_S), f"{self.who} was held for more than {HOLD_S:g} s")
        self._go_on.clear()

    def _serve(self) -> None:
        while (call := self._commands.get()) is not None:
            try:
                result = (False, call())
            except BaseException as error:  # noqa: BLE001 - raised again by `result`
                result = (True, error)
            self._results.put(result)


class ProcessRank:
    """A rank in a process of its own.

    Arguments as for `ThreadRank`; ``barrier`` is what ``step`` waits at.
    """

    def __init__(
        self,
        side: str,
        rank: int,
        engine: EngineClass,
        bucket_size: int,
        settings: Mapping[str, Any],
        *,
        barrier: Any = None,
    ) -> None:
        self.side, self.rank = side, rank
        self._running = ""
        self._pipe, far = _FORKSERVER.Pipe()
        arguments = (far, side, rank, engine, bucket_size, dict(settings), barrier)
        self.process = _FORKSERVER.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        far.close()
        self._started = False

    @property
    def who(self) -> str:
        """See `Rank`."""
        return f"{self.side} rank {self.rank}"

    def start(self, command: str, **arguments: Any) -> None:
        """See `Rank`."""
        self._await_engine()
        self._running = command
        self._pipe.send((command, arguments))

    def result(self, timeout_s: float) -> Any:
        """See `Rank`."""
        raised, value = self._next(timeout_s)
        self._running = ""
        if raised:
            raise value
        return value

    def wait_until_held(self, timeout_s: float) -> None:
        """See `Rank`."""
        said = self._next(timeout_s)
        check(said == _HELD, f"{self.who} did not come to its place: {said}")

    def go_on(self) -> None:
        """See `Rank`."""
        self._pipe.send(_HELD)

    def signal(self, what: signal.Signals) -> None:
        """Send the process a signal."""
        os.kill(cast(int, self.process.pid), what)

    def end(self) -> None:
        """See `Rank`."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join(_ENDING_S)
        self._pipe.close()

    def _await_engine(self) -> None:
        if not self._started:
            self._running = "making the engine"
            self.result(_STARTING_S)
            self._started = True

    def _next(self, timeout_s: float) -> Any:
        check(self._pipe.poll(timeout_s), f"{self._running} of {self.who} did not end within {timeout_s:g} s")
        try:
            return self._pipe.recv()
        except EOFError:
            raise ConformanceError(f"the process of {self.who} ended") from None


def preload(modules: list[str]) -> None:
    """Name modules that the processes' parent imports once; without effect after the first process."""
    _FORKSERVER.set_forkserver_preload(["torch", __name__, *modules])


def make_barrier(parties: int) -> Any:
    """Return a barrier that processes can wait at."""
    return _FORKSERVER.Barrier(parties)


def _serve(  # noqa: PLR0917 - what a process is started with
    pipe: Connection,
    side: str,
    rank: int,
    engine: EngineClass,
    bucket_size: int,
    settings: dict[str, Any],
    barrier: Any,
) -> None:
    """Run commands until the test closes the pipe."""
    import torch

    torch.set_num_threads(1)

    def hold() -> None:
        pipe.send(_HELD)
        if not pipe.poll(HOLD_S) or pipe.recv() != _HELD:
            raise ConformanceError(f"{side} rank {rank} was held for more than {HOLD_S:g} s")

    def step() -> None:
        if barrier is not None:
            barrier.wait(HOLD_S)

    workers: list[RankWorker] = []

    def begin() -> None:
        made = make_engine(engine, bucket_size, settings)
        workers.append(RankWorker(side, rank, made, bucket_size, hold=hold, step=step))

    _answer(pipe, begin)
    while True:
        try:
            command, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        _answer(pipe, lambda: getattr(workers[0], command)(**arguments))  # noqa: B023 - called at once


def _answer(pipe: Connection, call: Callable[[], Any]) -> None:
    try:
        answer = (False, call())
    except BaseException as error:  # noqa: BLE001 - raised again in the test
        answer = (True, error)
    try:
        pipe.send(answer)
    except (TypeError, AttributeError, ValueError) as error:  # what was raised cannot be pickled
        pipe.send((True, ConformanceError(f"{answer[1]!r} ({error})")))
