"""The figures of one send: what went, and where the time went."""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Mapping
from typing import Any

import torch

from weightsync.errors import LifecycleError
from weightsync.policy.shards import memory_of
from weightsync.tensors import WeightGenerator, WeightStream

Weights = Generator[tuple[str, torch.Tensor], None, None]


class MeteredWeights(WeightGenerator):
    """Passes a weight generator on to an engine, counting; holds no tensor between two items.

    Closing this one only ends it for the engine. The generator behind it is closed by its owner, after the
    peers were told: closing may take part in gathers, and peers should not wait for that.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._ended = False
        self._started = time.perf_counter()
        self._gather_s = 0.0
        self.tensors = 0
        self.nbytes = 0

    def for_engine(self) -> Weights:
        """Return what to hand to the engine; it has a manifest, and shards, if the generator has one."""
        if isinstance(self._weights, WeightStream):
            return WeightStream(self._weights.manifest, self, memory_of(self._weights))
        return self

    def select(self, names: Collection[str]) -> MeteredWeights:
        """Pass on, and count, only these tensors.

        Raises:
            LifecycleError: the weights behind this are a plain generator.
        """
        if not isinstance(self._weights, WeightStream):
            raise LifecycleError("tensors cannot be selected of a weight generator without a manifest")
        self._weights = self._weights.select(names)
        return self

    def send(self, value: None) -> tuple[str, torch.Tensor]:
        """Return the next item (generator protocol; ``value`` is ignored)."""
        if self._ended:
            raise StopIteration
        start = time.perf_counter()
        try:
            name, tensor = next(self._weights)
        finally:
            self._gather_s += time.perf_counter() - start
        self.tensors += 1
        self.nbytes += tensor.nbytes
        return name, tensor

    def close(self) -> None:
        """Yield nothing more."""
        self._ended = True

    def figures(self, engine_stats: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``{"bytes", "tensors", "batches", "seconds"}``; the engine's own figures go first.

        Args:
            engine_stats: what `CheckpointEngine.refit_stats` gave: counts, and ``seconds_<phase>``; may be
                empty, and then ``batches`` is 0.
        """
        measured = {"gather": self._gather_s, "total": time.perf_counter() - self._started}
        prefix = "seconds_"
        reported = {
            key.removeprefix(prefix): float(value)
            for key, value in engine_stats.items()
            if key.startswith(prefix)
        }
        return {
            "bytes": int(engine_stats.get("bytes", self.nbytes)),
            "tensors": int(engine_stats.get("tensors", self.tensors)),
            "batches": int(engine_stats.get("batches", 0)),
            "seconds": measured | reported,
        }
