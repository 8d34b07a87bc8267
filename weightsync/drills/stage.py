"""The processes of a drill: trainers, servers and a driver, started, asked, ended and replaced."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from weightsync.capacity import total_memory_bytes
from weightsync.drills.actors import ActorProcess, preload
from weightsync.drills.fault_driver import DrillDriver
from weightsync.drills.fault_workers import DrillServer, DrillTrainer
from weightsync.errors import RefitError

MODEL = (6, 512)
"""Layers and width: each layer's weight fills one of the smallest buckets."""

_BUCKET_BYTES = 1.5 * (1 << 20)
_HOST_ONLY = ("kimi_ckpt_engine",)
_MAKE_S = 40.0


@dataclass(frozen=True)
class Deadlines:
    """What a drill's refits wait for, in seconds."""

    connect_s: float = 3.0
    stall_s: float = 2.0
    total_s: float = 8.0
    silence_s: float = 1.0


@dataclass(frozen=True)
class Scene:
    """What is connected: who moves the weights, from whom to whom, whether buffers stay, how refits end."""

    transport: str
    topology: str = "auto"
    release: bool = False
    deadlines: Deadlines = Deadlines()
    commit: str = "in_place"
    on_failure: str = "fail"

    def config(self) -> dict[str, Any]:
        """Return the configuration, as it is written in a file."""
        device = {} if self.transport in _HOST_ONLY else {"device": "cpu"}
        scope = {
            "update_weights_bucket_memory_ratio": _BUCKET_BYTES / total_memory_bytes("cpu"),
            "topology": self.topology,
            "release_after_refit": self.release,
            **device,
        }
        limits = self.deadlines
        return {
            "policy": {
                "generation": {
                    "refit_transport": self.transport,
                    "refit_cfg": {self.transport: scope},
                    "refit_lifecycle": {
                        "connect_s": limits.connect_s,
                        "stall_s": limits.stall_s,
                        "total_s": limits.total_s,
                        "silence_s": limits.silence_s,
                        "commit": self.commit,
                        "on_failure": self.on_failure,
                    },
                }
            }
        }


class Stage:
    """Trainers, servers and a driver in processes of their own.

    Args:
        transport: that the workers prepare for when they start.
        policy_ranks: number of trainers.
        rollout_ranks: number of servers.
    """

    def __init__(self, transport: str, *, policy_ranks: int, rollout_ranks: int) -> None:
        preload(["weightsync.drills.fault_workers", "weightsync.drills.fault_driver"])
        self._config = Scene(transport).config()
        self._scratch = Path(tempfile.mkdtemp(prefix="weightsync-drill-"))
        self._started = 0
        self._step = 0
        self.digest = ""
        """Of the weights that the trainers have."""
        self.scene: Scene | None = None
        self.driver = self._start("driver", DrillDriver, {})
        self.policy = [self._worker("policy", rank) for rank in range(policy_ranks)]
        self.rollout = [self._worker("rollout", rank) for rank in range(rollout_ranks)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    @property
    def processes(self) -> dict[str, ActorProcess]:
        """Every process by what it is."""
        workers = {
            f"{side} rank {rank}": worker
            for side in ("policy", "rollout")
            for rank, worker in enumerate(self.workers(side))
        }
        return {**workers, "driver": self.driver}

    def workers(self, side: str) -> list[ActorProcess]:
        """Return the workers of a side, in rank order."""
        return self.policy if side == "policy" else self.rollout

    def end(self) -> None:
        """End every process."""
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(ActorProcess.end, self.processes.values()))
        shutil.rmtree(self._scratch, ignore_errors=True)

    def connect(self, scene: Scene) -> None:
        """Make a synchronizer in the driver, unless it has that one.

        Raises:
            RefitError: it could not connect.
        """
        if self.scene != scene:
            self.scene = None
            result = self.make(scene)
            if not result["ok"]:
                raise RefitError(result["text"])
            self.scene = scene

    def make(self, scene: Scene) -> dict[str, Any]:
        """Make a synchronizer in the driver; returns what it said."""
        addresses = [[worker.address for worker in each] for each in (self.policy, self.rollout)]
        for worker in self.processes.values():
            _ = worker.remote  # they have started
        made: dict[str, Any] = self.driver.remote.ask(
            "make", *addresses, scene.config(), scene.deadlines.total_s, timeout_s=_MAKE_S
        )
        return made

    def train(self) -> str:
        """Let all trainers take the next step."""
        self._step += 1
        digests = self._ask(self.policy, "train", self._step)
        if len(set(digests)) != 1:
            raise RefitError(f"the trainers differ: {digests}")
        self.digest = digests[0]
        return self.digest

    def sync(self, timeout_s: float) -> dict[str, Any]:
        """Run one refit; returns what the driver said."""
        said: dict[str, Any] = self.driver.remote.ask("sync", timeout_s=timeout_s)
        return said

    def start_sync(self) -> Future[dict[str, Any]]:
        """Start one refit."""
        return self.driver.remote.call("sync")

    def states(self, ranks: Sequence[int] | None = None) -> dict[int, Mapping[str, Any]]:
        """Return what servers say of themselves, by rank."""
        chosen = list(range(len(self.rollout)) if ranks is None else ranks)
        asked = self._ask([self.rollout[rank] for rank in chosen], "state", aside=True)
        return dict(zip(chosen, asked, strict=True))

    def fresh(self, side: str, rank: int) -> ActorProcess:
        """End a worker and start another in its place; returns it once it is there."""
        workers = self.workers(side)
        workers[rank].end()
        workers[rank] = worker = self._worker(side, rank)
        _ = worker.remote
        if side == "policy":
            worker.remote.ask("train", self._step, timeout_s=20.0)
        return worker

    def fresh_driver(self) -> None:
        """End the driver and start another, which has no synchronizer yet."""
        self.driver.end()
        self.driver, self.scene = self._start("driver", DrillDriver, {}), None

    def _worker(self, side: str, rank: int) -> ActorProcess:
        if side == "policy":
            arguments: dict[str, Any] = {"rank": rank, "config": self._config, "model": (*MODEL, 0)}
            return self._start(f"policy-{rank}", DrillTrainer, arguments)
        arguments = {"config": self._config, "model": (*MODEL, 1_000_000 + self._started)}
        return self._start(f"rollout-{rank}", DrillServer, arguments)

    def _start(self, name: str, make: Any, arguments: dict[str, Any]) -> ActorProcess:
        self._started += 1
        return ActorProcess(self._scratch, f"{name}-{self._started}", make, arguments)

    def _ask(
        self, workers: Sequence[ActorProcess], method: str, *arguments: Any, aside: bool = False
    ) -> list[Any]:
        ends = time.monotonic() + 20.0
        calls = [worker.remote.call(method, *arguments, aside=aside) for worker in workers]
        return [call.result(timeout=max(ends - time.monotonic(), 0.0)) for call in calls]
