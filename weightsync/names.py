"""The names of checkpoint engines, and nearest-name hints for error messages. No I/O.

The table lives down here so that the configuration can check a name without importing any engine;
`weightsync.engines.registry` fills it and turns its entries into classes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

BUILTIN_ENGINES = {"nixl": "weightsync.engines.nixl:NIXLCheckpointEngine"}
"""Short names that this package brings along, each with its ``module:ClassName``."""

engine_targets: dict[str, str | type] = dict(BUILTIN_ENGINES)
"""Every short name known in this process: its ``module:ClassName``, or the class itself."""


def known_checkpoint_engines() -> list[str]:
    """Return the short names that may be used in this process, sorted."""
    return sorted(engine_targets)


def portable_backend(backend: str) -> str:
    """Return a selector that other processes understand too.

    A name that was registered in this process becomes its ``module:ClassName``; all else is unchanged.
    """
    if backend in BUILTIN_ENGINES:
        return backend
    return class_path_of(engine_targets.get(backend, backend))


def class_path_of(target: str | type) -> str:
    """Return the ``module:ClassName`` of a class; a path is returned as it is."""
    return target if isinstance(target, str) else f"{target.__module__}:{target.__qualname__}"


def split_class_path(path: str) -> tuple[str, str] | None:
    """Return module and class of a ``module:ClassName`` path; `None` where it is malformed."""
    module, colon, attribute = path.partition(":")
    parts = module.split(".") + attribute.split(".")
    return (module, attribute) if colon and all(part.isidentifier() for part in parts) else None


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name most like ``name``, whatever its case and dashes; `None` if none is near."""
    plain = {_plain(candidate): candidate for candidate in known}
    close = difflib.get_close_matches(_plain(name), plain, n=1, cutoff=cutoff)
    return plain[close[0]] if close else None


def hint(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"``, or an empty text where nothing is near."""
    close = nearest(name, known)
    return f"; did you mean {close!r}?" if close else ""


def unknown_engine_message(name: str) -> str:
    """Say why ``name`` selects no engine, and what to write instead."""
    known = known_checkpoint_engines()
    text = f"known names: {', '.join(repr(each) for each in known)}{hint(name, known)}"
    if ":" in name or "." in name:
        return f"{name!r} is no class path; write 'module:ClassName', such as {_example(name)!r} ({text})"
    return (
        f"unknown checkpoint engine {name!r} ({text}). A name registered in another process is not known "
        "here; 'module:ClassName' works everywhere"
    )


def _example(name: str) -> str:
    """Guess the class path that a malformed one was meant to be."""
    module, _, attribute = name.replace(":", ".").strip(".").rpartition(".")
    guess = f"{module}:{attribute}"
    return guess if split_class_path(guess) else "my_pkg.refit:MyCheckpointEngine"


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
