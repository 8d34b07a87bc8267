"""One FSDP2 rank of the policy: it trains, compares log-probabilities, and sends its weights.

Four lines make it a sender of weights: the mixin in the class line, `preinit_checkpoint_engine`, and
`weight_stream`. All else is training. Every public method is a collective: call it on all ranks at once.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from weightsync.policy import PolicyCheckpointEngineMixin, preinit_checkpoint_engine, weight_stream_from
from weightsync.policy.fsdp import reshard

from .config import DemoConfig
from .grpo import Batch, LogprobGap, Sample, grpo_loss, token_logprobs

_COLLECTIVE_TIMEOUT = timedelta(seconds=180)


@dataclass(frozen=True)
class TrainFigures:
    """One rank's share of one update."""

    loss: float
    kl: float
    grad_norm: float
    gap: LogprobGap
    """Policy against sampler, on the weights before the update."""


class PolicyWorker(PolicyCheckpointEngineMixin):
    """A rank of the policy and of its frozen reference, both sharded.

    Args:
        rank: this rank, 0 to ``config.policy.workers`` - 1.
        checkpoint: directory of the Hugging Face checkpoint to start from.
        config: the run's configuration.
    """

    def __init__(self, rank: int, checkpoint: Path, config: DemoConfig) -> None:
        self.rank = rank
        self._checkpoint = checkpoint
        self._config = config
        preinit_checkpoint_engine(config.refit_source)

    def weight_stream(self) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield the current weights, gathered tensor by tensor, in Hugging Face names."""
        return weight_stream_from(self.model)

    def open_rendezvous(self) -> int:
        """On rank 0, before `join`: bind the store that the ranks meet at; returns its port."""
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return self._store.port

    def join(self, port: int) -> None:
        """Form the process group through the store at ``port``, then load and shard both models."""
        store = self._store if self.rank == 0 else TCPStore("127.0.0.1", port, is_master=False)
        ranks = self._config.policy.workers
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=ranks, timeout=_COLLECTIVE_TIMEOUT
        )
        mesh = init_device_mesh("cpu", (ranks,))
        # The policy keeps its parameters whole from forward to backward: 0.5 GB here, and half the gathers.
        self.model = _load_sharded(self._checkpoint, mesh, reshard_after_forward=False)
        self._reference = _load_sharded(self._checkpoint, mesh, reshard_after_forward=True)
        self._reference.requires_grad_(False)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=self._config.policy.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.0,
        )

    def train(self, samples: list[Sample]) -> TrainFigures:
        """Do one optimizer step on this rank's samples; every rank must bring equally many."""
        batches = self._micro_batches(samples)
        parts = [
            self._accumulate(batch, share=1 / len(batches), last=index == len(batches) - 1)
            for index, batch in enumerate(batches)
        ]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._config.policy.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return TrainFigures(
            loss=sum(part.loss for part in parts) / len(parts),
            kl=sum(part.kl for part in parts) / len(parts),
            grad_norm=_full(norm).item(),
            gap=LogprobGap.combine([part.gap for part in parts]),
        )

    def compare(self, samples: list[Sample]) -> LogprobGap:
        """Compare the current weights' log-probabilities with the sampler's, without training."""
        with torch.no_grad():
            gaps = [
                LogprobGap.measure(batch, _logprobs(self.model, batch))
                for batch in self._micro_batches(samples)
            ]
        reshard(self.model)
        return LogprobGap.combine(gaps)

    def _micro_batches(self, samples: list[Sample]) -> list[Batch]:
        size = self._config.policy.micro_batch_size
        return [Batch.collate(samples[start : start + size]) for start in range(0, len(samples), size)]

    def _accumulate(self, batch: Batch, *, share: float, last: bool) -> TrainFigures:
        """Add one micro-batch's gradient; gradients cross the ranks, and shards return, with the last one."""
        self.model.set_requires_gradient_sync(last)
        self.model.set_reshard_after_backward(last)
        with torch.no_grad():
            reference = _logprobs(self._reference, batch)
        logprobs = _logprobs(self.model, batch)
        settings = self._config.grpo
        parts = grpo_loss(
            batch,
            logprobs,
            reference,
            clip_ratio=settings.clip_ratio,
            kl_coefficient=settings.kl_coefficient,
        )
        (parts.loss * share).backward()  # type: ignore[no-untyped-call]
        gap = LogprobGap.measure(batch, logprobs)
        return TrainFigures(parts.loss.item(), parts.kl.item(), 0.0, gap)


def _load_sharded(checkpoint: Path, mesh: DeviceMesh, *, reshard_after_forward: bool) -> Any:
    """Load a checkpoint in float32 and shard it, decoder layer by decoder layer.

    float32 on both sides keeps policy and vLLM within 1e-4 of each other; with bfloat16 rounding alone
    makes differences of 0.1 and more, in which a stale weight could hide.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward)
    return model


def _logprobs(model: Any, batch: Batch) -> torch.Tensor:
    """Return the model's log-probabilities of a batch's completion tokens, ``(N, C)``."""
    output = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        position_ids=batch.position_ids,
        use_cache=False,
        # One more than the completion: position t predicts token t + 1.
        logits_to_keep=batch.targets.shape[1] + 1,
    )
    return token_logprobs(output.logits[:, :-1].float(), batch.targets)


def _full(value: torch.Tensor) -> torch.Tensor:
    full = getattr(value, "full_tensor", None)
    return value if full is None else full()
