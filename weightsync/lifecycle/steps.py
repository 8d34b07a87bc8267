"""How a refit takes one step: starts calls, waits for all answers within its time, and bears failures."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from weightsync.cluster.base import Answers, Failure, PendingCall, driver_failure
from weightsync.crew import Deadline, StepError
from weightsync.errors import ProtocolError
from weightsync.lifecycle.casualties import Casualties
from weightsync.lifecycle.cleanup import refusals
from weightsync.topology import RankId


class Steps:
    """Takes the steps of one refit.

    Args:
        casualties: who was left out so far.
        deadline: of the refit.
        hurries: whether one failure leaves the others only a short time. A host that fails must not cost
            slower ones their time where it alone would be left out.

    Attributes:
        seconds: what each phase has taken.
    """

    def __init__(self, casualties: Casualties, deadline: Deadline, *, hurries: bool) -> None:
        self.hurries = hurries
        self.seconds: dict[str, float] = {}
        self._casualties = casualties
        self._deadline = deadline

    def require(
        self, phase: str, *calls: PendingCall, patience_s: float = 0.0, limit_s: float = math.inf
    ) -> Answers:
        """Wait for all of a step's answers, within the refit's time and at most ``limit_s``.

        Raises:
            StepError: one of them did not come, or is an error.
        """
        deadline = Deadline(min(self._deadline.left_s(), limit_s))
        with self.timed(phase):
            return self._casualties.left.require(phase, *calls, deadline=deadline, patience_s=patience_s)

    def each(self, phase: str, *calls: PendingCall, limit_s: float = math.inf) -> Answers:
        """Wait for a step that each host takes for itself; those that fail may be left out.

        Raises:
            StepError: one has failed, and must not be left out.
        """
        with self.timed(phase):
            answers = self.hear(phase, *calls, limit_s=limit_s)
        self.bear(phase, answers.failures)
        return answers

    def control(
        self, phase: str, action: str, kwargs: Mapping[str, Any] | None = None, *, limit_s: float
    ) -> None:
        """Let each host take an action; as for `each`."""
        control = self._casualties.left.rollout.control(action, kwargs)
        answers = self.each(phase, control, limit_s=limit_s)
        self.bear(phase, refusals(answers, phase, action))

    def hear(self, phase: str, *calls: PendingCall, limit_s: float = math.inf) -> Answers:
        """Wait for the answers of a step; failures are returned."""
        timeout_s = min(self._deadline.left_s(), limit_s)
        return self._casualties.left.hear(phase, *calls, timeout_s=timeout_s, hurries=self.hurries)

    def bear(self, phase: str, failures: list[Failure]) -> None:
        """Leave out whom failures of a step are to be blamed on.

        Raises:
            StepError: nobody, or somebody who must not be left out.
        """
        if failures:
            self._casualties.leave_out(StepError(phase, failures))

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add what the block takes to the phase's seconds."""
        started = time.perf_counter()
        try:
            yield
        finally:
            taken = time.perf_counter() - started
            self.seconds[phase] = self.seconds.get(phase, 0.0) + taken


@contextmanager
def as_step_error(phase: str) -> Iterator[None]:
    """Let a worker's malformed answer fail the step like any other failure of that worker."""
    try:
        yield
    except ProtocolError as error:
        who = RankId(error.context.side or "rollout", error.context.rank or 0)
        raise StepError(phase, [driver_failure(who, phase, ProtocolError, error.message)]) from error
