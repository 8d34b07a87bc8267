"""Sockets of the control channel. Everything here runs on a hub's I/O thread and never blocks.

`ServerSocket` is the one ROUTER that a hub listens on, with the ZAP handler that admits known keys.
`ClientWire` is a link's DEALER, `ServerWire` a link's route through the ROUTER.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import zmq
import zmq.utils.z85
from zmq.utils.monitor import recv_monitor_message

from weightsync.control.addresses import bracketed, uses_ipv6
from weightsync.control.cards import Card
from weightsync.errors import ConfigurationError

LINGER_MS = 300
_DOMAIN = b"weightsync"
_RECONNECT_MS = 50
_MAX_RECONNECT_MS = 1000
# CURVE adds 33 bytes to each part; a header is far below the rest.
_ENVELOPE_BYTES = 4096
_BATCH = 256
_RECEIVE_AHEAD = 32

_EVENTS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_REFUSALS = {zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL}

Count = Callable[[str], None]
Watch = Callable[[zmq.Socket[bytes], Callable[[], None] | None], None]
"""Calls back when a socket is readable; `None` stops it."""


class Wire(Protocol):
    """How a link's frames leave."""

    def send(self, parts: list[bytes]) -> bool:
        """Hand a frame to the socket; `False` when the connection is gone."""


class Gatekeeper:
    """Answers ZAP requests: admits the CURVE keys on its list, counts and refuses everything else."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], count: Count) -> None:
        self.allowed: set[str] = set()
        self._count = count
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> None:
        """Answer the requests that wait."""
        for request in _received(self.socket):
            parts = [frame.bytes for frame in request]
            key = self._key(parts)
            admitted = key in self.allowed
            if not admitted:
                self._count("unauthenticated")
            verdict = [b"200", b"OK", key.encode()] if admitted else [b"400", b"unknown key", b""]
            self.socket.send_multipart([b"1.0", parts[1] if len(parts) > 1 else b"", *verdict, b""])

    @staticmethod
    def _key(parts: list[bytes]) -> str:
        if len(parts) != 7 or parts[0] != b"1.0" or parts[5] != b"CURVE" or len(parts[6]) != 32:
            return ""
        return zmq.utils.z85.encode(parts[6]).decode("ascii")


class ServerSocket:
    """The ROUTER of a hub: CURVE server, port chosen by the system."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], host: str, keys: tuple[bytes, bytes], max_bytes: int
    ) -> None:
        self.socket = context.socket(zmq.ROUTER)
        _limit(self.socket, max_bytes)
        self.socket.curve_server = True
        self.socket.curve_publickey, self.socket.curve_secretkey = keys
        self.socket.zap_domain = _DOMAIN
        self.socket.router_mandatory = True
        self.socket.ipv6 = uses_ipv6(host)
        try:
            self.socket.bind(f"tcp://{bracketed(host)}:*")
        except zmq.ZMQError as error:
            self.socket.close(0)
            raise ConfigurationError(
                f"cannot listen on {host!r}: {error}; set bind_host to an address of this host"
            ) from error
        self.port = int(self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2].rstrip("\0"))
        self.monitor = self.socket.get_monitor_socket(_EVENTS)

    def events(self) -> Iterator[int]:
        """Yield the connection events that wait."""
        yield from _events(self.monitor)

    def frames(self) -> Iterator[tuple[str, bytes, list[bytes]]]:
        """Yield ``(authenticated key, connection, parts)`` of the frames that wait."""
        for message in _received(self.socket):
            yield str(message[-1].get("User-Id")), message[0].bytes, [part.bytes for part in message[1:]]

    def close(self) -> None:
        """Close both sockets; what was sent last still leaves, for `LINGER_MS`."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(LINGER_MS)


class ServerWire:
    """One connection of the ROUTER."""

    def __init__(self, server: ServerSocket, connection: bytes) -> None:
        self._socket = server.socket
        self.connection = connection

    def send(self, parts: list[bytes]) -> bool:
        """Hand a frame to the socket; `False` when the connection is gone."""
        return _send(self._socket, [self.connection, *parts])


class ClientWire:
    """A DEALER, its connection to one server, and what became of it."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        card: Card,
        keys: tuple[bytes, bytes],
        *,
        ipv6: bool,
        max_bytes: int,
    ) -> None:
        self.socket = context.socket(zmq.DEALER)
        _limit(self.socket, max_bytes)
        self.socket.curve_serverkey = card.public_key.encode()
        self.socket.curve_publickey, self.socket.curve_secretkey = keys
        self.socket.reconnect_ivl = _RECONNECT_MS
        self.socket.reconnect_ivl_max = _MAX_RECONNECT_MS
        self.socket.ipv6 = ipv6
        self.monitor = self.socket.get_monitor_socket(_EVENTS)
        self.connected = False
        self.refused = False
        """The server knows our key not (yet); libzmq does not try again by itself."""
        self.broken = False
        """A connection was lost: what is queued belongs to the past."""
        self.socket.connect(card.address)

    def read_events(self) -> tuple[bool, bool]:
        """Take in the connection events; returns whether one was made, and whether one was lost."""
        made = lost = False
        for event in _events(self.monitor):
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                made = self.connected = True
            elif event == zmq.EVENT_DISCONNECTED:
                lost = lost or self.connected
                self.broken = self.broken or self.connected
                self.connected = False
            elif event in _REFUSALS:
                self.refused = True
        return made, lost

    def frames(self) -> Iterator[list[bytes]]:
        """Yield the parts of the frames that wait."""
        for message in _received(self.socket):
            yield [part.bytes for part in message]

    def send(self, parts: list[bytes]) -> bool:
        """Hand a frame to the socket; `False` when the connection is gone."""
        return self.connected and _send(self.socket, parts)

    def close(self) -> None:
        """Close both sockets; what was sent last still leaves, for `LINGER_MS`."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(LINGER_MS if self.connected else 0)


def _limit(socket: zmq.Socket[bytes], max_bytes: int) -> None:
    socket.linger = LINGER_MS
    socket.maxmsgsize = max_bytes + _ENVELOPE_BYTES
    # Nothing here may block the I/O thread; the protocol itself bounds what is under way.
    socket.sndhwm = 0
    # What a peer sends ahead of this thread stays in its own memory.
    socket.rcvhwm = _RECEIVE_AHEAD
    # Connections whose other host has vanished are given back some time; the silence is noticed long before.
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = 60
    socket.tcp_keepalive_intvl = 15
    socket.tcp_keepalive_cnt = 4


def _send(socket: zmq.Socket[bytes], parts: list[bytes]) -> bool:
    try:
        socket.send_multipart(parts, zmq.NOBLOCK)
    except zmq.ZMQError as error:
        if error.errno in {zmq.EHOSTUNREACH, zmq.EAGAIN}:
            return False
        raise
    return True


def _received(socket: zmq.Socket[bytes]) -> Iterator[list[zmq.Frame]]:
    for _ in range(_BATCH):
        if not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return
        try:
            yield socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return


def _events(monitor: Any) -> Iterator[int]:
    with contextlib.suppress(zmq.Again):
        while True:
            yield int(recv_monitor_message(monitor, zmq.NOBLOCK)["event"])
