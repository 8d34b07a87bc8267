"""Which transport a configuration selects, and whether generation is colocated with the training workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightsync.class_paths import load_class_path, naming_distribution
from weightsync.config_source import GENERATION, mapping_at
from weightsync.errors import ConfigurationError, MissingDependencyError
from weightsync.names import (
    NAIVE,
    distribution_of,
    engine_target,
    nearest,
    split_class_path,
    unknown_engine_message,
)

_TRANSPORT = f"{GENERATION}.refit_transport"
_COLOCATED = f"{GENERATION}.colocated"
_EITHER_WAY = ("ipc",)
"""What reaches other processes of one host, whether or not they share its GPUs."""


def select_transport(generation: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the transport's name or class path, and whether generation is colocated.

    Raises:
        ConfigurationError: the generation backend, ``colocated`` or ``refit_transport`` is wrong, or they do
            not go together; says what to write instead.
    """
    _check_backend(generation.get("backend", "vllm"))
    colocated = _read_colocated(generation.get("colocated"))
    name = generation.get("refit_transport")
    if name is None:
        return _read_null(written="refit_transport" in generation, colocated=colocated), colocated
    transport = _read_name(name)
    if transport == NAIVE and not colocated:
        raise ConfigurationError(
            f"{_TRANSPORT}: {NAIVE} hands weights over within one process; write {_COLOCATED}.enabled: true, "
            "or name a transport between processes, such as nixl"
        )
    if colocated and transport not in (NAIVE, *_EITHER_WAY):
        raise ConfigurationError(
            f"{_COLOCATED}.enabled is true, but {transport} refits generation on workers of its own; write "
            f"{_COLOCATED}.enabled: false, or {_TRANSPORT}: null (the weights stay in the process), or ipc "
            "(other processes of one host, by IPC)"
        )
    return transport, colocated


def _check_backend(backend: Any) -> None:
    if backend != "vllm":
        raise ConfigurationError(
            f"{GENERATION}.backend: this version cannot refit {backend!r}, only vllm; write vllm"
        )


def _read_colocated(value: Any) -> bool:
    colocated = mapping_at(value, _COLOCATED)
    for key in colocated:
        if key != "enabled" and isinstance(key, str) and nearest(key, ["enabled"], cutoff=0.8):
            raise ConfigurationError(f"unknown key {_COLOCATED}.{key}; write {_COLOCATED}.enabled")
    enabled = colocated.get("enabled", False)
    if not isinstance(enabled, bool):
        raise ConfigurationError(f"{_COLOCATED}.enabled: got {enabled!r}; write false, or true")
    return enabled


def _read_null(*, written: bool, colocated: bool) -> str:
    if colocated:
        return NAIVE
    if written:
        raise ConfigurationError(
            f"{_TRANSPORT} is null, which hands weights over within one process; write "
            f"{_COLOCATED}.enabled: true, or name a transport, such as {_TRANSPORT}: nixl"
        )
    raise ConfigurationError(f"{_TRANSPORT} is missing; write {_TRANSPORT}: nixl, or a 'module:ClassName'")


def _read_name(name: Any) -> str:
    if isinstance(name, list | tuple | dict):
        raise ConfigurationError(
            f"{_TRANSPORT}: two transports at once ({name!r:.120}); name exactly one, such as nixl"
        )
    if not isinstance(name, str):
        raise ConfigurationError(f"{_TRANSPORT}: got {name!r}; write nixl, or a 'module:ClassName'")
    try:
        if _known(name):
            return name
    except ConfigurationError as error:
        kind = MissingDependencyError if isinstance(error, MissingDependencyError) else ConfigurationError
        raise kind(f"{_TRANSPORT}: {error.message}") from error
    raise ConfigurationError(f"{_TRANSPORT}: {unknown_engine_message(name)}")


def _known(name: str) -> bool:
    target = engine_target(name)
    if distribution_of(name) is not None and isinstance(target, str):
        # It is installed here, so it has to work here; a class path may be importable by workers alone.
        with naming_distribution(name):
            load_class_path(target)
    return target is not None or split_class_path(name) is not None
