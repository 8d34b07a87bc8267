"""What the I/O thread does with a link: frames in and out, heartbeats, losses. `link` adds the callers' side.

Everything here runs on the hub's I/O thread, and takes the hub's lock for what it shares with callers.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

from weightsync.control.cards import Card, require_name
from weightsync.control.deadlines import Deadlines
from weightsync.control.frames import Frame, Header, encode_header, encode_message
from weightsync.control.messages import Abort, Bye, Heartbeat, Hello, Message, Ready, Welcome
from weightsync.control.refit import Attempt, MakeError, Refit
from weightsync.errors import PeerAbortedError, PeerLostError, ProtocolError, WeightSyncError

CLOSED_GRACE_S = 0.05
"""A peer's last words may still be on their way when its closed connection is noticed."""
PROBE_S = 0.05
MAX_QUEUED = 65_536
MAX_QUEUED_FRAMES = 4
"""Of the largest size: what messages that nobody has taken may hold in all."""
_HANDSHAKE = (Hello, Welcome, Ready)


class LinkHost(Protocol):
    """What a link needs of its hub."""

    name: str
    deadlines: Deadlines
    protocol: int
    max_frame_bytes: int
    news: threading.Condition
    """Guards the links of this hub; notified of whatever happens to one of them."""

    def count(self, what: str) -> None:
        """Count something dropped or refused."""

    def submit(self, job: Callable[[], None]) -> bool:
        """Run a job on the I/O thread."""

    def forget(self, link: LinkCore) -> None:
        """The link is closed."""


