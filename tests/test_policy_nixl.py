"""Sharded policy workers and a receiver over the real NIXL engine: one rank fails, the next refit works."""

import asyncio
import importlib.util
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from tests.policy_ranks import run_checks
from weightsync.engines.registry import create_checkpoint_engine
from weightsync.errors import PeerAbortedError
from weightsync.policy import DtypePolicy, PolicyCheckpointEngineMixin, weight_stream_from

INIT = {
    "backend": "nixl",
    "bucket_size_bytes": 1 << 20,
    "engine_kwargs": {"device": "cpu", "connect_s": 20.0, "stall_s": 30.0},
}
RECEIVER = 2
SEND = "send_weights_via_checkpoint_engine"
SOON_S = 10.0
"""Far below every deadline of the engine and the process group: nobody waited for one to run out."""


class FailsOn(DtypePolicy):
    """Its cast fails on one policy rank, at a tensor in the middle (`None`: on no rank)."""

    def __init__(self, rank: int | None):
        super().__init__("bf16")
        self.rank = rank

    def apply(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == "3.weight" and dist.get_rank() == self.rank:
            raise MemoryError("no room for the cast")
        return super().apply(name, tensor)


class Worker(PolicyCheckpointEngineMixin):
    def __init__(self, model: nn.Module):
        self.model = model
        self.policy = FailsOn(None)

    def weight_stream(self):
        return weight_stream_from(self.model, dtype_policy=self.policy)


def make_model() -> nn.Module:
    """Eight layers of 0.7 MB in bfloat16: several buckets on the way, and more after the failure."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(600, 601) for _ in range(8)))


def exchange(own: object) -> list[object]:
    everyone: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone


def refits():
    """Yield version, and the policy rank that fails in it."""
    for version, failing in enumerate([None, 1, None, 0, None], start=1):
        dist.barrier()
        yield version, failing


def check_refits_with_failures(rank: int) -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    (receive if rank == RECEIVER else send)(mesh)


def send(mesh: DeviceMesh) -> None:
    worker = Worker(fully_shard(make_model(), mesh=mesh))

    def call(method: str, **arguments):
        outcome = worker.checkpoint_engine_rpc(method, arguments)
        assert outcome["rank"] == dist.get_rank()
        return outcome

    call("init_checkpoint_engine", **INIT)
    metadata = exchange(call("prepare_checkpoint_engine")["value"])
    group = {"train_world_size": 2, "rollout_world_size": 1, "metadata": metadata}
    assert call("init_checkpoint_engine_process_group", **group)["value"] is None
    for version, failing in refits():
        worker.policy = FailsOn(failing)
        assert "error" not in call("open_refit", epoch=version, version=version)
        start = time.monotonic()
        outcome = call(SEND)
        assert time.monotonic() - start < SOON_S
        if failing is None:
            assert outcome["value"]["seconds"]["gather"] > 0
            assert outcome["value"]["tensors"] == (16 if dist.get_rank() == 0 else 0)
        else:
            expected = "MemoryError" if failing == dist.get_rank() else "PeerAbortedError"
            assert outcome["error"]["kind"] == expected
            assert "no room for the cast" in outcome["error"]["message"]
    dist.barrier()
    assert "error" not in call("close_checkpoint_engine")


def receive(mesh: DeviceMesh) -> None:
    expected = {name: tensor.bfloat16() for name, tensor in make_model().state_dict().items()}
    engine = create_checkpoint_engine(
        INIT["backend"], bucket_size_bytes=INIT["bucket_size_bytes"], engine_kwargs=INIT["engine_kwargs"]
    )
    metadata = exchange(engine.prepare())
    engine.init_rollout_process_group(
        rollout_rank=0, train_world_size=2, rollout_world_size=1, metadata=metadata
    )

    async def arrived() -> set[str]:
        names = set()
        async for batch in engine.receive_weight_batches():
            for name, tensor in batch:
                assert torch.equal(tensor, expected[name])
                names.add(name)
        return names

    for version, failing in refits():
        engine.open_refit(epoch=version, version=version)
        if failing is None:
            assert asyncio.run(arrived()) == set(expected)
        else:
            with pytest.raises(PeerAbortedError, match="no room for the cast"):
                asyncio.run(arrived())
    dist.barrier()
    engine.close()


@pytest.mark.slow
@pytest.mark.nixl
@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed")
def test_failures_of_one_policy_rank(tmp_path):
    name = check_refits_with_failures.__name__
    fault = run_checks(__name__, [name], 3, tmp_path, timeout_s=150)[name]
    assert not fault, fault
