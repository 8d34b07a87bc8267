"""What a training actor inherits to take part in refits: the entry point, the send, and the hooks around it.

::

    class Trainer(PolicyCheckpointEngineMixin):
        def __init__(self, config):
            preinit_checkpoint_engine(config)
            self.model = ...

        def weight_stream(self):
            return weight_stream_from(self.model, dtype_policy=DtypePolicy("bfloat16"))

The mixins need no constructor call. `PolicyCheckpointEngineMixin` has no ``async def``, because a single one
would make Ray run the whole actor on an event loop; actors that do run on one use
`AsyncPolicyCheckpointEngineMixin`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weightsync.config import NixlRefitConfig, RefitConfig, load_refit_config
from weightsync.digests import WeightDigest
from weightsync.errors import ConfigurationError, LifecycleError
from weightsync.outcomes import run_for_outcome
from weightsync.policy.figures import MeteredWeights
from weightsync.policy.session import (
    DESCRIBE,
    DIGEST,
    OFFLOAD,
    POLICY_METHODS,
    SEND,
    SESSION_METHODS,
    PolicySession,
)
from weightsync.policy.shards import described
from weightsync.tensors import WeightStream

_SIDE = "policy"


class PolicyWeightHooks:
    """What a policy worker implements, whichever mixin it inherits."""

    def weight_stream(self) -> WeightStream | Generator[tuple[str, torch.Tensor], None, None]:
        """Return the weights to send, in Hugging Face names; called once for each send, on every rank.

        Override it: ``return weight_stream_from(self.model)``, or any generator of ``(name, tensor)``.
        """
        raise LifecycleError(
            f"{type(self).__name__} does not say what to send; implement weight_stream(), for example "
            "`return weightsync.policy.weight_stream_from(self.model)`"
        )

    def prepare_weight_send(self) -> None:
        """Called before each send: the place to bring weights onto the device."""

    def finish_weight_send(self) -> None:
        """Called after each send, also after a failed one, and also when preparing failed."""

    def offload_policy(self) -> None:
        """Called in a colocated refit once every rank has the new weights, before the KV cache comes back.

        Also after a failed transfer. The place to free the accelerator's memory for generation.
        """


class PolicyCheckpointEngineMixin(PolicyWeightHooks):
    """The policy side of the worker protocol, for actors and processes without an event loop.

    The rank is the integer attribute ``rank`` where the class has one, else the rank in `torch.distributed`,
    else 0.
    """

    def checkpoint_engine_rpc(
        self, checkpoint_method: str, method_kwargs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Run one method of the worker protocol; returns its outcome, never raises an `Exception`."""
        call = partial(_call, self, checkpoint_method, method_kwargs)
        return run_for_outcome(_SIDE, _rank_of(self), checkpoint_method, call)

    def send_weights_via_checkpoint_engine(self) -> dict[str, Any]:
        """Send all weights to the rollout side; returns ``{"bytes", "tensors", "batches", "seconds"}``.

        Raises:
            LifecycleError: no engine or no peers yet, a send is running, or this thread runs an event loop.
        """
        if _in_event_loop():
            error = LifecycleError(
                f"{type(self).__name__} runs on an event loop (an async actor), where this call would block; "
                "inherit AsyncPolicyCheckpointEngineMixin instead"
            )
            with _session_of(self).sending() as engine:
                engine.abort_refit(error)
            raise error
        return asyncio.run(_send(self))


