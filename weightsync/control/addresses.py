"""Addresses of the control channel: which one to bind, which one to tell the peers."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from weightsync.errors import ConfigurationError

# Documentation networks: routed like any far address, owned by nobody.
_FAR_AWAY = ((socket.AF_INET, "203.0.113.1"), (socket.AF_INET6, "2001:db8::1"))
_PROBE_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A TCP host (name or literal, no brackets) and port."""

    host: str
    port: int

    @classmethod
    def parse(cls, address: str) -> Endpoint:
        """Read ``tcp://host:port`` or ``tcp://[ipv6]:port``.

        Raises:
            ConfigurationError: anything else.
        """
        host, port = _split(address.removeprefix("tcp://")) if address.startswith("tcp://") else ("", "")
        if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
            raise ConfigurationError(
                f"{address!r} is no control address; write tcp://host:port, an IPv6 host in brackets"
            )
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"tcp://{bracketed(self.host)}:{self.port}"


def _split(authority: str) -> tuple[str, str]:
    if authority.startswith("["):
        host, closed, port = authority[1:].partition("]:")
        return (host, port) if closed and is_ipv6(host) else ("", "")
    host, _, port = authority.rpartition(":")
    return ("", "") if ":" in host else (host, port)


def bracketed(host: str) -> str:
    """Return a host as it stands before ``:port``: IPv6 literals in brackets."""
    return f"[{host}]" if is_ipv6(host) else host


def plain_host(host: str, setting: str) -> str:
    """Check a host that a person wrote, and strip the brackets of an IPv6 literal.

    Raises:
        ConfigurationError: it is empty, or carries a scheme or a port; says what to write.
    """
    if host.startswith("[") and host.endswith("]") and is_ipv6(host[1:-1]):
        return host[1:-1]
    if is_ipv6(host):
        return host
    if not host or "://" in host or ":" in host or "/" in host or any(c.isspace() for c in host):
        only = _host_in(host)
        hint = f"write {setting}={only!r}" if only else f"write {setting}='10.0.0.5', for example"
        raise ConfigurationError(
            f"{setting}={host!r} is not a host: {hint} (the port is chosen by the system and published)"
        )
    return host


def _host_in(text: str) -> str:
    host, _ = _split(text.rpartition("://")[2])
    return host


def default_host() -> str:
    """Return the address of the interface that the default route leaves by, else the loopback address.

    Nothing is sent: connecting a datagram socket only asks the routing table.
    """
    for family, far in _FAR_AWAY:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((far, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return "127.0.0.1"


def choose_hosts(bind_host: str | None, advertise_host: str | None) -> tuple[str, str]:
    """Return the host to bind and the host to tell the peers.

    Raises:
        ConfigurationError: a host is malformed, or a wildcard would be advertised.
    """
    bind = plain_host(bind_host, "bind_host") if bind_host is not None else default_host()
    advertise = plain_host(advertise_host, "advertise_host") if advertise_host is not None else bind
    if is_wildcard(advertise):
        raise ConfigurationError(
            f"{advertise} stands for every interface and cannot be told to a peer: "
            "set advertise_host to the address by which peers reach this host"
        )
    return bind, advertise


def is_ipv6(host: str) -> bool:
    """Whether ``host`` is an IPv6 literal (without brackets; a zone is allowed)."""
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def is_wildcard(host: str) -> bool:
    """Whether ``host`` stands for every interface."""
    return host == "*" or _literal(host, "is_unspecified")


def is_loopback(host: str) -> bool:
    """Whether ``host`` is reached on this host only."""
    return host.lower() in {"localhost", "localhost.localdomain", "ip6-localhost"} or _literal(
        host, "is_loopback"
    )


def _literal(host: str, attribute: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return bool(getattr(address.ipv4_mapped, attribute))
    return bool(getattr(address, attribute))


def uses_ipv6(host: str) -> bool:
    """Whether a socket needs IPv6 for ``host``: a literal, or a name with IPv6 addresses only."""
    if is_ipv6(host):
        return True
    try:
        families = {info[0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return families == {socket.AF_INET6}


def is_this_host(host: str) -> bool:
    """Whether ``host`` is an address of this host, found by binding a port of it for a moment."""
    try:
        candidates = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return any(_can_bind(family, sockaddr) for family, _, _, _, sockaddr in candidates)


def _can_bind(family: int, sockaddr: tuple[object, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(sockaddr)
    except OSError:
        return False
    return True


def require_reachable_from(own: Endpoint, peer: Endpoint, peer_name: str) -> None:
    """Check that a peer can reach the loopback address that this side advertises.

    Raises:
        ConfigurationError: the peer is on another host.
    """
    if is_loopback(own.host) and not is_loopback(peer.host) and not is_this_host(peer.host):
        raise ConfigurationError(
            f"this side advertises {own}, a loopback address, to {peer_name} on another host ({peer.host}): "
            "set bind_host or advertise_host to an address that it can reach"
        )


def require_reachable(own: Endpoint, peer: Endpoint, peer_name: str) -> None:
    """Check that the loopback address which a peer advertises is meant for this host.

    Raises:
        ConfigurationError: the peer is on another host.
    """
    if not is_loopback(peer.host) or is_loopback(own.host):
        return
    try:
        socket.create_connection((peer.host, peer.port), timeout=_PROBE_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigurationError(
            f"{peer_name} advertises {peer}, a loopback address, and nothing listens there on this host "
            f"({own.host}): it is on another host, so set its bind_host or advertise_host"
        ) from error
