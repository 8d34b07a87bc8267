"""From a name to a checkpoint engine: short names, ``module:ClassName`` paths, and checked construction.

Everything that can be wrong with a plugin is found here, before a worker allocates anything, and is
said in terms of what its author or user has to change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, TypeVar, overload

from weightsync.class_paths import load_class_path, naming_distribution
from weightsync.engines.base import CheckpointEngine
from weightsync.errors import ConfigurationError
from weightsync.names import (
    BUILTIN_ENGINES,
    SHARED,
    class_path_of,
    engine_target,
    engine_targets,
    hint,
    known_checkpoint_engines,
    split_class_path,
    unknown_engine_message,
)
from weightsync.signatures import constructor_of

__all__ = [
    "create_checkpoint_engine",
    "known_checkpoint_engines",
    "register_checkpoint_engine",
    "resolve_checkpoint_engine",
]

_Engine = TypeVar("_Engine", bound=type[CheckpointEngine])


@overload
def register_checkpoint_engine(name: str, target: str | type[CheckpointEngine]) -> None: ...


@overload
def register_checkpoint_engine(name: str) -> Callable[[_Engine], _Engine]: ...


def register_checkpoint_engine(
    name: str, target: str | type[CheckpointEngine] | None = None
) -> Callable[[_Engine], _Engine] | None:
    """Give a checkpoint engine a short name in this process; without ``target``, a class decorator.

    Args:
        name: the name to use as ``refit_transport``: letters, digits, ``_`` and ``-``.
        target: the engine class, or its ``module:ClassName``, which is imported on first use.

    Raises:
        ConfigurationError: the name is malformed or stands for something else, or the target is no engine.
    """
    if target is not None:
        _register(name, target)
        return None

    def decorate(cls: _Engine) -> _Engine:
        _register(name, cls)
        return cls

    return decorate


def create_checkpoint_engine(
    backend: str, *, bucket_size_bytes: int, engine_kwargs: Mapping[str, Any] | None = None
) -> CheckpointEngine:
    """Construct the checkpoint engine that ``backend`` names.

    Args:
        backend: a short name (``"nixl"``, or a registered one) or a ``module:ClassName`` path.
        bucket_size_bytes: bytes of each transfer bucket, at least 1; passed on as ``bucket_size``.
        engine_kwargs: the backend's own settings; passed on as keywords.

    Raises:
        ConfigurationError: no such engine, or it does not take these arguments. What the constructor
            itself raises passes through.
    """
    cls = resolve_checkpoint_engine(backend)
    kwargs = dict(engine_kwargs or {})
    if isinstance(bucket_size_bytes, bool) or not isinstance(bucket_size_bytes, int) or bucket_size_bytes < 1:
        raise ConfigurationError(
            f"bucket_size_bytes must be a positive whole number, got {bucket_size_bytes!r}"
        )
    _require_complete(cls)
    _require_accepted(backend, cls, kwargs)
    engine = cls(bucket_size=bucket_size_bytes, **kwargs)  # type: ignore[call-arg]
    _require_layout(cls, engine)
    return engine


def resolve_checkpoint_engine(backend: str) -> type[CheckpointEngine]:
    """Return the class that a short name or a ``module:ClassName`` path stands for, importing it.

    Raises:
        ConfigurationError: an unknown name, a malformed path, an unimportable module, or no engine class.
        MissingDependencyError: the engine's module needs a package that is not installed, and says so.
    """
    if not isinstance(backend, str):
        raise ConfigurationError(f"a checkpoint engine is selected by a string, got {backend!r}")
    target = engine_target(backend) or backend
    if not isinstance(target, str):
        return _require_engine(target, backend)
    if split_class_path(target) is None:
        raise ConfigurationError(unknown_engine_message(backend))
    with naming_distribution(backend):
        return _require_engine(load_class_path(target, content=_engines_of), target)


def _register(name: str, target: str | type[CheckpointEngine]) -> None:
    if not isinstance(name, str) or not name.replace("-", "_").isidentifier():
        raise ConfigurationError(f"{name!r} is no engine name: use letters, digits, '_' and '-'")
    if not isinstance(target, str):
        _require_engine(target, name)
    elif split_class_path(target) is None:
        raise ConfigurationError(f"cannot register {name!r}: {target!r} is no 'module:ClassName' path")
    if name == SHARED:
        raise ConfigurationError(
            f"{name!r} is no engine name: refit_cfg.{name} has the settings of all engines"
        )
    known = engine_target(name)
    if known is not None and not _same(known, target):
        raise ConfigurationError(
            f"checkpoint engine {name!r} already stands for {class_path_of(known)}: "
            f"choose another name for {class_path_of(target)}"
        )
    if name not in BUILTIN_ENGINES:
        engine_targets[name] = target


def _same(old: str | type, new: str | type) -> bool:
    # Two classes made in one function share a path and are not the same; a reloaded module's are.
    return old is new or (class_path_of(old) == class_path_of(new) and "<locals>" not in class_path_of(new))


def _engines_of(module: ModuleType) -> str:
    names = sorted(
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, CheckpointEngine) and value is not CheckpointEngine
    )
    return f" (engines in it: {', '.join(names)})" if names else " (it has no checkpoint engine)"


def _require_engine(found: Any, path: str) -> type[CheckpointEngine]:
    if not isinstance(found, type):
        raise ConfigurationError(
            f"checkpoint engine {path!r} is no class but {type(found).__name__} {found!r:.80}; "
            "name the class itself"
        )
    if not issubclass(found, CheckpointEngine):
        raise ConfigurationError(
            f"checkpoint engine {path!r} is no subclass of weightsync.engines.base.CheckpointEngine "
            f"(its bases: {', '.join(base.__name__ for base in found.__bases__)})"
        )
    return found


def _require_complete(cls: type[CheckpointEngine]) -> None:
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if missing:
        raise ConfigurationError(
            f"checkpoint engine {class_path_of(cls)} does not implement {', '.join(missing)}"
        )


def _require_accepted(backend: str, cls: type[CheckpointEngine], kwargs: dict[str, Any]) -> None:
    constructor = constructor_of(cls)
    scope = f"policy.generation.refit_cfg[{backend!r}]"
    if "bucket_size" in kwargs:
        raise ConfigurationError(
            f"{scope}: 'bucket_size' is computed; set update_weights_bucket_memory_ratio instead"
        )
    if not constructor.takes("bucket_size"):
        raise ConfigurationError(
            f"the constructor of checkpoint engine {class_path_of(cls)} must take 'bucket_size' (bytes)"
            f"{hint('bucket_size', constructor.names)}"
        )
    settings = [name for name in constructor.names if name != "bucket_size"]
    unknown = [name for name in kwargs if not constructor.takes(name)]
    if unknown:
        raise ConfigurationError(
            f"{scope}: checkpoint engine {class_path_of(cls)} does not take "
            f"{', '.join(f'{name!r}{_near(name, settings)}' for name in unknown)}; "
            f"it takes {', '.join(settings) or 'no settings'}"
        )
    absent = [name for name in constructor.required if name not in ("bucket_size", *kwargs)]
    if absent:
        raise ConfigurationError(f"{scope}: checkpoint engine {class_path_of(cls)} needs {', '.join(absent)}")


def _near(name: str, accepted: list[str]) -> str:
    text = hint(name, accepted).removeprefix("; ")
    return f" ({text})" if text else ""


def _require_layout(cls: type[CheckpointEngine], engine: CheckpointEngine) -> None:
    inherited = cls.get_target_weight_layout is CheckpointEngine.get_target_weight_layout
    if engine.shard_expert_weights and inherited:
        raise ConfigurationError(
            f"checkpoint engine {class_path_of(cls)} enables shard_expert_weights, so it must implement "
            "get_target_weight_layout"
        )
