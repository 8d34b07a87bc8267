"""The algorithm: advantages, the loss and its reference KL. Pure functions of tensors.

GRPO samples a group of completions for each prompt and asks of every completion how much better it is
than its own group, so that no value model is needed. Here each batch is used for one update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_FLAT_GROUP = 1e-6


@dataclass(frozen=True)
class Sample:
    """One completion with everything a policy worker needs to learn from it: plain data."""

    prompt_ids: list[int]
    completion_ids: list[int]
    sampler_logprobs: list[float]
    """What the generation engine says it sampled each completion token with."""
    advantage: float = 0.0


@dataclass(frozen=True)
class Batch:
    """Samples as tensors, prompts padded on the left and completions on the right.

    With ``N`` samples, the longest prompt ``P`` and the longest completion ``C``: ``input_ids``,
    ``attention_mask`` and ``position_ids`` are ``(N, P + C)``; ``targets``, ``sampler_logprobs`` and
    ``mask`` are ``(N, C)``; ``advantages`` is ``(N,)``.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    position_ids: torch.Tensor
    targets: torch.Tensor
    sampler_logprobs: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor

    @classmethod
    def collate(cls, samples: list[Sample]) -> Batch:
        """Pad samples to one rectangle, so that all completions start in the same column."""
        prompt_width = max(len(sample.prompt_ids) for sample in samples)
        width = max(len(sample.completion_ids) for sample in samples)
        prompts = _padded([sample.prompt_ids for sample in samples], prompt_width, left=True)
        targets = _padded([sample.completion_ids for sample in samples], width)
        prompt_mask = _padded([[1] * len(sample.prompt_ids) for sample in samples], prompt_width, left=True)
        mask = _padded([[1] * len(sample.completion_ids) for sample in samples], width)
        attention_mask = torch.cat([prompt_mask, mask], dim=1)
        return cls(
            input_ids=torch.cat([prompts, targets], dim=1),
            attention_mask=attention_mask,
            position_ids=(attention_mask.cumsum(dim=1) - 1).clamp(min=0),
            targets=targets,
            sampler_logprobs=_padded([sample.sampler_logprobs for sample in samples], width).float(),
            mask=mask.bool(),
            advantages=torch.tensor([sample.advantage for sample in samples]),
        )


def _padded(rows: Sequence[Sequence[float]], width: int, *, left: bool = False) -> torch.Tensor:
    filled = []
    for row in rows:
        padding = [0] * (width - len(row))
        filled.append([*padding, *row] if left else [*row, *padding])
    return torch.tensor(filled)


def group_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Normalise rewards within each group: shape ``(prompts, samples)`` in and out.

    A group whose rewards are all alike teaches nothing and gets zeros; dividing by a standard deviation
    that is only rounding noise would turn that noise into a full-sized gradient.
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    spread = rewards.std(dim=1, keepdim=True, unbiased=False)
    flat = spread < _FLAT_GROUP
    return torch.where(flat, torch.zeros_like(centred), centred / spread.masked_fill(flat, 1.0))


def token_logprobs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return each target's log-probability: logits ``(N, C, vocabulary)``, targets and result ``(N, C)``."""
    chosen = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return chosen - logits.logsumexp(dim=-1)


def reference_kl(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """Estimate KL(policy || reference) token by token from the policy's own samples.

    ``r - 1 - log r`` with ``r`` = reference probability over policy probability: unbiased, never
    negative, and of lower variance than ``-log r`` alone.
    """
    log_ratio = reference_logprobs - logprobs
    return torch.expm1(log_ratio) - log_ratio


def clipped_objective(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, clip_ratio: float
) -> torch.Tensor:
    """Return PPO's clipped objective of each token, to be maximised; ``advantages`` is ``(N,)``."""
    ratio = (logprobs - old_logprobs).exp()
    weights = advantages.unsqueeze(1)
    return torch.minimum(ratio * weights, ratio.clamp(1 - clip_ratio, 1 + clip_ratio) * weights)


def sequence_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Average ``(N, C)`` values over each sample's own tokens: ``(N,)``."""
    return values.masked_fill(~mask, 0.0).sum(dim=1) / mask.sum(dim=1).clamp(min=1)


@dataclass(frozen=True)
class LossParts:
    """One batch's loss and the mean KL within it, scalars."""

    loss: torch.Tensor
    kl: torch.Tensor


def grpo_loss(
    batch: Batch,
    logprobs: torch.Tensor,
    reference_logprobs: torch.Tensor,
    *,
    clip_ratio: float,
    kl_coefficient: float,
) -> LossParts:
    """Return the loss of one (micro-)batch: mean over samples of the mean over their tokens.

    The behaviour policy's log-probabilities are the sampler's. Under equal weights the ratio is 1 and the
    clipping idle; what is left of the loss's *value* is the KL term, its gradient is the policy gradient.
    """
    objective = clipped_objective(logprobs, batch.sampler_logprobs, batch.advantages, clip_ratio)
    kl = reference_kl(logprobs, reference_logprobs)
    per_sample = sequence_mean(kl_coefficient * kl - objective, batch.mask)
    return LossParts(per_sample.mean(), sequence_mean(kl.detach(), batch.mask).mean())


@dataclass(frozen=True)
class LogprobGap:
    """How far two log-probabilities of the same sampled tokens are apart, natural logarithm."""

    largest: float
    total: float
    tokens: int

    @classmethod
    def measure(cls, batch: Batch, logprobs: torch.Tensor) -> LogprobGap:
        """Compare the policy's log-probabilities with the sampler's, over the completion tokens only."""
        gap = (logprobs.detach() - batch.sampler_logprobs).abs()[batch.mask]
        if gap.numel() == 0:
            return cls(0.0, 0.0, 0)
        return cls(gap.max().item(), gap.sum().item(), gap.numel())

    @classmethod
    def combine(cls, gaps: list[LogprobGap]) -> LogprobGap:
        """Put the gaps of several batches or ranks together; a NaN anywhere stays visible."""
        largest = torch.tensor([gap.largest for gap in gaps]).max().item() if gaps else 0.0
        return cls(largest, sum(gap.total for gap in gaps), sum(gap.tokens for gap in gaps))

    @property
    def mean(self) -> float:
        """Mean difference of a token."""
        return self.total / max(self.tokens, 1)
