"""The configuration contract: what `policy.generation` says about the refit, checked.

::

    policy:
      generation:
        backend: vllm
        colocated: {enabled: false}
        refit_transport: nixl            # another short name, "module:ClassName", or null if colocated
        refit_cfg:
          shared: {device: cpu}          # for whichever transport is selected
          nixl: {backend_name: UCX}      # and exactly the scope of the selected one
        refit_lifecycle: {total_s: 600}  # waits, verification, what happens to running requests

All other keys belong to the framework and are left alone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context, Decimal
from fractions import Fraction
from math import isfinite
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from weightsync.config_models import RATIO_KEY, PluginRefitConfig, RefitLifecycle, validate_section
from weightsync.config_scopes import EngineScope, NixlRefitConfig
from weightsync.config_selection import select_transport
from weightsync.config_settings import read_settings
from weightsync.config_sharding import EXPERTS_KEY, WEIGHTS_KEY, Sharding, plugin_sharding
from weightsync.config_source import (
    GENERATION,
    OWNED_KEYS,
    mapping_at,
    naming_file,
    read_generation_section,
)
from weightsync.errors import ConfigurationError
from weightsync.names import NAIVE, nearest
from weightsync.topology import AUTO, Topology, choose_topology, make_topology

__all__ = [
    "MIB",
    "NixlRefitConfig",
    "PluginRefitConfig",
    "RefitConfig",
    "RefitLifecycle",
    "load_refit_config",
    "resolve_bucket_size",
]

MIB = 1 << 20
_WAITS = {"connect_s", "stall_s", "total_s", "silence_s", "verify", "poison_released"}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RefitConfig:
    """The checked configuration of a refit."""

    transport: str
    """A short name such as ``"nixl"``, or a ``module:ClassName`` path; ``"naive"`` for ``null``."""
    scope: EngineScope | PluginRefitConfig
    lifecycle: RefitLifecycle
    colocated: bool = False
    """Whether generation runs on the training workers."""

    @property
    def bucket_memory_ratio(self) -> float:
        """Fraction of the smallest memory that one transfer bucket takes."""
        return self.scope.update_weights_bucket_memory_ratio

    @property
    def device(self) -> str:
        """Kind of memory that the buckets take: ``"cuda"``, ``"cpu"`` or ``"npu"``; ``"auto"`` if unknown."""
        return self.scope.device

    @property
    def sharding(self) -> Sharding:
        """Which tensors are moved by regions; ``"none"`` for every transport but nixl.

        A plugin is asked for them where it implements `CheckpointEngine.use_memory`, and its own scope has
        ``shard_weights``, or ``shard_expert_weights: true``.

        Raises:
            ConfigurationError: a plugin's ``shard_weights`` is none of its values, or contradicts the other.
        """
        if isinstance(self.scope, PluginRefitConfig):
            return plugin_sharding(self.transport, self.scope.settings)
        return self.scope.sharding if isinstance(self.scope, NixlRefitConfig) else "none"

    def engine_kwargs(self) -> dict[str, Any]:
        """Return the keywords for the engine's constructor, without ``bucket_size``."""
        if isinstance(self.scope, PluginRefitConfig):
            return dict(self.scope.settings)
        kwargs = self.scope.model_dump(exclude={RATIO_KEY}) | self.lifecycle.model_dump(include=_WAITS)
        if isinstance(self.scope, NixlRefitConfig):  # whichever of the two was written, both say it
            kwargs |= {WEIGHTS_KEY: self.sharding, EXPERTS_KEY: self.sharding == "experts"}
        return kwargs

    def topology(self, train_world_size: int, rollout_world_size: int) -> Topology | None:
        """Return who will send to whom; `None` where the engine decides: a plugin, or no transport at all.

        What ``auto`` chooses is logged.

        Args:
            train_world_size: number of policy workers.
            rollout_world_size: number of rollout workers, over all engines.

        Raises:
            ConfigurationError: the topology does not fit the world sizes; says what to change.
        """
        if self.transport == NAIVE or isinstance(self.scope, PluginRefitConfig):
            return None
        sizes = {"train_world_size": train_world_size, "rollout_world_size": rollout_world_size}
        if self.scope.topology != AUTO:
            return make_topology(self.scope.topology, **sizes, fan_out=self.scope.fan_out)
        chosen = choose_topology(self.scope.topologies(), **sizes, fan_out=self.scope.fan_out)
        _log.info("topology of %s: %s", self.transport, chosen)
        return chosen


