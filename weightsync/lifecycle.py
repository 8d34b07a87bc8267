"""The steps of a refit, over two worker groups.

pause -> release the KV cache -> open the refit everywhere -> send and receive at once -> commit ->
reset caches -> publish the version -> resume. Whatever fails, the rollout ranks that were written to and
not committed are fenced, caches are reset once, and requests resume; but not on a host whose caches could
not be reset: it stays paused until a later refit has reset them.

Where the engines live in the policy workers, memory changes hands on the way: the engine's weights come back
before the transfer; after the commit the policy goes, and then the KV cache comes back.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from weightsync.cluster.base import Answers, Failure, PendingCall, driver_failure
from weightsync.cluster.view import ranks_of
from weightsync.config import RefitLifecycle
from weightsync.crew import Crew, Deadline, StepError, require_complete
from weightsync.errors import ProtocolError, RefitError, WeightSyncError
from weightsync.failures import Serving, list_ranks, refit_error
from weightsync.report import RankFigures, RefitReport
from weightsync.topology import RankId

_MAX_CLEANUP_STEPS = 7  # fence, status, reset, offload, finalize, resume, and status once more
_LEAST_STEP_S = 0.25


@dataclass(frozen=True, kw_only=True)
class RefitPlan:
    """What one attempt is to do."""

    version: int
    epoch: int
    connect: Callable[[Deadline], None] | None
    """Connects the engines again first, where that is needed."""
    partial: bool = False
    """Whether only some rollout ranks take part, those that the crew has."""
    release: bool
    """Whether the engines give their buffers back afterwards."""

    def __str__(self) -> str:
        return f"refit {self.epoch} to version {self.version}"


class Refit:
    """One attempt. Use once: `run`, then read the attributes.

    Attributes:
        began: whether a byte may have moved.
        published: whether every host was told to report the new version, and did.
        serving: after a failure, what each rollout rank serves.
    """

    def __init__(self, crew: Crew, settings: RefitLifecycle, plan: RefitPlan) -> None:
        self.began = False
        self.published = False
        self.serving: dict[int, Serving] = {}
        self._crew = crew
        self._settings = settings
        self._plan = plan
        # What all of the clean-up may take, within the time of the whole: its steps share one deadline, and
        # each is sure of a moment of its own, for one host that hangs must not keep others from resuming.
        self._cleanup_s = min(2 * settings.silence_s, settings.total_s / 5)
        self._least_step_s = min(_LEAST_STEP_S, self._cleanup_s / (2 * _MAX_CLEANUP_STEPS))
        self._cleanup: Deadline | None = None
        self._deadline = Deadline(settings.total_s - self._cleanup_s)
        self._seconds: dict[str, float] = {}
        self._figures: dict[str, tuple[RankFigures, ...]] = {}
        self._paused = self._committed = self._reset = self._offloaded = False
        self._stale_before = frozenset(crew.stale)
        self._afterwards: list[Failure] = []
        self._notes: list[str] = []

    def run(self) -> RefitReport:
        """Run all steps.

        Raises:
            RefitError: one of them failed.
        """
        started = time.perf_counter()
        failures: list[Failure] = []
        try:
            self._steps()
        except StepError as error:
            failures = error.failures
            self._contain(f"{self._plan} failed: {failures[0].record}")
        except BaseException:
            self._contain(f"{self._plan} was interrupted")
            raise
        finally:
            self._resume()
        if failures or self._afterwards:
            failed, cause = self._error(failures)
            raise failed from cause
        self._seconds["total"] = time.perf_counter() - started
        return RefitReport(
            version=self._plan.version,
            epoch=self._plan.epoch,
            seconds=self._seconds,
            policy=self._figures["policy"],
            rollout=self._figures["rollout"],
        )

    def _steps(self) -> None:
        crew, version = self._crew, self._plan.version
        if self._plan.connect is not None:
            with self._timed("connect"):
                self._plan.connect(self._deadline)
        self._paused = True
        # A stopped worker is to be noticed before the time of a whole refit has passed. Only requests that
        # are waited for may take as long as they like.
        settings = self._settings
        pause_s = math.inf if settings.in_flight == "wait" else settings.stall_s
        self._control("pause", "pause", {"in_flight": settings.in_flight}, limit_s=pause_s)
        if crew.colocated:
            self._control("wake", "resume_weights", limit_s=settings.stall_s)
        self._control("release", "release_kv_cache", limit_s=settings.stall_s)
        named: dict[str, Any] = {"epoch": self._plan.epoch, "version": version}
        if self._plan.partial:
            named["receivers"] = ranks_of(crew.rollout)
        opening = crew.on_both("open_refit", named)
        self._require("open", *opening, limit_s=settings.connect_s + settings.silence_s)
        crew.stale.update(crew.rollout.rank_prefixes)
        self.began = True
        self._transfer()
        self._commit(version)
        if crew.colocated:
            self._offloaded = True
            self._require("offload", crew.policy.submit("offload_policy"), limit_s=settings.stall_s)
            self._control("wake_cache", "resume_kv_cache", limit_s=settings.stall_s)
        with self._timed("reset"):
            _fail_for(self._reset_caches(self._deadline.left_s()), "reset")
        self._publish()
        self.published = True
        if self._plan.release:
            self._require("finalize", *crew.on_both("finalize_checkpoint_engine"))

    def _transfer(self) -> None:
        answers = self._require("transfer", *self._crew.transfer(), patience_s=self._settings.connect_s)
        for group in (self._crew.policy, self._crew.rollout):
            require_complete(answers, group, "transfer")
        with _as_step_error("transfer"):
            figures = [RankFigures.from_value(*who, value) for who, value in sorted(answers.values.items())]
        self._figures = {
            side: tuple(each for each in figures if each.side == side) for side in ("policy", "rollout")
        }

    def _commit(self, version: int) -> None:
        committing = self._crew.rollout.submit("commit_refit", {"version": version})
        answers = self._require("commit", committing, limit_s=self._settings.stall_s)
        require_complete(answers, self._crew.rollout, "commit")
        wrong = {who: value for who, value in answers.values.items() if value != version}
        if wrong:
            raise StepError(
                "commit",
                [
                    driver_failure(who, "commit", ProtocolError, f"it serves {value!r} after the commit")
                    for who, value in wrong.items()
                ],
            )
        self._committed = True

    def _control(
        self, phase: str, action: str, kwargs: Mapping[str, Any] | None = None, *, limit_s: float
    ) -> None:
        answers = self._require(phase, self._crew.rollout.control(action, kwargs), limit_s=limit_s)
        _fail_for(refusals(answers, phase, action), phase)

    def _reset_caches(self, timeout_s: float) -> list[Failure]:
        """Reset the caches of every host, note which are reset, and return the failures of the others."""
        answers = self._crew.hear("reset", self._crew.rollout.control("reset_caches"), timeout_s=timeout_s)
        self._reset = True
        self._crew.stale -= {who.rank for who, value in answers.values.items() if value is not False}
        return [*answers.failures, *refusals(answers, "reset", "reset_caches")]

    def _publish(self) -> None:
        version = self._plan.version
        with self._timed("publish"):
            call = self._crew.rollout.control("publish_version", {"version": version})
            answers = self._crew.hear("publish", call, timeout_s=self._deadline.left_s())
        failures = [*answers.failures, *refusals(answers, "publish", "publish_version")]
        did_not = {failure.who for failure in failures}
        did = set(answers.values) - did_not
        if failures and did:
            self._notes.append(
                f"All ranks hold version {version}, but only the engine of {list_ranks(did)} reports it; "
                f"that of {list_ranks(did_not)} may still report an earlier one"
            )
        _fail_for(failures, "publish")

    def _require(
        self, phase: str, *calls: PendingCall, patience_s: float = 0.0, limit_s: float = math.inf
    ) -> Answers:
        """Wait for all of a step's answers, within the refit's time and at most ``limit_s``."""
        deadline = Deadline(min(self._deadline.left_s(), limit_s))
        with self._timed(phase):
            return self._crew.require(phase, *calls, deadline=deadline, patience_s=patience_s)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] = time.perf_counter() - started

    def _contain(self, reason: str) -> None:
        """Fence what was written and not committed, and learn what still serves; raises no `StepError`."""
        crew = self._crew
        if self.began and not self._committed:
            self._clean_up("fence", crew.rollout.submit("fence_refit", {"reason": reason}))
        self.serving = ask_serving(crew, self._cleanup_left_s())
        if self.began and not self._reset:
            wrote = self._hosts_written()
            crew.stale.intersection_update(wrote | self._stale_before)
            if wrote:
                self._afterwards.extend(self._reset_caches(self._cleanup_left_s()))
        if crew.colocated and self.began and not self._offloaded:
            # The KV cache that comes back with the resume needs the room, whatever has failed.
            self._clean_up("offload", crew.policy.submit("offload_policy"))
        if self._plan.release and self.began:
            self._clean_up("finalize", *crew.on_both("finalize_checkpoint_engine"))

    def _hosts_written(self) -> set[int]:
        """Return the hosts with a rank that may hold bytes of this refit."""
        return {
            self._crew.host_of(rank)
            for rank, state in self.serving.items()
            if not state.reached
            or state.dirty
            or state.fenced is not None
            or state.version == self._plan.version
        }

    def _resume(self) -> None:
        if not self._paused:
            return
        with self._timed("resume"):
            answers = self._clean_up("resume", *self._resuming())
        self._afterwards.extend(refusals(answers, "resume", "resume"))

    def _resuming(self) -> list[PendingCall]:
        rollout, stale = self._crew.rollout, self._crew.stale
        if not stale:
            return [rollout.control("resume")]
        fit = set(rollout.rank_prefixes) - stale
        return [rollout.control("resume", only=fit)] if fit else []

    def _clean_up(self, phase: str, *calls: PendingCall) -> Answers:
        answers = self._crew.hear(phase, *calls, timeout_s=self._cleanup_left_s())
        self._afterwards.extend(answers.failures)
        return answers

    def _cleanup_left_s(self) -> float:
        if self._cleanup is None:
            self._cleanup = Deadline(self._cleanup_s - _MAX_CLEANUP_STEPS * self._least_step_s)
        return self._cleanup.left_s(self._least_step_s)

    def _error(self, failures: list[Failure]) -> tuple[RefitError, WeightSyncError]:
        if not self.serving:
            self.serving = ask_serving(self._crew, self._cleanup_left_s())
        self.serving = {
            rank: replace(state, held=self._paused and self._crew.host_of(rank) in self._crew.stale)
            for rank, state in self.serving.items()
        }
        return refit_error(
            str(self._plan),
            failures or self._afterwards,
            afterwards=self._afterwards if failures else (),
            lost=self._crew.lost,
            busy=self._crew.busy(),
            patient=self._crew.patient(),
            serving=self.serving,
            notes=self._notes,
        )


def _fail_for(failures: list[Failure], phase: str) -> None:
    if failures:
        raise StepError(phase, failures)


def refusals(answers: Answers, phase: str, action: str) -> list[Failure]:
    """Return a failure for each host that answered ``False``: it did not do what it was asked."""
    return [
        driver_failure(who, phase, WeightSyncError, f"{action} returned False")
        for who, value in answers.values.items()
        if value is False
    ]


def ask_serving(crew: Crew, timeout_s: float) -> dict[int, Serving]:
    """Ask every rollout rank what it serves; busy and dead ones count as not reached."""
    answers = crew.hear("status", crew.rollout.submit("refit_status"), timeout_s=timeout_s)
    found = {rank: Serving.from_status(value) for rank, value in answers.of("rollout").items()}
    return {rank: found.get(rank, Serving(reached=False)) for rank in ranks_of(crew.rollout)}


@contextmanager
def _as_step_error(phase: str) -> Iterator[None]:
    """Let a worker's malformed answer fail the step like any other failure of that worker."""
    try:
        yield
    except ProtocolError as error:
        who = RankId(error.context.side or "rollout", error.context.rank or 0)
        raise StepError(phase, [driver_failure(who, phase, ProtocolError, error.message)]) from error