class LinkCore(ABC):
    """State of one end of a link, and its I/O."""

    def __init__(self, host: LinkHost, card: Card, session: str) -> None:
        self._host = host
        self._card = card
        self._session = session
        self._cond = host.news
        self._attempt: Attempt | None = None
        self._refit: Refit | None = None
        self._closed: str | None = None
        self._peer_closed = False
        self._last_epoch = 0
        self._last_token = b""
        self._last_heard = "nothing yet"

    @property
    def peer(self) -> str:
        """The peer's name."""
        return self._card.name

    def rename(self, name: str) -> None:
        """Call the peer by another name from now on."""
        require_name(name)
        self._card = replace(self._card, name=name)

    @property
    def card(self) -> Card:
        """The peer's card."""
        return self._card

    @abstractmethod
    def _start(self, attempt: Attempt) -> None:
        """Take the first step of a handshake."""

    @abstractmethod
    def _attempt_tick(self, attempt: Attempt, now: float) -> float | None:
        """Repeat a step of the handshake when it is due; returns when to come back."""

    @abstractmethod
    def _on_handshake(self, header: Header, message: Message, connection: bytes, now: float) -> None:
        """Take in a `Hello`, `Welcome` or `Ready`. The lock is held."""

    @abstractmethod
    def _on_foreign_protocol(self, protocol: int, connection: bytes) -> None:
        """Take in a frame of another protocol version. The lock is held."""

    @abstractmethod
    def farewell(self) -> None:
        """Tell the peer that this hub closes for good."""

    def on_frame(self, frame: Frame, connection: bytes, now: float) -> None:
        """Take in one frame from the authenticated peer."""
        with self._cond:
            if self._closed is not None:
                self._host.count("late")
            elif frame.header is None or frame.message is None:
                self._on_foreign_protocol(frame.protocol, connection)
            elif frame.header.session != self._session:
                self._host.count("foreign_session")
            elif isinstance(frame.message, _HANDSHAKE):
                self._on_handshake(frame.header, frame.message, connection, now)
            elif isinstance(frame.message, Bye) and not frame.header.token:
                self._on_hub_closed()
            elif (refit := self._refit_of(frame.header, frame.message, connection)) is not None:
                self._on_message(refit, frame.message, frame.nbytes, now)
            self._cond.notify_all()

    def tick(self, now: float) -> float | None:
        """Do what is due by the clock; returns when to come back (`None`: nothing is under way)."""
        with self._cond:
            if self._closed is not None:
                return None
            if self._attempt is not None:
                return self._attempt_tick(self._attempt, now)
            if self._refit is not None:
                return self._refit_tick(self._refit, now)
            return None

    def on_disconnect(self, now: float, *, certain: bool) -> None:
        """A connection of this link (``certain``), or one that may be its own, was closed."""
        with self._cond:
            if self._refit is None:
                return
            if certain:
                self._refit.lost_at = self._refit.lost_at or now + CLOSED_GRACE_S
            else:
                self._refit.next_beat = now
                self._refit.probe_until = now + 10 * PROBE_S

    def forgive(self, seconds: float) -> None:
        """This process did not run for so long: its peer's silence in that time means nothing."""
        with self._cond:
            if self._refit is not None:
                self._refit.heard_at = min(self._refit.heard_at + seconds, time.monotonic())

    def _transmit(self, refit: Refit, body: list[bytes]) -> None:
        with self._cond:
            refit.frames_out += 1
            header = Header(self._host.protocol, self._session, refit.epoch, refit.token, refit.frames_out)
            if refit.lost_at is None and not refit.wire.send([encode_header(header), *body]):
                refit.lost_at = time.monotonic() + CLOSED_GRACE_S

    def _greet(self, send: Callable[[list[bytes]], bool], message: Message, epoch: int | None) -> bool:
        header = Header(self._host.protocol, self._session, epoch, b"", 0)
        return send([encode_header(header), *encode_message(message)])

    def _open(self, attempt: Attempt, refit: Refit) -> None:
        self._refit = attempt.refit = refit
        self._attempt = None
        self._last_epoch = max(self._last_epoch, refit.epoch)
        self._cond.notify_all()

    def _refit_of(self, header: Header, message: Message, connection: bytes) -> Refit | None:
        """Return the refit that a frame belongs to; count a frame that belongs to none."""
        refit = self._refit
        if refit is not None and header.token == refit.token and header.epoch == refit.epoch:
            if connection != refit.connection:
                self._host.count("unexpected")
            elif header.number <= refit.frames_in:
                self._host.count("replayed")
            else:
                refit.frames_in = header.number
                return refit
        elif header.token and header.token == self._last_token:
            if not isinstance(message, Bye):  # the usual answer to our own
                self._host.count("late")
        elif refit is None or header.epoch != refit.epoch:
            self._host.count("foreign_epoch")
        else:
            self._host.count("foreign_token")
        return None

    def _on_message(self, refit: Refit, message: Message, nbytes: int, now: float) -> None:
        refit.hear(message, now)
        if isinstance(message, Heartbeat):
            return
        if isinstance(message, Abort):
            record = message.record
            refit.aborted = True
            refit.failure = partial(
                PeerAbortedError, f"{self.peer} failed and said so: {record}", remote=record
            )
            self._transmit(refit, encode_message(Bye("heard the abort")))
        elif isinstance(message, Bye):
            refit.ended, refit.peer_closed, refit.lost_at = message.reason, message.final, None
        elif self._overflows(refit, nbytes):
            self._host.count("overflow")
            queued = f"{len(refit.inbox)} messages of {refit.inbox_bytes} bytes that nobody took"
            self._fail(refit, partial(ProtocolError, f"{self.peer} sent {queued}, and more"))
        else:
            refit.inbox.append((message, nbytes))
            refit.inbox_bytes += nbytes

    def _overflows(self, refit: Refit, nbytes: int) -> bool:
        limit = MAX_QUEUED_FRAMES * self._host.max_frame_bytes
        return len(refit.inbox) >= MAX_QUEUED or refit.inbox_bytes + nbytes > limit

    def _on_hub_closed(self) -> None:
        self._peer_closed = True
        if self._attempt is not None:
            self._attempt.failure = self._hub_closed_error
        if self._refit is not None:
            self._refit.ended = self._refit.ended or "closed its control channel"
            self._refit.peer_closed = True

    def _hub_closed_error(self) -> WeightSyncError:
        return PeerLostError(f"{self.peer} has closed its control channel; connect to its new card")

    def _refit_tick(self, refit: Refit, now: float) -> float | None:
        if refit.failure is not None or refit.ended is not None:
            return None
        silence = self._host.deadlines.silence_s
        if refit.lost_at is not None and now >= refit.lost_at:
            self._lose(refit, "its connection closed: the process ended or the network broke")
            return None
        if now - refit.heard_at >= silence:
            self._lose(refit, f"silent for {now - refit.heard_at:.1f} s, stopped or unreachable")
            return None
        if now >= refit.next_beat:
            refit.next_beat = now + (PROBE_S if now < refit.probe_until else self._host.deadlines.beat_s)
            self._transmit(refit, encode_message(Heartbeat(refit.doing)))
        due = [refit.next_beat, refit.heard_at + silence]
        return min(due if refit.lost_at is None else [*due, refit.lost_at])

    def _lose(self, refit: Refit, how: str) -> None:
        if refit.ended is None and refit.closing is None:
            heard = refit.last_heard(time.monotonic())
            self._fail(refit, partial(PeerLostError, f"{self.peer} was lost: {how}; last heard: {heard}"))

    def _fail(self, refit: Refit, make: MakeError) -> None:
        if refit.failure is None:
            refit.failure = make
        self._cond.notify_all()
