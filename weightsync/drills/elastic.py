"""The elastic drill: rollout workers come and go on Ray, one is killed, and every digest is looked at."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from weightsync.cluster.ray import RayPolicyGroup, RayRolloutGroup
from weightsync.config import RefitConfig
from weightsync.drills.workers import Server, Trainer
from weightsync.errors import RefitError
from weightsync.synchronizer import CheckpointEngineWeightSynchronizer

_ANSWER_S = 60.0


@dataclass(frozen=True)
class Phase:
    """What one phase of the drill did, and what the workers served at its end."""

    number: int
    workers: int
    change: str
    version: int
    digests_right: int
    """Workers that serve the policy's weights, byte for byte, under that version."""
    kept: int
    """Workers that were there before, and still are the same processes."""
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether every worker served the right weights."""
        return self.digests_right == self.workers

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can carry."""
        return {**asdict(self), "passed": self.passed}


class ElasticDrill:
    """Runs a sequence of world sizes on one live synchronizer.

    Args:
        ray: the connected ``ray`` module.
        config: of the refits.
        policy_workers: number of trainers.
        model: layers, width and seed of the model.
        say: told what happens.
    """

    def __init__(
        self,
        ray: Any,
        config: RefitConfig,
        *,
        policy_workers: int,
        model: tuple[int, int, int] = (4, 512, 1),
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._ray = ray
        self._config = config
        self._model = model
        self._say = say
        self._servers: list[Any] = []
        self._pids: set[int] = set()
        self._step = 0
        self._digest = ""
        trainer = ray.remote(Trainer)
        self._trainers = [trainer.remote(rank, config, model) for rank in range(policy_workers)]

    def run(self, sequence: Sequence[int], *, kill_in: int | None) -> list[Phase]:
        """Go through world sizes; in phase ``kill_in`` (from 1) a worker is killed with SIGKILL and replaced.

        Raises:
            WeightSyncError: a step failed that should not have.
        """
        self._servers = self._started(sequence[0])
        policy, rollout = RayPolicyGroup(self._trainers), RayRolloutGroup(self._servers)
        phases: list[Phase] = []
        with CheckpointEngineWeightSynchronizer(
            policy, rollout, self._config, progress=False
        ) as synchronizer:
            synchronizer.init_communicator()
            for number, workers in enumerate(sequence, start=1):
                started = time.monotonic()
                change = self._resize(synchronizer, workers) if number > 1 else f"start with {workers}"
                if number == kill_in:
                    change += f", {self._kill_one(synchronizer)}"
                self._train(synchronizer)
                synchronizer.sync_weights()
                phases.append(self._look(synchronizer, number, change, time.monotonic() - started))
                self._say(f"phase {number}: {phases[-1]}")
        return phases

    def _resize(self, synchronizer: CheckpointEngineWeightSynchronizer, workers: int) -> str:
        missing = workers - len(self._servers)
        if missing > 0:
            new = self._started(missing)
            report = synchronizer.add_rollout(*new)
            self._servers += new
            self._require_served(new, synchronizer.weight_version)
            return f"add {missing}, which got version {report.version if report else None} at once"
        for _ in range(-missing):
            leaving = self._servers.pop(0)
            synchronizer.remove_rollout(0)
            self._ray.kill(leaving)
        return f"remove {-missing}" if missing else "nobody comes or goes"

    def _kill_one(self, synchronizer: CheckpointEngineWeightSynchronizer) -> str:
        """Kill the last worker, see that the refit fails and says so, and replace it."""
        rank = len(self._servers) - 1
        os.kill(self._ask([self._servers[rank]])[0]["pid"], signal.SIGKILL)
        self._train(synchronizer)
        try:
            synchronizer.sync_weights()
        except RefitError as error:
            said = f"rollout rank {rank}" in str(error)
        else:
            said = False
        if not said:
            raise RefitError(f"rollout rank {rank} was killed, and the refit did not say so")
        (self._servers[rank],) = self._started(1)
        synchronizer.replace_rollout(rank, self._servers[rank])
        return f"rank {rank} killed in a refit that said so, and replaced"

    def _started(self, count: int) -> list[Any]:
        server = self._ray.remote(Server)
        model = (*self._model[:2], self._model[2] + 100)  # other weights than the trainers'
        return [server.remote(self._config, model) for _ in range(count)]

    def _train(self, synchronizer: CheckpointEngineWeightSynchronizer) -> None:
        self._step += 1
        calls = [trainer.train.remote(self._step) for trainer in self._trainers]
        (self._digest,) = set(self._ray.get(calls, timeout=_ANSWER_S))
        synchronizer.mark_stale()

    def _require_served(self, servers: Sequence[Any], version: int | None) -> None:
        for state in self._ask(servers):
            if (state["version"], state["digest"]) != (version, self._digest):
                raise RefitError(f"a newcomer serves {state} in place of version {version}, {self._digest}")

    def _look(
        self, synchronizer: CheckpointEngineWeightSynchronizer, number: int, change: str, seconds: float
    ) -> Phase:
        states = self._ask(self._servers)
        version = synchronizer.weight_version or 0
        pids = {state["pid"] for state in states}
        right = [state for state in states if (state["version"], state["digest"]) == (version, self._digest)]
        kept, self._pids = len(pids & self._pids), pids
        return Phase(number, len(states), change, version, len(right), kept, round(seconds, 2))

    def _ask(self, servers: Sequence[Any]) -> list[dict[str, Any]]:
        states: list[dict[str, Any]] = self._ray.get(
            [server.state.remote() for server in servers], timeout=_ANSWER_S
        )
        return states
