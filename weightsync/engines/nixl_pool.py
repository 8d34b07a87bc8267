"""The NIXL agents of this process. Expensive to make, they outlive the engines that use them.

`preinit_nixl_agent` makes one early; an engine borrows it and gives it back.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from weightsync.engines.nixl_agent import NixlAgent, backend_params


class _AgentPool:
    """Idle agents of this process, by backend and parameters. A forked child starts with an empty pool."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[tuple[Any, ...], list[NixlAgent]] = {}

    def take(self, backend_name: str, params: Mapping[str, str]) -> NixlAgent:
        with self._lock:
            idle = self._idle.get(self._key(backend_name, params))
            if idle:
                return idle.pop()
        return NixlAgent(backend_name, params)

    def give(self, agent: NixlAgent, backend_name: str, params: Mapping[str, str]) -> None:
        with self._lock:
            self._idle.setdefault(self._key(backend_name, params), []).append(agent)

    def ensure(self, backend_name: str, params: Mapping[str, str]) -> NixlAgent:
        agent = self.take(backend_name, params)
        self.give(agent, backend_name, params)
        return agent

    @staticmethod
    def _key(backend_name: str, params: Mapping[str, str]) -> tuple[Any, ...]:
        return (os.getpid(), backend_name, tuple(sorted(params.items())))


_POOL = _AgentPool()


def preinit_nixl_agent(
    *, backend_name: str = "UCX", backend_init_params: Mapping[str, Any] | None = None
) -> NixlAgent:
    """Make this process's NIXL agent now, off the critical path; the first engine made later uses it."""
    return _POOL.ensure(backend_name, backend_params(backend_name, backend_init_params))


def borrow_agent(backend_name: str, params: Mapping[str, str]) -> NixlAgent:
    """Take an idle agent of this process, or make one."""
    return _POOL.take(backend_name, params)


def return_agent(agent: NixlAgent, backend_name: str, params: Mapping[str, str]) -> None:
    """Give an agent back for the next engine of this process."""
    _POOL.give(agent, backend_name, params)
