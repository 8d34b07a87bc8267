"""The process group of a collective transport: formed beside the caller, used, and given up in any state.

No call here waits without end. What a library cannot end, it finishes in a thread of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, Store

from weightsync.engines.collective_backends import CollectiveBackend
from weightsync.engines.transport import Check
from weightsync.engines.waiting import await_ended

T = TypeVar("T")
ROOT = 0
"""Rank of the sender in every group."""
_PAUSE_S = (0.0002, 0.001)
_END_PAUSE_S = 0.05


class Broadcast:
    """One broadcast under way. It holds on to its buffer until it has ended."""

    def __init__(self, backend: CollectiveBackend, work: Any) -> None:
        self._backend = backend
        self._work = work
        self.failure: str | None = None
        """Why it failed, once it has ended."""

    @property
    def has_ended(self) -> bool:
        """Whether the library has let go of the buffer."""
        work = self._work
        if work is None:
            return True
        if not work.is_completed():
            return False
        self.failure = self._backend.failure_of(work)
        self._work = None  # it would keep the group's connections open
        return True


class Group:
    """A process group, and a count of the broadcasts that this rank has posted in it.

    Args:
        backend: the library.
        label: the same on all ranks, another one for each group.
        process_group: the library's group.
    """

    def __init__(self, backend: CollectiveBackend, label: str, process_group: Any) -> None:
        self._backend = backend
        self._label = label
        self._process_group = process_group
        self._open: list[Broadcast] = []
        self._posted = 0

    @classmethod
    def form(
        cls,
        backend: CollectiveBackend,
        store: Store,
        *,
        label: str,
        rank: int,
        size: int,
        host: str,
        timeout_s: float,
        go_on: Check,
    ) -> Group:
        """Join a group and broadcast one byte in it: libraries connect as late as at the first operation.

        Args:
            backend: the library.
            store: where the ranks find each other.
            label: see `Group`.
            rank: of this process in the group; the sender is `ROOT`.
            size: of the group.
            host: address of this host that the library may bind.
            timeout_s: seconds that it may take.
            go_on: raises when nobody wants the group any more.

        Raises:
            RuntimeError: the group did not come about.
        """
        backend.bind_thread()
        process_group = backend.make_group(
            PrefixStore(label, store), rank, size, host=host, timeout_s=timeout_s
        )
        group = cls(backend, label, process_group)
        del process_group
        try:
            first = group.broadcast(
                torch.zeros(1, dtype=torch.uint8, device=backend.device), timeout_s=timeout_s
            )
            while not first.has_ended:
                go_on()
                time.sleep(_PAUSE_S[0])
            if first.failure is not None:
                raise RuntimeError(first.failure)
        except BaseException:
            group.drop(patience_s=0.0)
            raise
        return group

    @property
    def state(self) -> str | None:
        """Text that is alike on all ranks as long as they have posted the same; `None` once dropped."""
        return None if self._process_group is None else f"{self._label}/{self._posted}"

    def broadcast(self, data: torch.Tensor, *, timeout_s: float) -> Broadcast:
        """Post a broadcast from rank `ROOT` and return at once.

        Args:
            data: what is sent on that rank, and overwritten on the others.
            timeout_s: seconds after which the library itself gives up, if it can.

        Raises:
            RuntimeError: the group is broken, or dropped.
        """
        if self._process_group is None:
            raise RuntimeError("the group was given up")
        options: Any = BroadcastOptions()
        options.rootRank, options.rootTensor = ROOT, 0
        options.timeout = timedelta(seconds=timeout_s)
        if hasattr(options, "asyncOp"):  # without it, NCCL works on the caller's stream and returns nothing
            options.asyncOp = True
        broadcast = Broadcast(self._backend, self._process_group.broadcast([data], options))
        self._posted += 1
        self._open = [each for each in self._open if not each.has_ended]
        self._open.append(broadcast)
        return broadcast

    def drop(self, *, patience_s: float) -> None:
        """Give the group up, in whatever state it is. Idempotent.

        Returns when its connections are closed, or after ``patience_s`` seconds: an operation that cannot be
        ended keeps them and its buffer until its own time-out.
        """
        held, self._process_group = [self._process_group], None
        if held[0] is None:
            return
        end = threading.Thread(
            target=_end, args=(self._backend, held, self._open), name="weightsync-collective-end", daemon=True
        )
        end.start()
        end.join(patience_s)


def _end(backend: CollectiveBackend, held: list[Any], broadcasts: list[Broadcast]) -> None:
    backend.bind_thread()
    process_group = held.pop()
    backend.abort(process_group)
    while not all(each.has_ended for each in broadcasts):
        time.sleep(_END_PAUSE_S)
    # Only now: taking a gloo group apart waits for its operations.
    del process_group


class _Errand(threading.Thread, Generic[T]):
    """Work done in a thread of its own, whose caller may leave before its end."""

    def __init__(self, work: Callable[[Check], T], undo: Callable[[T], object]) -> None:
        super().__init__(name="weightsync-collective-form", daemon=True)
        self._work, self._undo = work, undo
        self._lock = threading.Lock()
        self._abandoned = False
        self.over = threading.Event()
        self._results: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            result = self._work(self._go_on)
            with self._lock:
                self._results.append(result)
                if self._abandoned:
                    self._undo(result)
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            self._error = error
        finally:
            self.over.set()

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._results[0]

    def abandon(self) -> None:
        with self._lock:
            self._abandoned = True
            if self._results:
                self._undo(self._results[0])

    def _go_on(self) -> None:
        if self._abandoned:
            raise InterruptedError("nobody waits for this any more")


def run_apart(
    work: Callable[[Check], T], *, undo: Callable[[T], object], timeout_s: float, check: Check, what: str
) -> T:
    """Return what ``work`` returns, or raise what it raises; leave it behind when ``check`` raises.

    Args:
        work: called in a thread with a function that raises once its caller has left.
        undo: takes back what it brings after that.
        timeout_s: seconds that it may take.
        check: called meanwhile.
        what: is waited for, for the error.

    Raises:
        DeadlineError: it took longer.
    """
    errand = _Errand(work, undo)
    errand.start()
    try:
        await_ended(errand.over.is_set, timeout_s=timeout_s, check=check, what=what)
    except BaseException:
        errand.abandon()
        raise
    return errand.result()