class AsyncPolicyCheckpointEngineMixin(PolicyWeightHooks):
    """The same for async actors: the engine is awaited on the actor's own event loop."""

    async def checkpoint_engine_rpc(
        self, checkpoint_method: str, method_kwargs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Run one method of the worker protocol; returns its outcome, never raises an `Exception`."""
        settled = await _settle(partial(_call, self, checkpoint_method, method_kwargs))
        return run_for_outcome(_SIDE, _rank_of(self), checkpoint_method, settled)

    async def send_weights_via_checkpoint_engine(self) -> dict[str, Any]:
        """Send all weights to the rollout side; see `PolicyCheckpointEngineMixin`."""
        return await _send(self)


def preinit_checkpoint_engine(config: RefitConfig | Mapping[str, Any] | str | Path) -> None:
    """Make what is slow to make, off the critical path; call it in the actor's constructor.

    With ``refit_transport: nixl`` the NIXL agent of this process is created; other transports need nothing.

    Args:
        config: the RL configuration: checked, a mapping, or the path of its YAML file.

    Raises:
        ConfigurationError: the configuration is wrong.
        MissingDependencyError: NIXL is selected and not installed.
    """
    refit = config if isinstance(config, RefitConfig) else load_refit_config(config)
    if isinstance(refit.scope, NixlRefitConfig):
        from weightsync.engines.nixl import preinit_nixl_agent

        preinit_nixl_agent(
            backend_name=refit.scope.backend_name,
            backend_init_params=dict(refit.scope.backend_init_params),
            device=refit.scope.device,
            sharding=refit.scope.sharding,
        )


def _rank_of(worker: PolicyWeightHooks) -> int:
    rank = getattr(worker, "rank", None)
    if isinstance(rank, Integral):
        return int(rank)
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _session_of(worker: PolicyWeightHooks) -> PolicySession:
    # Made on first use, so that classes need not call a constructor of ours; setdefault is atomic.
    session: PolicySession = worker.__dict__.setdefault("_weightsync_policy_session", PolicySession())
    return session


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _call(worker: PolicyWeightHooks, method: str, kwargs: Mapping[str, Any] | None) -> Any:
    """Run a protocol method by name; the send of an async worker comes back as an awaitable."""
    target = _target(worker, method)
    try:
        bound = inspect.signature(target).bind(**(kwargs or {}))
    except TypeError as error:
        raise ConfigurationError(f"{method}: {error}") from error
    return target(*bound.args, **bound.kwargs)


def _target(worker: PolicyWeightHooks, method: str) -> Callable[..., Any]:
    if method in (SEND, OFFLOAD):
        own: Callable[..., Any] = getattr(worker, method)
        return own
    if method in _OF_THE_STREAM:
        return partial(_OF_THE_STREAM[method], worker)
    if method not in SESSION_METHODS:
        raise ConfigurationError(
            f"a policy worker has no method {method!r}; known: {', '.join(POLICY_METHODS)}"
        )
    target: Callable[..., Any] = getattr(_session_of(worker), method)
    if method.endswith("_checkpoint_engine_process_group"):
        return partial(target, worker_rank=_rank_of(worker))
    return target


async def _settle(call: Callable[[], Any]) -> Callable[[], Any]:
    """Await a call if it has to be; return a function that gives its value or raises its error."""
    try:
        value = call()
        if isinstance(value, Awaitable):
            value = await value
    except Exception as error:  # noqa: BLE001 - raised again by the function returned
        return partial(_raise, error)
    return lambda: value


def _raise(error: Exception) -> None:
    raise error


async def _send(worker: PolicyWeightHooks) -> dict[str, Any]:
    """Send once, and tidy up whatever happens: tell the peers, close the generator, run the finish hook."""
    with _session_of(worker).sending() as engine:
        tidying: list[Callable[[], None]] = [worker.finish_weight_send]
        try:
            worker.prepare_weight_send()
            weights = worker.weight_stream()
            tidying.insert(0, weights.close)
            metered = MeteredWeights(weights)
            await engine.send_weights(metered.for_engine())
        except BaseException as error:
            _tidy([partial(engine.abort_refit, error), *tidying], error)
            raise
        _tidy(tidying)
        return metered.figures(engine.refit_stats())


def _digest(worker: PolicyWeightHooks, kind: str | None = None, tensors: bool = False) -> dict[str, Any]:
    """Digest what would be sent now. Every rank has to be called: making the weights may be a collective.

    Args:
        worker: whose stream is digested.
        kind: of the digest, to compare with one that another kind of device has made.
        tensors: whether to return the digest of each tensor, too.
    """
    with _session_of(worker).digesting(), _weights_of(worker) as weights:
        digest = WeightDigest.of(weights, kind)
    return digest.to_dict(tensors=tensors)


def _describe(worker: PolicyWeightHooks, sharding: str) -> dict[str, Any]:
    """Tell the engine where this rank's part of the weights is; no weight is gathered for that.

    Args:
        worker: whose stream is described.
        sharding: what is moved by regions; ``"none"`` takes back what the engine was told before.

    Returns:
        The ``manifest`` as msgpack, its ``digest``, and by name the tensors that this rank can only send
        ``whole``, each with the reason.

    Raises:
        ConfigurationError: the stream has no manifest, or the engine moves no regions.
    """
    with _session_of(worker).describing() as engine:
        if sharding == "none":
            engine.use_memory(None)
            return {"manifest": b"", "digest": "", "whole": {}}
        with _weights_of(worker) as weights:
            manifest, memory = described(weights)
            engine.use_memory(memory)
    return {"manifest": manifest.encode(), "digest": manifest.digest(), "whole": dict(memory.table.whole)}


_OF_THE_STREAM: Mapping[str, Callable[..., dict[str, Any]]] = {DIGEST: _digest, DESCRIBE: _describe}


@contextmanager
def _weights_of(worker: PolicyWeightHooks) -> Iterator[Generator[tuple[str, torch.Tensor], None, None]]:
    """Make a worker's weights as for a send, and tidy up as after one."""
    tidying: list[Callable[[], None]] = [worker.finish_weight_send]
    try:
        worker.prepare_weight_send()
        weights = worker.weight_stream()
        tidying.insert(0, weights.close)
        yield weights
    except BaseException as error:
        _tidy(tidying, error)
        raise
    _tidy(tidying)


def _tidy(steps: list[Callable[[], None]], cause: BaseException | None = None) -> None:
    """Run every step. A step's failure never hides the cause; without one, the first failure is raised."""
    failure: Exception | None = None
    for step in steps:
        try:
            step()
        except Exception as error:  # noqa: BLE001 - noted on the cause, or raised below
            if cause is not None:
                cause.add_note(f"cleaning up failed as well: {error!r}")
            failure = failure or error
    if cause is None and failure is not None:
        raise failure
