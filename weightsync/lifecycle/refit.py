"""The steps of a refit, over two worker groups.

pause -> release the KV cache -> open the refit everywhere -> send and receive at once -> commit ->
reset caches -> publish the version -> resume. Whatever fails, the rollout ranks that were written to and
not committed are fenced, caches are reset once, and requests resume; but not on a host whose caches could
not be reset: it stays paused until a later refit has reset them.

With ``commit: staged`` the transfer comes before the pause, into host memory, and one step more, the load,
after it. With ``on_failure: continue`` a host that fails is left out, and the others go on.

Where the engines live in the policy workers, memory changes hands on the way: the engine's weights come back
before the transfer; after the commit the policy goes, and then the KV cache comes back.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

from weightsync.cluster.base import Answers, Failure, driver_failure
from weightsync.cluster.view import ranks_of
from weightsync.config import RefitLifecycle
from weightsync.crew import Crew, Deadline, StepError, require_complete
from weightsync.errors import DeadlineError, ProtocolError, RefitError, WeightSyncError
from weightsync.failures import Serving, list_ranks, refit_error
from weightsync.lifecycle.blame import patience_of
from weightsync.lifecycle.casualties import Casualties
from weightsync.lifecycle.cleanup import Cleanup, refusals
from weightsync.lifecycle.late import MOMENT_S, as_they_end
from weightsync.lifecycle.plan import Progress, RefitPlan
from weightsync.lifecycle.steps import Steps, as_step_error
from weightsync.report import LeftOut, RankFigures, RefitReport
from weightsync.topology import RankId


class Refit:
    """One refit. Use once: `run`, then read the attributes.

    Attributes:
        epoch: number of the last attempt: more than one where the others went on without a host.
        left_out: the hosts, by first rank, that the others went on without.
    """

    def __init__(self, crew: Crew, settings: RefitLifecycle, plan: RefitPlan) -> None:
        self.epoch = plan.epoch
        self._crew = crew
        self._settings = settings
        self._plan = plan
        self._progress = Progress()
        self._cleanup = Cleanup(settings, plan, self._progress)
        self._deadline = Deadline(settings.total_s - self._cleanup.limit_s)
        goes_on = settings.on_failure == "continue"
        self._casualties = Casualties(crew, tolerated=goes_on)
        self._do = Steps(self._casualties, self._deadline, hurries=not goes_on)
        self._stale_before = frozenset(crew.stale)
        self._figures: dict[str, tuple[RankFigures, ...]] = {}
        self._paused_at: float | None = None
        self._paused_s = 0.0
        self._starting: Deadline | None = None
        self._notes: list[str] = []

    @property
    def began(self) -> bool:
        """Whether a byte may have moved."""
        return self._progress.began

    @property
    def published(self) -> bool:
        """Whether every host that is left was told to report the new version, and did."""
        return self._progress.published

    @property
    def serving(self) -> Mapping[int, Serving]:
        """After a failure, what each rollout rank that was asked serves."""
        return self._cleanup.serving

    @property
    def left_out(self) -> frozenset[int]:
        """The hosts, by first rank, that the others went on without."""
        return frozenset(self._casualties.hosts)

    def run(self) -> RefitReport:
        """Run all steps.

        Raises:
            RefitError: one of them failed, and the others did not go on without who failed.
        """
        started = time.perf_counter()
        failures: list[Failure] = []
        try:
            self._steps()
        except StepError as error:
            failures = error.failures
            self._contain(self._crew, f"{self._plan} failed: {failures[0].record}")
        except BaseException:
            self._crew.settle()  # what was interrupted goes on in the workers
            self._contain(self._crew, f"{self._plan} was interrupted")
            raise
        finally:
            whole = bool(failures) or not self._progress.published
            self._resume(self._crew if whole else self._casualties.left)
            if whole:
                self._put_the_late_right(failures)
        failures = failures or self._settle_the_rest()
        if failures:
            failed, cause = self._error(failures)
            raise failed from cause
        self._do.seconds["total"] = time.perf_counter() - started
        return self._report()

    def _report(self) -> RefitReport:
        here = set(ranks_of(self._casualties.left.rollout))
        return RefitReport(
            version=self._plan.version,
            epoch=self.epoch,
            seconds=self._do.seconds,
            policy=self._figures["policy"],
            rollout=tuple(each for each in self._figures["rollout"] if each.rank in here),
            failed=tuple(self._left_out()),
            commit=self._settings.commit,
            paused_s=self._paused_s,
        )

    def _steps(self) -> None:
        self._connect()
        if self._settings.commit == "staged":
            self._deliver()
            self._stop_requests()
            self._load()
        else:
            self._stop_requests()
            self._deliver()
        self._commit()
        if self._crew.colocated:
            self._progress.offloaded = True
            limit_s = self._settings.stall_s
            self._do.require("offload", self._crew.policy.submit("offload_policy"), limit_s=limit_s)
            self._do.control("wake_cache", "resume_kv_cache", limit_s=limit_s)
        with self._do.timed("reset"):
            crew, left_s = self._casualties.left, self._deadline.left_s()
            self._do.bear("reset", self._cleanup.reset_caches(crew, left_s, hurries=self._do.hurries))
        self._publish()
        self._progress.published = True
        if self._plan.release:
            calls = self._casualties.left.on_both("finalize_checkpoint_engine")
            self._do.each("finalize", *calls, limit_s=self._settings.stall_s)

    def _connect(self) -> None:
        """Connect the engines again, where that is needed: all, or those that are left after a failure."""
        while self._plan.connect is not None:
            try:
                with self._do.timed("connect"):
                    self._plan.connect(self._deadline, self._casualties.left)
            except StepError as error:
                self._casualties.leave_out(error, others_are_awaited=True)
                self._await_the_rest(error.phase)
            else:
                return

    def _stop_requests(self) -> None:
        settings = self._settings
        self._progress.paused, self._paused_at = True, time.perf_counter()
        # A stopped worker is to be noticed before the time of a whole refit has passed. Only requests that
        # are waited for may take as long as they like.
        pause_s = math.inf if settings.in_flight == "wait" else settings.stall_s
        self._do.control("pause", "pause", {"in_flight": settings.in_flight}, limit_s=pause_s)
        if self._crew.colocated:
            self._do.control("wake", "resume_weights", limit_s=settings.stall_s)
        self._do.control("release", "release_kv_cache", limit_s=settings.stall_s)

    def _deliver(self) -> None:
        """Send to all, and again to those that are left after a failure, as long as any are."""
        while True:
            try:
                self._open()
                self._transfer()
            except StepError as error:
                self._casualties.leave_out(error, others_are_awaited=True)
                self._await_the_rest(error.phase)
                self.epoch += 1
            else:
                return

    def _open(self) -> None:
        crew = self._casualties.left
        named: dict[str, Any] = {"epoch": self.epoch, "version": self._plan.version}
        if self._plan.partial or self._casualties.hosts:
            named["receivers"] = ranks_of(crew.rollout)
        limit_s = self._settings.connect_s + self._settings.silence_s
        self._do.require("open", *crew.on_both("open_refit", named), limit_s=limit_s)
        if self._settings.commit == "in_place":
            crew.stale.update(crew.rollout.rank_prefixes)
        self._progress.began = True

    def _transfer(self) -> None:
        crew = self._casualties.left
        self._starting = Deadline(self._settings.connect_s)
        transfer = crew.transfer(staged=self._settings.commit == "staged")
        answers = self._do.require("transfer", *transfer, patience_s=self._settings.connect_s)
        self._starting = None
        for group in (crew.policy, crew.rollout):
            require_complete(answers, group, "transfer")
        self._figures = {"policy": (), "rollout": ()}
        self._take_figures("transfer", answers)

    def _await_the_rest(self, phase: str) -> None:
        """Wait until those that are left have ended what they were in: until then they cannot be called.

        Raises:
            StepError: a policy worker does not end it.
        """
        crew = self._casualties.left
        policy = {RankId("policy", rank) for rank in ranks_of(crew.policy)}
        here = policy | {RankId("rollout", rank) for rank in ranks_of(crew.rollout)}
        patient = [left for who, left in crew.patient().items() if who in here]
        # A policy worker may need as long as the driver to notice that its peer is gone.
        within_s = min(max([*patient, self._settings.silence_s]) + MOMENT_S, self._deadline.left_s())
        busy = crew.settle(within_s, here) & here
        failures = [
            driver_failure(who, phase, DeadlineError, "has not ended its part of a failed transfer")
            for who in sorted(busy)
        ]
        if busy & policy:
            raise StepError(phase, [*self._casualties.failures, *failures])
        if failures:
            self._casualties.leave_out(StepError(phase, failures))

    def _load(self) -> None:
        crew = self._casualties.left
        crew.stale.update(crew.rollout.rank_prefixes)
        # As for the commit; loading takes no longer than the transfer did, for the bytes are the same.
        limit_s = self._settings.stall_s + self._do.seconds["transfer"]
        answers = self._do.each("load", crew.rollout.submit("load_staged_weights"), limit_s=limit_s)
        self._take_figures("load", answers)

    def _take_figures(self, phase: str, answers: Answers) -> None:
        with as_step_error(phase):
            figures = [RankFigures.from_value(*who, value) for who, value in sorted(answers.values.items())]
        for side in {each.side for each in figures}:
            self._figures[side] = tuple(each for each in figures if each.side == side)

    def _commit(self) -> None:
        crew, version = self._casualties.left, self._plan.version
        committing = crew.rollout.submit("commit_refit", {"version": version})
        answers = self._do.each("commit", committing, limit_s=self._settings.stall_s)
        if not self._casualties.hosts:
            require_complete(answers, crew.rollout, "commit")
        wrong = {who: value for who, value in answers.values.items() if value != version}
        self._do.bear(
            "commit",
            [
                driver_failure(who, "commit", ProtocolError, f"it serves {value!r} after the commit")
                for who, value in wrong.items()
            ],
        )
        self._progress.committed = True

    def _publish(self) -> None:
        version = self._plan.version
        with self._do.timed("publish"):
            crew = self._casualties.left
            call = crew.rollout.control("publish_version", {"version": version})
            answers = self._do.hear("publish", call)
        failures = [*answers.failures, *refusals(answers, "publish", "publish_version")]
        did_not = {failure.who for failure in failures}
        did = set(answers.values) - did_not
        if failures and did:
            self._notes.append(
                f"All ranks hold version {version}, but only the engine of {list_ranks(did)} reports it; "
                f"that of {list_ranks(did_not)} may still report an earlier one"
            )
        self._do.bear("publish", failures)

    # After a failure.

    def _contain(self, crew: Crew, reason: str) -> None:
        """Leave nobody half-written and unfenced; raises no `StepError`."""
        progress, policy = self._progress, self._crew.policy
        self._cleanup.contain(crew, reason, self._stale_before, fence=not progress.committed)
        if crew.colocated and progress.began and not progress.offloaded:
            # The KV cache that comes back with the resume needs the room, whatever has failed.
            self._cleanup.hear(crew, "offload", policy.submit("offload_policy"))
        if self._plan.release and progress.began:
            self._cleanup.hear(crew, "finalize", *crew.on_both("finalize_checkpoint_engine"))

    def _resume(self, crew: Crew) -> None:
        if not self._progress.paused:
            return
        with self._do.timed("resume"):
            self._cleanup.resume(crew)
        if self._paused_at is not None:
            self._paused_s = time.perf_counter() - self._paused_at

    def _put_the_late_right(self, failures: list[Failure]) -> None:
        """Resume the hosts that could not be asked before, each once it has ended what it was in."""
        if not self._progress.paused:
            return
        patience = patience_of(self._crew, failures)
        if not failures and self._starting is not None:
            # Interrupted before it was known who had been called: any may be waiting for peers that were not.
            patience |= {who: self._starting.left_s() for who in self._crew.busy() - patience.keys()}
        for hosts in as_they_end(self._crew, patience, self._deadline):
            crew = self._crew.among(hosts)
            self._contain(crew, f"{self._plan} failed while this rank waited for a peer")
            self._cleanup.resume(crew)

    def _settle_the_rest(self) -> list[Failure]:
        """Put right those that were left out, once the others serve; returns what fails the refit anyhow."""
        failures, self._cleanup.failures = self._cleanup.failures, []
        if failures:
            try:
                self._casualties.leave_out(StepError("resume", failures))
            except StepError as error:
                return error.failures
        if self._casualties.hosts:
            reason = f"{self._plan} went on without this rank, which had failed"
            crew = self._crew.among(self._casualties.hosts)
            self._cleanup.contain(crew, reason, self._stale_before)
            self._cleanup.resume(crew)
            for hosts in as_they_end(crew, {}, self._deadline):  # the others serve, but the caller waits
                self._cleanup.contain(self._crew.among(hosts), reason, self._stale_before)
                self._cleanup.resume(self._crew.among(hosts))
            self._cleanup.note_held(crew)
        return []

    def _left_out(self) -> Iterator[LeftOut]:
        for rank in ranks_of(self._crew.among(self._casualties.hosts).rollout):
            failure, state = self._casualties.failure_of(rank), self._cleanup.serving.get(rank, Serving())
            record = failure.record if failure is not None else None
            yield LeftOut(rank=rank, record=record, version=state.served_version, state=str(state))

    def _error(self, failures: list[Failure]) -> tuple[RefitError, WeightSyncError]:
        if not self._cleanup.serving:
            self._cleanup.ask_serving(self._crew)
        self._cleanup.note_held(self._crew)
        return refit_error(
            str(self._plan),
            failures,
            afterwards=self._cleanup.failures,
            lost=self._crew.lost,
            busy=self._crew.busy(),
            patient=self._crew.patient(),
            serving=self._cleanup.serving,
            notes=self._notes,
        )
