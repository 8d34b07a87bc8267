"""What one refit did: counts, seconds and who was slowest. Plain data, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from weightsync.errors import ErrorRecord, ProtocolError
from weightsync.tensors import MAX_NAMES_SHOWN, list_names

_GB = 1e9
_COUNTS = ("tensors", "bytes", "batches")


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """What one rank says about its part."""

    side: str
    rank: int
    tensors: int
    bytes: int
    batches: int
    seconds: Mapping[str, float]
    """By phase: gather, pack, wait and total (policy); receive, load and total (rollout)."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else the worker returned, such as the casts that its loader made; plain data."""

    @classmethod
    def from_value(cls, side: str, rank: int, value: Any) -> RankFigures:
        """Read the figures that a worker returned.

        Raises:
            ProtocolError: they are not as the worker protocol says.
        """
        try:
            seconds = {str(phase): float(taken) for phase, taken in value["seconds"].items()}
            counts = {key: int(value[key]) for key in _COUNTS}
            notes = {str(key): note for key, note in value.items() if key not in (*_COUNTS, "seconds")}
            return cls(side=side, rank=rank, seconds=seconds, notes=notes, **counts)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ProtocolError(f"malformed figures: {value!r:.200}", side=side, rank=rank) from error

    @property
    def total_s(self) -> float:
        """Seconds that this rank was at work or waiting."""
        return self.seconds.get("total", 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        counts = {"tensors": self.tensors, "bytes": self.bytes, "batches": self.batches}
        details = {"seconds": dict(self.seconds), "notes": dict(self.notes)}
        return {"side": self.side, "rank": self.rank, **counts, **details}

    def __str__(self) -> str:
        parts = {phase: taken for phase, taken in self.seconds.items() if phase != "total"}
        most = max(parts, key=lambda phase: parts[phase], default=None)
        why = f" ({most} {parts[most]:.2f} s)" if most is not None else ""
        return f"{self.side} rank {self.rank}: {self.total_s:.2f} s{why}"


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A rollout rank that the others went on without, because its engine had failed."""

    rank: int
    record: ErrorRecord | None
    """Its own error; `None` if another rank of its engine failed."""
    version: int | None
    """What it serves now: an earlier version, or `None`."""
    state: str
    """The same in words, such as ``fenced, serving nothing until a complete refit``."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        error = self.record.to_dict() if self.record else None
        return {"rank": self.rank, "error": error, "version": self.version, "state": self.state}

    def __str__(self) -> str:
        why = f" ({self.record.kind}: {self.record.message:.120})" if self.record else ""
        return f"rollout rank {self.rank}{why}, {self.state}"


@dataclass(frozen=True, kw_only=True)
class RefitReport:
    """A refit that succeeded."""

    version: int
    epoch: int
    """Number of the attempt, counted from 1, failed ones included."""
    seconds: Mapping[str, float]
    """By phase: ``pause``, ``open``, ``transfer``, ``commit``, ``reset``, ``resume``, ... and ``total``."""
    policy: tuple[RankFigures, ...]
    rollout: tuple[RankFigures, ...]
    transport: str = ""
    """What ``refit_transport`` selected."""
    topology: str = ""
    """Who sent to whom, and why ``auto`` chose that; empty for transports that know no topologies."""
    failed: tuple[LeftOut, ...] = ()
    """Ranks that the others went on without; only with ``on_failure: continue``."""
    commit: str = "in_place"
    """Whether weights were loaded as they came, or ``staged`` in host memory first."""
    paused_s: float = 0.0
    """Seconds from the first request that was held back to the resume."""
    whole: Mapping[str, str] = field(default_factory=dict)
    """In a refit by regions, the tensors that took the full path, each with the reason and who gave it."""

    @property
    def ok(self) -> tuple[int, ...]:
        """The rollout ranks that serve this version because of this refit."""
        return tuple(figures.rank for figures in self.rollout)

    @property
    def staged_bytes(self) -> int:
        """Host memory, in bytes, that waiting weights took on all rollout ranks together."""
        return sum(int(figures.notes.get("staged_bytes", 0)) for figures in self.rollout)

    @property
    def tensors(self) -> int:
        """Tensors that the rollout rank with the most of them took."""
        return max((figures.tensors for figures in self.rollout), default=0)

    @property
    def batches(self) -> int:
        """Batches that the rollout rank with the most of them took."""
        return max((figures.batches for figures in self.rollout), default=0)

    @property
    def bytes(self) -> int:
        """Bytes that all rollout ranks together received."""
        return sum(figures.bytes for figures in self.rollout)

    @property
    def bytes_by_rank(self) -> dict[int, int]:
        """Bytes that each rollout rank received."""
        return {figures.rank: figures.bytes for figures in self.rollout}

    @property
    def copies(self) -> dict[str, int]:
        """In a refit by regions, how the bytes came, over all rollout ranks: empty otherwise.

        ``in_place``: from the trained parameter into the served one, one copy; ``staged``: through a transfer
        buffer on the way; ``whole``: in tensors that took the full path.
        """
        total: dict[str, int] = {}
        for figures in self.rollout:
            found = figures.notes.get("copies")
            for way, nbytes in found.items() if isinstance(found, Mapping) else ():
                total[str(way)] = total.get(str(way), 0) + int(nbytes)
        return total

    @property
    def gb_per_s(self) -> float:
        """Gigabytes (1e9 bytes) a second, all rollout ranks together, over the transfer alone."""
        taken = self.seconds.get("transfer", 0.0)
        return self.bytes / _GB / taken if taken > 0 else 0.0

    @property
    def slowest(self) -> RankFigures | None:
        """The rank with the largest total, of both sides."""
        return max((*self.policy, *self.rollout), key=lambda figures: figures.total_s, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can carry."""
        slowest = self.slowest
        return {
            "version": self.version,
            "epoch": self.epoch,
            "transport": self.transport,
            "topology": self.topology,
            "tensors": self.tensors,
            "bytes": self.bytes,
            "bytes_by_rank": {str(rank): nbytes for rank, nbytes in self.bytes_by_rank.items()},
            "copies": self.copies,
            "whole": dict(self.whole),
            "batches": self.batches,
            "seconds": dict(self.seconds),
            "gb_per_s": self.gb_per_s,
            "commit": self.commit,
            "paused_s": self.paused_s,
            "staged_bytes": self.staged_bytes,
            "slowest": slowest.to_dict() if slowest else None,
            "policy": [figures.to_dict() for figures in self.policy],
            "rollout": [figures.to_dict() for figures in self.rollout],
            "failed": [each.to_dict() for each in self.failed],
        }

    def __str__(self) -> str:
        phases = ", ".join(
            f"{phase} {taken:.2f}" for phase, taken in self.seconds.items() if phase != "total"
        )
        slowest = f"; slowest {self.slowest}" if self.slowest else ""
        paused = f"; paused {self.paused_s:.2f} s" if self.paused_s else ""
        failed = f"; WITHOUT {'; '.join(map(str, self.failed))}" if self.failed else ""
        return (
            f"refit {self.epoch} to version {self.version}: {self.tensors} tensors, {_size(self.bytes)} in "
            f"{self.seconds.get('total', 0.0):.2f} s ({self.gb_per_s:.2f} GB/s; seconds: {phases})"
            f"{self._by_regions()}{paused}{slowest}{failed}"
        )

    def _by_regions(self) -> str:
        """Say how the bytes of a refit by regions came, and what took the full path."""
        if not self.copies and not self.whole:
            return ""
        ways = ", ".join(f"{_size(nbytes)} {way.replace('_', ' ')}" for way, nbytes in self.copies.items())
        least, most = min(self.bytes_by_rank.values(), default=0), max(self.bytes_by_rank.values(), default=0)
        each = _size(least) if least == most else f"{_size(least)} to {_size(most)}"
        whole = f"; {len(self.whole)} tensors took the full path ({list_reasons(self.whole)})"
        return f"; by regions: {ways}, {each} a rank{whole if self.whole else ''}"


def list_reasons(whole: Mapping[str, str]) -> str:
    """Return a bounded list of tensors that take the full path, by reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in islice(whole.items(), MAX_NAMES_SHOWN):
        by_reason.setdefault(reason, []).append(name)
    more = len(whole) - MAX_NAMES_SHOWN
    shown = "; ".join(f"{list_names(names)}: {reason}" for reason, names in by_reason.items())
    return shown + (f"; and {more} more" if more > 0 else "")


def _size(nbytes: int) -> str:
    return f"{nbytes / _GB:.3f} GB" if nbytes >= _GB / 1000 else f"{nbytes} bytes"
