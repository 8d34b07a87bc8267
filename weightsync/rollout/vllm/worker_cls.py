"""vLLM's worker with an early start for NIXL (``worker_cls``), and the arguments that select it.

Making the first NIXL agent is slow, and after vLLM's own set-up it would be on the path of the first refit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightsync.rollout.vllm.arguments import REFIT_CFG_KEY, configure_vllm_kwargs
from weightsync.rollout.vllm.cpu import enable_amx, is_cpu_platform

if TYPE_CHECKING:
    _PlatformWorker = object
elif is_cpu_platform():
    from vllm.v1.worker.cpu_worker import CPUWorker as _PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as _PlatformWorker

__all__ = ["NixlVllmWorker", "configure_vllm_kwargs"]


class NixlVllmWorker(_PlatformWorker):
    """vLLM worker that makes its NIXL agent before vLLM's own constructor runs."""

    _refit_preinit_agent: Any
    """Kept, so that the agent lives as long as the worker."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> NixlVllmWorker:
        """Make and keep the agent, then the worker."""
        from weightsync.engines.nixl import preinit_nixl_agent

        if is_cpu_platform():
            enable_amx()
        worker: NixlVllmWorker = super().__new__(cls)
        scope = (vllm_config.additional_config or {}).get(REFIT_CFG_KEY) or {}
        worker._refit_preinit_agent = preinit_nixl_agent(
            backend_name=scope.get("backend_name", "UCX"),
            backend_init_params=scope.get("backend_init_params"),
            device=scope.get("device", "cuda"),
            sharding="experts" if scope.get("shard_expert_weights") else scope.get("shard_weights", "none"),
        )
        return worker
