"""Outcomes: what a worker method returns to the driver, success or failure, as plain data. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weightsync.errors import ErrorRecord


@dataclass(frozen=True)
class Outcome:
    """One rank's answer: a value, or the error that it met."""

    rank: int
    value: Any = None
    error: ErrorRecord | None = None

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Outcome:
        """Read what `run_for_outcome` made."""
        error = data.get("error")
        return cls(data["rank"], data.get("value"), ErrorRecord.from_dict(error) if error else None)

    def to_dict(self) -> dict[str, Any]:
        """Return ``{"rank", "value"}`` or ``{"rank", "error"}``."""
        if self.error is not None:
            return {"rank": self.rank, "error": self.error.to_dict()}
        return {"rank": self.rank, "value": self.value}


def run_for_outcome(side: str, rank: int, phase: str, call: Callable[[], Any]) -> dict[str, Any]:
    """Run ``call`` and return its outcome; errors become data, so that no RPC layer can mangle them."""
    try:
        return Outcome(rank, value=call()).to_dict()
    except Exception as error:  # noqa: BLE001 - the one boundary at which every worker error becomes data
        return Outcome(
            rank, error=ErrorRecord.from_exception(error, side=side, rank=rank, phase=phase)
        ).to_dict()
