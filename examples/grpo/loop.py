"""The training loop: sample with vLLM, reward, train the policy, refit vLLM."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import torch

from weightsync.synchronizer import CheckpointEngineWeightSynchronizer

from .config import DemoConfig
from .grpo import LogprobGap, Sample, group_advantages
from .task import Completion, Prompt, Task
from .verdict import HeldOut, StepRecord
from .workers import Workers


class GrpoRun:
    """The loop's state: workers, task, and which weights each side has."""

    def __init__(
        self,
        workers: Workers,
        task: Task,
        config: DemoConfig,
        synchronizer: CheckpointEngineWeightSynchronizer | None,
    ) -> None:
        self._workers = workers
        self._task = task
        self._config = config
        self._synchronizer = synchronizer
        self._rng = random.Random(config.seed)
        self._policy_version = 0
        self._rollout_version = 0

    def step(self, number: int) -> StepRecord:
        """Run one step: sample, reward, train, refit."""
        began = time.monotonic()
        settings = self._config.grpo
        prompts = self._task.sample_prompts(settings.prompts_per_step, self._rng)
        groups = self._workers.generate(prompts, samples=settings.samples_per_prompt)
        generated = time.monotonic()
        rewards = self._rewards(prompts, groups)
        figures = self._workers.train(_samples(prompts, groups, group_advantages(rewards)))
        trained = time.monotonic()
        gap = LogprobGap.combine([figure.gap for figure in figures])
        record = StepRecord(
            step=number,
            reward=rewards.mean().item(),
            loss=sum(figure.loss for figure in figures) / len(figures),
            kl=sum(figure.kl for figure in figures) / len(figures),
            difference=gap.largest,
            mean_difference=gap.mean,
            policy_version=self._policy_version,
            rollout_version=self._rollout_version,
            refit_seconds=None,
            refit_bytes=None,
            generate_seconds=generated - began,
            train_seconds=trained - generated,
            seconds=trained - began,
        )
        self._policy_version += 1
        return self._refit(record, began)

    def _refit(self, record: StepRecord, began: float) -> StepRecord:
        if self._synchronizer is None:
            return record
        self._synchronizer.mark_stale()
        report = self._synchronizer.sync_weights(version=self._policy_version)
        self._rollout_version = report.version
        return replace(
            record,
            refit_seconds=report.seconds["total"],
            refit_bytes=report.bytes,
            seconds=time.monotonic() - began,
        )

    def held_out(self) -> HeldOut:
        """Answer the held-out prompts greedily."""
        prompts = self._task.held_out_prompts()
        groups = self._workers.generate(prompts, samples=1, greedy=True)
        right = [
            self._task.is_correct(prompt, group[0]) for prompt, group in zip(prompts, groups, strict=True)
        ]
        no_advantages = torch.zeros(len(prompts), 1)
        gap = self._workers.compare(_samples(prompts, groups, no_advantages))
        return HeldOut(accuracy=sum(right) / len(right), difference=gap.largest)

    def _rewards(self, prompts: list[Prompt], groups: list[list[Completion]]) -> torch.Tensor:
        return torch.tensor(
            [
                [self._task.reward(prompt, completion) for completion in group]
                for prompt, group in zip(prompts, groups, strict=True)
            ]
        )


def _samples(prompts: list[Prompt], groups: list[list[Completion]], advantages: torch.Tensor) -> list[Sample]:
    return [
        Sample(prompt.token_ids, completion.token_ids, completion.logprobs, advantage)
        for prompt, group, row in zip(prompts, groups, advantages.tolist(), strict=True)
        for completion, advantage in zip(group, row, strict=True)
    ]
