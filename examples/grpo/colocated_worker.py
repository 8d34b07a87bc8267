"""A policy rank and a vLLM engine in one process: the engine takes the weights without any transport."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weightsync.policy import ColocatedWorkerMixin

from .config import DemoConfig
from .policy_worker import PolicyWorker
from .rollout_worker import RolloutWorker
from .task import Completion


class ColocatedWorker(ColocatedWorkerMixin, PolicyWorker):
    """A rank of the policy that also samples.

    Args:
        rank: see `PolicyWorker`.
        checkpoint: directory of the Hugging Face checkpoint that both start from.
        config: the run's configuration.
        stop_token_ids: see `RolloutWorker`.
    """

    def __init__(self, rank: int, checkpoint: Path, config: DemoConfig, stop_token_ids: list[int]) -> None:
        super().__init__(rank, checkpoint, config)
        self._stop_token_ids = stop_token_ids

    def join(self, port: int) -> None:
        """Join the other ranks, then start this rank's engine.

        vLLM takes the policy's process group for its world, and makes the groups of its own in there: all
        ranks start their engines at once.
        """
        super().join(port)
        self.engine_host = RolloutWorker(self._checkpoint, self._config, self._stop_token_ids)

    def ready(self) -> None:
        """Answer once the engine has started; it does in `join`."""

    def sample(self, prompts: list[list[int]], **sampling: Any) -> list[list[Completion]]:
        """Sample with this rank's engine; see `RolloutWorker.sample`."""
        completions: list[list[Completion]] = self.engine_host.sample(prompts, **sampling)
        return completions
