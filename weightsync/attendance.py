"""Who can take part in what a driver is about to do: workers that are dead, or still busy, are told apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weightsync.cluster.base import Failure, driver_failure
from weightsync.crew import Crew
from weightsync.errors import DeadlineError
from weightsync.failures import Serving, refit_error
from weightsync.topology import RankId


def absent_ranks(crew: Crew) -> list[RankId]:
    """Return the rollout ranks that are known to be lost or busy."""
    return [who for who in crew.settle() | set(crew.lost) if who.side == "rollout"]


def require_workers(
    crew: Crew, attempt: str, leaving: Sequence[RankId], serving: Mapping[int, Serving]
) -> None:
    """Refuse at once, rather than hang, while a worker is dead or still busy with an earlier call.

    Args:
        crew: all workers.
        attempt: what they are needed for.
        leaving: those that may be dead or busy.
        serving: what rollout ranks are known to serve, for the error.

    Raises:
        RefitError: one is dead or busy.
    """
    busy = crew.settle() - set(leaving)
    lost = {who: error for who, error in crew.lost.items() if who not in leaving}
    failures = [Failure(who, record, "lost") for who, record in lost.items()] + [
        driver_failure(who, "check", DeadlineError, "still busy with a call that was given up earlier")
        for who in sorted(busy)
    ]
    if failures:
        error, cause = refit_error(
            attempt, failures, lost=lost, busy=busy, patient=crew.patient(), serving=serving
        )
        raise error from cause
