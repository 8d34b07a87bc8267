"""The Ray actors of a run, called together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weightsync.errors import DeadlineError, WeightSyncError

from .colocated_worker import ColocatedWorker
from .config import DemoConfig
from .grpo import LogprobGap, Sample
from .policy_worker import PolicyWorker, TrainFigures
from .rollout_worker import RolloutWorker
from .task import Completion, Prompt

_STARTUP_S = 300.0
_CALL_S = 300.0


class Workers:
    """Policy ranks, and the vLLM engines that sample; every call has a deadline.

    There is one engine in an actor of its own or, where the configuration says so, one in each policy worker.
    """

    def __init__(self, ray: Any, checkpoint: Path, config: DemoConfig, stop_token_ids: list[int]) -> None:
        self._ray = ray
        actor, ranks = ray.remote(num_cpus=1), range(config.policy.workers)
        if config.shares_processes:
            shared = actor(ColocatedWorker)
            self.policy = [shared.remote(rank, checkpoint, config, stop_token_ids) for rank in ranks]
            self.engines = self.policy
        else:
            self.engines = [actor(RolloutWorker).remote(checkpoint, config, stop_token_ids)]
            self.policy = [actor(PolicyWorker).remote(rank, checkpoint, config) for rank in ranks]

    def start(self) -> None:
        """Wait until the policy is loaded and sharded and vLLM is ready."""
        port = self.get(self.policy[0].open_rendezvous.remote(), _STARTUP_S)
        joined = [worker.join.remote(port) for worker in self.policy]
        self.get([*joined, *(engine.ready.remote() for engine in self.engines)], _STARTUP_S)

    def get(self, refs: Any, timeout_s: float = _CALL_S) -> Any:
        """Wait for one result or a list of them; the first failure of a list is raised at once.

        Raises:
            DeadlineError: a worker did not answer in time.
            WeightSyncError: a worker died or its call failed; Ray's error, with the traceback, is the cause.
        """
        try:
            return self._ray.get(refs, timeout=timeout_s)
        except self._ray.exceptions.GetTimeoutError as error:
            raise DeadlineError(f"a worker did not answer within {timeout_s:g} s") from error
        except self._ray.exceptions.RayError as error:
            last = str(error).strip().splitlines()[-1]
            raise WeightSyncError(f"a worker of the run failed: {last} (--debug shows where)") from error

    def generate(self, prompts: list[Prompt], **sampling: Any) -> list[list[Completion]]:
        """Return each prompt's completions."""
        hands = [prompts[number :: len(self.engines)] for number in range(len(self.engines))]
        answers = self.get(
            [
                engine.sample.remote([prompt.token_ids for prompt in hand], **sampling)
                for engine, hand in zip(self.engines, hands, strict=True)
            ]
        )
        groups: list[list[Completion]] = [[] for _ in prompts]
        for number, hand in enumerate(answers):
            groups[number :: len(answers)] = hand
        return groups

    def train(self, samples: list[Sample]) -> list[TrainFigures]:
        """Do one optimizer step, the samples dealt out over the ranks."""
        hands = deal(samples, len(self.policy))
        return list(
            self.get([worker.train.remote(hand) for worker, hand in zip(self.policy, hands, strict=True)])
        )

    def compare(self, samples: list[Sample]) -> LogprobGap:
        """Compare the policy's log-probabilities with the sampler's on the current weights of both."""
        hands = deal(samples, len(self.policy))
        return LogprobGap.combine(
            self.get([worker.compare.remote(hand) for worker, hand in zip(self.policy, hands, strict=True)])
        )


def deal(samples: list[Sample], ranks: int) -> list[list[Sample]]:
    """Deal samples out to the ranks in equal numbers; the first ones again if they do not come out even."""
    missing = -len(samples) % ranks
    filled = samples + samples[:missing]
    return [filled[rank::ranks] for rank in range(ranks)]
