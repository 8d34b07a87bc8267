"""Ranks that hold and store regions of tensors, without any model."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import torch

from tests.engine_crew import make_engine, run
from weightsync.engines.base import ParameterBatch
from weightsync.layout.holdings import Replicated, Sharded, box_pieces, local_ranges
from weightsync.layout.tables import HeldBox, RankTable, TableBuilder
from weightsync.tensors import TensorSpec, WeightManifest, WeightStream, dtype_name


@dataclass
class Memory:
    """A `RankMemory` over plain tensors."""

    manifest: WeightManifest
    table: RankTable
    flats: list[torch.Tensor | None]
    handed: dict[str, torch.Tensor] = field(default_factory=dict)

    def storage(self, index: int) -> torch.Tensor | None:
        return self.flats[index]

    def served(self, index: int) -> torch.Tensor:
        """What is served of a storage, wherever it came."""
        storage, flat = self.table.storages[index], self.flats[index]
        return self.handed[storage.name] if flat is None else flat.view(storage.shape)


def manifest_of(full: dict[str, torch.Tensor], sent_as: dict[str, str] | None = None) -> WeightManifest:
    sent_as = sent_as or {}
    return WeightManifest.build(
        TensorSpec(name, tuple(t.shape), sent_as.get(name, dtype_name(t.dtype))) for name, t in full.items()
    )


def sharded(manifest, full, rank, world, dims, *, whole=(), hold=True, in_place=True) -> Memory:
    """Return a rank's memory; tensors are cut over ``world`` along ``dims[name]``, or each rank has all."""
    builder, flats = TableBuilder(manifest), []
    for name, tensor in full.items():
        if name in whole:
            builder.need_whole(name, "the test wants it so")
            continue
        dim = dims.get(name)
        placed = Replicated() if dim is None else Sharded(dim)
        ranges = local_ranges(tensor.shape, (world,), (rank,), (placed,))
        pieces = box_pieces(rank, ranges)
        local = tensor
        for axis, runs in enumerate(ranges):
            local = (
                torch.cat([local.narrow(axis, lo, hi - lo) for lo, hi in runs], axis)
                if runs
                else local.narrow(axis, 0, 0)
            )
        local = local.contiguous().clone()
        dtype = (
            dtype_name(tensor.dtype) if hold else next(s.dtype for s in manifest.tensors if s.name == name)
        )
        index = builder.add_storage(name, local.shape, dtype)
        builder.add(name, [HeldBox(index, p.box, p.offset, p.strides) for p in pieces])
        flat = local.reshape(-1)
        flats.append(flat if hold else torch.zeros(flat.numel(), dtype=flat.dtype) if in_place else None)
    return Memory(manifest, builder.build(), flats)


class Stream(WeightStream):
    """A stream that has shards; whole tensors are made of ``full`` when they are selected."""

    def __init__(self, manifest, full, shards) -> None:
        self.full, self.asked = full, None
        super().__init__(manifest, iter(()))
        self.shards = shards

    def select(self, names):
        self.asked = list(names)
        specs = [spec for spec in self.manifest.tensors if spec.name in set(names)]
        return WeightStream(WeightManifest(tuple(specs)), ((s.name, self.full[s.name]) for s in specs))


class Regions:
    """Policy and rollout engines over hand-made memories, connected."""

    def __init__(self, policy, rollout, bucket_size=1 << 20, **settings) -> None:
        settings = {"shard_weights": "auto", "topology": "auto", **settings}
        self.memories = policy, rollout
        self.policy = [make_engine(bucket_size, **settings) for _ in policy]
        self.rollout = [make_engine(bucket_size, **settings) for _ in rollout]
        for engine, memory in zip((*self.policy, *self.rollout), (*policy, *rollout), strict=True):
            engine.use_memory(memory)
        self.connect()

    def connect(self):
        metadata = [engine.prepare() for engine in (*self.policy, *self.rollout)]
        worlds = {
            "train_world_size": len(self.policy),
            "rollout_world_size": len(self.rollout),
            "metadata": metadata,
        }
        for rank, engine in enumerate(self.policy):
            engine.init_policy_process_group(worker_rank=rank, **worlds)
        for rank, engine in enumerate(self.rollout):
            engine.init_rollout_process_group(rollout_rank=rank, **worlds)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for engine in (*self.policy, *self.rollout):
            engine.close()

    def refit(self, full, *, receive=None):
        """Run a refit; returns what each rollout rank got whole. Raises the first failure."""
        outcomes = self.attempt(full, receive=receive)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes[len(self.policy) :]

    def attempt(self, full, *, receive=None):
        async def work():
            sends = [
                engine.send_weights(Stream(memory.manifest, full, memory))
                for engine, memory in zip(self.policy, self.memories[0], strict=True)
            ]
            takes = [
                (receive or take)(engine, memory)
                for engine, memory in zip(self.rollout, self.memories[1], strict=True)
            ]
            return await asyncio.gather(*sends, *takes, return_exceptions=True)

        return run(work())


async def take(engine, memory):
    """Receive all; parameters that are handed over go into the memory, whole tensors are returned."""
    whole, arrived = {}, []
    async for batch in engine.receive_weight_batches():
        if isinstance(batch, ParameterBatch):
            memory.handed |= {name: tensor.clone() for name, tensor in batch}
            arrived += [spec.name for spec in batch.arrived]
        else:
            whole |= {name: tensor.clone() for name, tensor in batch}
    expected = [spec.name for spec in memory.manifest.tensors if spec.name not in whole]
    assert sorted(arrived) == sorted(expected)
    return whole
