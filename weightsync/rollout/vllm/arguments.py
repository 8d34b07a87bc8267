"""The arguments with which vLLM is started so that a checkpoint engine can refit it."""

from __future__ import annotations

from typing import Any, Protocol

from weightsync.errors import ConfigurationError

EXTENSION = "weightsync.rollout.vllm.extension.VllmInternalWorkerExtensionWithCheckpointEngine"
NIXL_WORKER = "weightsync.rollout.vllm.worker_cls.NixlVllmWorker"
_AGENT_KEYS = ("backend_name", "backend_init_params", "device", "shard_weights", "shard_expert_weights")
REFIT_CFG_KEY = "refit_cfg"
"""Key of ``additional_config`` under which the settings of the NIXL transport stand."""
LOADER_OPTIONS_KEY = "refit_loader"
"""Key of ``additional_config`` under which ``allow_missing`` and ``allow_unused`` stand."""

DEFAULT_TOTAL_S = 3600.0
"""Seconds that one refit may take where no configuration says it; the default of ``total_s`` there, too."""
_MARGIN_S = 60.0


class LifecycleSettings(Protocol):
    """The part of the refit configuration that an engine and its loader depend on."""

    @property
    def total_s(self) -> float:
        """Seconds that one refit may take."""

    @property
    def allow_missing(self) -> list[str]:
        """Parameters that need not be written."""

    @property
    def allow_unused(self) -> list[str]:
        """Tensors that may come and are not used."""


class RefitSettings(Protocol):
    """The part of the refit configuration that vLLM's start depends on."""

    @property
    def transport(self) -> str:
        """The selected transport: ``"nixl"``, or another one."""

    @property
    def lifecycle(self) -> LifecycleSettings:
        """How long a refit may take, and what the loader lets pass."""

    def engine_kwargs(self) -> dict[str, Any]:
        """Return the engine's settings."""


def rpc_timeout(refit_config: RefitSettings | None, rpc_timeout_s: float | None) -> float:
    """Return the seconds after which an engine that does not answer counts as lost.

    By default longer than a whole refit: a transfer that goes on belongs to an engine that lives.

    Raises:
        ConfigurationError: ``rpc_timeout_s`` is not above 0.
    """
    if rpc_timeout_s is None:
        return (DEFAULT_TOTAL_S if refit_config is None else refit_config.lifecycle.total_s) + _MARGIN_S
    if not rpc_timeout_s > 0:
        raise ConfigurationError(f"rpc_timeout_s must be above 0, got {rpc_timeout_s!r}")
    return rpc_timeout_s


def configure_vllm_kwargs(refit_config: RefitSettings, vllm_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return ``vllm_kwargs`` for ``LLM`` or ``AsyncEngineArgs`` with the refit worker and extension set.

    Args:
        refit_config: the loaded configuration (`weightsync.config.RefitConfig`).
        vllm_kwargs: the caller's own arguments; not changed.

    Raises:
        ConfigurationError: the caller set another worker or extension.
    """
    wanted = {"worker_extension_cls": EXTENSION}
    additional = dict(vllm_kwargs.get("additional_config") or {})
    if refit_config.transport == "nixl":
        wanted["worker_cls"] = NIXL_WORKER
        settings = refit_config.engine_kwargs()
        additional[REFIT_CFG_KEY] = {key: settings[key] for key in _AGENT_KEYS if settings.get(key)}
    additional[LOADER_OPTIONS_KEY] = {
        "allow_missing": list(refit_config.lifecycle.allow_missing),
        "allow_unused": list(refit_config.lifecycle.allow_unused),
    }
    for key, value in wanted.items():
        if vllm_kwargs.get(key) not in (None, "auto", value):
            raise ConfigurationError(
                f"vLLM argument {key} is {vllm_kwargs[key]!r}, but checkpoint-engine refit needs {value!r}: "
                "leave it out, or subclass that one and start vLLM without configure_vllm_kwargs"
            )
    return {**vllm_kwargs, **wanted, "additional_config": additional}
