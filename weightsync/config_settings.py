"""The settings of the selected transport: its own scope of ``refit_cfg``, over those that are shared."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from weightsync.class_paths import load_class_path
from weightsync.config_models import (
    RATIO_KEY,
    RENAMED_KEYS,
    PluginRatio,
    PluginRefitConfig,
    Shared,
    validate_section,
)
from weightsync.config_scopes import SCOPES, EngineScope, NixlRefitConfig, SharedRefitConfig
from weightsync.config_sharding import KEYS as SHARDING_KEYS
from weightsync.config_sharding import ONLY_NIXL, WEIGHTS_KEY, require_agreement
from weightsync.config_source import GENERATION, mapping_at
from weightsync.errors import ConfigurationError
from weightsync.names import (
    NAIVE,
    SHARED,
    engine_target,
    known_checkpoint_engines,
    nearest,
    split_class_path,
)
from weightsync.signatures import constructor_of

_PATH = f"{GENERATION}.refit_cfg"
_SHARED_PATH = f"{_PATH}.{SHARED}"
_log = logging.getLogger(__name__)


def read_settings(transport: str, refit_cfg: Any) -> EngineScope | PluginRefitConfig:
    """Return the settings of the selected transport.

    Args:
        transport: the selected name or class path.
        refit_cfg: what was written there.

    Raises:
        ConfigurationError: a scope of another transport, an unknown key or a wrong value; says what to write.
    """
    scopes = mapping_at(refit_cfg, _PATH)
    _check_scopes(transport, scopes)
    path = f"{_PATH}[{transport!r}]" if split_class_path(transport) else f"{_PATH}.{transport}"
    own = mapping_at(scopes.get(transport), path)
    if transport in SCOPES and WEIGHTS_KEY in SCOPES[transport].model_fields:
        require_agreement(own, path)
    shared = _read_shared(transport, mapping_at(scopes.get(SHARED), _SHARED_PATH), path)
    if transport not in SCOPES:
        return _plugin(transport, own, shared, path)
    elsewhere = Shared(_SHARED_PATH, frozenset(shared.keys() - own.keys()), transport)
    return validate_section(SCOPES[transport], {**shared, **own}, path, elsewhere)


def _check_scopes(transport: str, scopes: Mapping[Any, Any]) -> None:
    others = [scope for scope in scopes if scope not in (transport, SHARED)]
    if not others:
        return
    fields = {*SharedRefitConfig.model_fields, *NixlRefitConfig.model_fields, *RENAMED_KEYS}
    if any(scope in fields for scope in others):
        raise ConfigurationError(
            f"{_PATH}.{others[0]} has no scope; write it under {_PATH}.{transport}, or under {_SHARED_PATH} "
            "for whichever transport is selected"
        )
    known = known_checkpoint_engines()
    near = nearest(str(others[0]), [each for each in (transport, SHARED) if each not in scopes])
    if near is not None and len(others) == 1 and others[0] not in known:
        as_selected = f", as in {GENERATION}.refit_transport" if near == transport != NAIVE else ""
        raise ConfigurationError(
            f"{_PATH}: {others[0]!r} is not the selected transport; did you mean {near!r}{as_selected}?"
        )
    selects = f"null ({NAIVE})" if transport == NAIVE else repr(transport)
    raise ConfigurationError(
        f"two transports at once: {GENERATION}.refit_transport selects {selects}, but {_PATH} has settings "
        f"for {', '.join(map(repr, others))}; keep only {_PATH}.{transport}, and write under {_SHARED_PATH} "
        f"what holds for whichever transport is selected (known names: {', '.join(known)})"
    )


def _read_shared(transport: str, shared: dict[Any, Any], path: str) -> dict[str, Any]:
    """Return what is shared, each value checked as far as all transports agree on it."""
    special = {key for model in SCOPES.values() for key in model.model_fields} - {
        *SharedRefitConfig.model_fields
    }
    for key in shared:
        if key in special:
            ours = transport not in SCOPES or key in SCOPES[transport].model_fields
            fix = f"write it under {path}" if ours else f"leave it out, {transport} does not take it"
            if not ours and key in SHARDING_KEYS:
                fix = ONLY_NIXL
            raise ConfigurationError(f"{_SHARED_PATH}.{key} is a setting of one transport; {fix}")
    checked = validate_section(SharedRefitConfig, shared, _SHARED_PATH)
    return checked.model_dump(include=set(shared))


def _plugin(transport: str, own: dict[Any, Any], shared: Mapping[str, Any], path: str) -> PluginRefitConfig:
    for key in own:
        if not isinstance(key, str):
            raise ConfigurationError(f"{path}: the key {key!r} is no string; write {str(key)!r}")
        if key == "bucket_size":
            raise ConfigurationError(f"{path}.bucket_size is computed; write {path}.{RATIO_KEY}")
        if key != RATIO_KEY and (key in RENAMED_KEYS or nearest(key, [RATIO_KEY], cutoff=0.85)):
            raise ConfigurationError(f"unknown key {path}.{key}; write {RENAMED_KEYS.get(key, RATIO_KEY)}")
    ratio = {key: value for key, value in {**shared, **own}.items() if key == RATIO_KEY}
    checked = validate_section(PluginRatio, ratio, path)
    settings = {**_taken(transport, shared, own, path), **own}
    settings.pop(RATIO_KEY, None)
    return PluginRefitConfig(
        update_weights_bucket_memory_ratio=checked.update_weights_bucket_memory_ratio, settings=settings
    )


def _taken(transport: str, shared: Mapping[str, Any], own: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the shared settings that a plugin's constructor takes and its own scope does not overrule."""
    offered = {key: value for key, value in shared.items() if key != RATIO_KEY and key not in own}
    if not offered:
        return {}
    constructor = constructor_of(_plugin_class(transport, offered, path))
    taken = {key: value for key, value in offered.items() if constructor.takes(key)}
    left = [key for key in offered if key not in taken]
    if left:
        _log.info("%s: %s does not take %s", _SHARED_PATH, transport, ", ".join(left))
    return taken


def _plugin_class(transport: str, offered: Mapping[str, Any], path: str) -> type:
    target = engine_target(transport) or transport
    try:
        found = load_class_path(target) if isinstance(target, str) else target
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{_SHARED_PATH}: whether {transport!r} takes {', '.join(offered)} cannot be seen here; write it "
            f"under {path}. {error.message}"
        ) from error
    if not isinstance(found, type):
        raise ConfigurationError(f"{GENERATION}.refit_transport: {transport!r} is no class; name the class")
    return found
