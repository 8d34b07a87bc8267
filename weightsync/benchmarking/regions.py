"""Refit by regions in a benchmark: policy ranks hold a part of each parameter, rollout ranks store all."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import torch

from weightsync.benchmarking.shapes import Parameters
from weightsync.benchmarking.workers import EngineWorker, Stretch, phases_of
from weightsync.layout.holdings import chunk_bounds
from weightsync.layout.regions import Box
from weightsync.layout.tables import HeldBox, RankTable, TableBuilder
from weightsync.tensors import TensorSpec, WeightManifest, WeightStream, dtype_name

REGIONS = "regions"
"""Stands in the place of a topology where every rollout rank reads what it stores from all that hold it."""


class PartMemory:
    """A `RankMemory`: rows of each parameter, a contiguous part each.

    Args:
        parameters: whole ones; of a policy rank its part is a view of them.
        rank: of ``ranks`` that the rows are cut over, as ``torch.chunk`` cuts.
        ranks: 1 for all rows.
    """

    def __init__(self, parameters: Parameters, rank: int, ranks: int) -> None:
        self.manifest = manifest_of(parameters)
        builder = TableBuilder(self.manifest)
        self._flats: list[torch.Tensor] = []
        for name, tensor in parameters.items():
            lo, hi = chunk_bounds(tensor.shape[0], ranks, rank)
            part = tensor[lo:hi]
            index = builder.add_storage(name, part.shape, dtype_name(part.dtype))
            rest = tuple(tensor.shape[1:])
            builder.add(name, [HeldBox(index, Box((lo, *(0 for _ in rest)), (hi, *rest)))])
            self._flats.append(part.reshape(-1))
        self.table: RankTable = builder.build()

    def storage(self, index: int) -> torch.Tensor:
        """Return the live memory of a part, flat."""
        return self._flats[index]


class RegionWorker(EngineWorker):
    """An `EngineWorker` whose engines move by regions."""

    def make_regions(
        self,
        backend: str,
        bucket_bytes: int,
        settings: dict[str, Any],
        sides: tuple[str, ...],
        place: tuple[int, int],
    ) -> Any:
        """Make and prepare the engines, as `make` does; ``place``: rank of, and number of, policy ranks."""
        self._create(backend, bucket_bytes, settings, sides)
        for side, engine in self._engines.items():
            held = (self.policy, *place) if side == "policy" else (self.served, 0, 1)
            self._memory = PartMemory(*held)
            engine.use_memory(self._memory)
        return {side: engine.prepare() for side, engine in self._engines.items()}

    def _send(self) -> Stretch:
        engine = self._engines["policy"]
        start = time.perf_counter()
        asyncio.run(engine.send_weights(WeightStream(self._memory.manifest, (), self._memory)))
        return Stretch("policy", start, time.perf_counter(), phases_of(engine))


def manifest_of(parameters: Parameters) -> WeightManifest:
    """Return the manifest of parameters."""
    return WeightManifest.build(TensorSpec.of(name, tensor) for name, tensor in parameters.items())
