"""The hub: a worker's sockets and keys for the control channel, and the links made of them."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self

import zmq

from weightsync.control.addresses import (
    Endpoint,
    choose_hosts,
    require_reachable,
    require_reachable_from,
    uses_ipv6,
)
from weightsync.control.cards import Card, require_name
from weightsync.control.client import ClientLink
from weightsync.control.core import LinkCore
from weightsync.control.deadlines import Deadlines
from weightsync.control.frames import Frame, MalformedFrameError, decode_frame
from weightsync.control.guests import GuestLink, Ticket
from weightsync.control.link import Link
from weightsync.control.loop import IoLoop
from weightsync.control.messages import PROTOCOL_VERSION
from weightsync.control.server import ServerLink
from weightsync.control.watch import Watch
from weightsync.control.wires import ClientWire, Gatekeeper, ServerSocket, ServerWire
from weightsync.errors import ConfigurationError, LifecycleError

_log = logging.getLogger(__name__)

MAX_FRAME_BYTES = 64 << 20
_CLOSE_S = 1.8


class ControlHub:
    """One worker's access to the control channel: a key pair, a listening socket, and an I/O thread.

    Args:
        name: of this worker, as its peers' error texts show it.
        bind_host: address of an interface to listen on; `None` takes that of the default route.
        advertise_host: address that peers are told; `None` tells ``bind_host``.
        deadlines: of every link.
        max_frame_bytes: largest message, its payload included.

    Raises:
        ConfigurationError: a host is malformed, not this host's, or a wildcard that would be advertised.
    """

    def __init__(
        self,
        name: str,
        *,
        bind_host: str | None = None,
        advertise_host: str | None = None,
        deadlines: Deadlines = Deadlines(),  # noqa: B008 - frozen
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        require_name(name)
        bind, advertise = choose_hosts(bind_host, advertise_host)
        self.name = name
        self.deadlines = deadlines
        self.max_frame_bytes = max_frame_bytes
        self.protocol = PROTOCOL_VERSION
        self.news = threading.Condition()
        self._keys = zmq.curve_keypair()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._closed = False
        self._links: list[Link] = []
        self._by_key: dict[str, ServerLink] = {}
        self._loop = IoLoop(
            f"weightsync-control-{name:.40}",
            tick=self._tick,
            forgive=self._forgive,
            teardown=self._teardown,
            count=self.count,
        )
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._open_sockets(bind)
        self._card = Card(
            name, str(Endpoint(advertise, self._server.port)), self._keys[0].decode(), os.urandom(16).hex()
        )
        self._loop.start()
        atexit.register(self.close)

    def card(self) -> dict[str, str]:
        """Return what a peer needs to meet this hub: ``name``, ``address``, ``public_key``, ``session``."""
        return self._card.to_dict()

    def watch(self) -> Watch:
        """Return what waits for news of several links of this hub at once."""
        return Watch(self.news)

    def accept(self, peer_card: dict[str, Any]) -> Link:
        """Return the server end of a link: from now on the peer of that card may dial in.

        A peer that dials before is refused and counted as ``unauthenticated``; it tries again by itself.

        Raises:
            ConfigurationError: the card is malformed, or this hub advertises a loopback address to a peer
                on another host.
            LifecycleError: that peer is accepted already, or the hub is closed.
        """
        card = Card.parse(peer_card)
        require_reachable_from(self._card.endpoint, card.endpoint, card.name)
        link = ServerLink(self, card, self._card.session, wire_to=partial(ServerWire, self._server))
        with self._lock:
            self._require_open()
            if card.public_key in self._by_key:
                raise LifecycleError("this peer is accepted already: close its link first", peer=card.name)
            self._enter(link)
        return link

    def accept_guests(self) -> GuestLink:
        """Return the server end of a link for whoever holds its ticket, one guest at a time.

        Raises:
            LifecycleError: the hub is closed.
        """
        ticket = Ticket.new()
        card = replace(self._card, name="a latecomer", public_key=ticket.public_key)
        link = GuestLink(self, card, self._card.session, ticket, wire_to=partial(ServerWire, self._server))
        with self._lock:
            self._require_open()
            self._enter(link)
        return link

    def connect(self, peer_card: dict[str, Any], *, ticket: dict[str, str] | None = None) -> Link:
        """Return the client end of a link; it dials at its first `Link.begin`.

        Args:
            peer_card: the peer's `card`.
            ticket: of the peer's `accept_guests`; without it, the peer has to `accept` this hub's card.

        Raises:
            ConfigurationError: the card or the ticket is malformed, or the card advertises the loopback
                address of another host.
            LifecycleError: the hub is closed.
        """
        card = Card.parse(peer_card)
        if card.public_key == self._card.public_key:
            raise ConfigurationError("a hub cannot connect to itself", peer=card.name)
        require_reachable(self._card.endpoint, card.endpoint, card.name)
        link = ClientLink(
            self,
            card,
            dial=self._dial,
            hang_up=self._hang_up,
            ipv6=uses_ipv6(card.endpoint.host),
            keys=self._keys if ticket is None else Ticket.parse(ticket).keys,
        )
        with self._lock:
            self._require_open()
            self._links.append(link)
        return link

    @property
    def counters(self) -> dict[str, int]:
        """How many frames and connections were dropped, by reason.

        ``malformed``, ``oversize``, ``replayed``, ``late`` (of the refit just ended), ``stale`` (of an
        earlier handshake), ``foreign_epoch``, ``foreign_token``, ``foreign_session``, ``unauthenticated``,
        ``broken_handshake`` (connections that closed before they said who they are), ``unexpected``,
        ``overflow`` (messages that nobody took), and ``internal`` (errors in this package). Missing reasons
        read as 0.
        """
        with self._lock:
            return Counter(self._counts)

    def close(self) -> None:
        """Say good-bye to every peer and give back sockets, context and thread, in under two seconds.

        Idempotent. Waits blocked in a link raise `LifecycleError`.
        """
        with self._lock:
            first, self._closed = not self._closed, True
            links = list(self._links)
        if first:
            atexit.unregister(self.close)
            for link in links:
                link.shut_down()
            self._loop.submit(self._say_farewell)
        self._loop.stop(_CLOSE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # What links need (`link.LinkHost`).

    def count(self, what: str) -> None:
        """Count something dropped or refused."""
        with self._lock:
            self._counts[what] += 1

    def submit(self, job: Callable[[], None]) -> bool:
        """Run a job on the I/O thread; `False` when the hub is closed."""
        return self._loop.submit(job)

    def forget(self, link: LinkCore) -> None:
        """Drop a closed link; while the hub itself closes, links stay until their farewell."""
        with self._lock:
            if self._closed:
                return
            self._links = [other for other in self._links if other is not link]
            if isinstance(link, ServerLink):
                self._by_key.pop(link.key, None)
                self._gate.allowed.discard(link.key)
        if isinstance(link, ClientLink):
            self.submit(link.release_wire)

    # On the I/O thread.

    def _open_sockets(self, bind: str) -> None:
        self._gate = Gatekeeper(self._context, self.count)
        try:
            self._server = ServerSocket(self._context, bind, self._keys, self.max_frame_bytes)
        except ConfigurationError:
            self._gate.socket.close(0)
            self._context.term()
            self._loop.discard()
            raise
        self._loop.watch(self._gate.socket, self._gate.answer)
        self._loop.watch(self._server.monitor, self._on_server_events)
        self._loop.watch(self._server.socket, self._on_server_frames)

    def _dial(self, link: ClientLink) -> ClientWire:
        card = link.card
        wire = ClientWire(self._context, card, link.keys, ipv6=link.ipv6, max_bytes=self.max_frame_bytes)
        self._loop.watch(wire.monitor, link.on_events)
        self._loop.watch(wire.socket, partial(self._on_client_frames, link, wire))
        return wire

    def _hang_up(self, wire: ClientWire) -> None:
        self._loop.watch(wire.monitor, None)
        self._loop.watch(wire.socket, None)
        wire.close()

    def _on_server_events(self) -> None:
        now = time.monotonic()
        for event in self._server.events():
            if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self.count("unauthenticated")
            elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self.count("broken_handshake")
            elif event == zmq.EVENT_DISCONNECTED:
                for link in list(self._by_key.values()):
                    link.on_disconnect(now, certain=False)

    def _on_server_frames(self) -> None:
        for key, connection, parts in self._server.frames():
            link = self._by_key.get(key)
            if link is None:
                self.count("unauthenticated")
            elif (frame := self._decode(parts)) is not None:
                link.on_frame(frame, connection, time.monotonic())

    def _on_client_frames(self, link: ClientLink, wire: ClientWire) -> None:
        for parts in wire.frames():
            if (frame := self._decode(parts)) is not None:
                link.on_frame(frame, b"", time.monotonic())

    def _decode(self, parts: list[bytes]) -> Frame | None:
        if sum(map(len, parts[1:])) > self.max_frame_bytes:
            self.count("oversize")
            return None
        try:
            return decode_frame(parts, self.protocol)
        except MalformedFrameError:
            self.count("malformed")
            return None

    def _tick(self, now: float) -> float | None:
        dues = [due for link in self._all_links() if (due := self._tick_link(link, now)) is not None]
        return min(dues, default=None)

    def _tick_link(self, link: Link, now: float) -> float | None:
        try:
            return link.tick(now)
        except Exception:  # noqa: BLE001 - logged and counted
            # The other links must go on; this one's waits end by their deadlines.
            _log.exception("control channel: the clock of the link to %s failed", link.peer)
            self.count("internal")
            return now + 1.0

    def _forgive(self, seconds: float) -> None:
        for link in self._all_links():
            link.forgive(seconds)

    def _all_links(self) -> list[Link]:
        with self._lock:
            return list(self._links)

    def _say_farewell(self) -> None:
        for link in self._all_links():
            link.farewell()

    def _teardown(self) -> None:
        for link in self._all_links():
            link.shut_down()
            if isinstance(link, ClientLink):
                link.release_wire()
        self._server.close()
        self._gate.socket.close(0)
        self._context.term()

    def _enter(self, link: ServerLink) -> None:
        self._by_key[link.key] = link
        self._links.append(link)
        self._gate.allowed.add(link.key)

    def _require_open(self) -> None:
        if self._closed:
            raise LifecycleError("the control hub is closed")
