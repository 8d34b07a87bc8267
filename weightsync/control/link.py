"""A link: one worker's end of the control channel to one peer.

Callers' threads wait on the link's condition; the hub's I/O thread brings frames, losses and time. The two
ends of the handshake are in `client` and `server`.
"""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any, TypeVar, cast

from weightsync.control.core import LinkCore
from weightsync.control.frames import encode_message
from weightsync.control.messages import Abort, Bye, Heartbeat, Message
from weightsync.control.refit import Attempt, Refit
from weightsync.errors import (
    ConfigurationError,
    DeadlineError,
    LifecycleError,
    PeerAbortedError,
    PeerLostError,
    ProtocolError,
    WeightSyncError,
)

ABORT_FLUSH_S = 1.0

M = TypeVar("M", bound=Message)


class Link(LinkCore):
    """One end of the channel to one peer. All methods block only within their deadlines; any thread may call.

    Made by `ControlHub.accept` and `ControlHub.connect`. A refit lasts from `begin` to `end` or `abort`;
    then `begin` may be called again.
    """

    @property
    def last_heard(self) -> str:
        """What the peer said last, and how long ago, for error texts: ``bucket 3, 0.4 s ago``."""
        refit = self._refit
        return refit.last_heard(time.monotonic()) if refit is not None else self._last_heard

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
        self._require_queued(self._host.submit(partial(self._start, attempt)))
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
            self._require_queued(self._host.submit(partial(self._transmit, refit, body)))

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
        end = started + (self._host.deadlines.stall_s if timeout_s is None else timeout_s)
        with self._cond:
            refit = self._require_open(phase)
            while True:
                message = self._take(refit, types, phase)
                if message is not None:
                    return message
                now = time.monotonic()
                if now >= end:
                    raise self._overdue_error(refit, types, phase, now - started)
                self._cond.wait(min(end, self._total_end()) - now)

    def poll(self, *types: type[M], phase: str) -> M | None:
        """Return the next message if one has come; arguments and errors as for `receive`."""
        with self._cond:
            return self._take(self._require_open(phase), types, phase)

    def overdue(self, *types: type[Message], phase: str, waited_s: float) -> WeightSyncError:
        """Return the error that says that the peer was waited for in vain; ``types`` as for `receive`."""
        with self._cond:
            return self._overdue_error(self._require_open(phase), types, phase, waited_s)

    def check(self) -> None:
        """Raise if the peer aborted or was lost, or the time is up; return at once otherwise.

        A peer that has merely ended the refit is no error here: only a wait for more of it is.

        Raises:
            PeerAbortedError, PeerLostError: the refit has failed.
            DeadlineError: the refit takes longer than `Deadlines.total_s`.
            LifecycleError: the link is closed.
        """
        with self._cond:
            self._require_not_closed()
            refit = self._refit
            if refit is None:
                return
            self._raise_failure(refit, "check")
            if refit.peer_closed and not refit.inbox:
                raise self._left_error(refit, (), "check")
            if time.monotonic() >= self._total_end():
                raise self._overdue_error(refit, (), "check", None)

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
            if not told and self._host.submit(partial(self._transmit, refit, body)) and reachable:
                self._cond.wait_for(
                    lambda: refit.ended is not None or refit.failure is not None or self._closed is not None,
                    ABORT_FLUSH_S,
                )
            self._leave(refit)

    def end(self) -> None:
        """Leave the refit, or the wait for one: no more heartbeats, what the peer still sends is dropped."""
        self._end(Bye("ended the refit"))

    def close(self) -> None:
        """Leave the refit and close the link. Idempotent; waits blocked in it raise `LifecycleError`."""
        self._end(Bye("closed the link", final=True))
        if self._shut(f"the link to {self.peer} was closed"):
            self._host.forget(self)

    def shut_down(self) -> None:
        """The hub closes."""
        self._shut("the control hub was closed")
        self._end(Bye("closed its control channel", final=True))

    # Under the lock, in either kind of thread.

    def _total_end(self) -> float:
        """Until when the open refit may last; an ended one is told of by other means."""
        opened_at = self._refit.opened_at if self._refit is not None else math.inf
        return opened_at + self._host.deadlines.total_s

    def _require_not_closed(self) -> None:
        if self._closed is not None:
            raise LifecycleError(self._closed, peer=self.peer)

    def _require_queued(self, queued: bool) -> None:
        if not queued:
            self._require_not_closed()
            raise LifecycleError(
                "this process has no control channel: the hub was made before a fork; make one here",
                peer=self.peer,
            )

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

    def _take(self, refit: Refit, types: tuple[type[M], ...], phase: str) -> M | None:
        message = self._next(refit, types, phase)
        if message is None and time.monotonic() >= self._total_end():
            raise self._overdue_error(refit, types, phase, None)
        return cast(M | None, message)

    def _next(self, refit: Refit, types: tuple[type[Message], ...], phase: str) -> Message | None:
        self._require_not_closed()
        if self._refit is not refit or refit.closing is not None:
            raise LifecycleError(
                refit.closing or "the refit was ended while waiting", peer=self.peer, phase=phase
            )
        if refit.aborted:
            self._raise_failure(refit, phase)
        if refit.inbox:
            message, nbytes = refit.inbox.popleft()
            refit.inbox_bytes -= nbytes
            return self._expected(message, types, phase)
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
        heard = attempt.heard or f"nothing was heard of it ({self._card.address})"
        return DeadlineError(f"{self.peer} did not begin {epoch} within {seconds:g} s: {heard}", **where)

    def _overdue_error(
        self, refit: Refit, types: tuple[type[Message], ...], phase: str, waited: float | None
    ) -> WeightSyncError:
        """A wait ran out after ``waited`` seconds, or (`None`) the whole refit did."""
        heard = refit.last_heard(time.monotonic())
        total = self._host.deadlines.total_s
        limit = f"waited {waited:.1f} s" if waited is not None else f"the refit may take {total:g} s; waiting"
        return DeadlineError(
            f"{limit} for {_names(types)} from {self.peer}; last heard: {heard}", peer=self.peer, phase=phase
        )

    def _end(self, bye: Bye) -> None:
        with self._cond:
            self._cancel_begin()
            refit = self._refit
            if refit is None:
                return
            if refit.failure is None and refit.ended is None and refit.closing is None:
                self._host.submit(partial(self._transmit, refit, encode_message(bye)))
            self._leave(refit)

    def _cancel_begin(self) -> None:
        """End a `begin` that still waits in another thread: nobody wants its refit any more."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.failure = partial(LifecycleError, "the refit was ended before it began", peer=self.peer)
            self._cond.notify_all()

    def _leave(self, refit: Refit) -> None:
        self._last_heard = refit.last_heard(time.monotonic())
        self._last_token = refit.token
        refit.closing = refit.closing or "the refit was ended while waiting"
        refit.inbox.clear()
        refit.inbox_bytes = 0
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
