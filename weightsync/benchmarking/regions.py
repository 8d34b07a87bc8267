"""Refit by regions in a benchmark: policy ranks hold rows of each parameter, rollout ranks all or a part."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import torch

from weightsync.benchmarking.shapes import Parameters, Part
from weightsync.benchmarking.workers import EngineWorker, Stretch, counts_of, phases_of
from weightsync.layout.holdings import chunk_bounds
from weightsync.layout.regions import Box
from weightsync.layout.tables import HeldBox, RankTable, TableBuilder
from weightsync.tensors import TensorSpec, WeightManifest, WeightStream, dtype_name

REGIONS = "regions"
"""Stands in the place of a topology where every rollout rank reads what it stores from all that hold it."""


class PartMemory:
    """A `RankMemory`: one contiguous region of each parameter.

    Args:
        manifest: of whole parameters.
        regions: by parameter, the memory and which part of the parameter it is.
    """

    def __init__(self, manifest: WeightManifest, regions: Mapping[str, tuple[torch.Tensor, Box]]) -> None:
        self.manifest = manifest
        builder = TableBuilder(manifest)
        self._flats: list[torch.Tensor] = []
        for name, (memory, box) in regions.items():
            index = builder.add_storage(name, memory.shape, dtype_name(memory.dtype))
            builder.add(name, [HeldBox(index, box)])
            self._flats.append(memory.view(-1))
        self.table: RankTable = builder.build()

    @classmethod
    def rows(cls, parameters: Parameters, rank: int, ranks: int) -> PartMemory:
        """Return what a policy rank holds: rows, cut over ``ranks`` as ``torch.chunk`` cuts."""
        regions = {}
        for name, tensor in parameters.items():
            lo, hi = chunk_bounds(tensor.shape[0], ranks, rank)
            rest = tuple(tensor.shape[1:])
            regions[name] = tensor[lo:hi], Box((lo, *(0 for _ in rest)), (hi, *rest))
        return cls(manifest_of(parameters), regions)

    @classmethod
    def served(cls, whole: Parameters, served: Parameters, part: Part) -> PartMemory:
        """Return what a rollout rank stores: a part of each parameter."""
        regions = {name: (served[name], part.box(name, tensor.shape)) for name, tensor in whole.items()}
        return cls(manifest_of(whole), regions)

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
            self._memory = (
                PartMemory.rows(self.policy, *place)
                if side == "policy"
                else PartMemory.served(self.policy, self.served, self.part)
            )
            engine.use_memory(self._memory)
        return {side: engine.prepare() for side, engine in self._engines.items()}

    def _send(self) -> Stretch:
        engine = self._engines["policy"]
        start = time.perf_counter()
        asyncio.run(engine.send_weights(WeightStream(self._memory.manifest, (), self._memory)))
        return Stretch("policy", start, time.perf_counter(), phases_of(engine), counts_of(engine))


def manifest_of(parameters: Parameters) -> WeightManifest:
    """Return the manifest of parameters."""
    return WeightManifest.build(TensorSpec.of(name, tensor) for name, tensor in parameters.items())
