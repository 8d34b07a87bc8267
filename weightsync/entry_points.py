"""Checkpoint engines that installed distributions bring: the entry-point group `GROUP`.

::

    [project.entry-points."weightsync.checkpoint_engines"]
    folder = "folder_engine:FolderEngine"

Reading them imports nothing. Every process reads its own, so what another one shall use has to be installed
there too.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint, distributions

GROUP = "weightsync.checkpoint_engines"
_FILE = "entry_points.txt"
_TARGET = re.compile(r"\s*(?P<path>[\w.]+(?:\s*:\s*[\w.]+)?)\s*(?:\[.*\])?\s*")
_log = logging.getLogger(__name__)
_told: set[str] = set()


@dataclass(frozen=True)
class InstalledEngine:
    """One entry point."""

    name: str
    target: str
    """As the distribution has it, without extras and blanks: ``module:ClassName`` if it is right."""
    distribution: str
    """Name and version, such as ``folder-engine 1.2``."""


def installed_engines(reserved: Collection[str]) -> dict[str, list[InstalledEngine]]:
    """Return what the distributions of this process bring, by name.

    Names in ``reserved`` are left out, with a warning; so is a distribution whose entry points cannot be
    read.
    """
    found: dict[str, list[InstalledEngine]] = {}
    for engine in _all():
        if engine.name in reserved:
            _warn(
                f"distribution {engine.distribution} brings a checkpoint engine {engine.name!r}, a name of "
                f"weightsync's own: ignored. Write {engine.target!r} as refit_transport to use it"
            )
        else:
            found.setdefault(engine.name, []).append(engine)
    return found


def _all() -> Iterator[InstalledEngine]:
    seen: set[str] = set()
    for distribution in distributions():
        if GROUP not in (distribution.read_text(_FILE) or ""):
            continue
        name, version = _identity(distribution)
        plain = re.sub(r"[-_.]+", "-", name).lower()
        if plain in seen:
            continue  # an older copy, further down on the path
        seen.add(plain)
        for point in _points(distribution, name):
            yield InstalledEngine(point.name, _target(point), f"{name} {version}".strip())


def _points(distribution: Distribution, name: str) -> list[EntryPoint]:
    try:
        return list(distribution.entry_points.select(group=GROUP))
    except (ValueError, TypeError) as error:  # a line without "=", or before any [group]
        _warn(
            f"distribution {name}: its {_FILE} cannot be read, so its checkpoint engines are ignored: {error}"
        )
        return []


def _identity(distribution: Distribution) -> tuple[str, str]:
    if not any(distribution.read_text(each) for each in ("METADATA", "PKG-INFO")):
        return str(getattr(distribution, "_path", "of unknown name")), ""
    return distribution.metadata["Name"] or "of unknown name", distribution.metadata["Version"] or ""


def _target(point: EntryPoint) -> str:
    match = _TARGET.fullmatch(point.value)
    return re.sub(r"\s", "", match["path"]) if match else point.value


def _warn(text: str) -> None:
    if text not in _told:
        _told.add(text)
        _log.warning(text)
