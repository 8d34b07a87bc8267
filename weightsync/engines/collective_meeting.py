"""How the ranks of a collective transport agree, refit by refit, on the group that they broadcast in.

Any of them may have lost its group without the others' knowing, and may come late or again. So every refit
begins with a meeting at a store that policy rank 0 hosts: each other rank *asks* with a token that is new for
this refit and says what it holds; rank 0 *plans* for the tokens that it sees, plans again when one changes,
and says *go* once every rank has accepted that very plan.

The store, like all of `torch.distributed`, asks nobody who he is: keep its host in a trusted network.
"""

from __future__ import annotations

import socket
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
from torch._C._distributed_c10d import Store, TCPStore

from weightsync.control.addresses import is_wildcard, uses_ipv6
from weightsync.engines.transport import Check
from weightsync.errors import ConfigurationError, ProtocolError

_PAUSE_S = 0.002
_PLAN = "plan"
_BACKLOG = 128


@dataclass(frozen=True)
class Ask:
    """What a rank other than 0 says."""

    token: str
    held: str | None
    """The state of the group that it has from earlier refits."""
    accepted: str | None = None
    """Name of the plan that it has accepted."""


@dataclass(frozen=True)
class Plan:
    """What rank 0 says. ``name`` is new for each plan, and the label of the group if one is to be formed."""

    name: str
    tokens: list[str]
    keep: bool
    """Whether the group that all ranks hold is used again."""
    go: bool = False


_Said = TypeVar("_Said", Ask, Plan)


class Meeting:
    """One meeting, seen from one rank.

    Args:
        store: this rank's connection to the store; the keys begin with the session's name already.
        rank: in the group.
        size: of the group.
        held: the state of the group that this rank has from earlier refits, if it is to be used again.
    """

    def __init__(self, store: Store, *, rank: int, size: int, held: str | None) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._held = held

    def agree(self, go_on: Check) -> Plan:
        """Return the plan that all ranks follow.

        ``go_on`` is called again and again, and ends the wait by raising.

        Raises:
            ProtocolError: the store holds something else.
            RuntimeError: the store cannot be reached.
        """
        return self._follow(go_on) if self._rank else self._lead(go_on)

    def _lead(self, go_on: Check) -> Plan:
        plan = Plan("", [], keep=False)
        while True:
            go_on()
            asks = [self._read(_ask_of(rank), Ask) for rank in range(1, self._size)]
            present = [ask for ask in asks if ask is not None]
            if len(present) == len(asks):
                tokens = [ask.token for ask in present]
                if tokens != plan.tokens or not plan.name:
                    keep = self._held is not None and all(ask.held == self._held for ask in present)
                    plan = Plan(uuid.uuid4().hex, tokens, keep)
                    self._write(_PLAN, plan)
                elif all(ask.accepted == plan.name for ask in present):
                    self._write(_PLAN, Plan(plan.name, plan.tokens, plan.keep, go=True))
                    return plan
            time.sleep(_PAUSE_S)

    def _follow(self, go_on: Check) -> Plan:
        ask = Ask(uuid.uuid4().hex, self._held)
        self._write(_ask_of(self._rank), ask)
        while True:
            go_on()
            plan = self._read(_PLAN, Plan)
            if plan is not None and plan.tokens[self._rank - 1 : self._rank] == [ask.token]:
                if ask.accepted != plan.name:
                    ask = Ask(ask.token, ask.held, accepted=plan.name)
                    self._write(_ask_of(self._rank), ask)
                elif plan.go:
                    return plan
            time.sleep(_PAUSE_S)

    def _write(self, key: str, said: Ask | Plan) -> None:
        self._store.set(key, msgspec.json.encode(said).decode())

    def _read(self, key: str, kind: type[_Said]) -> _Said | None:
        if not self._store.check([key]):
            return None
        try:
            return msgspec.json.decode(self._store.get(key), type=kind)
        except (msgspec.MsgspecError, ValueError) as error:
            raise ProtocolError(f"the store of the group holds a damaged {key!r}: {error}") from error


def _ask_of(rank: int) -> str:
    return f"ask/{rank}"


def reserve_port(bind_host: str) -> socket.socket:
    """Return a listening socket on a port that the system chooses: the store's, where one is hosted.

    Raises:
        ConfigurationError: the address is not this host's.
    """
    host = "" if bind_host == "*" else bind_host
    family = socket.AF_INET6 if uses_ipv6(bind_host) else socket.AF_INET
    try:
        return socket.create_server((host, 0), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigurationError(f"the store of the group cannot listen on {bind_host!r}: {error}") from error


def host_store(listener: socket.socket, bind_host: str, *, timeout_s: float) -> Store:
    """Serve a store on a reserved port, which it takes over, and return a connection to it."""
    port = listener.getsockname()[1]
    host = _loopback(listener) if is_wildcard(bind_host) else bind_host
    settings: dict[str, Any] = {"master_listen_fd": listener.detach(), "wait_for_workers": False}
    return TCPStore(host, port, is_master=True, timeout=timedelta(seconds=timeout_s), **settings)


def join_store(host: str, port: int, *, timeout_s: float) -> Store:
    """Connect to a store; waits for its host.

    Raises:
        RuntimeError: it does not answer.
    """
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def _loopback(listener: socket.socket) -> str:
    return "::1" if listener.family == socket.AF_INET6 else "127.0.0.1"
