"""A link: one worker's end of the control channel to one peer.

Callers' threads wait on the link's condition; the hub's I/O thread brings frames, losses and time. The two
ends of the handshake are in `client` and `server`.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar, cast

from weightsync.control.cards import Card
from weightsync.control.deadlines import Deadlines
from weightsync.control.messages import (
    MAX_PROGRESS_CHARS,
    Abort,
    Bye,
    Frame,
    Header,
    Heartbeat,
    Hello,
    Message,
    Ready,
    Welcome,
    encode_header,
    encode_message,
)
from weightsync.control.refit import Attempt, MakeError, Refit
from weightsync.errors import (
    ConfigurationError,
    DeadlineError,
    LifecycleError,
    PeerAbortedError,
    PeerLostError,
    ProtocolError,
    WeightSyncError,
)

M = TypeVar("M", bound=Message)

ABORT_FLUSH_S = 1.0
CLOSED_GRACE_S = 0.05
"""A peer's last words may still be on their way when its closed connection is noticed."""
PROBE_S = 0.05
MAX_QUEUED = 65_536
_HANDSHAKE = (Hello, Welcome, Ready)


class LinkHost(Protocol):
    """What a link needs of its hub."""

    name: str
    deadlines: Deadlines
    protocol: int
    max_frame_bytes: int

    def count(self, what: str) -> None:
        """Count something dropped or refused."""

    def submit(self, job: Callable[[], None]) -> bool:
        """Run a job on the I/O thread."""

    def forget(self, link: Link) -> None:
        """The link is closed. On the I/O thread."""


