"""Comparing what two engines generate: the same greedy tokens, the same log-probabilities. No I/O."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}
"""Largest difference of a log-probability that the dtype's own rounding explains."""


@dataclass(frozen=True)
class Generation:
    """Greedy tokens of one prompt, and the log-probability of each."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Comparison:
    """Two engines on the same prompts."""

    tokens: int
    equal_tokens: int
    largest_difference: float
    """Of log-probabilities, over the tokens that are equal up to the first that is not."""
    tolerance: float

    @property
    def agrees(self) -> bool:
        """Whether all tokens are equal and no log-probability differs by more than the tolerance."""
        return self.equal_tokens == self.tokens and self.largest_difference <= self.tolerance


def compare_generations(
    served: Sequence[Generation], expected: Sequence[Generation], tolerance: float
) -> Comparison:
    """Compare generations prompt by prompt; a prompt counts up to its first differing token."""
    tokens = sum(len(each.token_ids) for each in expected)
    equal, largest = 0, 0.0
    for one, other in zip(served, expected, strict=True):
        for a, b, p, q in zip(one.token_ids, other.token_ids, one.logprobs, other.logprobs, strict=True):
            if a != b:
                break
            equal, largest = equal + 1, max(largest, _difference(p, q))
    return Comparison(tokens, equal, largest, tolerance)


def _difference(one: float, other: float) -> float:
    """Return the distance of two log-probabilities; infinite where either is no number."""
    distance = abs(one - other)
    return distance if math.isfinite(distance) else math.inf
