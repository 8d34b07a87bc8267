"""Whether a run did what it claims: the two criteria, and what a failure of each means."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .config import CheckSettings


@dataclass(frozen=True)
class StepRecord:
    """What one step printed. Times in seconds; the refit fields are `None` when it was switched off."""

    step: int
    reward: float
    loss: float
    kl: float
    difference: float
    """Largest |policy - vLLM| log-probability of a sampled token, both on this step's weights."""
    mean_difference: float
    policy_version: int
    """Number of optimizer steps behind the policy's weights while this step sampled."""
    rollout_version: int
    """The same of vLLM's weights."""
    refit_seconds: float | None
    refit_bytes: int | None
    generate_seconds: float
    train_seconds: float
    seconds: float


@dataclass(frozen=True)
class HeldOut:
    """Greedy accuracy on prompts that are never trained on, and the difference on those completions."""

    accuracy: float
    difference: float


@dataclass
class RunResult:
    """Everything a run found; `report.write_result` stores it."""

    model: str
    task: str
    seed: int
    refit: bool
    tolerance: float
    steps: list[StepRecord] = field(default_factory=list)
    held_out_before: HeldOut | None = None
    held_out_after: HeldOut | None = None
    wall_seconds: float = 0.0

    @property
    def largest_difference(self) -> float:
        """Worst difference of the whole run, the held-out completions included; NaN if any was NaN."""
        checks = [check for check in (self.held_out_before, self.held_out_after) if check is not None]
        differences = [record.difference for record in self.steps] + [check.difference for check in checks]
        return max(differences, key=lambda value: (math.isnan(value), value), default=0.0)

    @property
    def reward_rise(self) -> float:
        """Mean reward of the last third of the steps less that of the first third."""
        rewards = [record.reward for record in self.steps]
        third = max(len(rewards) // 3, 1)
        return sum(rewards[-third:]) / third - sum(rewards[:third]) / third if rewards else 0.0


@dataclass(frozen=True)
class Verdict:
    """Passed, or the reasons why not, each a sentence or two for a person."""

    reasons: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.reasons


def judge(result: RunResult, check: CheckSettings) -> Verdict:
    """Apply both criteria: the difference never over its tolerance, the reward risen by the margin."""
    reasons = []
    # Written so that NaN fails.
    if not result.largest_difference <= check.logprob_tolerance:
        reasons.append(_explain_difference(result, check))
    if not result.reward_rise >= check.reward_rise:
        reasons.append(
            f"The reward did not rise: from the first third of the steps to the last its mean changed by "
            f"{result.reward_rise:+.3f}, and {check.reward_rise:+.3f} was asked for."
        )
    return Verdict(tuple(reasons))


def _explain_difference(result: RunResult, check: CheckSettings) -> str:
    found = (
        f"The policy's and vLLM's log-probabilities of the same sampled tokens differ by up to "
        f"{result.largest_difference:.3g}; equal weights keep that under {check.logprob_tolerance:.0e}."
    )
    if result.refit:
        return f"{found} vLLM did not serve the weights it should have: the refit is broken."
    return (
        f"{found} This is what a missed refit looks like: the policy has moved on, vLLM still samples from "
        "the weights it was started with, and the run trains on samples of a model that no longer exists. "
        "No call failed: without this comparison a reward that stays flat would be the only sign."
    )
