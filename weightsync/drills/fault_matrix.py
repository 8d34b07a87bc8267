"""Runs the cells of the fault matrix: a good refit, one with the fault, the recovery, and one more."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from typing import Any

from weightsync.drills.actors import ActorLostError
from weightsync.drills.fault_cells import NOT_APPLICABLE, Cell, Expected, Verdict
from weightsync.drills.fault_points import BUCKET_PHASES
from weightsync.drills.stage import Deadlines, Scene, Stage
from weightsync.errors import WeightSyncError

LOST, SUCCEEDED = "driver lost", "succeeded"
_MARGIN_S = 2.0
_MOMENT_S = 0.05
_LOSS_S = 5.0
"""For a killed process to be gone, with all of its memory, or a stopped one to stand still."""
_SHOWN = 300


class FaultMatrix:
    """Runs cells one after the other; processes stay for the next one where they can.

    Args:
        policy_ranks: number of trainers.
        rollout_ranks: number of servers; at least two, so that one of them can forward.
        deadlines: of every refit.
        commit: ``in_place`` or ``staged``, as in the configuration.
        on_failure: ``fail`` or ``continue``.
    """

    def __init__(
        self,
        *,
        policy_ranks: int = 2,
        rollout_ranks: int = 2,
        deadlines: Deadlines,
        commit: str = "in_place",
        on_failure: str = "fail",
    ) -> None:
        self._policy_ranks = policy_ranks
        self._rollout_ranks = rollout_ranks
        self._deadlines = deadlines
        self._how = (commit, on_failure)

    def run(
        self, cells: Sequence[Cell], say: Callable[[Verdict], None] = lambda _: None
    ) -> Iterator[Verdict]:
        """Yield the verdict of each cell."""
        stage: Stage | None = None
        transport = ""
        try:
            for cell in cells:
                if stage is not None and cell.transport != transport:
                    stage.end()
                    stage = None
                transport = cell.transport
                if cell.why_not:
                    verdict = Verdict(cell, NOT_APPLICABLE, detail=cell.why_not)
                else:
                    stage = stage or self._make_stage(transport)
                    verdict = self._run_one(stage, cell)
                    if not verdict.passed:
                        stage.end()
                        stage = None
                yield verdict
        finally:
            if stage is not None:
                stage.end()

    def _make_stage(self, transport: str) -> Stage:
        return Stage(transport, policy_ranks=self._policy_ranks, rollout_ranks=self._rollout_ranks)

    def _run_one(self, stage: Stage, cell: Cell) -> Verdict:
        try:
            return _Trial(stage, cell, self._scene(cell)).run()
        except (WeightSyncError, TimeoutError) as error:
            return Verdict(cell, f"the drill failed: {type(error).__name__}", detail=str(error)[-_SHOWN:])

    def _scene(self, cell: Cell) -> Scene:
        topology = "ring" if cell.actor == "forwarder" else "auto"
        return Scene(cell.transport, topology, cell.phase == "finalize", self._deadlines, *self._how)


class _Trial:
    """One cell."""

    def __init__(self, stage: Stage, cell: Cell, scene: Scene) -> None:
        self._stage = stage
        self._cell = cell
        self._scene = scene
        self._limit_s = scene.deadlines.total_s + _MARGIN_S
        self._rank = self._rank_of_actor(stage)
        self._notes: list[str] = []

    @property
    def _side(self) -> str:
        return "policy" if self._cell.actor == "sender" else "rollout"

    @property
    def _expected(self) -> Expected:
        cell = self._cell
        return cell.expected if self._scene.on_failure == "fail" else cell.expected_where_the_others_go_on

    def _rank_of_actor(self, stage: Stage) -> int:
        if self._cell.actor in {"sender", "forwarder"}:
            return 0
        return len(stage.rollout) - 1

    def run(self) -> Verdict:
        """Run it."""
        before = self._begin()
        self._arm()
        started = time.monotonic()
        outcome, said = self._strike()
        seconds = time.monotonic() - started
        self._judge(outcome, said, seconds)
        if outcome != LOST:
            self._look_at_the_others(before)
        recovered = self._recover(outcome)
        shown = said.get("kind", "") if outcome not in {LOST, SUCCEEDED} else ""
        kinds = ", ".join(dict.fromkeys(said.get("kinds", ())))
        return Verdict(
            self._cell,
            f"{shown} ({kinds})" if shown and kinds else shown or outcome,
            seconds,
            recovered,
            recovered and not self._notes,
            "; ".join(self._notes) or said.get("text", "")[:_SHOWN],
        )

    def _begin(self) -> tuple[int, str]:
        """Connect and refit once; returns the version and the digest that are served."""
        stage, known = self._stage, self._stage.scene == self._scene
        stage.connect(self._scene)
        if not known:
            stage.train()
            said = stage.sync(self._limit_s)
            if not said["ok"]:
                raise WeightSyncError(f"the first refit failed: {said['text']}")
        version, digest = stage.driver.remote.ask("version"), stage.digest
        self._require_served(version, digest)
        stage.train()
        return version, digest

    def _require_served(self, version: int, digest: str) -> None:
        for rank, state in self._stage.states().items():
            found = (state["version"], state["digest"], state["refuses"], state["paused"])
            if found != (version, digest, "", False):
                raise WeightSyncError(f"rollout rank {rank} is at {found}, not at {(version, digest)}")

    def _arm(self) -> None:
        cell, stage = self._cell, self._stage
        if cell.actor == "driver" and cell.fault in {"drop", "corrupt"}:
            stage.driver.remote.ask("arm", cell.fault, cell.phase, self._rank, aside=True)
            return
        side, rank = self._trigger()
        pid = 0
        if cell.actor == "driver":
            pid = stage.driver.pid
        elif (side, rank) != (self._side, self._rank):
            pid = stage.workers(self._side)[self._rank].pid
        order = {"fault": cell.fault, "phase": cell.phase, "pid": pid, "kind": _kind(cell)}
        self._armed = stage.workers(side)[rank]
        self._armed.remote.ask("arm", order, aside=True)

    def _trigger(self) -> tuple[str, int]:
        """Return the worker at whose place in the refit the fault strikes."""
        cell = self._cell
        if cell.actor == "driver":
            return ("policy", 0) if cell.phase in BUCKET_PHASES else ("rollout", self._rank)
        if cell.actor == "sender" and cell.phase == "commit":
            return "rollout", self._rank
        return self._side, self._rank

    def _strike(self) -> tuple[str, dict[str, Any]]:
        future = self._stage.start_sync()
        ends = time.monotonic() + self._limit_s
        while time.monotonic() < ends and not future.done():
            if self._stage.driver.is_stopped and self._cell.fault == "stop":
                return LOST, {}
            wait_for_futures([future], timeout=_MOMENT_S)
        return self._outcome(future)

    def _outcome(self, future: Future[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
        if not future.done():
            return "hangs", {}
        try:
            said = future.result(timeout=0)
        except ActorLostError:
            return LOST, {}
        return (SUCCEEDED if said["ok"] else "failed"), said

    def _judge(self, outcome: str, said: dict[str, Any], seconds: float) -> None:
        cell, expected = self._cell, self._expected
        if not self._has_struck():
            self._notes.append("the fault was not reached")
        allowed = {SUCCEEDED: expected.success, "failed": expected.error, LOST: expected.lost}
        if not allowed.get(outcome, False):
            self._notes.append(f"the refit {outcome}, which it must not: {said.get('text', '')[:_SHOWN]}")
        if seconds > self._limit_s:
            self._notes.append(f"it took {seconds:.1f} s")
        left_out = said.get("left_out", [])
        if outcome == SUCCEEDED and expected.left_out and left_out != [self._rank]:
            self._notes.append(f"the refit went on without {left_out}, not without {[self._rank]}")
        if outcome != "failed":
            return
        if not said["typed"] and said["kind"] != expected.kind:
            self._notes.append(f"not a typed error: {said['text'][:_SHOWN]}")
        kinds = [said["kind"], *said["kinds"]]
        says = expected.kind in kinds or f"{expected.kind}: " in said["text"]
        if expected.kind and not expected.success and not says:
            self._notes.append(f"no {expected.kind} among {kinds}: {said['text'][:_SHOWN]}")
        if expected.names and f"{self._side} rank {self._rank}" not in said["text"]:
            self._notes.append(f"{cell.actor} is not named: {said['text'][:_SHOWN]}")

    def _has_struck(self) -> bool:
        cell, stage = self._cell, self._stage
        if cell.actor == "driver" and cell.fault in {"drop", "corrupt"}:
            return bool(stage.driver.remote.ask("struck", aside=True))
        if cell.is_loss:
            process = stage.driver if self._is_driver else stage.workers(self._side)[self._rank]
            await_loss = process.await_stopped if cell.fault == "stop" else process.await_end
            return await_loss(_LOSS_S)
        return bool(self._armed.remote.ask("struck", aside=True))

    def _look_at_the_others(self, before: tuple[int, str]) -> None:
        """Check that nobody is left paused, and that who serves has the weights of its version."""
        version, digest = before
        known = {version: digest, version + 1: self._stage.digest}
        # One whose answer got lost is given up as well: it stays as it is until it is replaced.
        is_gone = self._cell.loses_an_answer or (self._cell.is_loss and not self._is_driver)
        gone = {self._rank} if is_gone and self._side == "rollout" else set()
        alive = [rank for rank in range(len(self._stage.rollout)) if rank not in gone]
        # A rank that still waits for the one that is gone hears of the end when its own deadline has come.
        ends = time.monotonic() + self._limit_s
        states = self._stage.states(alive)
        while any(state["paused"] for state in states.values()) and time.monotonic() < ends:
            time.sleep(_MOMENT_S)
            states = self._stage.states(alive)
        for rank, state in states.items():
            if state["paused"]:
                self._notes.append(f"rollout rank {rank} is left paused")
            if not state["refuses"] and known.get(state["committed"]) != state["digest"]:
                self._notes.append(f"rollout rank {rank} serves other weights than those of its version")

    @property
    def _is_driver(self) -> bool:
        return self._cell.actor == "driver"

    def _recover(self, outcome: str) -> bool:
        """Replace who is gone, and refit; only a worker that still has to end its part is waited for."""
        steps: list[Callable[[], dict[str, Any]]] = []
        stage = self._stage
        stage.scene = None
        if outcome == LOST or (outcome == "hangs" and self._is_driver):
            stage.fresh_driver()
            steps.append(lambda: stage.make(self._scene))
        elif self._cell.is_loss or self._cell.loses_an_answer:
            side, rank = self._side, self._rank
            worker = stage.fresh(side, rank)
            _ = worker.remote
            steps.append(
                lambda: stage.driver.remote.ask("replace", side, rank, worker.address, timeout_s=20.0)
            )
        stage.train()
        steps.append(lambda: stage.sync(self._limit_s))
        ends = time.monotonic() + 2 * self._limit_s
        for step in steps:
            said = step()
            while _is_to_be_tried_again(said) and time.monotonic() < ends:
                time.sleep(_MOMENT_S)
                said = step()
            if not said["ok"]:
                self._notes.append(f"afterwards: {said['text'][:_SHOWN]}")
                return False
        self._require_served(stage.driver.remote.ask("version"), stage.digest)
        stage.scene = self._scene
        return True


def _is_to_be_tried_again(said: dict[str, Any]) -> bool:
    """Whether a worker still had to end what it was in; it may have been left out because of that."""
    return bool(said.get("left_out")) if said["ok"] else "busy" in said["text"]


def _kind(cell: Cell) -> str:
    """Return what is dropped or corrupted at a bucket."""
    if cell.phase not in BUCKET_PHASES:
        return ""
    if cell.fault == "drop":
        return "release" if cell.actor == "receiver" else "bucket"
    if cell.fault == "corrupt":
        return "fetch" if cell.actor == "receiver" else "publish"
    return ""
