"""Workers that are Ray actors.

A policy actor is one rank. A rollout actor hosts one inference engine with one or several ranks; hosts
around an asynchronous engine offer ``checkpoint_engine_rpc_async`` and are called through it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from weightsync.cluster.colocated import COLOCATED_METHODS, ColocatedPolicyGroup, ColocatedRolloutGroup
from weightsync.cluster.units import AnswerSource, HostGroup, RawAnswer, Request, UnitGroup
from weightsync.errors import (
    ConfigurationError,
    ErrorRecord,
    MissingDependencyError,
    PeerLostError,
    TransportError,
)

_FETCH_S = 10.0
_MAX_TEXT = 500


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise MissingDependencyError("Ray worker groups need Ray: pip install 'weightsync[ray]'") from error
    return ray


class RayPolicyGroup(UnitGroup):
    """Policy workers as Ray actors.

    Args:
        actors: handles of actors with ``checkpoint_engine_rpc``, in rank order.

    Raises:
        MissingDependencyError: Ray is not installed.
        ConfigurationError: an actor does not have the method.
    """

    def __init__(self, actors: Sequence[Any]) -> None:
        super().__init__("policy", actors, _RayCaller(_ray()))

    def _require_workers(self, workers: Sequence[Any]) -> None:
        _require_methods(workers, ["checkpoint_engine_rpc"])


class RayRolloutGroup(HostGroup):
    """Inference engines as Ray actors, one host for each engine.

    Global rollout ranks follow the order of the hosts: each host is asked how many ranks it has and told
    its first one, so that ranks are unique and contiguous however the engines count theirs.

    Args:
        hosts: handles of actors with ``refit_control`` and ``checkpoint_engine_rpc`` or
            ``checkpoint_engine_rpc_async``.
        startup_s: seconds in which all engines must have started and answered.

    Raises:
        MissingDependencyError: Ray is not installed.
        ConfigurationError: an actor does not have the methods.
        WeightSyncError: a host died, or did not answer in time; says which.
    """

    def __init__(self, hosts: Sequence[Any], *, startup_s: float = 600.0) -> None:
        super().__init__(hosts, _RayCaller(_ray()), startup_s)

    def _require_workers(self, workers: Sequence[Any]) -> None:
        _require_methods(workers, ["checkpoint_engine_rpc_async", "checkpoint_engine_rpc"])
        _require_methods(workers, ["refit_control"])


def ray_colocated_groups(
    actors: Sequence[Any], *, startup_s: float = 600.0
) -> tuple[ColocatedPolicyGroup, ColocatedRolloutGroup]:
    """Return both groups of actors that hold a policy rank and an inference engine each.

    Args:
        actors: handles of actors with the methods of `ColocatedWorkerMixin`, in rank order.
        startup_s: seconds in which all engines must have started and answered.

    Raises:
        MissingDependencyError: Ray is not installed.
        ConfigurationError: an actor does not have the methods.
        WeightSyncError: an actor died, or did not answer in time; says which.
    """
    caller = _RayCaller(_ray())
    for method in COLOCATED_METHODS:
        _require_methods(actors, [method])
    return ColocatedPolicyGroup(actors, caller), ColocatedRolloutGroup(actors, caller, startup_s)


def _require_methods(actors: Sequence[Any], any_of: Sequence[str]) -> None:
    for number, actor in enumerate(actors):
        if not any(hasattr(actor, name) for name in any_of):
            raise ConfigurationError(f"Ray actor {number} ({actor!r}) has no method {any_of[-1]!r}")


class _RayCaller:
    def __init__(self, ray: Any) -> None:
        self._ray = ray

    def start(self, requests: Sequence[Request]) -> AnswerSource:
        return _RayAnswers(self._ray, requests)


class _RayAnswers:
    """Object references on their way."""

    def __init__(self, ray: Any, requests: Sequence[Request]) -> None:
        self._ray = ray
        self._refused: dict[int, RawAnswer] = {}
        self._refs: dict[int, Any] = {}
        for request in requests:
            try:
                method = getattr(request.unit.worker, _entry(request))
                self._refs[request.unit.index] = method.remote(request.method, request.kwargs)
            except (ray.exceptions.RayError, ValueError, TypeError) as error:
                self._refused[request.unit.index] = _failed(ray, request.unit.index, error)

    def take(self, timeout_s: float, awaited: Collection[int]) -> list[RawAnswer]:
        answers = [answer for index, answer in self._refused.items() if index in awaited]
        refs = {ref: index for index, ref in self._refs.items() if index in awaited}
        if not refs:
            return answers
        if not answers:
            self._ray.wait(list(refs), num_returns=1, timeout=timeout_s)
        ready, _ = self._ray.wait(list(refs), num_returns=len(refs), timeout=0)
        return answers + [self._answer(ref, refs[ref]) for ref in ready]

    def _answer(self, ref: Any, index: int) -> RawAnswer:
        try:
            return RawAnswer(index, value=self._ray.get(ref, timeout=_FETCH_S))
        except Exception as error:  # noqa: BLE001 - a task error has the type of what the worker raised
            return _failed(self._ray, index, error)


def _entry(request: Request) -> str:
    asynchronous = f"{request.entry}_async"
    return asynchronous if hasattr(request.unit.worker, asynchronous) else request.entry


def _failed(ray: Any, index: int, error: Exception) -> RawAnswer:
    """Say what an error of a Ray call means for the worker."""
    errors = ray.exceptions
    if isinstance(error, errors.RayTaskError):
        # First: it also has the type of what the worker raised, which may be news about another actor.
        cause = error.cause if isinstance(error.cause, Exception) else error
        record = ErrorRecord.from_exception(cause)
        return RawAnswer(index, error=replace(record, traceback=str(error)))
    if isinstance(error, errors.ActorDiedError | errors.NodeDiedError | errors.WorkerCrashedError):
        return RawAnswer(index, lost=f"its Ray actor is dead and must be replaced: {_one_line(error)}")
    if isinstance(error, errors.ActorUnavailableError):
        message = f"its Ray actor cannot be reached at the moment: {_one_line(error)}"
        return RawAnswer(index, error=ErrorRecord(kind=PeerLostError.__name__, message=message))
    if isinstance(error, errors.RayError):
        message = f"Ray could not carry the call ({type(error).__name__}): {_one_line(error)}"
        return RawAnswer(index, error=ErrorRecord(kind=TransportError.__name__, message=message))
    return RawAnswer(index, error=ErrorRecord.from_exception(error))


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    # The end matters most: that is where a traceback names the error.
    return text if len(text) <= _MAX_TEXT else f"{text[:100]} ... {text[100 - _MAX_TEXT :]}"
