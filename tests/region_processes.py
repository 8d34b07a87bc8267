"""Ranks of a refit by regions in processes of their own, which wait, fail or end where a test wants it."""

from __future__ import annotations

import asyncio
import importlib

import torch

from tests.engine_crew import MIB, make_engine
from tests.engine_processes import _CONTEXT, QUICK, Remote, _Worker, answer
from tests.region_support import Stream, manifest_of, sharded, take

SHAPES = {"cast": (96, 4096), "lent": (64, 96), "late": (64, 3000), "all": (64,)}
HELD = {"cast": 0, "lent": 0, "late": 0, "all": 0}
SERVED = {"cast": 1, "lent": 0, "late": 0, "all": None}

STAGES = {
    "before it says where its shards are": "sender.RegionSender._expose",
    "before it packs": "sender.RegionSender._send_bucket",
    "while it waits for its readers": "sender.RegionSender._await_taken",
    "before it asks": "receiver.RegionReceiver._await_exposed",
    "before it reads what is lent": "borrowing.Borrower.read_lent",
    "before it reads a bucket": "receiver.RegionReceiver._read_bucket",
    "before it hands over": "borrowing.Borrower.parameters",
}


def values(seed):
    make = torch.Generator().manual_seed(seed)
    full = {name: torch.randn(shape, generator=make) for name, shape in SHAPES.items()}
    return {name: t if name in {"cast", "all"} else t.to(torch.bfloat16) for name, t in full.items()}


class RegionRemote(Remote):
    """A rank that has its part of `SHAPES`."""

    def __init__(self, role: str, rank: int, worlds: tuple[int, int], **settings) -> None:
        self.role, self.rank = role, rank
        self.launch(_CONTEXT, _serve, role, rank, worlds, {**QUICK, "shard_weights": "all", **settings})


def _serve(pipe, role: str, rank: int, worlds: tuple[int, int], settings: dict) -> None:
    torch.set_num_threads(1)
    worker = _RegionWorker(pipe, role, rank, make_engine(MIB, **settings), worlds)
    answer(pipe, worker)


class _RegionWorker(_Worker):
    def __init__(self, pipe, role, rank, engine, worlds) -> None:
        super().__init__(pipe, role, rank, engine)
        self.world = worlds[role == "rollout"]
        full = values(0)
        self.manifest = manifest_of(full, {"cast": "bfloat16"})
        self.memory = self._memory(full)

    def _memory(self, full):
        served = {n: t.to(torch.bfloat16) if n == "cast" else t for n, t in full.items()}
        policy = self.role == "policy"
        return sharded(
            self.manifest, full if policy else served, self.rank, self.world,
            HELD if policy else SERVED, hold=policy,
        )  # fmt: skip

    def prepare(self):
        self.engine.use_memory(self.memory)
        return self.engine.prepare()

    def metadata(self):
        """What this rank told of itself when it was prepared."""
        return self.engine._session.own.to_dict()

    def update(self, train: int, rollout: int, metadata: list) -> None:
        worlds = {"train_world_size": train, "rollout_world_size": rollout, "metadata": metadata}
        self.engine.update_process_group(rank=self.rank, **worlds)

    def refit(self, *, seed=0, stage=None, fails=False):
        full = values(seed)
        undo = self._stop_at(STAGES[stage], fails) if stage else lambda: None
        try:
            return self._refit(full)
        finally:
            undo()

    def _refit(self, full):
        if self.role == "policy":
            for flat, new in zip(self.memory.flats, self._memory(full).flats, strict=True):
                flat.copy_(new)
            asyncio.run(self.engine.send_weights(Stream(self.manifest, full, self.memory)))
            return "done"
        asyncio.run(take(self.engine, self.memory))
        served = {n: t.to(torch.bfloat16) if n == "cast" else t for n, t in full.items()}
        want = sharded(self.manifest, served, self.rank, self.world, SERVED)
        for index, storage in enumerate(self.memory.table.storages):
            assert torch.equal(self.memory.flats[index], want.flats[index]), storage.name
        return "done"

    def _stop_at(self, where: str, fails: bool):
        module, owner, name = where.split(".")
        kind = getattr(importlib.import_module(f"weightsync.engines.regions.{module}"), owner)
        original, seen = getattr(kind, name), []

        def stops(*args, **kwargs):
            if not seen:
                seen.append(name)
                if fails:
                    raise ValueError(f"broken in {name}")
                self.hold()
            return original(*args, **kwargs)

        setattr(kind, name, stops)
        return lambda: setattr(kind, name, original)
