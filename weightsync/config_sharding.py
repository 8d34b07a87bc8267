"""Which tensors a refit moves by regions, as the settings of a transport say it. No I/O.

``shard_weights`` is the setting; ``shard_expert_weights: true`` says the same as ``shard_weights: experts``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast, get_args

from weightsync.class_paths import load_class_path
from weightsync.errors import ConfigurationError
from weightsync.names import engine_target

Sharding = Literal["none", "experts", "all", "auto"]
"""Which tensors are moved by regions: none, those of routed experts, all, or all that can be."""
SHARDINGS: tuple[str, ...] = get_args(Sharding)
BY_REGIONS = tuple(each for each in SHARDINGS if each != "none")

WEIGHTS_KEY = "shard_weights"
EXPERTS_KEY = "shard_expert_weights"
KEYS = (WEIGHTS_KEY, EXPERTS_KEY)
ONLY_NIXL = "only refit_transport nixl moves weights by regions: select that, or leave the key out"
_CONTRACT = "weightsync.engines.base"


def read_off(value: Any) -> Any:
    """Read the YAML boolean ``false`` as ``none``.

    Raises:
        ValueError: ``true`` does not say which tensors.
    """
    if value is True:
        raise ValueError("true does not say which tensors")
    return "none" if value is False else value


def require_agreement(written: Mapping[Any, Any], path: str) -> None:
    """Check that the two settings, where both were written under ``path``, mean the same.

    Raises:
        ConfigurationError: they do not; says what to write.
    """
    weights, experts = (written.get(key) for key in KEYS)
    if weights is False:
        weights = "none"
    if not isinstance(experts, bool) or weights not in SHARDINGS:
        return  # not written, or wrong in itself
    if weights != ("experts" if experts else "none"):
        means = "experts" if experts else "none"
        raise ConfigurationError(
            f"{path}.{EXPERTS_KEY}: {str(experts).lower()} means {WEIGHTS_KEY}: {means}, but {WEIGHTS_KEY} "
            f"is {weights}; keep only {path}.{WEIGHTS_KEY}: {weights}"
        )


def plugin_sharding(transport: str, settings: Mapping[str, Any]) -> Sharding:
    """Return which tensors a plugin is to move by regions, on layouts that the workers report.

    Only an engine that implements `CheckpointEngine.use_memory` is given them. One that has its own way to
    shard, by `CheckpointEngine.get_target_weight_layout` alone, arranges that itself: ``none``.

    Args:
        transport: its name or class path.
        settings: its scope, which may have the two settings.

    Raises:
        ConfigurationError: ``shard_weights`` is none of its values, or the two settings contradict.
    """
    default = "experts" if settings.get(EXPERTS_KEY) is True else "none"
    wanted = settings.get(WEIGHTS_KEY, default)
    if wanted in (None, False, "none") or not _takes_regions(transport):
        return "none"
    require_agreement(settings, transport)
    if wanted not in SHARDINGS:
        raise ConfigurationError(
            f"{transport}: {WEIGHTS_KEY} is {wanted!r:.80}; write one of {', '.join(SHARDINGS)}"
        )
    return cast(Sharding, wanted)


def _takes_regions(transport: str) -> bool:
    """Whether a plugin's class implements ``use_memory``; one that only workers can import does not count."""
    target = engine_target(transport) or transport
    try:
        cls = load_class_path(target) if isinstance(target, str) else target
    except ConfigurationError:
        return False
    owner = next((each for each in getattr(cls, "__mro__", ()) if "use_memory" in vars(each)), None)
    return owner is not None and owner.__module__ != _CONTRACT
