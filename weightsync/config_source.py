"""Reading ``policy.generation`` out of a whole RL configuration, and nothing else of it.

Only the values of owned keys are looked at, so the rest may use tags and interpolations that only its
own framework understands.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from weightsync.errors import ConfigurationError
from weightsync.names import hint

SECTIONS = ("policy", "generation")
GENERATION = ".".join(SECTIONS)
OWNED_KEYS = ("backend", "colocated", "refit_transport", "refit_cfg", "refit_lifecycle")


@contextmanager
def naming_file(source: str | Path | Mapping[str, Any]) -> Iterator[None]:
    """Put the name of the file, if it is one, before what a `ConfigurationError` says."""
    try:
        yield
    except ConfigurationError as error:
        if isinstance(source, str | Path) and str(source) not in error.message:
            raise ConfigurationError(f"{source}: {error.message}") from error
        raise


def read_generation_section(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Return ``policy.generation`` of a YAML file or of a mapping, as plain dicts and lists.

    Keys of the framework are there, so that misspelled ones can be found; their values are `None`.

    Raises:
        ConfigurationError: the file cannot be read or parsed, or has no such section.
    """
    if isinstance(source, Mapping):
        return _from_mapping(source)
    if isinstance(source, str | Path):
        return _from_yaml(Path(source))
    raise ConfigurationError(f"give the path of a YAML file, or a mapping, not {type(source).__name__}")


def mapping_at(value: Any, path: str) -> dict[Any, Any]:
    """Return what was written under ``path``, which may be nothing.

    Raises:
        ConfigurationError: it is no mapping.
    """
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigurationError(f"{path} must be a mapping, got {value!r:.80}")
    return value


def _from_mapping(source: Mapping[str, Any]) -> dict[str, Any]:
    section: Any = source
    for depth, key in enumerate(SECTIONS):
        if key not in section:
            raise _no_section(depth, section)
        section = section[key]
        if not isinstance(section, Mapping):
            raise _no_mapping(depth, section)
    return {key: _plain(section[key]) if key in OWNED_KEYS else None for key in section}


def _plain(value: Any) -> Any:
    """Turn mappings of any kind (an OmegaConf one, say) into dicts."""
    return {key: _plain(value[key]) for key in value} if isinstance(value, Mapping) else value


def _from_yaml(path: Path) -> dict[str, Any]:
    with _readable(path):
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        try:
            policy = _child(loader, loader.get_single_node(), 0)
            return _owned_values(loader, _child(loader, policy, 1))
        finally:
            loader.dispose()


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except ConfigurationError:
        raise
    except OSError as error:
        raise ConfigurationError(
            f"cannot read the configuration {str(path)!r:.200}: {error.strerror}"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"cannot understand {path} as YAML: {error}") from error
    except ValueError as error:
        raise ConfigurationError(f"cannot read the configuration {str(path)!r:.200}: {error}") from error


def _child(loader: yaml.SafeLoader, node: yaml.Node | None, depth: int) -> yaml.MappingNode:
    if not isinstance(node, yaml.MappingNode):
        raise ConfigurationError("the configuration is empty, or no mapping: it needs policy.generation")
    key = SECTIONS[depth]
    entries = _entries(loader, node, ".".join(SECTIONS[:depth]), [key])
    child = entries.get(key)
    if child is None:
        raise _no_section(depth, entries)
    if not isinstance(child, yaml.MappingNode):
        raise _no_mapping(depth, child.value)
    return child


def _owned_values(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[str, Any]:
    path = ".".join(SECTIONS)
    entries = _entries(loader, node, path, OWNED_KEYS)
    values: dict[str, Any] = dict.fromkeys(entries)
    for key in OWNED_KEYS:
        if key in entries:
            _refuse_repeated(entries[key], f"{path}.{key}")
            values[key] = loader.construct_document(entries[key])
    return values


def _entries(
    loader: yaml.SafeLoader, node: yaml.MappingNode, path: str, once: Iterable[str]
) -> dict[str, yaml.Node]:
    """Return a mapping's entries, merged with what ``<<`` names; keys in ``once`` must not be repeated."""
    _refuse_repeated_keys(node, path, once)
    loader.flatten_mapping(node)
    return {key.value: value for key, value in node.value if isinstance(key, yaml.ScalarNode)}


def _refuse_repeated(node: yaml.Node, path: str) -> None:
    if isinstance(node, yaml.MappingNode):
        _refuse_repeated_keys(node, path)
        for key, value in node.value:
            _refuse_repeated(value, f"{path}.{key.value}")


def _refuse_repeated_keys(node: yaml.MappingNode, path: str, only: Iterable[str] | None = None) -> None:
    """Refuse what YAML would silently settle by taking the last: two ``nixl`` scopes, say."""
    seen: set[str] = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        if key.value in seen and (only is None or key.value in only):
            full = f"{path}.{key.value}".lstrip(".")
            raise ConfigurationError(f"{full} is written twice, again in line {key.start_mark.line + 1}")
        seen.add(key.value)


def _no_section(depth: int, section: Mapping[str, Any]) -> ConfigurationError:
    full = ".".join(SECTIONS[: depth + 1])
    names = [key for key in section if isinstance(key, str)]
    return ConfigurationError(f"the configuration has no {full}{hint(SECTIONS[depth], names)}")


def _no_mapping(depth: int, section: Any) -> ConfigurationError:
    full = ".".join(SECTIONS[: depth + 1])
    return ConfigurationError(f"{full} must be a mapping, got {section!r:.80}")
