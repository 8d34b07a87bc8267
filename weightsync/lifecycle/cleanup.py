"""What is put right after a failure: partly written ranks fenced, caches reset, requests resumed.

A host whose caches could not be reset stays paused until a later refit has reset them.
"""

from __future__ import annotations

from dataclasses import replace

from weightsync.cluster.base import Answers, Failure, PendingCall, driver_failure
from weightsync.cluster.view import ranks_of
from weightsync.config import RefitLifecycle
from weightsync.crew import Crew, Deadline
from weightsync.errors import WeightSyncError
from weightsync.failures import Serving
from weightsync.lifecycle.plan import Progress, RefitPlan
from weightsync.topology import RankId

_MAX_STEPS = 8  # fence, status, reset, offload, finalize, resume twice, and status once more
_LEAST_STEP_S = 0.25


class Cleanup:
    """The clean-up of one refit, within a time of its own.

    Args:
        settings: of the refit.
        plan: of the refit.
        progress: how far it has come.

    Attributes:
        limit_s: what all of the clean-up may take, within the time of the whole: its steps share one
            deadline, and each is sure of a moment of its own, for one host that hangs must not keep others
            from resuming.
        failures: what failed in it.
        serving: what each rollout rank that was asked serves.
    """

    def __init__(self, settings: RefitLifecycle, plan: RefitPlan, progress: Progress) -> None:
        self.limit_s = min(2 * settings.silence_s, settings.total_s / 5)
        self.failures: list[Failure] = []
        self.serving: dict[int, Serving] = {}
        self._plan = plan
        self._progress = progress
        self._least_step_s = min(_LEAST_STEP_S, self.limit_s / (2 * _MAX_STEPS))
        self._deadline: Deadline | None = None

    def contain(self, crew: Crew, reason: str, stale_before: frozenset[int], *, fence: bool = True) -> None:
        """Fence what was written and not committed, learn what still serves, and reset caches once.

        Args:
            crew: whose ranks may have been written to.
            reason: said by those that are fenced.
            stale_before: the hosts whose caches an earlier refit has left unreset.
            fence: whether any may have written and not committed.
        """
        progress = self._progress
        if progress.began and fence:
            self.hear(crew, "fence", crew.rollout.submit("fence_refit", {"reason": reason}))
        self.ask_serving(crew)
        if not progress.began:
            return
        wrote = {crew.host_of(rank) for rank in ranks_of(crew.rollout) if self._may_be_written(rank)}
        unasked = set(crew.rollout.rank_prefixes) - progress.asked_to_reset
        crew.stale.difference_update(unasked - wrote - stale_before)
        # One that is busy could not say that it did: it is asked once it has ended what it is in.
        here = {RankId("rollout", rank) for rank in ranks_of(crew.rollout)}
        busy = {crew.host_of(who.rank) for who in crew.busy() & here}
        if asked := (wrote & unasked) - busy:
            self.failures.extend(self.reset_caches(crew.among(asked), self.left_s()))

    def ask_serving(self, crew: Crew) -> None:
        """Ask every rollout rank what it serves; busy and dead ones count as not reached."""
        answers = crew.hear("status", crew.rollout.submit("refit_status"), timeout_s=self.left_s())
        found = {rank: Serving.from_status(value) for rank, value in answers.of("rollout").items()}
        unknown = Serving(reached=False)
        self.serving.update({rank: found.get(rank, unknown) for rank in ranks_of(crew.rollout)})

    def note_held(self, crew: Crew) -> None:
        """Note which ranks serve nothing because their host stays paused."""
        self.serving = {
            rank: replace(state, held=self._progress.paused and crew.host_of(rank) in crew.stale)
            for rank, state in self.serving.items()
        }

    def reset_caches(self, crew: Crew, timeout_s: float, *, hurries: bool = True) -> list[Failure]:
        """Reset the caches of every host, note which are reset, and return the failures of the others."""
        call = crew.rollout.control("reset_caches")
        answers = crew.hear("reset", call, timeout_s=timeout_s, hurries=hurries)
        self._progress.asked_to_reset.update(crew.rollout.rank_prefixes)
        crew.stale.difference_update(
            {who.rank for who, value in answers.values.items() if value is not False}
        )
        return [*answers.failures, *refusals(answers, "reset", "reset_caches")]

    def resume(self, crew: Crew) -> None:
        """Let requests run again, where caches are those of the weights; a host that fails is asked twice."""
        fit = set(crew.rollout.rank_prefixes) - crew.stale
        failures = self._resume(crew, fit) if fit else []
        if again := {failure.who.rank for failure in failures if failure.how == "reported"}:
            failures = [failure for failure in failures if failure.who.rank not in again]
            failures += self._resume(crew, again)
        self.failures.extend(failures)

    def _resume(self, crew: Crew, hosts: set[int]) -> list[Failure]:
        some = hosts != set(crew.rollout.rank_prefixes)
        call = crew.rollout.control("resume", only=hosts) if some else crew.rollout.control("resume")
        answers = crew.hear("resume", call, timeout_s=self.left_s())
        return [*answers.failures, *refusals(answers, "resume", "resume")]

    def hear(self, crew: Crew, phase: str, *calls: PendingCall) -> Answers:
        """Wait for a step of the clean-up; keep its failures."""
        answers = crew.hear(phase, *calls, timeout_s=self.left_s())
        self.failures.extend(answers.failures)
        return answers

    def left_s(self) -> float:
        """Return the seconds that the next step may take."""
        if self._deadline is None:
            self._deadline = Deadline(self.limit_s - _MAX_STEPS * self._least_step_s)
        return self._deadline.left_s(self._least_step_s)

    def _may_be_written(self, rank: int) -> bool:
        """Whether a rank may hold bytes of this refit."""
        state = self.serving.get(rank, Serving(reached=False))
        written = state.dirty or state.fenced is not None
        return not state.reached or written or state.version == self._plan.version


def refusals(answers: Answers, phase: str, action: str) -> list[Failure]:
    """Return a failure for each host that answered ``False``: it did not do what it was asked."""
    return [
        driver_failure(who, phase, WeightSyncError, f"{action} returned False")
        for who, value in answers.values.items()
        if value is False
    ]
