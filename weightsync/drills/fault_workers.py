"""The workers of the drills in processes: they train, serve, and fail where they are told to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch

import weightsync.rollout.module as module_rollout
from weightsync.drills.actors import DROPPED
from weightsync.drills.fault_points import BUCKET_PHASES, FAULTS, Order, install
from weightsync.drills.workers import Server, Trainer, digest_of, make_model
from weightsync.errors import LifecycleError
from weightsync.policy.session import SEND
from weightsync.rollout.loader import Batch
from weightsync.tensors import WeightManifest, WeightStream

_LAST_OF_A_TRANSFER = ("update_weights_from_checkpoint_engine", "load_staged_weights")
_OTHER_VERSION = 1_000_000


def _phase_of(number: int, count: int) -> str:
    """Return the name of a place among ``count`` items."""
    places = {0: BUCKET_PHASES[0], count // 2: BUCKET_PHASES[1], count - 1: BUCKET_PHASES[2]}
    return places.get(number, "")


class _Armed:
    """What is asked of both kinds of worker, aside."""

    def arm(self, order: Mapping[str, Any] | None) -> None:
        """Let a fault come."""
        FAULTS.arm(None if order is None else msgspec.convert(order, Order))

    def struck(self) -> bool:
        """Return whether it has come."""
        return FAULTS.struck


class DrillTrainer(_Armed, Trainer):
    """A trainer whose weights at each step follow from the step alone."""

    def __init__(self, rank: int, config: Any, model: Sequence[int]) -> None:
        super().__init__(rank, config, model)
        self._layers, self._width, _ = model
        install()

    def train(self, step: int) -> str:
        """Take a step; returns the digest of the new weights."""
        self.model.load_state_dict(make_model(self._layers, self._width, step).state_dict())
        return digest_of(self.model)

    def weight_stream(self) -> Any:
        """Return what is sent; places of the stream are places of faults."""
        stream = super().weight_stream()
        return WeightStream(stream.manifest, self._passing(stream))

    def prepare_weight_send(self) -> None:
        """Begin: nothing is connected yet."""
        FAULTS.connect()

    def checkpoint_engine_rpc(self, checkpoint_method: str, method_kwargs: Any = None) -> Any:
        """Run one method of the worker protocol."""
        lost = checkpoint_method == "finalize_checkpoint_engine" and FAULTS.reach("finalize") == "drop"
        outcome = super().checkpoint_engine_rpc(checkpoint_method, method_kwargs)
        if checkpoint_method == SEND and "error" not in outcome:
            FAULTS.complete()
        return DROPPED if lost else outcome

    def _passing(self, stream: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(stream):
            FAULTS.reach(_phase_of(number, len(stream.manifest.tensors)))
            yield item


class _Loader(module_rollout.ModuleLoader):
    """A loader whose batches are places of faults."""

    _loaded = 0
    _expected = 0

    def check_manifest(self, manifest: WeightManifest) -> None:
        super().check_manifest(manifest)
        self._loaded, self._expected = 0, len(manifest.tensors)

    def load(self, batch: Batch) -> None:
        for number in range(self._loaded, self._loaded + len(batch)):
            FAULTS.reach(_phase_of(number, self._expected))
        super().load(batch)
        self._loaded += len(batch)


class DrillServer(_Armed, Server):
    """A server that says of itself what the drill wants to know."""

    def __init__(self, config: Any, model: Sequence[int]) -> None:
        # In this process only: the worker makes its loader by this name.
        module_rollout.ModuleLoader = _Loader  # type: ignore[misc]
        super().__init__(config, model)
        install()

    def checkpoint_engine_rpc(self, checkpoint_method: str, method_kwargs: Any = None) -> Any:
        """Run one method of the worker protocol."""
        fault = self._reach(checkpoint_method)
        outcomes = super().checkpoint_engine_rpc(checkpoint_method, method_kwargs)
        if checkpoint_method in _LAST_OF_A_TRANSFER and "error" not in outcomes[0]:
            FAULTS.complete()
        if fault == "corrupt":
            outcomes[0]["value"] = _OTHER_VERSION
        return DROPPED if fault == "drop" else outcomes

    def state(self) -> dict[str, Any]:
        """Return the published version, the digest, and whether it serves, is paused or fenced."""
        try:
            self.worker.require_serving()
            refuses = ""
        except LifecycleError as error:
            refuses = type(error).__name__
        committed = self.worker.checkpoint_engine_rpc("refit_status")[0]["value"]["version"]
        return {**super().state(), "refuses": refuses, "committed": committed, "paused": self.worker._paused}

    def _reach(self, method: str) -> str:
        phase = {"commit_refit": "commit", "finalize_checkpoint_engine": "finalize"}.get(method, "")
        return FAULTS.reach(phase)
