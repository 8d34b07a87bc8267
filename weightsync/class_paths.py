"""From a ``module:ClassName`` path to what it names, with errors that say what to mend."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from weightsync.errors import ConfigurationError, MissingDependencyError, WeightSyncError
from weightsync.names import distribution_of, hint, split_class_path


def load_class_path(path: str, *, content: Callable[[ModuleType], str] = lambda module: "") -> Any:
    """Import a path's module and return what it names.

    Args:
        path: ``module:ClassName``; ``ClassName`` may be dotted.
        content: says of a module without such a name what it has instead.

    Raises:
        ConfigurationError: a malformed path, an unimportable module, or no such name in it.
        WeightSyncError: whatever of this kind the module raises, such as a `MissingDependencyError`.
    """
    parts = split_class_path(path)
    if parts is None:
        raise ConfigurationError(f"{path!r} is no class path; write 'module:ClassName'")
    module = _import(parts[0], path)
    found: Any = module
    for part in parts[1].split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise ConfigurationError(
                f"checkpoint engine {path!r}: {module.__name__!r} has no {parts[1]!r}"
                f"{hint(part, dir(found))}{content(module)}"
            ) from error
    return found


@contextmanager
def naming_distribution(name: str) -> Iterator[None]:
    """Say in a `ConfigurationError` from which distribution a short name comes, if it is an entry point."""
    try:
        yield
    except ConfigurationError as error:
        distribution = distribution_of(name)
        if distribution is None:
            raise
        kind = MissingDependencyError if isinstance(error, MissingDependencyError) else ConfigurationError
        raise kind(f"{error.message} (entry point {name!r} of distribution {distribution})") from error


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
