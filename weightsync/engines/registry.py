"""From a name to a checkpoint engine: short names, ``module:ClassName`` paths, and checked construction.

Everything that can be wrong with a plugin is found here, before a worker allocates anything, and is
said in terms of what its author or user has to change.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, TypeVar, overload

from weightsync.engines.base import CheckpointEngine
from weightsync.errors import ConfigurationError, WeightSyncError
from weightsync.names import (
    BUILTIN_ENGINES,
    class_path_of,
    engine_targets,
    hint,
    known_checkpoint_engines,
    split_class_path,
    unknown_engine_message,
)

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
    target = engine_targets.get(backend, backend)
    if not isinstance(target, str):
        return _require_engine(target, backend)
    path = split_class_path(target)
    if path is None:
        raise ConfigurationError(unknown_engine_message(backend))
    return _require_engine(_attribute(_import(path[0], target), path[1], target), target)


def _register(name: str, target: str | type[CheckpointEngine]) -> None:
    if not isinstance(name, str) or not name.replace("-", "_").isidentifier():
        raise ConfigurationError(f"{name!r} is no engine name: use letters, digits, '_' and '-'")
    if not isinstance(target, str):
        _require_engine(target, name)
    elif split_class_path(target) is None:
        raise ConfigurationError(f"cannot register {name!r}: {target!r} is no 'module:ClassName' path")
    if name in engine_targets and not _same(engine_targets[name], target):
        raise ConfigurationError(
            f"checkpoint engine {name!r} already stands for {class_path_of(engine_targets[name])}: "
            f"choose another name for {class_path_of(target)}"
        )
    if name not in BUILTIN_ENGINES:
        engine_targets[name] = target


def _same(old: str | type, new: str | type) -> bool:
    # Two classes made in one function share a path and are not the same; a reloaded module's are.
    return old is new or (class_path_of(old) == class_path_of(new) and "<locals>" not in class_path_of(new))


def _import(name: str, path: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except WeightSyncError:
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise ConfigurationError(
                f"checkpoint engine {path!r}: no module named {error.name!r}; check the spelling, and that "
                "it is installed, or on PYTHONPATH, where this worker runs"
            ) from error
        raise _broken(name, path, error) from error
    except Exception as error:
        raise _broken(name, path, error) from error


def _broken(name: str, path: str, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"checkpoint engine {path!r}: module {name!r} was found, but importing it raised "
        f"{type(error).__name__}: {error}"
    )


def _attribute(module: ModuleType, attribute: str, path: str) -> Any:
    found: Any = module
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise ConfigurationError(
                f"checkpoint engine {path!r}: {module.__name__!r} has no {attribute!r}"
                f"{hint(part, dir(found))}{_engines_of(module)}"
            ) from error
    return found


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
    parameters = list(inspect.signature(cls).parameters.values())
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    scope = f"policy.generation.refit_cfg[{backend!r}]"
    if "bucket_size" in kwargs:
        raise ConfigurationError(
            f"{scope}: 'bucket_size' is computed; set update_weights_bucket_memory_ratio instead"
        )
    if "bucket_size" not in named and not takes_any:
        raise ConfigurationError(
            f"the constructor of checkpoint engine {class_path_of(cls)} must take 'bucket_size' (bytes)"
            f"{hint('bucket_size', named)}"
        )
    settings = [name for name in named if name != "bucket_size"]
    unknown = [] if takes_any else [name for name in kwargs if name not in settings]
    if unknown:
        raise ConfigurationError(
            f"{scope}: checkpoint engine {class_path_of(cls)} does not take "
            f"{', '.join(f'{name!r}{_near(name, settings)}' for name in unknown)}; "
            f"it takes {', '.join(settings) or 'no settings'}"
        )
    absent = [p.name for p in parameters if _is_required(p) and p.name not in ("bucket_size", *kwargs)]
    if absent:
        raise ConfigurationError(f"{scope}: checkpoint engine {class_path_of(cls)} needs {', '.join(absent)}")


def _is_required(parameter: inspect.Parameter) -> bool:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and parameter.kind not in variadic


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
