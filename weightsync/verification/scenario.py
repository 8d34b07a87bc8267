"""The verification: refits in a row, each compared with an engine started from the policy's checkpoint.

A refit that changed nothing fails, since the engine then still agrees with the weights before it; one that
changed only a part fails, since the engine then agrees with no checkpoint.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightsync.cluster.ray import RayPolicyGroup, RayRolloutGroup
from weightsync.config import RefitConfig, load_refit_config
from weightsync.errors import ConfigurationError
from weightsync.report import RefitReport
from weightsync.synchronizer import CheckpointEngineWeightSynchronizer
from weightsync.verification.compare import TOLERANCES, Comparison, Generation, compare_generations
from weightsync.verification.live import LiveReport, verify_live
from weightsync.verification.workers import FreshEngines, VerifyEngine, VerifyPolicy

_CALL_S = 300.0


@dataclass(frozen=True, kw_only=True)
class VerifySettings:
    """What to verify.

    Attributes:
        checkpoint: where the policy starts.
        other_checkpoint: same architecture, other weights: where the engine under test starts.
        dtype: of the policy and of vLLM.
        refits: how many, in a row, with weights that change before each.
        drop: a tensor to leave out of every refit, to see that it is noticed.
        allow_missing: patterns of vLLM parameters that a refit may leave unwritten.
        device: of the transfer buffers, ``cpu`` or ``cuda``.
    """

    checkpoint: Path
    other_checkpoint: Path
    dtype: str = "float32"
    refits: int = 3
    drop: str | None = None
    allow_missing: tuple[str, ...] = ()
    device: str = "cpu"

    def refit_config(self) -> RefitConfig:
        """Return the configuration of the refits: NIXL, every digest checked."""
        generation = {
            "backend": "vllm",
            "colocated": {"enabled": False},
            "refit_transport": "nixl",
            "refit_cfg": {"nixl": {"device": self.device, "update_weights_bucket_memory_ratio": 0.002}},
            "refit_lifecycle": {"allow_missing": list(self.allow_missing), "total_s": _CALL_S},
        }
        return load_refit_config({"policy": {"generation": generation}})

    def vllm_kwargs(self, checkpoint: Path) -> dict[str, Any]:
        """Return the arguments of a small engine on a checkpoint."""
        return {
            "model": str(checkpoint),
            "dtype": self.dtype,
            "seed": 0,
            "max_model_len": 128,
            "max_num_seqs": 8,
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "kv_cache_memory_bytes": 32 << 20,
        }


@dataclass(frozen=True)
class RefitCheck:
    """One refit, compared."""

    version: int
    tensors: int
    bytes: int
    seconds: float
    changed: bool
    """Whether the engine generates otherwise than before the refit."""
    comparison: Comparison

    @property
    def passed(self) -> bool:
        """Whether the weights arrived, all of them."""
        return self.changed and self.comparison.agrees


class Verification:
    """One policy, one engine under test, and an actor that starts fresh engines, on a connected Ray.

    Args:
        ray: the module, connected.
        settings: what to verify.
        scratch: an empty directory for checkpoints; they are removed as it goes.

    Raises:
        ConfigurationError: no tolerance is known for the dtype.
    """

    def __init__(self, ray: Any, settings: VerifySettings, scratch: Path) -> None:
        if settings.dtype not in TOLERANCES:
            raise ConfigurationError(f"dtype must be one of {', '.join(TOLERANCES)}, got {settings.dtype!r}")
        self._ray = ray
        self._settings = settings
        self._scratch = scratch
        self._config = settings.refit_config()
        actor = ray.remote(num_cpus=1)
        self._policy = actor(VerifyPolicy).remote(
            settings.checkpoint, settings.dtype, self._config, settings.drop
        )
        self._engine = actor(VerifyEngine).remote(
            settings.vllm_kwargs(settings.other_checkpoint), refit_config=self._config
        )
        self._fresh = actor(FreshEngines).remote()

    def run(self) -> Iterator[RefitCheck]:
        """Yield one check for each refit.

        Raises:
            RefitError: a refit failed; one with a dropped tensor, for example.
        """
        self._get([each.ready.remote() for each in (self._policy, self._engine, self._fresh)])
        policy, rollout = RayPolicyGroup([self._policy]), RayRolloutGroup([self._engine])
        with CheckpointEngineWeightSynchronizer(policy, rollout, self._config) as synchronizer:
            synchronizer.init_communicator()
            before = self._get(self._engine.greedy.remote())
            for version in range(1, self._settings.refits + 1):
                expected = self._change_policy(version)
                report = synchronizer.sync_weights(version=version)
                served = self._get(self._engine.greedy.remote())
                yield self._check(report, before, served, expected)
                before = served

    def live(self) -> Iterator[LiveReport]:
        """Yield two comparisons of what runs: after a refit, and after the policy alone has changed.

        The first has to pass, the second must not.
        """
        self._get([each.ready.remote() for each in (self._policy, self._engine)])
        policy, rollout = RayPolicyGroup([self._policy]), RayRolloutGroup([self._engine])
        with CheckpointEngineWeightSynchronizer(policy, rollout, self._config) as synchronizer:
            synchronizer.init_communicator()
            synchronizer.sync_weights()
            yield verify_live(policy, rollout, timeout_s=_CALL_S, compare=self._compare_live)
            self._get(self._policy.change.remote(seed=1))
            yield verify_live(policy, rollout, timeout_s=_CALL_S, compare=self._compare_live)

    def _compare_live(self) -> Comparison:
        """Compare the engine's tokens with what the policy itself makes of them."""
        served = self._get(self._engine.greedy.remote())
        expected = self._get(self._policy.score.remote(served))
        return compare_generations(served, expected, TOLERANCES[self._settings.dtype])

    def _change_policy(self, version: int) -> list[Generation]:
        """Change the policy's weights; returns what an engine started from them generates."""
        directory = self._scratch / f"version-{version}"
        self._get(self._policy.change.remote(seed=version))
        self._get(self._policy.save.remote(directory))
        expected: list[Generation] = self._get(
            self._fresh.greedy.remote(self._settings.vllm_kwargs(directory))
        )
        shutil.rmtree(directory)
        return expected

    def _check(
        self,
        report: RefitReport,
        before: list[Generation],
        served: list[Generation],
        expected: list[Generation],
    ) -> RefitCheck:
        return RefitCheck(
            version=report.version,
            tensors=report.tensors,
            bytes=report.bytes,
            seconds=report.seconds["total"],
            changed=served != before,
            comparison=compare_generations(served, expected, TOLERANCES[self._settings.dtype]),
        )

    def _get(self, reference: Any) -> Any:
        return self._ray.get(reference, timeout=_CALL_S)
