"""An engine host around vLLM's ``AsyncLLM``; the twin of `weightsync.rollout.vllm.host`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

from weightsync.errors import ConfigurationError, DeadlineError, ErrorRecord
from weightsync.outcomes import Outcome
from weightsync.rollout.controls import control_method, require_in_flight_mode
from weightsync.rollout.vllm.arguments import RefitSettings, rpc_timeout
from weightsync.rollout.vllm.cpu import is_cpu_platform
from weightsync.rollout.vllm.host import (
    describe_loss,
    prepare_process,
    require_reset,
    with_refit_classes,
)
from weightsync.rollout.vllm.host_state import (
    POLL_S,
    STAGE,
    STATUS_CHANGING,
    WRITING,
    HostState,
    has_ended,
)
from weightsync.rollout.vllm.resolving import resolve_async

_LIVENESS_S = 0.5


class AsyncVllmEngineHost:
    """One asynchronous vLLM engine and all its ranks, as the driver sees them.

    Args:
        vllm_kwargs: arguments for ``AsyncEngineArgs``; the engine is made here.
        engine: an ``AsyncLLM`` that exists already, instead of ``vllm_kwargs``.
        refit_config: sets the refit worker and extension in ``vllm_kwargs``; `None` if they are set.
        rank_prefix: the engine's first global rollout rank.
        rpc_timeout_s: seconds after which an engine that does not answer counts as lost; by default a minute
            more than the refit's ``total_s`` in ``refit_config``, or than the default of that, an hour.
    """

    def __init__(
        self,
        vllm_kwargs: dict[str, Any] | None = None,
        *,
        engine: Any = None,
        refit_config: RefitSettings | None = None,
        rank_prefix: int = 0,
        rpc_timeout_s: float | None = None,
    ) -> None:
        prepare_process()
        if (vllm_kwargs is None) == (engine is None):
            raise ConfigurationError("give either vllm_kwargs or engine")
        self.engine = engine or _make_engine(with_refit_classes(refit_config, vllm_kwargs or {}))
        self._timeout_s = rpc_timeout(refit_config, rpc_timeout_s)
        self._state = HostState(self.engine.vllm_config, rank_prefix)
        self._requests: set[str] = set()
        self._pauses = 0

    async def checkpoint_engine_rpc_async(
        self, checkpoint_method: str, method_kwargs: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """Run one method of the worker protocol on every rank; returns their outcomes in rank order."""
        if checkpoint_method == STAGE:
            return await self._stage()
        with self._state.writing(checkpoint_method):
            outcomes = await self._call_ranks(checkpoint_method, method_kwargs)
        if checkpoint_method in STATUS_CHANGING and self._state.lost is None:
            self._state.learn(await self._call_ranks("refit_status", None))
            if checkpoint_method in WRITING and self._state.withheld and self._state.is_whole:
                await (
                    self._let_run()
                )  # the driver gave the update up and resumed: nothing was written after all
        return outcomes

    async def refit_control(self, action: str, kwargs: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run one action on the engine; returns one outcome."""
        rank = self._state.rank_prefix
        try:
            call = control_method(self, action)(**(kwargs or {}))
            local = action in ("describe", "assign_ranks")
            value = await (call if local else self._bounded(action, call))
            return Outcome(rank, value=value).to_dict()
        except Exception as error:  # noqa: BLE001 - the boundary at which a host's errors become data
            record = ErrorRecord.from_exception(error, side="rollout", rank=rank, phase=action)
            return Outcome(rank, error=record).to_dict()

    def require_serving(self) -> None:
        """Check that requests may be taken now; while the engine is paused they are, and wait.

        Raises:
            WorkerFencedError: a rank holds partly written weights.
            PeerLostError: the engine does not answer any more.
        """
        self._state.require_serving()

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        """``AsyncLLM.generate``, refused or ended while the engine must not serve; see `require_serving`."""
        self.require_serving()
        self._requests.add(request_id)
        try:
            async for output in self.engine.generate(prompt, sampling_params, request_id, **kwargs):
                self.require_serving()
                yield output
        finally:
            self._requests.discard(request_id)

    async def control_pause(self, in_flight: str = "wait") -> None:
        """Let no request run: abort, drain or freeze those that do."""
        require_in_flight_mode(in_flight)
        self._pauses += 1
        self._state.pause(in_flight)
        await self.engine.pause_generation(mode=in_flight, clear_cache=False)

    async def control_release_kv_cache(self) -> None:
        """Give the KV cache's memory back where vLLM can."""
        sleeps = self.engine.vllm_config.model_config.enable_sleep_mode and not is_cpu_platform()
        if not sleeps or self._state.paused in (None, "keep") or self._state.kv_released:
            return
        # Before the call: a resume may overtake its answer, and to wake what is awake does no harm.
        self._state.kv_released = True
        await self.engine.release_kv_cache_memory()

    async def control_resume_weights(self) -> None:
        """Do nothing: this host does not put its engine to sleep."""

    async def control_resume_kv_cache(self) -> None:
        """Do nothing: vLLM lets requests run once its memory is whole, so the cache returns at the resume."""

    async def control_reset_caches(self) -> None:
        """Reset prefix, multimodal and encoder caches. Kept requests are computed anew."""
        kept = self._state.paused == "keep"
        require_reset(await self.engine.reset_prefix_cache(reset_running_requests=kept))
        await self.engine.reset_mm_cache()
        await self.engine.reset_encoder_cache()

    async def control_publish_version(self, version: int) -> None:
        """Make ``version`` what vLLM reports as its weight version."""
        await self.engine.update_weight_version(str(version))

    async def control_resume(self) -> None:
        """Let requests run again.

        While the weights are not whole, or an update still runs, the engine stays paused, and waiting
        requests are ended.
        """
        if self._state.is_whole:
            await self._let_run()
            return
        self._state.withheld = True
        for request_id in list(self._requests):
            await self.engine.abort(request_id)

    async def control_assign_ranks(self, rank_prefix: int) -> None:
        """Learn the engine's first global rollout rank."""
        self._state.assign_ranks(rank_prefix)

    async def control_describe(self) -> dict[str, int]:
        """Return ``{"world_size", "pid"}``."""
        return self._state.describe()

    def shutdown(self) -> None:
        """End vLLM's processes. The host is not used again."""
        self._state.lose("it was shut down")
        self.engine.shutdown()

    async def _stage(self) -> list[dict[str, Any]]:
        """Let the ranks receive in threads of their own, so that requests run meanwhile; wait for the end."""
        outcomes = await self._call_ranks("start_staging", None)
        if any("error" in outcome for outcome in outcomes):
            return outcomes
        deadline = time.monotonic() + self._timeout_s
        while not has_ended(outcomes := await self._call_ranks("poll_staging", None)):
            if time.monotonic() > deadline:
                return self._state.failed_outcomes(DeadlineError("staging did not end"), STAGE)
            await asyncio.sleep(POLL_S)
        return outcomes

    async def _let_run(self) -> None:
        pauses = self._pauses
        if self._state.kv_released:
            await self.engine.wake_up(tags=["kv_cache"])
            self._state.kv_released = False
        if self._pauses == pauses:
            await self.engine.resume_generation()
        if self._pauses == pauses:  # else the next refit has paused the engine meanwhile
            self._state.paused, self._state.withheld = None, False

    async def _call_ranks(self, method: str, kwargs: dict[str, Any] | None) -> list[dict[str, Any]]:
        try:
            outcomes: list[dict[str, Any]] = await self._bounded(method, self._collective(method, kwargs))
        except Exception as error:  # noqa: BLE001 - worker methods return their errors: this is the engine's
            self._state.lose(describe_loss(error))
            return self._state.lost_outcomes(method)
        return outcomes

    async def _collective(self, method: str, kwargs: dict[str, Any] | None) -> Any:
        args = (method, kwargs)
        answer = self.engine.collective_rpc("checkpoint_engine_call", timeout=self._timeout_s, args=args)
        return await resolve_async(answer)

    async def _bounded(self, phase: str, call: Coroutine[Any, Any, Any]) -> Any:
        """Await ``call`` for at most the host's timeout, or until vLLM's engine process is dead."""
        if self._state.lost is not None:
            call.close()
            self._state.require_serving()
        task = asyncio.ensure_future(call)
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline and not self.engine.errored:
            done, _ = await asyncio.wait({task}, timeout=_LIVENESS_S)
            if done:
                return task.result()
        task.cancel()
        raise self._state.gave_up(phase, None if self.engine.errored else self._timeout_s)


def _make_engine(vllm_kwargs: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**vllm_kwargs))
