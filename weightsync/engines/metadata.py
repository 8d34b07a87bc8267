"""What built-in engines tell their peers in `prepare`, and the check of what they are told. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar, get_origin, get_type_hints

from weightsync.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One worker's entry in the combined metadata list; ``control`` is the card of its control channel."""

    alike: ClassVar[Mapping[str, str]] = {
        "engine": "all workers need the same refit_transport",
        "bucket_size": "all workers need the same bucket_size",
    }
    """What must be alike on all workers, and what to do where it is not."""

    engine: str
    bucket_size: int
    control: dict[str, Any]

    @classmethod
    def types(cls) -> dict[str, type]:
        """Return the type of each field."""
        hints, names = get_type_hints(cls), [each.name for each in fields(cls)]
        return {name: get_origin(hints[name]) or hints[name] for name in names}

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for any RPC layer."""
        return {name: getattr(self, name) for name in self.types()}

    @property
    def session(self) -> str:
        """What tells this worker's `prepare` from all others."""
        return str(self.control.get("session"))

    def card(self, name: str) -> dict[str, Any]:
        """Return the control card under the name that error texts are to show."""
        return {**self.control, "name": name}


@dataclass(frozen=True, kw_only=True)
class WorkerMetadata(Entry):
    """The entry of a worker whose engine is a bucketed one.

    ``digest`` is the kind of digests, ``transport`` what its transport's `describe` returned, ``guests`` the
    ticket for workers that come later, if it takes any; ``table`` what it holds or stores, as
    `RankTable.encode` gives it, if it moves regions.
    """

    alike: ClassVar[Mapping[str, str]] = {
        **Entry.alike,
        "digest": "set verify and device alike on all workers",
        "topology": "set topology alike on all workers",
        "fan_out": "set fan_out alike on all workers",
    }

    digest: str
    topology: str
    fan_out: int
    transport: dict[str, Any]
    guests: dict[str, Any] = field(default_factory=dict)
    table: bytes = b""


AnyEntry = TypeVar("AnyEntry", bound=Entry)


def read_metadata(
    metadata: list[Any], *, expected: int, own_index: int | None, own: AnyEntry
) -> list[AnyEntry]:
    """Check the combined metadata list of a process group.

    Args:
        metadata: one entry a worker, policy ranks first.
        expected: number of workers.
        own_index: place of this worker; `None` if it is not among them.
        own: what this worker's last `prepare` returned.

    Raises:
        ConfigurationError: entries are missing, malformed, of another engine or setting, or of an earlier
            `prepare` of this worker.
    """
    if not isinstance(metadata, (list, tuple)) or len(metadata) != expected:
        count = len(metadata) if isinstance(metadata, (list, tuple)) else repr(metadata)[:80]
        raise ConfigurationError(
            f"metadata must hold one entry for each worker, policy ranks first: "
            f"expected {expected}, got {count}"
        )
    entries = [_entry(index, data, own) for index, data in enumerate(metadata)]
    if own_index is not None and entries[own_index].control != own.control:
        raise ConfigurationError(
            f"metadata entry {own_index} is not what this worker's last prepare() returned: "
            f"the list is out of order, or older than that call"
        )
    return entries


def _entry(index: int, data: Any, own: AnyEntry) -> AnyEntry:
    if not isinstance(data, dict) or data.get("engine") != own.engine:
        raise ConfigurationError(f"metadata entry {index} was not made by a {own.engine} engine")
    types = own.types()
    for name, kind in types.items():
        if not isinstance(data.get(name), kind):
            raise ConfigurationError(f"metadata entry {index} has no proper {name!r}: {data.get(name)!r:.80}")
    entry = type(own)(**{name: data[name] for name in types})
    for name, advice in own.alike.items():
        theirs, ours = getattr(entry, name), getattr(own, name)
        if theirs != ours:
            raise ConfigurationError(
                f"metadata entry {index} has {name} {theirs!r}, this worker {ours!r}: {advice}"
            )
    return entry
