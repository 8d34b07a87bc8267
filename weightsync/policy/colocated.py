"""What a training actor inherits that also holds an inference engine: both sides of a refit in one process.

::

    class Worker(ColocatedWorkerMixin):
        def __init__(self, config):
            self.model = ...
            self.engine_host = VllmEngineHost({...}, refit_config=load_refit_config(config))

        def weight_stream(self):
            return weight_stream_from(self.model)

        def offload_policy(self):                # optional
            self.model.to("cpu")

The policy side answers through ``checkpoint_engine_rpc``, the engine through ``colocated_rpc`` and
``refit_control``.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from weightsync.engines.buffers import bind_thread
from weightsync.policy.session import OFFLOAD, SEND
from weightsync.policy.worker import AsyncPolicyCheckpointEngineMixin, PolicyCheckpointEngineMixin

REFIT = "refit_colocated"
_UPDATE = "update_weights_from_checkpoint_engine"
TRANSFER = "transfer"
_NOTED = frozenset(
    {
        "pause", "resume_weights", "release_kv_cache", TRANSFER, "commit_refit", OFFLOAD, "resume_kv_cache",
        "reset_caches", "publish_version", "resume", "fence_refit",
    }
)  # fmt: skip
"""The steps that are kept."""


class _Steps:
    """Keeps the steps of the last refit."""

    def refit_steps(self) -> list[str]:
        """Return the steps of the last refit on this worker, in order; a failed one ends in ``failed``."""
        return list(self._steps())

    def _begin_steps(self, action: str) -> None:
        if action == "pause":
            self._steps().clear()

    def _note(self, step: str, *outcomes: dict[str, Any]) -> None:
        if step in _NOTED:
            failed = any("error" in outcome for outcome in outcomes)
            self._steps().append(f"{step} failed" if failed else step)

    def _steps(self) -> list[str]:
        # Made on first use, so that classes need not call a constructor of ours.
        steps: list[str] = self.__dict__.setdefault("_weightsync_refit_steps", [])
        return steps


class ColocatedWorkerMixin(_Steps, PolicyCheckpointEngineMixin):
    """Both sides of the worker protocol, for actors and processes without an event loop.

    Attributes:
        engine_host: the inference engine of this process, to be set by the class: a ``VllmEngineHost`` with
            ``VLLM_ENABLE_V1_MULTIPROCESSING=0``, a ``ModuleRolloutWorker``, or anything like them.
    """

    engine_host: Any

    def checkpoint_engine_rpc(
        self, checkpoint_method: str, method_kwargs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Run one method of the worker protocol for the policy rank; returns its outcome."""
        outcome = super().checkpoint_engine_rpc(checkpoint_method, method_kwargs)
        self._note(checkpoint_method, outcome)
        return outcome

    def colocated_rpc(self, checkpoint_method: str, method_kwargs: dict[str, Any] | None = None) -> Any:
        """Run one method of the worker protocol for the engine; returns an outcome for each of its ranks.

        ``refit_colocated`` sends and receives at once, the engine's half in a thread of its own; it returns
        ``{"policy": outcome, "rollout": [outcome, ...]}``.
        """
        if checkpoint_method == REFIT:
            return self._refit_colocated()
        outcomes = self.engine_host.checkpoint_engine_rpc(checkpoint_method, method_kwargs)
        self._note(checkpoint_method, *outcomes)
        return outcomes

    def refit_control(self, action: str, kwargs: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run one action on the engine; returns one outcome."""
        self._begin_steps(action)
        outcome: dict[str, Any] = self.engine_host.refit_control(action, kwargs)
        self._note(action, outcome)
        return outcome

    def _refit_colocated(self) -> dict[str, Any]:
        receiving = _in_thread(partial(self.engine_host.checkpoint_engine_rpc, _UPDATE))
        policy = self.checkpoint_engine_rpc(SEND)
        # Not bounded here: both ends keep the refit's deadlines, and the driver those of the call.
        rollout = receiving.result()
        self._note(TRANSFER, policy, *rollout)
        return {"policy": policy, "rollout": rollout}


class AsyncColocatedWorkerMixin(_Steps, AsyncPolicyCheckpointEngineMixin):
    """The same for async actors: what is asynchronous is awaited on the actor's own event loop.

    Attributes:
        engine_host: see `ColocatedWorkerMixin`; an ``AsyncVllmEngineHost``, whose engine has processes of its
            own, goes with ``refit_transport: ipc``.
    """

    engine_host: Any

    async def checkpoint_engine_rpc(
        self, checkpoint_method: str, method_kwargs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Run one method of the worker protocol for the policy rank; returns its outcome."""
        outcome = await super().checkpoint_engine_rpc(checkpoint_method, method_kwargs)
        self._note(checkpoint_method, outcome)
        return outcome

    async def colocated_rpc(self, checkpoint_method: str, method_kwargs: dict[str, Any] | None = None) -> Any:
        """Run one method of the worker protocol for the engine; see `ColocatedWorkerMixin`."""
        if checkpoint_method == REFIT:
            policy, rollout = await asyncio.gather(
                self.checkpoint_engine_rpc(SEND), self._engine_rpc(_UPDATE)
            )
            self._note(TRANSFER, policy, *rollout)
            return {"policy": policy, "rollout": rollout}
        outcomes = await self._engine_rpc(checkpoint_method, method_kwargs)
        self._note(checkpoint_method, *outcomes)
        return outcomes

    async def refit_control(self, action: str, kwargs: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run one action on the engine; returns one outcome."""
        self._begin_steps(action)
        outcome: dict[str, Any] = await _awaited(self.engine_host.refit_control, action, kwargs)
        self._note(action, outcome)
        return outcome

    async def _engine_rpc(self, method: str, kwargs: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        host = self.engine_host
        rpc = getattr(host, "checkpoint_engine_rpc_async", None) or host.checkpoint_engine_rpc
        outcomes: list[dict[str, Any]] = await _awaited(rpc, method, kwargs)
        return outcomes


async def _awaited(call: Callable[..., Any], *arguments: Any) -> Any:
    """Await an asynchronous call; run another in a thread, for it may block."""
    if inspect.iscoroutinefunction(call):
        return await call(*arguments)
    return await asyncio.wrap_future(_in_thread(partial(call, *arguments)))


def _current_device() -> torch.device | None:
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None or kind.type not in {"cuda", "npu"}:
        return None
    return torch.device(kind.type, torch.accelerator.current_device_index())


def _in_thread(call: Callable[[], Any]) -> Future[Any]:
    """Run a call in a daemon thread on the device of this one."""
    future: Future[Any] = Future()
    device = _current_device()

    def run() -> None:
        try:
            if device is not None:
                bind_thread(device)
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
            future.set_exception(error)

    threading.Thread(target=run, name="weightsync-colocated", daemon=True).start()
    return future
