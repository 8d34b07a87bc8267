"""An engine host around ``vllm.LLM``: the driver's calls on one side, vLLM's ``collective_rpc`` on the other.

Make it in the process, or as the Ray actor, that owns the engine. `weightsync.rollout.vllm.async_host` is
its twin for ``AsyncLLM``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from weightsync.errors import (
    ConfigurationError,
    DeadlineError,
    LifecycleError,
    WeightSyncError,
)
from weightsync.outcomes import run_for_outcome
from weightsync.rollout.controls import control_method, require_in_flight_mode
from weightsync.rollout.vllm.arguments import RefitSettings, configure_vllm_kwargs, rpc_timeout
from weightsync.rollout.vllm.cpu import enable_amx, is_cpu_platform
from weightsync.rollout.vllm.host_state import POLL_S, STAGE, STATUS_CHANGING, HostState, has_ended
from weightsync.rollout.vllm.memory import EngineMemory
from weightsync.rollout.vllm.resolving import resolve
from weightsync.rollout.vllm.turns import Turns

_LIVENESS_S = 0.5
_log = logging.getLogger(__name__)


class VllmEngineHost:
    """One synchronous vLLM engine and all its ranks, as the driver sees them.

    Args:
        vllm_kwargs: arguments for ``vllm.LLM``, which is made here.
        llm: an engine that exists already, instead of ``vllm_kwargs``.
        refit_config: sets the refit worker and extension in ``vllm_kwargs``; `None` if they are set.
        rank_prefix: the engine's first global rollout rank.
        rpc_timeout_s: seconds after which an engine that does not answer counts as lost; by default a minute
            more than the refit's ``total_s`` in ``refit_config``, or than the default of that, an hour.
    """

    def __init__(
        self,
        vllm_kwargs: dict[str, Any] | None = None,
        *,
        llm: Any = None,
        refit_config: RefitSettings | None = None,
        rank_prefix: int = 0,
        rpc_timeout_s: float | None = None,
    ) -> None:
        prepare_process()
        if (vllm_kwargs is None) == (llm is None):
            raise ConfigurationError("give either vllm_kwargs or llm")
        if llm is None:
            from vllm import LLM

            llm = LLM(**with_refit_classes(refit_config, vllm_kwargs or {}))
        self.llm = llm
        self._timeout_s = rpc_timeout(refit_config, rpc_timeout_s)
        self._state = HostState(llm.llm_engine.vllm_config, rank_prefix)
        self._memory = EngineMemory(llm, self._state)
        self._turns = Turns()  # vLLM's synchronous client serves one thread at a time

    def checkpoint_engine_rpc(
        self, checkpoint_method: str, method_kwargs: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """Run one method of the worker protocol on every rank; returns their outcomes in rank order."""
        if checkpoint_method == STAGE:
            return self._stage()
        try:
            with self._turns.take(self._timeout_s, checkpoint_method):
                with self._state.writing(checkpoint_method):
                    outcomes = self._call_ranks(checkpoint_method, method_kwargs)
                if checkpoint_method in STATUS_CHANGING and self._state.lost is None:
                    self._state.learn(self._call_ranks("refit_status", None))
        except DeadlineError as error:  # busy, not lost
            return self._state.failed_outcomes(error, checkpoint_method)
        return outcomes

    def refit_control(self, action: str, kwargs: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run one action on the engine; returns one outcome."""
        return run_for_outcome(
            "rollout", self._state.rank_prefix, action, lambda: self._control(action, kwargs or {})
        )

    def require_serving(self) -> None:
        """Check that requests may run now.

        Raises:
            WorkerFencedError: a rank holds partly written weights.
            PeerLostError: the engine does not answer any more.
            LifecycleError: the engine is paused for a refit.
        """
        self._state.require_serving()
        if self._state.paused is not None:
            raise LifecycleError("this engine is paused for a refit", side="rollout", phase="generate")
        if self._state.asleep:
            raise LifecycleError(
                "this engine sleeps: refit it, or call wake_up", side="rollout", phase="generate"
            )

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """``LLM.generate``, refused while the engine must not serve; see `require_serving`."""
        with self._turns.take(None, "generate"):
            self.require_serving()
            return self.llm.generate(*args, **kwargs)

    def sleep(self, level: int = 1) -> bool:
        """Give the engine's memory back for training; the next refit wakes it in the right order.

        Args:
            level: 1 keeps the weights in host memory; 2 gives them up: only a complete refit lets the engine
                serve again.

        Returns:
            Whether it sleeps. Where vLLM cannot give memory back, on a CPU and without
            ``enable_sleep_mode=True``, it stays awake, and the log says so.

        Raises:
            ConfigurationError: another level.
            LifecycleError: a refit is running.
        """
        if level not in (1, 2):
            raise ConfigurationError(f"level must be 1 or 2, got {level!r}")
        with self._turns.take(None, "sleep"):
            if self._state.paused is not None:
                raise LifecycleError("this engine is paused for a refit", side="rollout", phase="sleep")
            if (reason := self._memory.why_resident) is not None:
                _log.warning("the engine stays awake: %s", reason)
                return False
            if level == 2:  # before: a sleep that fails half-way must not leave it serving
                self._call_ranks("discard_weights", {"reason": "its weights were given up to sleep"})
                self._state.learn(self._call_ranks("refit_status", None))
            if not self._state.asleep:
                self._memory.sleep(level)
        return True

    def wake_up(self) -> None:
        """Bring back what `sleep` gave back, without a refit."""
        with self._turns.take(None, "wake_up"):
            self._memory.resume()

    def control_pause(self, in_flight: str = "wait") -> None:
        """Let no request begin, and wait for the one that runs: a synchronous engine cannot stop it."""
        require_in_flight_mode(in_flight)
        self._state.pause(in_flight)
        with self._turns.take(self._timeout_s, "pause"):
            pass

    def control_release_kv_cache(self) -> None:
        """Give the KV cache's memory back where vLLM can; an engine that sleeps has its weights woken."""
        self._memory.release_kv_cache()

    def control_resume_weights(self) -> None:
        """Bring the weights of an engine that sleeps back into its memory; the KV cache stays away."""
        self._memory.resume_weights()

    def control_resume_kv_cache(self) -> None:
        """Bring the KV cache back, if it was given back; requests stay paused."""
        self._memory.resume_kv_cache()

    def control_reset_caches(self) -> None:
        """Reset prefix, multimodal and encoder caches."""
        require_reset(self.llm.reset_prefix_cache())
        self.llm.reset_mm_cache()
        self.llm.llm_engine.reset_encoder_cache()

    def control_publish_version(self, version: int) -> None:
        """Make ``version`` what vLLM reports as its weight version."""
        self.llm.update_weight_version(str(version))

    def control_resume(self) -> None:
        """Let requests run again; a fenced engine still refuses them."""
        self._memory.resume()
        self._state.paused = None

    def control_assign_ranks(self, rank_prefix: int) -> None:
        """Learn the engine's first global rollout rank."""
        self._state.assign_ranks(rank_prefix)

    def control_describe(self) -> dict[str, int]:
        """Return ``{"world_size", "pid"}``."""
        return self._state.describe()

    def shutdown(self) -> None:
        """End vLLM's processes. The host is not used again."""
        self._state.lose("it was shut down")
        self.llm.llm_engine.engine_core.shutdown()

    def _stage(self) -> list[dict[str, Any]]:
        """Let the ranks receive in threads of their own, so that requests run meanwhile; wait for the end."""
        outcomes = self.checkpoint_engine_rpc("start_staging")
        if any("error" in outcome for outcome in outcomes):
            return outcomes
        deadline = time.monotonic() + self._timeout_s
        while not has_ended(outcomes := self.checkpoint_engine_rpc("poll_staging")):
            if time.monotonic() > deadline:
                return self._state.failed_outcomes(DeadlineError("staging did not end"), STAGE)
            time.sleep(POLL_S)
        return outcomes

    def _control(self, action: str, kwargs: dict[str, Any]) -> Any:
        method = control_method(self, action)
        if action in ("describe", "assign_ranks", "pause"):
            return method(**kwargs)
        if action == "resume" and not (self._state.kv_released or self._state.asleep):
            # Nothing to ask of vLLM: also while a request runs whose end a pause was not waited for.
            return self._bounded(action, lambda: method(**kwargs))
        with self._turns.take(self._timeout_s, action):
            return self._bounded(action, lambda: method(**kwargs))

    def _call_ranks(self, method: str, kwargs: dict[str, Any] | None) -> list[dict[str, Any]]:
        def call() -> Any:
            args = (method, kwargs)
            answer = self.llm.collective_rpc("checkpoint_engine_call", self._timeout_s, args)
            return resolve(answer, self._timeout_s)

        try:
            outcomes: list[dict[str, Any]] = self._bounded(method, call)
        except Exception as error:  # noqa: BLE001 - worker methods return their errors: this is the engine's
            self._state.lose(describe_loss(error))
            return self._state.lost_outcomes(method)
        return outcomes

    def _bounded(self, phase: str, call: Callable[[], Any]) -> Any:
        """Run ``call`` for at most the host's timeout, or until vLLM's engine process is seen to be dead."""
        if self._state.lost is not None:
            self._state.require_serving()
        if getattr(self.llm.llm_engine, "model_executor", None) is not None:
            return call()  # the engine runs in this very thread: nothing else could answer
        future = _in_thread(call)
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline:
            try:
                return future.result(_LIVENESS_S)
            except FutureTimeoutError:
                if future.done():
                    raise
                if self.llm.llm_engine.engine_core.resources.engine_dead:
                    raise self._state.gave_up(phase, None) from None
        raise self._state.gave_up(phase, self._timeout_s)


def _in_thread(call: Callable[[], Any]) -> Future[Any]:
    """Run ``call`` in a daemon thread: a stalled engine must not keep the process from ending."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - handed to the waiting thread
            future.set_exception(error)

    threading.Thread(target=run, name="weightsync-engine-call", daemon=True).start()
    return future


def prepare_process() -> None:
    """Check that vLLM is here, and prepare this process for computing with it.

    Raises:
        MissingDependencyError: vLLM is not installed.
    """
    if is_cpu_platform():
        enable_amx()


def with_refit_classes(refit_config: RefitSettings | None, vllm_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the engine's arguments, with the refit worker and extension where a configuration is given."""
    return dict(vllm_kwargs) if refit_config is None else configure_vllm_kwargs(refit_config, vllm_kwargs)


def describe_loss(error: BaseException) -> str:
    """Say why an engine counts as lost."""
    return error.message if isinstance(error, WeightSyncError) else f"{type(error).__name__}: {error}"


def require_reset(done: bool) -> None:
    """Check what ``reset_prefix_cache`` returned.

    Raises:
        LifecycleError: blocks are in use, so answers computed with old weights would be reused.
    """
    if not done:
        raise LifecycleError("vLLM did not reset its prefix cache: requests still hold blocks of it")
