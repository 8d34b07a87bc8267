"""What the policy is asked, and what its answers are worth. No model, no cluster.

A task makes prompts as token ids and rewards completions. Two of them: `ArithmeticTask`, which a real
small model learns, and `TokenClassTask`, which a tiny random model learns in seconds.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Prompt:
    """A question: what the model reads, and what `Task.reward` compares with."""

    token_ids: list[int]
    answer: int
    text: str = ""


@dataclass(frozen=True)
class Completion:
    """What the model sampled for one prompt.

    ``logprobs`` are the generation engine's own log-probabilities of ``token_ids``, one each, natural
    logarithm, temperature 1. ``ended`` is true if the last token is one of the task's stop tokens.
    """

    token_ids: list[int]
    logprobs: list[float]
    ended: bool


class Tokenizer(Protocol):
    """The two calls a task needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Return token ids; special tokens in the text count as such, none are added."""

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of token ids, without special tokens."""


class Task(Protocol):
    """Prompts and their rewards."""

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens at which a completion ends; empty if it always runs to its full length."""

    def sample_prompts(self, count: int, rng: random.Random) -> list[Prompt]:
        """Draw ``count`` training prompts."""

    def held_out_prompts(self) -> list[Prompt]:
        """Return the prompts that are never trained on, always the same ones."""

    def reward(self, prompt: Prompt, completion: Completion) -> float:
        """Return the completion's reward, 0 to 1."""

    def is_correct(self, prompt: Prompt, completion: Completion) -> bool:
        """Whether the answer is right, whatever its form."""


class ArithmeticTask:
    """Single-digit addition, asked in the chat format of SmolLM2.

    Reward: 0.8 if the last integer of the completion is the sum, 0.2 if the model ended by itself.
    """

    _QUESTION = (
        "<|im_start|>user\nWhat is {a} + {b}? Answer with just the number.<|im_end|>\n<|im_start|>assistant\n"
    )
    _STOP = "<|im_end|>"
    _HELD_OUT = 20
    _INTEGER = re.compile(r"-?\d+")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)]
        # A fixed shuffle: every run holds out the same pairs, whatever its own seed.
        random.Random(2024).shuffle(pairs)
        self._held_out, self._training = pairs[: self._HELD_OUT], pairs[self._HELD_OUT :]

    @property
    def stop_token_ids(self) -> list[int]:
        """The chat format's end-of-message token."""
        return self._tokenizer.encode(self._STOP)

    def sample_prompts(self, count: int, rng: random.Random) -> list[Prompt]:
        """Draw training pairs, without repeats as long as there are enough."""
        pairs = rng.sample(self._training, min(count, len(self._training)))
        pairs += rng.choices(self._training, k=count - len(pairs))
        return [self._ask(a, b) for a, b in pairs]

    def held_out_prompts(self) -> list[Prompt]:
        """Return the pairs that are never trained on."""
        return [self._ask(a, b) for a, b in self._held_out]

    def reward(self, prompt: Prompt, completion: Completion) -> float:
        """Return 0.8 for the right sum plus 0.2 for ending by itself."""
        return 0.8 * self.is_correct(prompt, completion) + 0.2 * completion.ended

    def is_correct(self, prompt: Prompt, completion: Completion) -> bool:
        """Whether the last integer of the completion is the sum."""
        numbers = self._INTEGER.findall(self._tokenizer.decode(completion.token_ids))
        return bool(numbers) and int(numbers[-1]) == prompt.answer

    def _ask(self, a: int, b: int) -> Prompt:
        text = self._QUESTION.format(a=a, b=b)
        return Prompt(self._tokenizer.encode(text), a + b, text)


class TokenClassTask:
    """Emit tokens of the class that the prompt's last token asks for.

    Last token 1: ids of the first quarter of the vocabulary; 2: ids of the last quarter. Reward: the
    share of the completion's tokens in that class, so that a random model starts at 0.25.
    """

    _PROMPT_TOKENS = 6
    _HELD_OUT = 16

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        quarter = vocab_size // 4
        self._classes = {1: range(quarter), 2: range(vocab_size - quarter, vocab_size)}

    @property
    def stop_token_ids(self) -> list[int]:
        """None: completions run to their full length."""
        return []

    def sample_prompts(self, count: int, rng: random.Random) -> list[Prompt]:
        """Draw random tokens that end in 1 or 2, half of the prompts each."""
        return [self._ask(1 + index % 2, rng) for index in range(count)]

    def held_out_prompts(self) -> list[Prompt]:
        """Return fixed prompts from a generator of their own."""
        return self.sample_prompts(self._HELD_OUT, random.Random(-1))

    def reward(self, prompt: Prompt, completion: Completion) -> float:
        """Return the share of tokens in the class asked for; 0 for an empty completion."""
        wanted = self._classes[prompt.answer]
        hits = sum(token in wanted for token in completion.token_ids)
        return hits / max(len(completion.token_ids), 1)

    def is_correct(self, prompt: Prompt, completion: Completion) -> bool:
        """Whether every token is in the class asked for."""
        return self.reward(prompt, completion) == 1.0

    def _ask(self, wanted: int, rng: random.Random) -> Prompt:
        filler = [rng.randrange(3, self._vocab_size) for _ in range(self._PROMPT_TOKENS - 1)]
        return Prompt([*filler, wanted], wanted)
