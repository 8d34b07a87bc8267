"""The YAML file of a run: the example's own keys, and weightsync's keys handed on untouched.

Everything under ``policy.generation`` but ``vllm_kwargs`` is weightsync's (``refit_transport``,
``refit_cfg``, ...) and is read by `weightsync.config.load_refit_config`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from weightsync.config import load_refit_config
from weightsync.errors import ConfigurationError
from weightsync.names import NAIVE


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PolicySettings(_Settings):
    """The trained model and how it is trained."""

    model: str
    """``smollm2-135m-instruct``, ``tiny-qwen3``, or the path of a Hugging Face checkpoint."""
    workers: int = Field(default=2, ge=1)
    """FSDP2 ranks, one Ray actor each."""
    learning_rate: float = Field(gt=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    micro_batch_size: int = Field(ge=1)
    """Samples in one forward and backward pass of one rank."""
    generation: dict[str, Any]


class GrpoSettings(_Settings):
    """The algorithm and its task."""

    task: Literal["arithmetic", "token-class"]
    steps: int = Field(ge=3)
    prompts_per_step: int = Field(ge=1)
    samples_per_prompt: int = Field(ge=2)
    max_new_tokens: int = Field(ge=1)
    clip_ratio: float = Field(default=0.2, gt=0, lt=1)
    kl_coefficient: float = Field(default=0.01, ge=0)


class CheckSettings(_Settings):
    """What the run must show to exit with zero."""

    logprob_tolerance: float = Field(gt=0)
    """Largest allowed |policy - vLLM| log-probability of a sampled token, natural logarithm."""
    reward_rise: float
    """Mean reward of the last third of the steps less that of the first third, at least."""


class DemoConfig(_Settings):
    """One run."""

    policy: PolicySettings
    grpo: GrpoSettings
    check: CheckSettings
    seed: int = 0

    @model_validator(mode="after")
    def _same_work_on_every_rank(self) -> Self:
        # FSDP's collectives pair up only if every rank runs the same number of equal passes.
        samples = self.grpo.prompts_per_step * self.grpo.samples_per_prompt
        one_pass = self.policy.workers * self.policy.micro_batch_size
        if samples % one_pass:
            raise ValueError(
                f"prompts_per_step x samples_per_prompt ({samples}) must be a multiple of "
                f"workers x micro_batch_size ({one_pass})"
            )
        return self

    @property
    def vllm_kwargs(self) -> dict[str, Any]:
        """Extra keyword arguments of ``vllm.LLM``."""
        return dict(self.policy.generation.get("vllm_kwargs") or {})

    @property
    def shares_processes(self) -> bool:
        """Whether each policy worker has a vLLM engine in its own process."""
        return load_refit_config(self.refit_source).transport == NAIVE

    @property
    def refit_source(self) -> dict[str, Any]:
        """The part of the file that belongs to weightsync, in the shape `load_refit_config` takes."""
        own = {key: value for key, value in self.policy.generation.items() if key != "vllm_kwargs"}
        return {"policy": {"generation": own}}


def load_config(
    path: Path,
    *,
    steps: int | None = None,
    seed: int | None = None,
    transport: str | None = None,
    shard_weights: str | None = None,
) -> DemoConfig:
    """Read and check a YAML file; ``steps``, ``seed`` and the others replace what it says.

    Raises:
        ConfigurationError: the file is unreadable, no YAML mapping, or holds a wrong or unknown key.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigurationError(f"cannot read the configuration {path}: {error}") from error
    if not isinstance(data, dict):
        raise ConfigurationError(f"{path} does not hold a mapping at its top level")
    try:
        return DemoConfig.model_validate(_with_overrides(data, steps, seed, transport, shard_weights))
    except ValidationError as error:
        raise ConfigurationError(f"{path}: {_first_problems(error)}") from error


def _with_overrides(
    data: dict[str, Any],
    steps: int | None,
    seed: int | None,
    transport: str | None,
    shard_weights: str | None,
) -> dict[str, Any]:
    policy = data.get("policy")
    if isinstance(policy, dict) and isinstance(policy.get("generation"), dict):
        generation = _redirected(policy["generation"], transport, shard_weights)
        data = {**data, "policy": {**policy, "generation": generation}}
    if steps is not None and isinstance(data.get("grpo"), dict):
        data = {**data, "grpo": {**data["grpo"], "steps": steps}}
    return data if seed is None else {**data, "seed": seed}


def _redirected(
    generation: dict[str, Any], transport: str | None, shard_weights: str | None
) -> dict[str, Any]:
    if transport is not None:
        generation = {**generation, "refit_transport": transport}
    if shard_weights is None:
        return generation
    # Of the transport that is selected: one that moves whole tensors only refuses the key.
    scopes, name = generation.get("refit_cfg") or {}, str(generation.get("refit_transport"))
    scope = {**(scopes.get(name) or {}), "shard_weights": shard_weights}
    return {**generation, "refit_cfg": {**scopes, name: scope}}


def _first_problems(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(map(str, problem['loc'])) or 'file'}: {problem['msg']}" for problem in error.errors()[:5]
    )