def load_refit_config(source: str | Path | Mapping[str, Any]) -> RefitConfig:
    """Read and check the refit settings of an RL configuration.

    Args:
        source: path of a YAML file, or the loaded mapping; the whole configuration, not only our part.

    Raises:
        ConfigurationError: a value, a key or a combination is wrong; says what to write instead.
    """
    with naming_file(source):
        return _check(read_generation_section(source))


def _check(generation: Mapping[str, Any]) -> RefitConfig:
    _refuse_misspelled(generation)
    transport, colocated = select_transport(generation)
    scope = read_settings(transport, generation.get("refit_cfg"))
    path = f"{GENERATION}.refit_lifecycle"
    lifecycle = validate_section(RefitLifecycle, mapping_at(generation.get("refit_lifecycle"), path), path)
    if transport == NAIVE:
        _refuse_in_one_process(lifecycle, path)
    return RefitConfig(transport=transport, scope=scope, lifecycle=lifecycle, colocated=colocated)


def _refuse_in_one_process(lifecycle: RefitLifecycle, path: str) -> None:
    """Refuse what needs engines that fail, and load, apart from the policy."""
    if lifecycle.on_failure == "continue":
        raise ConfigurationError(
            f"{path}.on_failure: a colocated engine shares its process with a policy worker, without which "
            "the others cannot go on; write fail"
        )
    if lifecycle.commit == "staged":
        raise ConfigurationError(
            f"{path}.commit: a colocated engine is asleep until the transfer, which moves nothing; "
            "write in_place"
        )


def resolve_bucket_size(capacities_bytes: Sequence[int], ratio: float) -> int:
    """Return the bytes of one bucket: the smallest capacity times ``ratio``, rounded down to a MiB.

    Args:
        capacities_bytes: memory of every policy and rollout worker, in bytes.
        ratio: above 0, at most 1.

    Raises:
        ConfigurationError: no capacity or a wrong one, a wrong ratio, or less than 1 MiB results.
    """
    if isinstance(ratio, bool) or not isinstance(ratio, Real) or not isfinite(ratio) or not 0 < ratio <= 1:
        raise ConfigurationError(f"{RATIO_KEY} must be above 0 and at most 1, got {ratio!r}")
    capacities = list(capacities_bytes)
    if not capacities:
        raise ConfigurationError("no worker reported a memory capacity: there is no worker to refit")
    for rank, capacity in enumerate(capacities):
        if isinstance(capacity, bool) or not isinstance(capacity, Integral) or capacity <= 0:
            raise ConfigurationError(
                f"worker {rank} of {len(capacities)} reported a capacity of {capacity!r} bytes"
            )
    smallest = int(min(capacities))
    # The decimal that was written, not its nearest binary fraction: 0.07 of 100 MiB is 7 MiB, not 6.
    size = int(smallest * Fraction(repr(float(ratio)))) // MIB * MIB
    if size < MIB:
        raise ConfigurationError(
            f"a bucket of {ratio} of the smallest capacity, {smallest} bytes, is less than 1 MiB; "
            f"{_least_ratio(smallest)}"
        )
    return size


def _least_ratio(capacity: int) -> str:
    least = Context(prec=4, rounding=ROUND_CEILING).divide(Decimal(MIB), Decimal(capacity))
    if least > 1:
        return "no ratio makes one: this worker needs more memory"
    limit = (
        " (transports take at most 0.5: this worker has too little memory)" if least > Decimal("0.5") else ""
    )
    return f"set {RATIO_KEY} to {least:f} or more{limit}"


def _refuse_misspelled(generation: Mapping[str, Any]) -> None:
    for key in generation:
        near = (
            nearest(key, OWNED_KEYS, cutoff=0.8) if isinstance(key, str) and key not in OWNED_KEYS else None
        )
        if near is not None:
            raise ConfigurationError(f"unknown key {GENERATION}.{key}; write {GENERATION}.{near}")
