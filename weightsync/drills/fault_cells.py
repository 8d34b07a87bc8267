"""The cells of the fault matrix: which there are, which make no sense and why, and how each must end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from weightsync.drills.fault_points import BUCKET_PHASES

ACTORS = ("sender", "receiver", "driver", "forwarder")
FAULTS = ("kill", "stop", "raise", "delay", "drop", "corrupt")
PHASES = ("connect", *BUCKET_PHASES, "commit", "finalize")
FORWARDING = ("nixl", "mooncake")
"""The transports in which a rollout rank may send on what it has received."""

NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True)
class Cell:
    """One fault: to whom, what and where."""

    transport: str
    actor: str
    fault: str
    phase: str

    def __str__(self) -> str:
        return f"{self.transport} {self.actor} {self.fault} {self.phase}"

    @property
    def is_loss(self) -> bool:
        """Whether the actor is gone afterwards."""
        return self.fault in {"kill", "stop"}

    @property
    def loses_an_answer(self) -> bool:
        """Whether the driver waits for an answer in vain: it must give that worker up."""
        if self.fault != "drop":
            return False
        return self.phase in {"commit", "finalize"} or self.actor == "driver"

    @property
    def why_not(self) -> str:
        """Why there is no such fault; empty if there is."""
        if self.actor == "forwarder" and self.transport not in FORWARDING:
            return "no rollout rank sends on what it has received"
        if self.actor == "sender" and self.phase == "commit" and not self.is_loss:
            return "the sender takes no part in the commit"
        if self.actor == "driver" and self.phase in BUCKET_PHASES and self.fault in {"drop", "corrupt"}:
            return "the driver says nothing while buckets move"
        if self.phase == "finalize" and self.fault == "corrupt":
            return "nothing is said there that could be altered"
        return ""

    @property
    def expected(self) -> Expected:
        """How the refit must end."""
        if self.actor == "driver":
            return self._expected_of_driver()
        if self.fault == "delay":
            return Expected(success=True)
        greeting = self.phase == "connect" and self.fault in {"drop", "corrupt"}  # it is said again
        if greeting or (self.actor == "sender" and self.phase == "commit"):  # its part is over
            return Expected(success=True, error=True)
        kinds = {
            "raise": "InjectedError",
            "corrupt": "ProtocolError" if self.phase == "commit" else "DigestError",
        }
        names = self.is_loss or self.loses_an_answer or self.fault == "raise"
        return Expected(error=True, kind=kinds.get(self.fault, ""), names=names)

    @property
    def expected_where_the_others_go_on(self) -> Expected:
        """How it must end with ``on_failure: continue``."""
        usual = self.expected
        if usual.success or usual.lost or (self.fault == "raise" and self.actor == "driver"):
            return usual
        if self.fault in {
            "drop",
            "corrupt",
        }:  # one of those at either end of what was lost or altered is left out
            return Expected(success=True, error=True)
        return usual if self.actor == "sender" else Expected(success=True, left_out=True)

    def _expected_of_driver(self) -> Expected:
        if self.is_loss:
            return Expected(lost=True)
        if self.fault == "delay":
            return Expected(success=True)
        return Expected(error=True, kind="InterruptedDriverError" if self.fault == "raise" else "")


@dataclass(frozen=True)
class Expected:
    """How a refit may end."""

    success: bool = False
    error: bool = False
    """In a typed one."""
    lost: bool = False
    """The driver ends, or stands still, and with it the call."""
    kind: str = ""
    """Of the error, or of one of the failures that it reports."""
    names: bool = False
    """Whether the error must say which rank failed."""
    left_out: bool = False
    """Whether the others must have gone on without that rank, and no more."""


@dataclass(frozen=True)
class Verdict:
    """What became of one cell."""

    cell: Cell
    outcome: str
    seconds: float = 0.0
    """Until the refit had ended."""
    recovered: bool = False
    passed: bool = False
    detail: str = ""

    @property
    def counts(self) -> bool:
        """Whether there is such a fault."""
        return self.outcome != NOT_APPLICABLE

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can carry."""
        return {
            **asdict(self.cell),
            "outcome": self.outcome,
            "seconds": round(self.seconds, 3),
            "recovered": self.recovered,
            "passed": self.passed,
            "detail": self.detail,
        }


def make_cells(
    transports: Sequence[str], actors: Sequence[str], faults: Sequence[str], phases: Sequence[str]
) -> Iterator[Cell]:
    """Yield the cells, in an order that changes what is connected as seldom as can be."""
    for transport in transports:
        for forwards in (False, True):
            for last in (False, True):
                yield from (
                    Cell(transport, actor, fault, phase)
                    for actor in actors
                    if (actor == "forwarder") == forwards
                    for fault in faults
                    for phase in phases
                    if (phase == "finalize") == last
                )
