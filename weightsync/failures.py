"""How a failed step becomes the one `RefitError` that a trainer sees. No I/O.

The text names the cause first, then who else failed, what still serves, and what to do next.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import groupby
from typing import Any

from weightsync.cluster.base import Failure
from weightsync.errors import (
    DeadlineError,
    ErrorRecord,
    LifecycleError,
    PeerLostError,
    RefitError,
    TransportError,
    WeightSyncError,
)
from weightsync.topology import RankId

_MAX_OTHERS_SHOWN = 4
_AGAIN = "call sync_weights again"
_ABOUT_A_PEER = {cls.__name__ for cls in (PeerLostError, DeadlineError, TransportError)}


@dataclass(frozen=True)
class Serving:
    """What one rollout rank says that it serves; ``reached`` is false if it could not say.

    ``held`` is set where the engine host stays paused, because its caches may be of other weights;
    ``highest`` is the highest version that was ever committed there.
    """

    version: int | None = None
    dirty: bool = False
    fenced: str | None = None
    reached: bool = True
    held: bool = False
    highest: int | None = None

    @property
    def served_version(self) -> int | None:
        """The version that requests get; `None` for the starting weights, and where none run."""
        return None if self.held else self.version

    @property
    def is_untouched(self) -> bool:
        """Whether it is known that nothing of a refit that failed was written."""
        return self.reached and not self.dirty and self.fenced is None

    @classmethod
    def from_status(cls, status: Any) -> Serving:
        """Read the value of ``refit_status``; anything else counts as no answer."""
        if not isinstance(status, Mapping):
            return cls(reached=False)
        return cls(
            status.get("version"),
            bool(status.get("dirty")),
            status.get("fenced"),
            highest=status.get("highest"),
        )

    def __str__(self) -> str:
        if not self.reached:
            return "unknown (no answer)"
        if self.fenced is not None:
            return "fenced, serving nothing until a complete refit"
        if self.dirty:
            return "partly written and not fenced, must not serve"
        if self.held:
            held = "the starting weights" if self.version is None else f"version {self.version}"
            return f"paused with {held}, serving nothing until a refit has reset its caches"
        return "serving the starting weights" if self.version is None else f"serving version {self.version}"


def may_lack_engine(failures: Iterable[ErrorRecord]) -> bool:
    """Whether a worker may have been started anew behind its handle, and so have no engine."""
    return any(record.kind == LifecycleError.__name__ for record in failures)


class Distance(IntEnum):
    """How far what a rank says is from the cause of a failure."""

    LOST = 0
    OWN = 1
    SILENT = 2
    ABOUT_A_PEER = 3
    SECONDHAND = 4


def distance_of(failure: Failure, gone: Collection[RankId]) -> Distance:
    """Return how far a failure is from the cause; ``gone``: the ranks whose worker died."""
    if failure.how == "lost" or failure.who in gone:
        return Distance.LOST
    if failure.record.is_secondhand:
        return Distance.SECONDHAND
    if failure.how == "silent":
        return Distance.SILENT
    return Distance.ABOUT_A_PEER if failure.record.kind in _ABOUT_A_PEER else Distance.OWN


def cause_first(failures: Iterable[Failure], lost: Iterable[RankId]) -> list[Failure]:
    """Order failures so that the likeliest cause comes first; keeps one for each rank.

    A dead worker explains its peers' errors; a worker's own error explains a silent one; a silent worker
    explains what its peers say about the connection; who only passes on another's failure comes last.
    """
    gone = set(lost)

    ordered = sorted(
        failures, key=lambda failure: distance_of(failure, gone)
    )  # stable: of equals, the one heard first
    by_rank: dict[RankId, Failure] = {}
    for failure in ordered:
        by_rank.setdefault(failure.who, failure)
    return list(by_rank.values())


def refit_error(
    attempt: str,
    failures: Sequence[Failure],
    *,
    lost: Iterable[RankId],
    busy: Iterable[RankId],
    patient: Mapping[RankId, float] | None = None,
    serving: Mapping[int, Serving] | None = None,
    afterwards: Sequence[Failure] = (),
    notes: Sequence[str] = (),
    remedy: str = _AGAIN,
) -> tuple[RefitError, WeightSyncError]:
    """Compose the error and its cause.

    Args:
        attempt: what failed, such as ``"refit 3 to version 7"``.
        failures: in order of arrival; at least one.
        lost: ranks whose worker must be replaced.
        busy: ranks that have not answered yet.
        patient: those of them that may be waiting still, until a deadline of their own in so many seconds.
        serving: what each rollout rank serves now.
        afterwards: what failed while cleaning up; never the cause.
        notes: further sentences about the state that the failure leaves.
        remedy: what helps when every worker is alive.
    """
    lost, busy = sorted(set(lost)), sorted(set(busy) - set(lost))
    # Who was found silent by its own peer is not merely waiting.
    accused = {each.record.context.peer for each in failures if each.record.kind == PeerLostError.__name__}
    patient = {who: left for who, left in (patient or {}).items() if str(who) not in accused}
    known = {failure.who for failure in failures}
    later = [failure for failure in afterwards if failure.who not in known]
    ordered = [*cause_first(failures, lost), *cause_first(later, lost)]
    first = ordered[0]
    if remedy == _AGAIN and "init_communicator" in first.record.message:
        # What the cause itself asks for: the same again would fail the same way.
        remedy = "call shutdown() and init_communicator(), then sync_weights again"
    sentences = [
        f"{attempt} failed in phase {first.record.context.phase or 'unknown'} at {first.who}: "
        f"{first.record.kind}: {first.record.message}",
        _others(ordered[1:]),
        *notes,
        _serving_text(serving or {}),
        _advice(lost, busy, patient, _unreached(serving or {}), remedy),
    ]
    where = first.record.context
    error = RefitError(
        ". ".join(sentence.rstrip(". ") for sentence in sentences if sentence),
        failures=tuple(failure.record for failure in ordered),
        serving={rank: state.served_version for rank, state in (serving or {}).items()},
        side=first.who.side,
        rank=first.who.rank,
        phase=where.phase,
        tensor=where.tensor,
        bucket=where.bucket,
        bytes_done=where.bytes_done,
    )
    return error, first.record.to_exception()


def list_ranks(ranks: Iterable[RankId]) -> str:
    """Return ``policy ranks 0, 1 and rollout rank 3``."""
    parts = []
    for side, group in groupby(sorted(ranks), key=lambda who: who.side):
        numbers = [str(who.rank) for who in group]
        parts.append(f"{side} rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}")
    return " and ".join(parts)


def _others(failures: Sequence[Failure]) -> str:
    shown = [f"{failure.who} ({_brief(failure.record)})" for failure in failures[:_MAX_OTHERS_SHOWN]]
    more = len(failures) - len(shown)
    return f"Also failed: {', '.join(shown)}" + (f" and {more} more" if more > 0 else "") if shown else ""


def _brief(record: ErrorRecord, limit: int = 120) -> str:
    text = f"{record.kind}: {record.message}"
    return text if len(text) <= limit else f"{text[:limit]}..."


def _serving_text(serving: Mapping[int, Serving]) -> str:
    by_state: dict[str, list[RankId]] = {}
    for rank, state in sorted(serving.items()):
        by_state.setdefault(str(state), []).append(RankId("rollout", rank))
    text = "; ".join(f"{list_ranks(ranks)} {state}" for state, ranks in by_state.items())
    return f"Now: {text}" if text else ""


def _unreached(serving: Mapping[int, Serving]) -> list[RankId]:
    return [RankId("rollout", rank) for rank, state in sorted(serving.items()) if not state.reached]


def _advice(
    lost: Sequence[RankId],
    busy: Sequence[RankId],
    patient: Mapping[RankId, float],
    unreached: Sequence[RankId],
    remedy: str,
) -> str:
    if lost:
        return (
            f"What to do: replace {list_ranks(lost)} (the worker is dead), then shut this synchronizer down "
            "and make a new one over the new workers"
        )
    if silent := [who for who in busy if who not in patient]:
        return (
            f"What to do: restart or replace {list_ranks(silent)} (has not answered); "
            f"if it answers after all, {remedy}"
        )
    if busy:
        seconds = math.ceil(max(patient[who] for who in busy))
        return (
            f"What to do: {remedy}; {list_ranks(busy)} may be busy until its own deadline, "
            f"{seconds} s from now"
        )
    if unreached:
        return f"What to do: {remedy}; if {list_ranks(unreached)} cannot answer then either, replace it"
    return f"What to do: {remedy}"
