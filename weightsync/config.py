"""The configuration contract: what `policy.generation` says about the refit, checked.

::

    policy:
      generation:
        backend: vllm
        colocated: {enabled: false}
        refit_transport: nixl            # or "module:ClassName"
        refit_cfg:
          nixl: {device: cpu}            # exactly the scope of the selected transport
        refit_lifecycle: {total_s: 600}  # waits, verification, what happens to running requests

All other keys belong to the framework and are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context, Decimal
from fractions import Fraction
from math import isfinite
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from weightsync.config_models import (
    RATIO_KEY,
    RENAMED_KEYS,
    NixlRefitConfig,
    PluginRatio,
    PluginRefitConfig,
    RefitLifecycle,
    validate_section,
)
from weightsync.config_source import OWNED_KEYS, naming_file, read_generation_section
from weightsync.errors import ConfigurationError
from weightsync.names import (
    engine_targets,
    known_checkpoint_engines,
    nearest,
    split_class_path,
    unknown_engine_message,
)

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
_GENERATION = "policy.generation"


@dataclass(frozen=True, kw_only=True)
class RefitConfig:
    """The checked configuration of a refit."""

    transport: str
    """``"nixl"``, a registered name, or a ``module:ClassName`` path."""
    scope: NixlRefitConfig | PluginRefitConfig
    lifecycle: RefitLifecycle

    @property
    def bucket_memory_ratio(self) -> float:
        """Fraction of the smallest memory that one transfer bucket takes."""
        return self.scope.update_weights_bucket_memory_ratio

    @property
    def device(self) -> str:
        """Kind of memory that the buckets take: ``"cuda"`` or ``"cpu"``."""
        return self.scope.device

    def engine_kwargs(self) -> dict[str, Any]:
        """Return the keywords for the engine's constructor, without ``bucket_size``."""
        if isinstance(self.scope, PluginRefitConfig):
            return dict(self.scope.settings)
        waits = {"connect_s", "stall_s", "total_s", "silence_s", "verify", "poison_released"}
        return self.scope.model_dump(exclude={RATIO_KEY}) | self.lifecycle.model_dump(include=waits)


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
    _check_backend(generation.get("backend", "vllm"))
    _check_colocated(generation.get("colocated"))
    transport = _transport(generation)
    scope = _scope(transport, generation.get("refit_cfg"))
    path = f"{_GENERATION}.refit_lifecycle"
    lifecycle = validate_section(RefitLifecycle, _mapping(generation.get("refit_lifecycle"), path), path)
    return RefitConfig(transport=transport, scope=scope, lifecycle=lifecycle)


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
    limit = " (nixl takes at most 0.5: this worker has too little memory)" if least > Decimal("0.5") else ""
    return f"set {RATIO_KEY} to {least:f} or more{limit}"


def _refuse_misspelled(generation: Mapping[str, Any]) -> None:
    for key in generation:
        near = (
            nearest(key, OWNED_KEYS, cutoff=0.8) if isinstance(key, str) and key not in OWNED_KEYS else None
        )
        if near is not None:
            raise ConfigurationError(f"unknown key {_GENERATION}.{key}; write {_GENERATION}.{near}")


def _check_backend(backend: Any) -> None:
    if backend != "vllm":
        raise ConfigurationError(
            f"{_GENERATION}.backend: this version cannot refit {backend!r}, only vllm; write vllm"
        )


def _check_colocated(value: Any) -> None:
    path = f"{_GENERATION}.colocated"
    colocated = _mapping(value, path)
    for key in colocated:
        if key != "enabled" and isinstance(key, str) and nearest(key, ["enabled"], cutoff=0.8):
            raise ConfigurationError(f"unknown key {path}.{key}; write {path}.enabled")
    enabled = colocated.get("enabled", False)
    if not isinstance(enabled, bool):
        raise ConfigurationError(f"{path}.enabled: got {enabled!r}; write false")
    if enabled:
        raise ConfigurationError(
            f"{path}.enabled is true, but checkpoint-engine refit serves generation on workers of its own; "
            f"write {path}.enabled: false, or leave out {_GENERATION}.refit_transport and refit colocated "
            "generation through your framework's IPC path"
        )


def _transport(generation: Mapping[str, Any]) -> str:
    path = f"{_GENERATION}.refit_transport"
    name = generation.get("refit_transport")
    if name is None:
        raise ConfigurationError(f"{path} is missing; write {path}: nixl, or a 'module:ClassName'")
    if isinstance(name, list | tuple | dict):
        raise ConfigurationError(
            f"{path}: two transports at once ({name!r:.120}); name exactly one, such as nixl"
        )
    if not isinstance(name, str):
        raise ConfigurationError(f"{path}: got {name!r}; write nixl, or a 'module:ClassName'")
    if name not in engine_targets and split_class_path(name) is None:
        raise ConfigurationError(f"{path}: {unknown_engine_message(name)}")
    return name


def _scope(transport: str, value: Any) -> NixlRefitConfig | PluginRefitConfig:
    path = f"{_GENERATION}.refit_cfg"
    scopes = _mapping(value, path)
    _check_scopes(transport, scopes, path)
    path = f"{path}.{transport}" if transport in engine_targets else f"{path}[{transport!r}]"
    settings = _mapping(scopes.get(transport), path)
    return (
        validate_section(NixlRefitConfig, settings, path) if transport == "nixl" else _plugin(settings, path)
    )


def _check_scopes(transport: str, scopes: Mapping[Any, Any], path: str) -> None:
    others = [scope for scope in scopes if scope != transport]
    if not others:
        return
    fields = {*NixlRefitConfig.model_fields, *RENAMED_KEYS}
    if any(scope in fields for scope in others):
        raise ConfigurationError(f"{path}.{others[0]} has no scope; write it under {path}.{transport}")
    near = nearest(str(others[0]), [transport]) if len(scopes) == 1 else None
    if near is not None:
        raise ConfigurationError(
            f"{path}: {others[0]!r} is not the selected transport; did you mean {transport!r}, as in "
            f"{_GENERATION}.refit_transport?"
        )
    raise ConfigurationError(
        f"two transports at once: {_GENERATION}.refit_transport selects {transport!r}, but {path} has "
        f"settings for {', '.join(map(repr, others))}; keep only {path}.{transport}"
        f" (known names: {', '.join(known_checkpoint_engines())})"
    )


def _plugin(settings: dict[Any, Any], path: str) -> PluginRefitConfig:
    for key in settings:
        if not isinstance(key, str):
            raise ConfigurationError(f"{path}: the key {key!r} is no string; write {str(key)!r}")
        if key == "bucket_size":
            raise ConfigurationError(f"{path}.bucket_size is computed; write {path}.{RATIO_KEY}")
        if key != RATIO_KEY and (key in RENAMED_KEYS or nearest(key, [RATIO_KEY], cutoff=0.85)):
            raise ConfigurationError(f"unknown key {path}.{key}; write {RENAMED_KEYS.get(key, RATIO_KEY)}")
    ratio = {key: settings[key] for key in settings if key == RATIO_KEY}
    checked = validate_section(PluginRatio, ratio, path)
    return PluginRefitConfig(
        update_weights_bucket_memory_ratio=checked.update_weights_bucket_memory_ratio,
        settings={key: settings[key] for key in settings if key != RATIO_KEY},
    )


def _mapping(value: Any, path: str) -> dict[Any, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigurationError(f"{path} must be a mapping, got {value!r:.80}")
    return value
