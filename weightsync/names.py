"""The names of checkpoint engines, and nearest-name hints for error messages. Imports no engine.

A short name is built in, registered in this process, or an entry point of an installed distribution; the
configuration checks it here, and `weightsync.engines.registry` turns it into a class.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from weightsync.entry_points import InstalledEngine, installed_engines
from weightsync.errors import ConfigurationError

NAIVE = "naive"
"""What ``refit_transport: null`` means: no transport, the weights stay in the process."""

SHARED = "shared"
"""The scope of ``refit_cfg`` whose settings hold for whichever transport is selected: no engine's name."""

BUILTIN_ENGINES = {
    "nixl": "weightsync.engines.nixl:NIXLCheckpointEngine",
    "ipc": "weightsync.engines.ipc:IPCCheckpointEngine",
    "gloo": "weightsync.engines.collective:GlooCheckpointEngine",
    "nccl": "weightsync.engines.collective:NCCLCheckpointEngine",
    "hccl": "weightsync.engines.collective:HCCLCheckpointEngine",
    "mooncake": "weightsync.engines.mooncake:MooncakeCheckpointEngine",
    "kimi_ckpt_engine": "weightsync.engines.kimi:KimiCheckpointEngine",
    NAIVE: "weightsync.engines.naive:NaiveCheckpointEngine",
}
"""Short names that this package brings along, each with its ``module:ClassName``."""

engine_targets: dict[str, str | type] = dict(BUILTIN_ENGINES)
"""Built-in short names and those registered in this process: ``module:ClassName``, or the class itself."""


def known_checkpoint_engines() -> list[str]:
    """Return the short names that may be used in this process, sorted."""
    return sorted({*engine_targets, *_installed()})


def engine_target(name: str) -> str | type | None:
    """Return what a short name stands for, a ``module:ClassName`` or a class; `None` for an unknown name.

    Raises:
        ConfigurationError: it is an entry point that names no class, or several distributions bring it.
    """
    installed = _installed().get(name, [])
    if name in engine_targets:
        return engine_targets[name]
    if not installed:
        return None
    if len({each.target for each in installed}) > 1:
        sources = " and ".join(f"{each.distribution} ({each.target})" for each in installed)
        raise ConfigurationError(
            f"several distributions bring a checkpoint engine {name!r}: {sources}; uninstall all but one, or "
            "write the 'module:ClassName' itself"
        )
    if split_class_path(installed[0].target) is None:
        raise ConfigurationError(
            f"checkpoint engine {name!r} of distribution {installed[0].distribution}: its entry point "
            f"{installed[0].target!r} is no 'module:ClassName'"
        )
    return installed[0].target


def distribution_of(name: str) -> str | None:
    """Return name and version of the distribution whose entry point a short name is; `None` if it is none."""
    installed = [] if name in engine_targets else _installed().get(name, [])
    return installed[0].distribution if installed else None


def portable_backend(backend: str) -> str:
    """Return a selector that other processes understand too.

    A name that was registered in this process, or that an installed distribution brings, becomes its
    ``module:ClassName``; all else is unchanged.

    Raises:
        ConfigurationError: as for `engine_target`.
    """
    if backend in BUILTIN_ENGINES:
        return backend
    return class_path_of(engine_target(backend) or backend)


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
    if name.lower() in ("null", "none", "~", ""):
        return f"{name!r} is a text here; write null, without quotes"
    known = known_checkpoint_engines()
    text = f"known names: {', '.join(repr(each) for each in known)}{hint(name, known)}"
    if ":" in name or "." in name:
        return f"{name!r} is no class path; write 'module:ClassName', such as {_example(name)!r} ({text})"
    return (
        f"unknown checkpoint engine {name!r} ({text}). A name registered in another process, or brought by "
        "a distribution that is not installed here, is not known here; 'module:ClassName' works everywhere"
    )


def _example(name: str) -> str:
    """Guess the class path that a malformed one was meant to be."""
    module, _, attribute = name.replace(":", ".").strip(".").rpartition(".")
    guess = f"{module}:{attribute}"
    return guess if split_class_path(guess) else "my_pkg.refit:MyCheckpointEngine"


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _installed() -> dict[str, list[InstalledEngine]]:
    return installed_engines({*BUILTIN_ENGINES, SHARED})
