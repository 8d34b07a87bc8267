"""The server end of a link: waits for a hello, answers it, and begins on the ready that follows."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from weightsync.control.cards import Card
from weightsync.control.client import protocol_error, version_error
from weightsync.control.core import LinkHost
from weightsync.control.frames import Header, encode_header, encode_message
from weightsync.control.link import Link
from weightsync.control.messages import NONCE_BYTES, Bye, Hello, Message, Ready, Welcome
from weightsync.control.refit import Attempt, Refit
from weightsync.control.wires import ServerWire

_NO_NONCE = bytes(NONCE_BYTES)


@dataclass(frozen=True)
class Answer:
    """A hello that was answered, and with what."""

    hello: Hello
    connection: bytes
    welcome: Welcome


class ServerLink(Link):
    """The end that is dialled. ``wire_to`` makes a wire of a connection."""

    def __init__(
        self, host: LinkHost, card: Card, session: str, *, wire_to: Callable[[bytes], ServerWire]
    ) -> None:
        super().__init__(host, card, session)
        self._wire_to = wire_to
        self._waiting: tuple[Hello, bytes] | None = None
        self._answer: Answer | None = None
        self._foreign: int | None = None
        self._connection: bytes | None = None
        self._begun_by = _NO_NONCE
        """Nonce of the hello that the open refit, or the last one, began with."""

    @property
    def key(self) -> str:
        """The peer's public key: frames are this link's because they came under it."""
        return self._card.public_key

    def farewell(self) -> None:  # noqa: D102 - inherited
        if self._connection is not None:
            self._greet(self._wire_to(self._connection).send, Bye("closed its control channel"), None)

    def _start(self, attempt: Attempt) -> None:
        with self._cond:
            if self._attempt is not attempt:
                return
            attempt.started = True
            self._answer = None
            foreign, self._foreign = self._foreign, None
            waiting, self._waiting = self._waiting, None
            if self._peer_closed:
                attempt.failure = self._hub_closed_error
            elif foreign is not None:
                attempt.failure = partial(protocol_error, self.peer, foreign, self._host.protocol)
            elif waiting is not None:
                self._consider(attempt, *waiting)
            self._cond.notify_all()

    def _attempt_tick(self, attempt: Attempt, now: float) -> float | None:
        return None  # the client repeats itself until it is answered

    def _on_handshake(self, header: Header, message: Message, connection: bytes, now: float) -> None:
        if isinstance(message, Hello):
            self._on_hello(message, connection)
        elif isinstance(message, Ready):
            self._on_ready(header, message, connection, now)
        else:
            self._host.count("unexpected")

    def _on_hello(self, hello: Hello, connection: bytes) -> None:
        if hello.session != self._session or hello.protocol != self._host.protocol:
            self._host.count("malformed")
            return
        refit = self._refit
        serving = refit is not None and refit.failure is None and refit.ended is None
        if serving and refit is not None and connection != refit.connection:
            # Somebody else holds the peer's key: the open refit is not theirs to disturb.
            self._host.count("unexpected")
            return
        if serving and refit is not None and self._was_said_before(hello, refit):
            self._host.count("stale")  # and no sign that the peer has left this refit
            return
        self._foreign = None
        self._connection = connection
        if self._attempt is not None and self._attempt.started and not self._attempt.settled:
            self._consider(self._attempt, hello, connection)
        else:
            self._waiting = hello, connection

    def _was_said_before(self, hello: Hello, refit: Refit) -> bool:
        return hello.nonce == self._begun_by or (hello.epoch is not None and hello.epoch < refit.epoch)

    def _consider(self, attempt: Attempt, hello: Hello, connection: bytes) -> None:
        epoch = self._epoch(attempt, hello)
        if hello.epoch is not None and hello.epoch != epoch:
            self._host.count("foreign_epoch")
            attempt.heard = f"it said hello for epoch {hello.epoch}"
            # Answered all the same, so that the client can say which epoch this side is at.
            self._welcome(hello, connection, epoch, attempt.version)
        elif None not in (attempt.version, hello.version) and attempt.version != hello.version:
            self._welcome(hello, connection, epoch, attempt.version)
            attempt.failure = partial(version_error, self.peer, attempt.version, hello.version)
        else:
            version = hello.version if attempt.version is None else attempt.version
            self._answer = self._welcome(hello, connection, epoch, version)

    def _epoch(self, attempt: Attempt, hello: Hello) -> int:
        if attempt.epoch is not None:
            return attempt.epoch
        return max(hello.epoch or 0, self._last_epoch + 1)

    def _welcome(self, hello: Hello, connection: bytes, epoch: int, version: int | None) -> Answer:
        answer = self._answer
        repeated = answer is not None and (answer.hello, answer.connection) == (hello, connection)
        nonce = answer.welcome.nonce if answer is not None and repeated else os.urandom(NONCE_BYTES)
        welcome = Welcome(self._host.protocol, epoch, version, nonce, hello.nonce)
        self._greet(self._wire_to(connection).send, welcome, epoch)
        return Answer(hello, connection, welcome)

    def _on_ready(self, header: Header, ready: Ready, connection: bytes, now: float) -> None:
        attempt, answer = self._attempt, self._answer
        expected = answer is not None and (ready.echo, connection) == (
            answer.welcome.nonce,
            answer.connection,
        )
        if attempt is None or answer is None or not expected or attempt.settled:
            self._refuse(header, ready, connection)
            return
        welcome, self._answer = answer.welcome, None
        self._begun_by = answer.hello.nonce
        wire = self._wire_to(connection)
        refit = Refit(
            welcome.epoch, welcome.version, welcome.nonce, wire, connection, now, now, last_message_at=now
        )
        self._open(attempt, refit)

    def _refuse(self, header: Header, ready: Ready, connection: bytes) -> None:
        """Nobody waits for this client any more: say so, or it would believe that the refit is open."""
        if self._refit is not None and self._refit.token == ready.echo:
            self._host.count("replayed")
            return
        self._host.count("stale")
        answer = Header(self._host.protocol, self._session, header.epoch, ready.echo, 1)
        body = encode_message(Bye("had given up waiting for the handshake"))
        self._wire_to(connection).send([encode_header(answer), *body])

    def _has_moved_on(self, refit: Refit) -> bool:
        return self._waiting is not None and self._waiting[1] == refit.connection

    def _on_foreign_protocol(self, protocol: int, connection: bytes) -> None:
        if self._refit is not None and self._refit.failure is None:
            self._host.count("malformed")
            return
        # A frame of our version, whatever it says, lets the other side see the difference.
        welcome = Welcome(self._host.protocol, self._last_epoch, None, _NO_NONCE, _NO_NONCE)
        self._greet(self._wire_to(connection).send, welcome, None)
        if self._attempt is not None:
            self._attempt.failure = partial(protocol_error, self.peer, protocol, self._host.protocol)
        else:
            self._foreign = protocol

    def _open(self, attempt: Attempt, refit: Refit) -> None:
        self._waiting = None
        super()._open(attempt, refit)
