"""The vLLM engine: it samples completions with their log-probabilities, and takes the policy's weights.

The base class makes it a receiver: it starts vLLM with the refit's worker classes and answers the
synchronizer. All else is sampling.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weightsync.config import load_refit_config
from weightsync.rollout.vllm.host import VllmEngineHost

from .config import DemoConfig
from .task import Completion


class RolloutWorker(VllmEngineHost):
    """One vLLM engine in this process.

    Args:
        checkpoint: directory of the Hugging Face checkpoint to start from.
        config: the run's configuration.
        stop_token_ids: tokens at which a completion ends.
    """

    def __init__(self, checkpoint: Path, config: DemoConfig, stop_token_ids: list[int]) -> None:
        self._max_new_tokens = config.grpo.max_new_tokens
        self._stop_token_ids = stop_token_ids
        super().__init__(
            _vllm_kwargs(checkpoint, config), refit_config=load_refit_config(config.refit_source)
        )

    def ready(self) -> None:
        """Answer once the engine has started: an actor's methods wait for its constructor."""

    def sample(
        self, prompts: list[list[int]], *, samples: int, greedy: bool = False
    ) -> list[list[Completion]]:
        """Sample ``samples`` completions for each prompt, at temperature 1 or greedily.

        Raises:
            WorkerFencedError: the engine holds partly written weights after a failed refit.
        """
        from vllm import SamplingParams

        sampling = SamplingParams(
            n=samples,
            temperature=0.0 if greedy else 1.0,
            max_tokens=self._max_new_tokens,
            stop_token_ids=self._stop_token_ids,
            # The log-probability of the sampled token itself, and of no other.
            logprobs=0,
            ignore_eos=True,
            detokenize=False,
        )
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.generate(requests, sampling, use_tqdm=False)
        return [[_completion(each) for each in output.outputs] for output in outputs]


def _vllm_kwargs(checkpoint: Path, config: DemoConfig) -> dict[str, Any]:
    return {
        "model": str(checkpoint),
        # As the policy: see `policy_worker`.
        "dtype": "float32",
        "seed": config.seed,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "use_tqdm_on_load": False,
        **config.vllm_kwargs,
    }


def _completion(output: Any) -> Completion:
    token_ids = list(output.token_ids)
    logprobs = [entry[token].logprob for token, entry in zip(token_ids, output.logprobs, strict=True)]
    return Completion(token_ids, logprobs, ended=output.finish_reason == "stop")
