"""Several NIXL engines in one process: what the engine tests build their refits from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import torch

from weightsync.engines.nixl import NIXLCheckpointEngine
from weightsync.tensors import TensorSpec, WeightManifest, WeightStream, flat_bytes

MIB = 1 << 20
BOUND_S = 20.0
Pairs = list[tuple[str, torch.Tensor]]

FAST = {"device": "cpu", "bind_host": "127.0.0.1", "connect_s": 5.0, "stall_s": 5.0, "silence_s": 4.0}


def make_engine(bucket_size: int = MIB, *, engine=NIXLCheckpointEngine, **settings):
    return engine(bucket_size, **{**FAST, **settings})


def join(policy: list[NIXLCheckpointEngine], rollout: list[NIXLCheckpointEngine]) -> None:
    """Prepare every engine and connect them all, as a synchronizer does."""
    metadata = [engine.prepare() for engine in (*policy, *rollout)]
    worlds = {"train_world_size": len(policy), "rollout_world_size": len(rollout), "metadata": metadata}
    for rank, engine in enumerate(policy):
        engine.init_policy_process_group(worker_rank=rank, **worlds)
    for rank, engine in enumerate(rollout):
        engine.init_rollout_process_group(rollout_rank=rank, **worlds)


class Crew:
    """``T`` policy and ``R`` rollout engines, connected; closed at the end of the ``with`` block."""

    def __init__(self, policy: int = 1, rollout: int = 1, bucket_size: int = MIB, **settings) -> None:
        self.policy = [make_engine(bucket_size, **settings) for _ in range(policy)]
        self.rollout = [make_engine(bucket_size, **settings) for _ in range(rollout)]
        join(self.policy, self.rollout)

    @property
    def engines(self) -> list[NIXLCheckpointEngine]:
        return [*self.policy, *self.rollout]

    @property
    def pair(self) -> tuple[NIXLCheckpointEngine, NIXLCheckpointEngine]:
        return self.policy[0], self.rollout[0]

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self.engines:
            engine.close()

    def open(self, epoch: int, version: int) -> None:
        for engine in self.engines:
            engine.open_refit(epoch=epoch, version=version)

    def refit(self, pairs: Pairs, *, manifest: bool = False) -> list[Pairs]:
        """Send the same stream from every policy rank; returns what each rollout rank received."""
        streams = [stream_of(pairs, manifest=manifest) for _ in self.policy]
        outcomes = self.attempt(streams)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes[len(self.policy) :]

    def attempt(self, streams: list, receive: Callable | None = None) -> list:
        """Run one refit; returns each rank's outcome, policy ranks first: a value or an exception."""
        return run(self.attempt_async(streams, receive))

    async def attempt_async(self, streams: list, receive: Callable | None = None) -> list:
        sends = [e.send_weights(s) for e, s in zip(self.policy, streams, strict=True)]
        receives = [(receive or collect)(engine) for engine in self.rollout]
        return await asyncio.gather(*sends, *receives, return_exceptions=True)


def run(work):
    """Run a coroutine within a bound."""

    async def bounded():
        return await asyncio.wait_for(work, BOUND_S)

    return asyncio.run(bounded())


async def collect(engine) -> Pairs:
    """Receive everything; every batch is copied before the next one is asked for."""
    received = []
    async for batch in engine.receive_weight_batches():
        received += [(name, tensor.clone()) for name, tensor in batch]
    return received


def plain(pairs: Iterable[tuple[str, torch.Tensor]]):
    yield from pairs


def stream_of(pairs: Pairs, *, manifest: bool = False):
    if not manifest:
        return plain(pairs)
    return WeightStream(WeightManifest.build(TensorSpec.of(n, t) for n, t in pairs), plain(pairs))


def assert_same(received: Pairs, sent: Pairs) -> None:
    """Names in order, dtypes, shapes, and every byte: NaN and -0.0 count."""
    assert [name for name, _ in received] == [name for name, _ in sent]
    for (name, got), (_, want) in zip(received, sent, strict=True):
        assert (got.dtype, got.shape) == (want.dtype, want.shape), name
        assert got.is_contiguous(), name
        assert not got.requires_grad, name
        assert torch.equal(flat_bytes(got), flat_bytes(want)), name


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    """Random bytes, shape ``(nbytes,)``, uint8."""
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def some_weights(seed: int = 0, count: int = 12, nbytes: int = 300_000) -> Pairs:
    """A stream of a few buckets of 1 MiB."""
    return [(f"layer.{i}.weight", noise(nbytes + i, seed * 1000 + i)) for i in range(count)]
