"""A whole job in this process: trainers of one model, modules that serve it, and real engines in between."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

from tests.test_synchronizer_nixl import Trainer, model, same, step
from weightsync.cluster.local import LocalPolicyGroup, LocalRolloutGroup
from weightsync.report import RefitReport
from weightsync.rollout.module import ModuleRolloutWorker
from weightsync.synchronizer import CheckpointEngineWeightSynchronizer

WAITS = {"connect_s": 5, "stall_s": 5, "total_s": 30, "silence_s": 2}


class LocalJob:
    """Trainers, engine hosts and a synchronizer that has connected them. A context manager.

    Args:
        transport: that moves the weights.
        trainers: number of policy ranks.
        rollout: number of engine hosts, of one rank each.
        make_host: makes one of them, with weights of its own.
        lifecycle: settings of the refits beside `WAITS`.
        settings: of the transport.
    """

    def __init__(
        self,
        transport: str = "nixl",
        *,
        trainers: int = 2,
        rollout: int = 1,
        make_host: Callable[[], ModuleRolloutWorker] = lambda: ModuleRolloutWorker(model(9)),
        lifecycle: Mapping[str, Any] = {},
        **settings: Any,
    ) -> None:
        self.make_host = make_host
        self.trained = model(0)
        self.trainers = [Trainer(self.trained, rank) for rank in range(trainers)]
        self.hosts = [make_host() for _ in range(rollout)]
        self.policy, self.rollout = LocalPolicyGroup(self.trainers), LocalRolloutGroup(self.hosts)
        scope = {"device": "cpu", "update_weights_bucket_memory_ratio": 0.0001, **settings}
        generation = {
            "refit_transport": transport,
            "refit_cfg": {transport: scope},
            "refit_lifecycle": {**WAITS, **lifecycle},
        }
        self.synchronizer = CheckpointEngineWeightSynchronizer(
            self.policy, self.rollout, {"policy": {"generation": generation}}, progress=False
        )
        self.synchronizer.init_communicator()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.synchronizer.shutdown()
        self.policy.close()
        self.rollout.close()

    def train(self) -> None:
        """Take one step."""
        step(self.trained)
        self.synchronizer.mark_stale()

    def sync(self) -> RefitReport:
        """Take one step and refit."""
        self.train()
        return self.synchronizer.sync_weights()

    def add(self, count: int = 1) -> RefitReport | None:
        """Let so many hosts join."""
        new = [self.make_host() for _ in range(count)]
        report = self.synchronizer.add_rollout(*new)
        self.hosts += new
        return report

    def remove(self, rank: int) -> None:
        """Let a host leave."""
        self.synchronizer.remove_rollout(rank)
        del self.hosts[rank]

    def serves(self, rank: int, version: int) -> bool:
        """Whether a host serves the trainers' weights as that version; raises if it serves nothing."""
        host = self.hosts[rank]
        host.require_serving()
        return self.holds(rank, version)

    def holds(self, rank: int, version: int | None) -> bool:
        """Whether a host has the trainers' weights as that version."""
        host = self.hosts[rank]
        return host.published_version == version and same(host.model, self.trained)

    def all_serve(self, version: int) -> bool:
        """Whether all of them do; raises if one serves nothing."""
        return all(self.serves(rank, version) for rank in range(len(self.hosts)))
