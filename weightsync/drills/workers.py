"""Ray actors of the drills: trainers of one small model, and modules that serve it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from weightsync.digests import WeightDigest
from weightsync.policy import PolicyCheckpointEngineMixin, preinit_checkpoint_engine, weight_stream_from
from weightsync.rollout.module import ModuleRolloutWorker


def make_model(layers: int, width: int, seed: int) -> torch.nn.Module:
    """Return linear layers with random weights; the same seed gives the same ones."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))


def digest_of(model: torch.nn.Module) -> str:
    """Return a digest of all names, shapes, dtypes and bytes of a module."""
    return WeightDigest.of(model.state_dict().items()).total()


class Trainer(PolicyCheckpointEngineMixin):
    """One policy rank; every rank holds the whole model and trains it alike."""

    def __init__(self, rank: int, config: Any, model: Sequence[int]) -> None:
        preinit_checkpoint_engine(config)
        self.rank = rank
        self.model = make_model(*model)

    def weight_stream(self) -> Any:
        """Return what is sent."""
        return weight_stream_from(self.model)

    def train(self, step: int) -> str:
        """Take a step; returns the digest of the new weights."""
        with torch.no_grad():
            for number, parameter in enumerate(self.model.parameters()):
                noise = torch.Generator().manual_seed(1_000 * step + number)
                parameter.add_(torch.randn(parameter.shape, generator=noise), alpha=1e-3)
        return digest_of(self.model)


class Server:
    """One rollout rank: a module, and what it says of itself."""

    def __init__(self, config: Any, model: Sequence[int]) -> None:
        preinit_checkpoint_engine(config)
        self.model = make_model(*model)
        self.worker = ModuleRolloutWorker(self.model)

    def checkpoint_engine_rpc(self, checkpoint_method: str, method_kwargs: Any = None) -> Any:
        """Run one method of the worker protocol."""
        return self.worker.checkpoint_engine_rpc(checkpoint_method, method_kwargs)

    def refit_control(self, action: str, kwargs: Any = None) -> Any:
        """Run one action of an engine host."""
        return self.worker.refit_control(action, kwargs)

    def state(self) -> dict[str, Any]:
        """Return the published version, the digest of what is served, and the process."""
        return {
            "version": self.worker.published_version,
            "digest": digest_of(self.model),
            "pid": os.getpid(),
        }
