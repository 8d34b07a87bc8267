"""Objects in processes of their own, called over Unix sockets: workers and drivers that a drill may kill.

An actor answers one call after the other in its main thread, as a Ray actor does; a call that is made
``aside`` is answered at once, beside the one that runs. Several callers may be connected: a worker outlives
its driver. What crosses the socket is msgpack. An actor ends with the process that started it.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any, cast

import msgspec

from weightsync.errors import DeadlineError, ErrorRecord, PeerLostError

START_S = 60.0
"""Seconds for an actor to start."""

_END_S = 10.0
_RETRY_S = 0.01
_LOG_TAIL = 2000
_FORKSERVER = multiprocessing.get_context("forkserver")
_OWN = "own"


class _Call(msgspec.Struct, array_like=True):
    number: int
    method: str
    arguments: list[Any]
    aside: bool = False


class _Answer(msgspec.Struct, array_like=True):
    number: int
    value: Any = None
    error: dict[str, Any] | None = None


class ActorLostError(PeerLostError):
    """The actor's process has ended, or its connection."""


class Remote:
    """A connection to an actor. Calls may be made from any thread.

    Args:
        address: path of the actor's socket.
        timeout_s: seconds in which the actor must be there.

    Raises:
        DeadlineError: it is not.
    """

    def __init__(self, address: str, *, timeout_s: float = START_S) -> None:
        self.address = address
        self._pipe = _connect(address, timeout_s)
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._futures: dict[int, Future[Any]] = {}
        self._lost = False
        threading.Thread(target=self._read, name="weightsync-remote", daemon=True).start()

    def call(self, method: str, *arguments: Any, aside: bool = False) -> Future[Any]:
        """Start a call; its future raises what the call raised, or `ActorLostError` if the actor is gone."""
        future: Future[Any] = Future()
        with self._lock:
            if self._lost:
                future.set_exception(_lost(self.address))
                return future
            number = next(self._numbers)
            self._futures[number] = future
            with suppress(OSError):  # the reader hears of it as well
                self._pipe.send_bytes(
                    msgspec.msgpack.encode(_Call(number, method, list(arguments), aside=aside))
                )
        return future

    def ask(self, method: str, *arguments: Any, timeout_s: float = 10.0, aside: bool = False) -> Any:
        """Call and wait.

        Raises:
            DeadlineError: no answer came in time.
            ActorLostError: the actor is gone.
            WeightSyncError: what the call raised.
        """
        try:
            return self.call(method, *arguments, aside=aside).result(timeout=timeout_s)
        except TimeoutError as error:
            raise DeadlineError(
                f"{method} had no answer within {timeout_s:g} s", peer=self.address
            ) from error

    def close(self) -> None:
        """Hang up."""
        with suppress(OSError):
            self._pipe.close()

    def _read(self) -> None:
        while True:
            try:
                answer = msgspec.msgpack.decode(self._pipe.recv_bytes(), type=_Answer)
            except (EOFError, OSError, TypeError):  # TypeError: closed here while it was read
                break
            with self._lock:
                future = self._futures.pop(answer.number)
            if answer.error is None:
                future.set_result(answer.value)
            else:
                future.set_exception(ErrorRecord.from_dict(answer.error).to_exception())
        with self._lock:
            self._lost = True
            futures, self._futures = list(self._futures.values()), {}
        for future in futures:
            future.set_exception(_lost(self.address))


