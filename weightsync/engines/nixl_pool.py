"""The NIXL agents of this process. Expensive to make, they outlive the engines that use them.

`preinit_nixl_agent` makes one early; an engine borrows it and gives it back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightsync.engines.nixl_agent import NixlAgent
from weightsync.engines.nixl_params import backend_params, reading_threads
from weightsync.engines.pool import Pool

_POOL: Pool[NixlAgent] = Pool()


def preinit_nixl_agent(
    *,
    backend_name: str = "UCX",
    backend_init_params: Mapping[str, Any] | None = None,
    device: str = "cuda",
    sharding: str = "none",
) -> NixlAgent:
    """Make this process's NIXL agent now, off the critical path; the first engine made later uses it.

    Args:
        backend_name: as the engine's.
        backend_init_params: as the engine's.
        device: as the engine's.
        sharding: the engine's ``shard_weights``.
    """
    threads = reading_threads(device, sharding)
    params = backend_params(backend_name, backend_init_params, threads=threads)
    agent = borrow_agent(backend_name, params)
    return_agent(agent, backend_name, params)
    return agent


def borrow_agent(backend_name: str, params: Mapping[str, str]) -> NixlAgent:
    """Take an idle agent of this process, or make one."""
    return _POOL.take(_key(backend_name, params), lambda: NixlAgent(backend_name, params))


def return_agent(agent: NixlAgent, backend_name: str, params: Mapping[str, str]) -> None:
    """Give an agent back for the next engine of this process."""
    _POOL.give(_key(backend_name, params), agent)


def _key(backend_name: str, params: Mapping[str, str]) -> tuple[Any, ...]:
    return (backend_name, *sorted(params.items()))
