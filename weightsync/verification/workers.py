"""The actors of a verification: a policy whose weights change, and vLLM engines that generate from it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from weightsync.config import RefitConfig
from weightsync.errors import ConfigurationError
from weightsync.names import hint
from weightsync.policy import PolicyCheckpointEngineMixin, preinit_checkpoint_engine, weight_stream_from
from weightsync.rollout.vllm.host import VllmEngineHost
from weightsync.tensors import WeightManifest, WeightStream
from weightsync.verification.compare import Generation

PROMPTS = ((5, 6, 7, 8), (100, 3, 50), (1,), tuple(range(40, 72)))
_NEW_TOKENS = 12
_NOISE = 0.05
"""Relative size of a change between two refits: enough to move every log-probability."""


class VerifyPolicy(PolicyCheckpointEngineMixin):
    """A policy of one rank whose weights change at random, as an optimizer would change them.

    Args:
        checkpoint: Hugging Face checkpoint to start from.
        dtype: of the parameters: ``float32``, ``bfloat16``, ...
        config: the refit's configuration.
        drop: leave this tensor out of every stream: a fault that verification has to notice.
    """

    def __init__(self, checkpoint: Path, dtype: str, config: RefitConfig, drop: str | None = None) -> None:
        from transformers import AutoModelForCausalLM

        preinit_checkpoint_engine(config)
        self.rank = 0
        self._drop = drop
        self.model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype))

    def ready(self) -> None:
        """Answer once the model is loaded: an actor's methods wait for its constructor."""

    def weight_stream(self) -> WeightStream:
        """Return the current weights, all of them or all but the dropped one."""
        stream = weight_stream_from(self.model)
        if self._drop is None:
            return stream
        if self._drop not in stream.manifest.names:
            raise ConfigurationError(
                f"there is no tensor {self._drop!r} to drop{hint(self._drop, stream.manifest.names)}"
            )
        kept = WeightManifest(tuple(spec for spec in stream.manifest.tensors if spec.name != self._drop))
        return WeightStream(kept, _without(self._drop, stream))

    def change(self, seed: int) -> None:
        """Change every parameter by noise in proportion to its own size."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                noise = torch.randn(parameter.shape, generator=generator) * _NOISE
                scale = parameter.float().std(correction=0).clamp(min=0.1)
                parameter.add_((noise * scale).to(parameter.dtype))

    def score(self, served: list[Generation]) -> list[Generation]:
        """Say what this model itself would generate next, after each token that an engine has generated."""
        return [self._score(prompt, each.token_ids) for prompt, each in zip(PROMPTS, served, strict=True)]

    @torch.no_grad()
    def _score(self, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> Generation:
        logits = self.model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        logprobs, choices = logits.float().log_softmax(-1).max(-1)
        return Generation(tuple(choices.tolist()), tuple(logprobs.tolist()))

    def save(self, directory: Path) -> None:
        """Save the current weights as a checkpoint that an engine can be started from."""
        self.model.save_pretrained(directory)


def _without(name: str, stream: WeightStream) -> Iterator[tuple[str, torch.Tensor]]:
    return (item for item in stream if item[0] != name)


class VerifyEngine(VllmEngineHost):
    """A vLLM engine that generates greedily from fixed prompts."""

    def ready(self) -> None:
        """Answer once the engine has started: an actor's methods wait for its constructor."""

    def greedy(self) -> list[Generation]:
        """Generate from every prompt at temperature 0."""
        return _greedy(self.generate)


class FreshEngines:
    """Starts one vLLM engine after another in this process, without any refit, and generates from each."""

    def ready(self) -> None:
        """Answer once the actor has started."""

    def greedy(self, vllm_kwargs: dict[str, Any]) -> list[Generation]:
        """Start an engine, generate from every prompt, end the engine."""
        host = VllmEngineHost(vllm_kwargs)
        try:
            return _greedy(host.generate)
        finally:
            host.shutdown()


def _greedy(generate: Any) -> list[Generation]:
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=_NEW_TOKENS, logprobs=0, ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]
    return [_generation(output.outputs[0]) for output in generate(prompts, sampling, use_tqdm=False)]


def _generation(output: Any) -> Generation:
    tokens = tuple(output.token_ids)
    logprobs = tuple(
        float(entry[token].logprob) for token, entry in zip(tokens, output.logprobs, strict=True)
    )
    return Generation(tokens, logprobs)