class Link(ABC):
    """One end of the channel to one peer. All methods block only within their deadlines; any thread may call.

    Made by `ControlHub.accept` and `ControlHub.connect`. A refit lasts from `begin` to `end` or `abort`;
    then `begin` may be called again.
    """

    def __init__(self, host: LinkHost, card: Card, session: str) -> None:
        self._host = host
        self._card = card
        self._session = session
        self._cond = threading.Condition()
        self._attempt: Attempt | None = None
        self._refit: Refit | None = None
        self._closed: str | None = None
        self._peer_closed = False
        self._last_epoch = 0
        self._last_token = b""
        self._last_heard = "nothing yet"
        self._progress: str | None = None

    # Calls of the worker.

    @property
    def peer(self) -> str:
        """The peer's name."""
        return self._card.name

    @property
    def card(self) -> Card:
        """The peer's card."""
        return self._card

    @property
    def last_heard(self) -> str:
        """What the peer said last, and how long ago, for error texts: ``bucket 3, 0.4 s ago``."""
        refit = self._refit
        return refit.last_heard(time.monotonic()) if refit is not None else self._last_heard

    @property
    def progress(self) -> str:
        """What this side is doing; its heartbeats carry it. Follows the last message sent until it is set."""
        return self._progress or ""

    @progress.setter
    def progress(self, text: str) -> None:
        self._progress = text[:MAX_PROGRESS_CHARS]

    def begin(
        self, *, epoch: int | None, version: int | None = None, connect_s: float | None = None
    ) -> tuple[int, int | None]:
        """Open a refit together with the peer; either side may come first.

        Args:
            epoch: of the refit. `None` takes the server's (on the client), or the client's or else the next
                (on the server).
            version: of the weights; `None` takes the peer's.
            connect_s: seconds to wait instead of `Deadlines.connect_s`.

        Returns:
            The epoch and the version agreed.

        Raises:
            DeadlineError: the peer did not come, or came for another epoch.
            ProtocolError: the peer speaks another protocol version, or is at another version of the weights.
            PeerLostError: the peer has closed its hub.
            LifecycleError: a refit is open, or the link is closed.
        """
        seconds = self._host.deadlines.connect_s if connect_s is None else connect_s
        attempt = Attempt(epoch, version)
        with self._cond:
            self._require_idle()
            self._attempt = attempt
        self._submit(partial(self._start, attempt))
        with self._cond:
            self._cond.wait_for(lambda: attempt.settled or self._closed is not None, seconds)
            if self._attempt is attempt:
                self._attempt = None
            if attempt.refit is not None and self._closed is None:
                return attempt.refit.epoch, attempt.refit.version
            raise self._begin_error(attempt, seconds)

    def send(self, message: Message) -> None:
        """Send a message; returns once it is queued.

        Raises:
            ConfigurationError: the message cannot be encoded, or is larger than the channel allows.
            PeerAbortedError, PeerLostError: the refit has failed.
            LifecycleError: no refit is open.
        """
        body = encode_message(message)
        if sum(map(len, body)) > self._host.max_frame_bytes:
            raise ConfigurationError(
                f"{message.describe()} takes {sum(map(len, body))} bytes, the control channel carries "
                f"{self._host.max_frame_bytes} in one frame: use smaller buckets"
            )
        with self._cond:
            refit = self._require_open(message.describe())
            self._raise_failure(refit, f"sending {message.describe()}")
            if not isinstance(message, Heartbeat):
                refit.doing = message.describe()
            # Queued under the lock, so that nothing sent after `end` overtakes it.
            self._submit(partial(self._transmit, refit, body))

    def receive(self, *types: type[M], phase: str, timeout_s: float | None = None) -> M:
        """Wait for the next message.

        Args:
            types: what is expected now; none means anything.
            phase: what this side is doing, for error texts.
            timeout_s: seconds to wait instead of `Deadlines.stall_s`. Heartbeats do not count.

        Raises:
            PeerAbortedError: the peer failed; ``remote`` holds its error and traceback.
            PeerLostError: the peer is dead, silent, or has left the refit.
            DeadlineError: nothing came in time, or the refit takes longer than `Deadlines.total_s`.
            ProtocolError: a message of another type came.
            LifecycleError: no refit is open, or it was ended meanwhile.
        """
        started = time.monotonic()
        stall = started + (self._host.deadlines.stall_s if timeout_s is None else timeout_s)
        with self._cond:
            refit = self._require_open(phase)
            total = refit.opened_at + self._host.deadlines.total_s
            while True:
                message = self._next(refit, types, phase)
                if message is not None:
                    return cast(M, message)
                now = time.monotonic()
                if now >= min(stall, total):
                    raise self._receive_deadline(refit, types, phase, now - started, now >= total)
                self._cond.wait(min(stall, total) - now)

    def poll(self) -> Message | None:
        """Return the next message if there is one, without waiting; raises as `receive` does."""
        with self._cond:
            return self._next(self._require_open("poll"), (), "poll")

    def check(self) -> None:
        """Raise if the peer aborted or was lost; return at once otherwise.

        Raises:
            PeerAbortedError, PeerLostError: the refit has failed.
            LifecycleError: the link is closed.
        """
        with self._cond:
            self._require_not_closed()
            if self._refit is not None:
                self._raise_failure(self._refit, "check")
                if self._refit.peer_closed and not self._refit.inbox:
                    raise self._left_error(self._refit, (), "check")

    def abort(self, error: BaseException) -> None:
        """Tell the peer that this side failed, and leave the refit. Best effort; returns within a second."""
        body = encode_message(Abort.of(error))
        with self._cond:
            refit = self._refit
            if refit is None or self._closed is not None or refit.closing is not None:
                return
            refit.closing = f"this side aborted: {type(error).__name__}"
            told = refit.aborted or refit.ended is not None
            reachable = refit.failure is None
            self._cond.notify_all()
            if not told and self._submit(partial(self._transmit, refit, body)) and reachable:
                self._cond.wait_for(
                    lambda: refit.ended is not None or refit.failure is not None or self._closed is not None,
                    ABORT_FLUSH_S,
                )
            self._leave(refit)

    def end(self) -> None:
        """Leave the refit: no more heartbeats, and what the peer still sends is dropped."""
        self._end(Bye("ended the refit"))

    def close(self) -> None:
        """Leave the refit and close the link. Idempotent; waits blocked in it raise `LifecycleError`."""
        self._end(Bye("closed the link", final=True))
        if self._shut(f"the link to {self.peer} was closed"):
            self._submit(partial(self._host.forget, self))

    # On the I/O thread.

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
                self._on_message(refit, frame.message, now)
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
                self._refit.lost_at = now + CLOSED_GRACE_S
            else:
                self._refit.next_beat = now
                self._refit.probe_until = now + 10 * PROBE_S

    def forgive(self, seconds: float) -> None:
        """This process did not run for so long: its peer's silence in that time means nothing."""
        with self._cond:
            if self._refit is not None:
                self._refit.heard_at = min(self._refit.heard_at + seconds, time.monotonic())

    def shut_down(self) -> None:
        """The hub closes."""
        self._shut("the control hub was closed")
        self._end(Bye("closed its control channel", final=True))

    def _transmit(self, refit: Refit, body: list[bytes]) -> None:
        with self._cond:
            refit.frames_out += 1
            header = Header(self._host.protocol, self._session, refit.epoch, refit.token, refit.frames_out)
            if not refit.wire.send([encode_header(header), *body]):
                self._lose(refit, "its connection is closed: the process ended or the network broke")

    def _greet(self, send: Callable[[list[bytes]], bool], message: Message, epoch: int | None) -> bool:
        header = Header(self._host.protocol, self._session, epoch, b"", 0)
        return send([encode_header(header), *encode_message(message)])

    def _open(self, attempt: Attempt, refit: Refit) -> None:
        self._refit = attempt.refit = refit
        self._attempt = None
        self._progress = None
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

    def _on_message(self, refit: Refit, message: Message, now: float) -> None:
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
        elif len(refit.inbox) >= MAX_QUEUED:
            self._fail(
                refit, partial(ProtocolError, f"{self.peer} sent {MAX_QUEUED} messages that nobody took")
            )
        else:
            refit.inbox.append(message)

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
            self._transmit(refit, encode_message(Heartbeat(self._progress or refit.doing)))
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

    # Under the lock, in either kind of thread.

    def _submit(self, job: Callable[[], None]) -> bool:
        return self._host.submit(job)

    def _require_not_closed(self) -> None:
        if self._closed is not None:
            raise LifecycleError(self._closed, peer=self.peer)

    def _require_idle(self) -> None:
        self._require_not_closed()
        if self._attempt is not None or (self._refit is not None and self._refit.failure is None):
            raise LifecycleError(
                "a refit is open on this link already: end or abort it before the next begin", peer=self.peer
            )
        if self._refit is not None:
            self._leave(self._refit)

    def _require_open(self, doing: str) -> Refit:
        self._require_not_closed()
        if self._refit is None or self._refit.closing is not None:
            raise LifecycleError(f"no refit is open: begin comes before {doing}", peer=self.peer)
        return self._refit

    def _next(self, refit: Refit, types: tuple[type[Message], ...], phase: str) -> Message | None:
        self._require_not_closed()
        if self._refit is not refit or refit.closing is not None:
            raise LifecycleError(
                refit.closing or "the refit was ended while waiting", peer=self.peer, phase=phase
            )
        if refit.aborted:
            self._raise_failure(refit, phase)
        if refit.inbox:
            return self._expected(refit.inbox.popleft(), types, phase)
        self._raise_failure(refit, phase)
        if refit.ended is not None or self._has_moved_on(refit):
            raise self._left_error(refit, types, phase)
        return None

    def _left_error(self, refit: Refit, types: tuple[type[Message], ...], phase: str) -> WeightSyncError:
        how = refit.ended or "began another refit"
        heard = refit.last_heard(time.monotonic())
        return PeerLostError(
            f"{self.peer} left the refit before {_names(types)}: it {how}; last heard: {heard}",
            peer=self.peer,
            phase=phase,
        )

    def _has_moved_on(self, refit: Refit) -> bool:
        """Whether the peer has left this refit for another without a word."""
        return False

    def _expected(self, message: Message, types: tuple[type[Message], ...], phase: str) -> Message:
        if types and not isinstance(message, types):
            self._host.count("unexpected")
            raise ProtocolError(
                f"expected {_names(types)} from {self.peer}, got {_name(message)}",
                peer=self.peer, phase=phase,
            )  # fmt: skip
        return message

    def _raise_failure(self, refit: Refit, phase: str) -> None:
        if refit.failure is None:
            return
        error = refit.failure().with_context(peer=self.peer, phase=phase)
        if isinstance(error, PeerAbortedError) and error.remote is not None and error.remote.traceback:
            error.add_note(f"traceback of {self.peer}:\n{error.remote.traceback}")
        raise error

    def _begin_error(self, attempt: Attempt, seconds: float) -> WeightSyncError:
        where: dict[str, Any] = {"peer": self.peer, "phase": "begin"}
        if self._closed is not None:
            return LifecycleError(self._closed, **where)
        if attempt.failure is not None:
            return attempt.failure().with_context(**where)
        epoch = "the next epoch" if attempt.epoch is None else f"epoch {attempt.epoch}"
        heard = attempt.heard or self._unheard()
        return DeadlineError(f"{self.peer} did not begin {epoch} within {seconds:g} s: {heard}", **where)

    def _unheard(self) -> str:
        return f"nothing was heard of it ({self._card.address})"

    def _receive_deadline(
        self, refit: Refit, types: tuple[type[Message], ...], phase: str, waited: float, total: bool
    ) -> WeightSyncError:
        heard = refit.last_heard(time.monotonic())
        limit = (
            f"the refit has taken {self._host.deadlines.total_s:g} s" if total else f"waited {waited:.1f} s"
        )
        return DeadlineError(
            f"{limit} for {_names(types)} from {self.peer}; last heard: {heard}", peer=self.peer, phase=phase
        )

    def _end(self, bye: Bye) -> None:
        with self._cond:
            refit = self._refit
            if refit is None:
                return
            if refit.failure is None and refit.ended is None and refit.closing is None:
                self._submit(partial(self._transmit, refit, encode_message(bye)))
            self._leave(refit)

    def _leave(self, refit: Refit) -> None:
        self._last_heard = refit.last_heard(time.monotonic())
        self._last_token = refit.token
        refit.closing = refit.closing or "the refit was ended while waiting"
        refit.inbox.clear()
        if self._refit is refit:
            self._refit = None
        self._cond.notify_all()

    def _shut(self, reason: str) -> bool:
        with self._cond:
            if self._closed is not None:
                return False
            self._closed = reason
            self._cond.notify_all()
            return True


def _name(message: Message) -> str:
    kind, words = type(message).__name__, message.describe()
    return kind if words == kind.lower() else f"{kind} ({words})"


def _names(types: tuple[type[Message], ...]) -> str:
    return " or ".join(kind.__name__ for kind in types) or "any message"
