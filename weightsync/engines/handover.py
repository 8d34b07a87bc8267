"""Where a sending and a receiving engine of one process meet, and how they pass things to each other.

Either side runs in an event loop of its own or in the same one, so what is passed is put into the other
side's `Inbox`, which wakes whatever loop waits for it. Nothing is copied and nothing is polled.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from weightsync.errors import (
    DeadlineError,
    ErrorRecord,
    LifecycleError,
    PeerAbortedError,
    PeerLostError,
    WeightSyncError,
)
from weightsync.topology import RankId

MakeError = Callable[[], WeightSyncError]
"""Errors are made anew for each side that raises them: threads must not share a traceback."""


class Inbox:
    """What one side has been given and has not taken yet. `get` is for one task; the rest for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: deque[Any] = deque()
        self._failure: MakeError | None = None
        self._sleeper: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None

    def put(self, item: Any) -> None:
        """Add an item."""
        with self._lock:
            self._items.append(item)
            self._wake()

    def fail(self, make_error: MakeError) -> None:
        """Let every `get` raise, at once, whatever is still here. The first failure counts."""
        with self._lock:
            self._failure = self._failure or make_error
            self._wake()

    async def get(self, timeout_s: float) -> Any:
        """Return the next item.

        Raises:
            TimeoutError: there was none in time.
            WeightSyncError: see `fail`.
        """
        async with asyncio.timeout(timeout_s):
            while True:
                with self._lock:
                    if self._failure is not None:
                        raise self._failure()
                    if self._items:
                        return self._items.popleft()
                    loop = asyncio.get_running_loop()
                    woken: asyncio.Future[None] = loop.create_future()
                    self._sleeper = loop, woken
                await woken

    def _wake(self) -> None:
        if self._sleeper is None:
            return
        (loop, woken), self._sleeper = self._sleeper, None
        with contextlib.suppress(RuntimeError):  # the loop has ended: whoever waited in it is gone
            loop.call_soon_threadsafe(_set, woken)


def _set(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)


@dataclass(eq=False)
class Part:
    """One side's part in one refit. ``epoch`` and ``version`` `None` take the other side's."""

    who: RankId
    epoch: int | None
    version: int | None
    inbox: Inbox = field(default_factory=Inbox)
    peer: Part | None = None
    """The other side's, once they have met."""
    told: bool = False
    """Whether it failed because the other side did."""

    def fits(self, epoch: int | None, version: int | None) -> bool:
        """Whether this is the refit of that name."""
        return all(
            own is None or other is None or own == other
            for own, other in ((self.epoch, epoch), (self.version, version))
        )


@dataclass(frozen=True)
class _Refusal:
    """A side failed in a refit that the other had not begun."""

    side: str
    epoch: int | None
    version: int | None
    make_error: MakeError

    def applies_to(self, part: Part) -> bool:
        return part.who.side != self.side and part.fits(self.epoch, self.version)


class Handover:
    """The meeting place of one sending and one receiving engine. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[str, Part] = {}
        self._refusal: _Refusal | None = None
        self._closed: str | None = None

    async def meet(self, part: Part, peer: str, timeout_s: float) -> None:
        """Begin a refit together with the other side.

        Args:
            part: this side's.
            peer: who is expected, for messages.
            timeout_s: seconds to wait.

        Raises:
            DeadlineError: the other side did not begin this refit.
            PeerAbortedError: it has failed already.
            PeerLostError: it was closed, or has been prepared again.
        """
        self._enter(part, peer)
        try:
            await part.inbox.get(timeout_s)
        except TimeoutError:
            raise DeadlineError(
                f"{peer} did not begin this refit within {timeout_s:g} s{self._other(part)}",
                peer=peer,
                phase="connect",
            ) from None

    def leave(self, part: Part, error: BaseException | None) -> None:
        """End this side's part; with an error, the other side is told of it."""
        with self._lock:
            if self._parts.get(part.who.side) is part:
                del self._parts[part.who.side]
        if error is not None and part.peer is not None:
            self.tell(part, error)
        elif error is not None and not part.told:
            self.refuse(part.who, part.epoch, part.version, error)

    def tell(self, part: Part, error: BaseException) -> None:
        """Let the other side of a refit under way fail."""
        if part.peer is not None:
            part.peer.inbox.fail(_told(part.who, error))

    def refuse(self, who: RankId, epoch: int | None, version: int | None, error: BaseException) -> None:
        """Tell the other side that this one fails before it begins; also if it comes for that refit later."""
        make_error = _told(who, error)
        with self._lock:
            waiting = next((part for side, part in self._parts.items() if side != who.side), None)
            if waiting is not None and waiting.peer is None:
                if waiting.fits(epoch, version):
                    waiting.told = True
                    waiting.inbox.fail(make_error)
            elif epoch is not None:  # a refit without a name could not be told from the next one
                self._refusal = _Refusal(who.side, epoch, version, make_error)

    def close(self, reason: str) -> None:
        """Let whoever waits here, or comes, fail."""
        with self._lock:
            self._closed = self._closed or reason
            for part in self._parts.values():
                part.inbox.fail(lambda: PeerLostError(reason))

    def _enter(self, part: Part, peer: str) -> None:
        with self._lock:
            if self._closed is not None:
                raise PeerLostError(self._closed, peer=peer, phase="connect")
            refusal, self._refusal = self._refusal, None
            if refusal is not None and refusal.applies_to(part):
                part.told = True
                raise refusal.make_error()
            if part.who.side in self._parts:
                raise LifecycleError(f"a refit of {part.who} is still under way")
            self._parts[part.who.side] = part
            for other in self._parts.values():
                if other is not part and other.peer is None and other.fits(part.epoch, part.version):
                    part.peer, other.peer = other, part
                    part.inbox.put(None)
                    other.inbox.put(None)

    def _other(self, part: Part) -> str:
        with self._lock:
            other = next((other for other in self._parts.values() if other is not part), None)
        return f" (it is in refit {other.epoch} to version {other.version})" if other else ""


def _told(who: RankId, error: BaseException) -> MakeError:
    """Return what the other side raises for a failure of ``who``."""
    record = ErrorRecord.from_exception(error, side=who.side, rank=who.rank)
    text = f"{who} failed: {record.kind}: {record.message}"
    return lambda: PeerAbortedError(text, remote=record, peer=str(who))
