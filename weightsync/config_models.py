"""The parts of the configuration contract as checked models: what they have in common, and the small ones.

A field's description completes the sentence "write ..." in the error about a wrong value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, ValidationError

from weightsync.config_sharding import KEYS as SHARDING_KEYS
from weightsync.config_sharding import ONLY_NIXL
from weightsync.errors import ConfigurationError
from weightsync.names import hint

DEFAULT_BUCKET_RATIO = 0.05
RATIO_KEY = "update_weights_bucket_memory_ratio"
RENAMED_KEYS = {
    "update_weights_bucket_megabytes": f"{RATIO_KEY}, a fraction of the smallest device memory",
    "cleanup_after_load": "release_after_refit",
}


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number is needed")
    return value


def _on_off(value: Any) -> Any:
    """YAML 1.1 reads a bare ``off`` as false."""
    return {False: "off", True: "full"}[value] if isinstance(value, bool) else value


Ratio = Annotated[float, BeforeValidator(_no_bool)]
Text = Annotated[str, Field(min_length=1)]
_Seconds = Annotated[float, BeforeValidator(_no_bool), Field(gt=0, allow_inf_nan=False)]


class Section(BaseModel):
    """A part of the configuration that takes only known keys. A field's description says what to write."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class RefitLifecycle(Section):
    """``refit_lifecycle``: how long to wait, how much to check, what happens to running requests."""

    connect_s: _Seconds = Field(60.0, description="seconds above 0 in which peers must connect")
    stall_s: _Seconds = Field(300.0, description="seconds above 0 that one bucket may take")
    total_s: _Seconds = Field(3600.0, description="seconds above 0 that one refit may take")
    silence_s: _Seconds = Field(
        15.0, description="seconds above 0 without a sign of life before a peer is lost"
    )
    verify: Annotated[Literal["full", "sample", "off"], BeforeValidator(_on_off)] = Field(
        "full", description="'full' (digests of every chunk), 'sample' (of one in 16) or 'off'"
    )
    in_flight: Literal["abort", "wait", "keep"] = Field(
        "abort", description="'abort', 'wait' or 'keep': what happens to running requests"
    )
    on_failure: Literal["fail", "continue"] = Field(
        "fail",
        description="'fail' or 'continue': whether the others go on when an inference engine has failed",
    )
    commit: Literal["in_place", "staged"] = Field(
        "in_place",
        description="'in_place' or 'staged': whether weights wait in host memory for a short pause",
    )
    allow_missing: list[Text] = Field([], description="a list of name patterns, such as ['lm_head.*']")
    allow_unused: list[Text] = Field([], description="a list of name patterns, such as ['mtp.*']")
    poison_released: StrictBool = Field(False, description="true or false")


@dataclass(frozen=True, kw_only=True)
class PluginRefitConfig:
    """``refit_cfg.<class path or registered name>``: the bucket ratio, and the plugin's own settings."""

    update_weights_bucket_memory_ratio: float
    settings: Mapping[str, Any]

    @property
    def device(self) -> str:
        """Kind of memory that the buckets take: the plugin's ``device`` setting, else ``"auto"``."""
        named = str(self.settings.get("device", "auto")).partition(":")[0]
        return named if named in {"cpu", "cuda"} else "auto"


def any_ratio() -> Any:
    """Make the field of a ratio that may be the whole memory: how many buckets there are is not known."""
    return Field(
        DEFAULT_BUCKET_RATIO, gt=0, le=1, description="a fraction of the smallest memory, above 0, at most 1"
    )


class PluginRatio(Section):
    """The one setting of a plugin's scope that is ours."""

    update_weights_bucket_memory_ratio: Ratio = any_ratio()


@dataclass(frozen=True)
class Shared:
    """Which keys of a section were written in another scope, that of all transports."""

    path: str
    keys: frozenset[str] = frozenset()
    transport: str = ""


_Model = TypeVar("_Model", bound=Section)


def validate_section(
    model: type[_Model], values: Mapping[Any, Any], path: str, shared: Shared | None = None
) -> _Model:
    """Make a model of what was written under ``path``; every complaint at once.

    Args:
        model: what to make.
        values: what was written.
        path: where; for keys of ``shared``, the scope that may overrule them.
        shared: the keys that were written elsewhere.

    Raises:
        ConfigurationError: an unknown key, or a wrong value; says what to write.
    """
    shared = shared or Shared("")
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        complaints = [_complaint(model, each, path, shared) for each in error.errors()]
        raise ConfigurationError("; ".join(dict.fromkeys(complaints))) from error


def _complaint(model: type[Section], error: Any, path: str, shared: Shared) -> str:
    key = error["loc"][0]
    unknown = error["type"] in ("extra_forbidden", "invalid_key")
    if key in shared.keys:
        return _misfit(model, key, error["input"], path, shared)
    if unknown and key in SHARDING_KEYS:
        return f"unknown key {path}.{key}; {ONLY_NIXL}"
    if unknown:
        fix = f"; write {RENAMED_KEYS[key]}" if key in RENAMED_KEYS else hint(str(key), model.model_fields)
        return f"unknown key {path}.{key}" + (fix or f" (known: {', '.join(model.model_fields)})")
    where = ".".join(map(str, error["loc"][:2])) if key == "backend_init_params" else str(key)
    reason = f" ({error['ctx']['error']})" if error["type"] == "value_error" else ""
    return f"{path}.{where}: got {error['input']!r:.120}{reason}; write {model.model_fields[key].description}"


def _misfit(model: type[Section], key: str, value: Any, path: str, shared: Shared) -> str:
    return (
        f"{shared.path}.{key}: refit_transport {shared.transport!r} cannot use {value!r:.120}; write "
        f"{model.model_fields[key].description}, for this transport alone as {path}.{key}"
    )
