"""Soak: many refits in a row, good and failing ones, and what every process holds before and after."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from weightsync.drills.holdings import Holdings, growth, holdings_of
from weightsync.drills.stage import Deadlines, Scene, Stage
from weightsync.errors import RefitError
from weightsync.testing.shared_files import left_behind, shared_files

_REFIT_S = 40.0
_DEADLINES = Deadlines(connect_s=10.0, stall_s=10.0, total_s=30.0, silence_s=4.0)
_FAULTS = (("policy", "middle"), ("rollout", "middle"), ("policy", "first"), ("rollout", "last"))
_MOMENT_S = 0.3


@dataclass(frozen=True)
class Grown:
    """What one process held after the warm-up and at the end."""

    process: str
    before: Holdings
    after: Holdings

    @property
    def beyond(self) -> dict[str, float]:
        """What has grown by more than it may, and by how much."""
        return growth(self.before, self.after)

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can carry."""
        return {
            "process": self.process,
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
            "beyond": self.beyond,
        }


@dataclass(frozen=True)
class Soaked:
    """What came of a soak."""

    refits: int
    failed: int
    """Refits that were to fail, and did."""
    seconds: float
    processes: tuple[Grown, ...]
    left_behind: tuple[str, ...]
    """Names in /dev/shm that were not there before."""

    @property
    def passed(self) -> bool:
        """Whether nothing has grown by more than it may."""
        return not self.left_behind and not any(each.beyond for each in self.processes)

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can carry."""
        return {
            "refits": self.refits,
            "failed": self.failed,
            "seconds": round(self.seconds, 1),
            "passed": self.passed,
            "processes": [each.to_dict() for each in self.processes],
            "left_behind": list(self.left_behind),
        }


class Soak:
    """Refits a small model again and again, and compares the weights after each of them.

    Args:
        transport: what moves the weights.
        topology: who sends to whom.
        policy_ranks: number of trainers.
        rollout_ranks: number of servers.
        fail_every: each so many refits one more comes that fails; 0: none does.
        say: told how it goes.
    """

    def __init__(
        self,
        transport: str,
        topology: str = "auto",
        *,
        policy_ranks: int = 2,
        rollout_ranks: int = 2,
        fail_every: int = 0,
        say: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._scene = Scene(transport, topology, deadlines=_DEADLINES)
        self._ranks = (policy_ranks, rollout_ranks)
        self._fail_every = fail_every
        self._faults: Iterator[tuple[str, str]] = cycle(_FAULTS)
        self._failed = 0
        self._say = say

    def run(self, refits: int, *, warm_up: int) -> Soaked:
        """Run so many refits after ``warm_up`` others.

        Raises:
            RefitError: a refit failed that should not have, or brought other weights, or did not fail.
        """
        policy, rollout = self._ranks
        files = shared_files()
        with Stage(self._scene.transport, policy_ranks=policy, rollout_ranks=rollout) as stage:
            stage.connect(self._scene)
            self._refit(stage, warm_up)
            before = _look(stage)
            started = time.monotonic()
            self._failed = 0
            self._refit(stage, refits)
            seconds = time.monotonic() - started
            after = _look(stage)
            stage.driver.remote.ask("shutdown", timeout_s=_REFIT_S)
        processes = tuple(Grown(name, before[name], after[name]) for name in before)
        return Soaked(refits, self._failed, seconds, processes, tuple(left_behind(files, ())))

    def _refit(self, stage: Stage, refits: int) -> None:
        for number in range(1, refits + 1):
            if self._fail_every and number % self._fail_every == 0:
                self._fail(stage)
            stage.train()
            said = stage.sync(_REFIT_S)
            if not said["ok"]:
                raise RefitError(f"refit {number} failed: {said['text']}")
            for rank, state in stage.states().items():
                served = state["version"], state["digest"], state["refuses"]
                if served != (said["version"], stage.digest, ""):
                    raise RefitError(f"refit {number} left rollout rank {rank} at {state}")
            self._say(number)

    def _fail(self, stage: Stage) -> None:
        side, phase = next(self._faults)
        worker = stage.workers(side)[self._failed % len(stage.workers(side))]
        worker.remote.ask("arm", {"fault": "raise", "phase": phase}, aside=True)
        stage.train()
        if stage.sync(_REFIT_S)["ok"]:
            raise RefitError(f"a refit that was to fail at {worker.name} has not")
        self._failed += 1


def _look(stage: Stage) -> dict[str, Holdings]:
    time.sleep(_MOMENT_S)  # what the last refit has let go is on its way
    return {name: holdings_of(process.pid) for name, process in stage.processes.items()}
