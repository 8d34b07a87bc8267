"""The client end of a link: dials, says hello until it is answered, and says ready."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from weightsync.control.cards import Card
from weightsync.control.core import LinkHost
from weightsync.control.frames import Header
from weightsync.control.link import Link
from weightsync.control.messages import Bye, Hello, Message, Ready, Welcome
from weightsync.control.refit import Attempt, Refit
from weightsync.control.wires import ClientWire
from weightsync.errors import ProtocolError, WeightSyncError

HELLO_S = 0.5
_REDIAL_S = 0.1


class ClientLink(Link):
    """The end that dials. ``dial`` and ``hang_up`` make and close a wire, on the I/O thread."""

    def __init__(
        self,
        host: LinkHost,
        card: Card,
        *,
        dial: Callable[[ClientLink], ClientWire],
        hang_up: Callable[[ClientWire], None],
        ipv6: bool,
        keys: tuple[bytes, bytes],
    ) -> None:
        super().__init__(host, card, card.session)
        self.keys = keys
        """The key pair that the server knows this end by."""
        self._dial, self._hang_up = dial, hang_up
        self.ipv6 = ipv6
        """Asked of the resolver once, in the caller's thread: the I/O thread must not wait for it."""
        self._wire: ClientWire | None = None

    def on_events(self) -> None:
        """Take in what happened to the connection."""
        if self._wire is None:
            return
        now = time.monotonic()
        made, lost = self._wire.read_events()
        with self._cond:
            if made and self._attempt is not None:
                self._attempt.next_due = now
        if lost:
            self.on_disconnect(now, certain=True)

    def release_wire(self) -> None:
        """Close the wire, if there is one."""
        if self._wire is not None:
            wire, self._wire = self._wire, None
            self._hang_up(wire)

    def farewell(self) -> None:  # noqa: D102 - inherited
        if self._wire is not None:
            self._greet(self._wire.send, Bye("closed its control channel"), None)

    def _start(self, attempt: Attempt) -> None:
        """Nothing to do: the tick that follows dials and says hello."""

    def _attempt_tick(self, attempt: Attempt, now: float) -> float | None:
        if self._peer_closed:
            attempt.failure = self._hub_closed_error
            self._cond.notify_all()
            return None
        if now < attempt.next_due:
            return attempt.next_due
        wire = self._ready_wire()
        if wire.connected:
            hello = Hello(
                self._host.protocol,
                self._session,
                attempt.epoch,
                attempt.nonce,
                self._host.name,
                attempt.version,
            )
            self._greet(wire.send, hello, attempt.epoch)
            attempt.next_due = now + HELLO_S
        else:
            attempt.next_due = now + _REDIAL_S
        return attempt.next_due

    def _ready_wire(self) -> ClientWire:
        """Return a wire that may reach the server, dialling anew after a refusal or a lost connection."""
        if self._wire is not None and (self._wire.refused or self._wire.broken):
            self.release_wire()
        if self._wire is None:
            self._wire = self._dial(self)
        return self._wire

    def _on_handshake(self, header: Header, message: Message, connection: bytes, now: float) -> None:
        attempt = self._attempt
        if not isinstance(message, Welcome):
            self._host.count("unexpected")
        elif attempt is None or message.echo != attempt.nonce or attempt.settled:
            if self._refit is None or message.nonce != self._refit.token:  # not just the answer said twice
                self._host.count("stale")
        elif attempt.epoch is not None and message.epoch != attempt.epoch:
            attempt.heard = f"it is at epoch {message.epoch}"
            self._host.count("foreign_epoch")
        elif None not in (attempt.version, message.version) and message.version != attempt.version:
            attempt.failure = partial(self._version_error, attempt.version, message.version)
        else:
            self._enter(attempt, message, now)

    def _enter(self, attempt: Attempt, welcome: Welcome, now: float) -> None:
        if self._wire is None or not self._greet(self._wire.send, Ready(welcome.nonce), welcome.epoch):
            return
        version = attempt.version if welcome.version is None else welcome.version
        refit = Refit(welcome.epoch, version, welcome.nonce, self._wire, b"", now, now, last_message_at=now)
        self._open(attempt, refit)

    def _on_foreign_protocol(self, protocol: int, connection: bytes) -> None:
        if self._attempt is None:
            self._host.count("malformed")
        else:
            self._attempt.failure = partial(protocol_error, self.peer, protocol, self._host.protocol)

    def _version_error(self, ours: int | None, theirs: int | None) -> WeightSyncError:
        return version_error(self.peer, ours, theirs)


def protocol_error(peer: str, theirs: int, ours: int) -> WeightSyncError:
    """The peers speak different protocol versions."""
    return ProtocolError(
        f"{peer} speaks version {theirs} of the control protocol, this side version {ours}: "
        "install the same weightsync on both sides"
    )


def version_error(peer: str, ours: int | None, theirs: int | None) -> WeightSyncError:
    """The peers are to refit different versions of the weights."""
    return ProtocolError(f"{peer} refits version {theirs} of the weights, this side version {ours}")
