"""Guests: peers that come later, and whose own key therefore nobody could be told.

A hub that takes guests makes a key pair for them. Its secret half is the ticket: whoever holds it may dial
in. The tickets are part of what workers tell each other through the driver, so that they reach the workers of
one job and nobody else; they are worth no more than the weights which such a worker is given anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import zmq

from weightsync.control.cards import Card
from weightsync.control.core import LinkHost
from weightsync.control.messages import Hello
from weightsync.control.server import Answer, ServerLink
from weightsync.control.wires import ServerWire
from weightsync.errors import ConfigurationError

_ANSWER_S = 1.0
"""Seconds for which an answered hello keeps that of another guest from being answered."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A CURVE key pair, both halves in Z85."""

    public_key: str
    secret_key: str

    @classmethod
    def new(cls) -> Ticket:
        """Make one."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    @classmethod
    def parse(cls, data: Any) -> Ticket:
        """Check plain data from a peer.

        Raises:
            ConfigurationError: it is no ticket. The text does not repeat it.
        """
        if isinstance(data, dict):
            public, secret = data.get("public_key"), data.get("secret_key")
            if isinstance(public, str) and isinstance(secret, str) and _is_pair(public, secret):
                return cls(public, secret)
        raise ConfigurationError("a peer's ticket for guests must hold a CURVE key pair")

    @property
    def keys(self) -> tuple[bytes, bytes]:
        """Public and secret key."""
        return self.public_key.encode(), self.secret_key.encode()

    def to_dict(self) -> dict[str, str]:
        """Return plain data for any RPC layer."""
        return asdict(self)


def _is_pair(public: str, secret: str) -> bool:
    try:
        return bool(zmq.curve_public(secret.encode()) == public.encode())
    except (ValueError, KeyError, ArithmeticError, zmq.ZMQError):
        return False


class GuestLink(ServerLink):
    """The server end of a link that any holder of the ticket may dial, one at a time.

    The others repeat their hello until it is free again. Between refits nobody is answered; `is_asked` says
    that somebody waits.
    """

    def __init__(
        self,
        host: LinkHost,
        card: Card,
        session: str,
        ticket: Ticket,
        *,
        wire_to: Callable[[bytes], ServerWire],
    ) -> None:
        super().__init__(host, card, session, wire_to=wire_to)
        self.ticket = ticket
        self._answered_at = 0.0

    @property
    def is_asked(self) -> bool:
        """Whether a guest has said hello since the last `begin`."""
        return self._waiting is not None

    def _on_hello(self, hello: Hello, connection: bytes) -> None:
        if not self._is_taken_by_another(connection):
            super()._on_hello(hello, connection)

    def _welcome(self, hello: Hello, connection: bytes, epoch: int, version: int | None) -> Answer:
        self._answered_at = time.monotonic()
        return super()._welcome(hello, connection, epoch, version)

    def _is_taken_by_another(self, connection: bytes) -> bool:
        refit, answer = self._refit, self._answer
        if refit is not None and refit.failure is None and refit.ended is None:
            return connection != refit.connection
        fresh = time.monotonic() < self._answered_at + _ANSWER_S
        return answer is not None and fresh and connection != answer.connection

    def _on_hub_closed(self) -> None:
        """One guest is gone; others may come."""