class ActorProcess:
    """An actor, as the one who started it sees it.

    Args:
        scratch: a directory of the drill's own, for sockets and logs.
        name: unique within it.
        make: the actor's class.
        arguments: of its constructor.
    """

    def __init__(
        self, scratch: Path, name: str, make: Callable[..., Any], arguments: Mapping[str, Any]
    ) -> None:
        self.name = name
        self.address = str(scratch / f"{name}.socket")
        self._log = scratch / f"{name}.log"
        self._process = _FORKSERVER.Process(
            target=_run, args=(self.address, str(self._log), make, dict(arguments)), daemon=True
        )
        self._process.start()
        self._remote: Remote | None = None

    @property
    def pid(self) -> int:
        """Of the process."""
        return cast(int, self._process.pid)

    @property
    def is_stopped(self) -> bool:
        """Whether the process is stopped by a signal."""
        try:
            status = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8")
        except OSError:
            return False
        return status.rpartition(")")[2].split()[0] == "T"

    def await_stopped(self, timeout_s: float) -> bool:
        """Return whether the process is stopped by then."""
        ends = time.monotonic() + timeout_s
        while not self.is_stopped and time.monotonic() < ends:
            time.sleep(_RETRY_S)
        return self.is_stopped

    def await_end(self, timeout_s: float) -> bool:
        """Return whether the process has ended by then."""
        self._process.join(timeout_s)
        return not self._process.is_alive()

    @property
    def remote(self) -> Remote:
        """The connection to it.

        Raises:
            DeadlineError: it did not start.
        """
        if self._remote is None:
            try:
                self._remote = Remote(self.address)
                self._remote.ask(_OWN, timeout_s=START_S)
            except (DeadlineError, PeerLostError) as error:
                raise DeadlineError(f"{self.name} did not start: {self.log()}") from error
        return self._remote

    def signal(self, what: signal.Signals) -> None:
        """Send the process a signal."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, what)

    def end(self) -> None:
        """End the process, whatever state it is in."""
        if self._remote is not None:
            self._remote.close()
        if self._process.is_alive():
            self._process.kill()
        self._process.join(_END_S)

    def log(self) -> str:
        """Return the end of what it has written to standard error."""
        try:
            return self._log.read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL:]
        except OSError:
            return ""


def preload(modules: Sequence[str]) -> None:
    """Name modules that the parent of all actors imports once; without effect after the first actor."""
    _FORKSERVER.set_forkserver_preload(["torch", __name__, *modules])


def _lost(address: str) -> ActorLostError:
    return ActorLostError(f"the process behind {Path(address).name} has ended")


def _connect(address: str, timeout_s: float) -> Any:
    ends = time.monotonic() + timeout_s
    while True:
        try:
            return Client(address, family="AF_UNIX")
        except OSError as error:
            if time.monotonic() > ends:
                raise DeadlineError(f"nobody listens at {address} after {timeout_s:g} s") from error
            time.sleep(_RETRY_S)


# In the actor's process.


def _run(address: str, log: str, make: Callable[..., Any], arguments: dict[str, Any]) -> None:
    import torch

    torch.set_num_threads(1)
    with open(log, "ab") as errors, open(os.devnull, "wb") as nowhere:
        sys.stdout.flush()
        os.dup2(nowhere.fileno(), 1)  # a worker reports each refit there
        os.dup2(errors.fileno(), 2)
    _Server(address).serve(make(**arguments))


class _Server:
    """Answers calls in the main thread."""

    def __init__(self, address: str) -> None:
        self._listener = Listener(address, family="AF_UNIX", backlog=64)
        self._calls: queue.SimpleQueue[tuple[_Line, _Call]] = queue.SimpleQueue()
        self._actor: Any = None

    def serve(self, actor: Any) -> None:
        """Answer for ever."""
        self._actor = actor
        threading.Thread(target=self._accept, name="weightsync-accept", daemon=True).start()
        while True:
            with suppress(queue.Empty):
                line, call = self._calls.get(timeout=1.0)
                self._answer(line, call)

    def _accept(self) -> None:
        while True:
            line = _Line(self._listener.accept())
            threading.Thread(target=self._read, args=(line,), name="weightsync-line", daemon=True).start()

    def _read(self, line: _Line) -> None:
        owned = False
        while True:
            try:
                call = msgspec.msgpack.decode(line.pipe.recv_bytes(), type=_Call)
            except (EOFError, OSError):
                break
            if call.method == _OWN:
                owned = True
                line.send(_Answer(call.number))
            elif call.aside:
                self._answer(line, call)
            else:
                self._calls.put((line, call))
        line.pipe.close()
        if owned:
            os._exit(0)

    def _answer(self, line: _Line, call: _Call) -> None:
        try:
            value = getattr(self._actor, call.method)(*call.arguments)
            answer = _Answer(call.number, value)
        except Exception as error:  # noqa: BLE001 - raised again by the caller's future
            answer = _Answer(call.number, error=ErrorRecord.from_exception(error).to_dict())
        if answer.value is not DROPPED:
            line.send(answer)


DROPPED = object()
"""Returned by a method whose answer is to be lost on its way."""


class _Line:
    """One caller's connection."""

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe
        self._lock = threading.Lock()

    def send(self, answer: _Answer) -> None:
        """Answer, if the caller is still there."""
        with self._lock, suppress(OSError):
            self.pipe.send_bytes(msgspec.msgpack.encode(answer))
