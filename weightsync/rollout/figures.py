"""What one refit moved at one rollout rank, how long it took, and how far it came. No I/O."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from weightsync.tensors import list_names

COPY_PREFIX = "bytes_"
WAYS = ("in_place", "staged", "whole")
"""How bytes came: straight into what is served, as parts through a buffer, or as whole tensors."""


@dataclass
class ReceiveFigures:
    """What one refit moved at one rank, and where its time went (seconds)."""

    bytes: int = 0
    tensors: int = 0
    batches: int = 0
    receive_s: float = 0.0
    digest_s: float = 0.0
    stage_s: float = 0.0
    load_s: float = 0.0
    total_s: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)

    def count(self, tensors: int, nbytes: int) -> None:
        """Enter one batch."""
        self.batches += 1
        self.tensors += tensors
        self.bytes += nbytes

    def note_copies(self, stats: Mapping[str, float]) -> None:
        """Take from an engine's figures how many bytes came in which way, if it says."""
        copies = {way: int(stats[COPY_PREFIX + way]) for way in WAYS if COPY_PREFIX + way in stats}
        if copies:
            self.extra["copies"] = copies

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        optional = {"digest": self.digest_s, "stage": self.stage_s}
        some = {phase: taken for phase, taken in optional.items() if taken}
        seconds = {"receive": self.receive_s, **some, "load": self.load_s, "total": self.total_s}
        counts = {"bytes": self.bytes, "tensors": self.tensors, "batches": self.batches}
        return {**counts, "seconds": seconds, **self.extra}

    def line(self, kind: str) -> str:
        """Return the line that is printed for each update."""
        return (
            f"[{kind} refit] Loaded {self.tensors} tensors in {self.batches} batches via checkpoint engine; "
            f"bytes={self.bytes} total={self.total_s:.3f}s receive={self.receive_s:.3f}s "
            f"load={self.load_s:.3f}s"
        )


@contextmanager
def timed(figures: ReceiveFigures, name: str) -> Iterator[None]:
    """Add the time that the block takes to the figure of that name."""
    started = time.perf_counter()
    try:
        yield
    finally:
        setattr(figures, name, getattr(figures, name) + time.perf_counter() - started)


@dataclass(frozen=True)
class Position:
    """How far a refit has come: the phase, and the tensors or parameters that are being loaded."""

    phase: str
    loading: tuple[str, ...] = ()

    @property
    def tensor(self) -> str | None:
        """The tensor at hand, where it is only one."""
        return self.loading[0] if len(self.loading) == 1 else None

    @property
    def failed(self) -> str:
        """Say which tensors are not loaded if the refit fails here; empty where that is said otherwise."""
        count = len(self.loading)
        return f"{count} tensors failed to load: {list_names(self.loading)}" if count > 1 else ""
