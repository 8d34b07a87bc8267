"""Local shards of real sharded models: put together, they are what the stream's full tensors are."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.policy_ranks import faults_of
from tests.shard_oracle import assembled, plan_covers
from tests.test_policy_fsdp import FailsOnRank1, Small, sharded, sharded_transformer
from weightsync.errors import ManifestError
from weightsync.policy import DtypePolicy, PolicyCheckpointEngineMixin, weight_stream_from
from weightsync.testing.tiny_models import make_tiny_model


def assert_shards_make_up(model: nn.Module, whole: tuple[str, ...] = (), **options) -> None:
    """Compare the boxes of all ranks, put together, with the tensors of the stream, byte for byte."""
    from torch.distributed.tensor.debug import CommDebugMode  # its import takes seconds

    with CommDebugMode() as collectives:
        stream = weight_stream_from(model, **options)
        shards = stream.shards
        table = shards.table
        memory = [shards.storage(index) for index in range(len(table.storages))]
    assert collectives.get_total_counts() == 0
    assert not any(flat.requires_grad or not flat.is_contiguous() for flat in memory)
    ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (stream.manifest, table, [flat.clone() for flat in memory]))
    assert all(manifest == stream.manifest for manifest, _, _ in ranks)
    assert {name for _, other, _ in ranks for name in other.whole} == set(whole)
    found = assembled(stream.manifest, [(other, flat) for _, other, flat in ranks])
    if dist.get_rank() == 0:
        plan_covers(stream.manifest, [other for _, other, _ in ranks])
    for name, tensor in stream:
        if name not in whole:
            assert found[name].dtype == tensor.dtype
            # Bytes: running statistics and the like may be anything.
            assert torch.equal(
                found[name].view(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
            ), name
    assert weight_stream_from(model, **options).shards.table is table


def check_fsdp(rank: int) -> None:
    model = sharded(Small())
    assert_shards_make_up(model)
    assert_shards_make_up(model, dtype_policy=DtypePolicy("bf16", {"norm.*": "keep"}), rename="a.{}".format)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(4, 3, generator=torch.Generator().manual_seed(0))).sum().backward()
    shards = weight_stream_from(model).shards
    before = [shards.storage(index) for index in range(len(shards.table.storages))]
    addresses = [flat.data_ptr() for flat in before]
    optimizer.step()
    assert_shards_make_up(model)
    shards = weight_stream_from(model).shards
    assert [shards.storage(index).data_ptr() for index in range(len(before))] == addresses


def check_other_ways_of_fsdp(rank: int) -> None:
    assert_shards_make_up(sharded(Small(), offload_policy=CPUOffloadPolicy(pin_memory=False)))
    tied = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 7, bias=False))
    tied[1].weight = tied[0].weight
    model = fully_shard(tied, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    assert_shards_make_up(model)
    assert_shards_make_up(model, keep_tied=True)


def check_unsharded_copies(rank: int) -> None:
    """After a forward pass the root shows copies; a stream looks behind them, and an older one says so."""
    model = fully_shard(
        nn.Linear(3, 8),
        mesh=init_device_mesh("cpu", (dist.get_world_size(),)),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        reshard_after_forward=False,
    )
    shards = weight_stream_from(model).shards
    shards.storage(0)
    with torch.no_grad():
        model(torch.ones(2, 3))
    with pytest.raises(ManifestError, match="its shard is bfloat16"):
        shards.storage(0)
    assert_shards_make_up(model)


def check_replicas(rank: int) -> None:
    """Shards that each are on two ranks, beside tensors that every rank has."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(Small(7), mesh)
    assert_shards_make_up(model, dtype_policy=DtypePolicy("bf16"))
    table = weight_stream_from(model).shards.table
    pattern = table.patterns[table.pattern_of[0]]
    assert [(held.lo, held.hi) for held in pattern] == ([((0, 0), (4, 3))], [((4, 0), (7, 3))])[rank % 2]


def check_fsdp_with_tensor_parallelism(rank: int) -> None:
    for shape in ((2, 2), (1, 4), (4, 1)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        for width in (8, 5, 3, 1):
            model = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 7))
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            assert_shards_make_up(sharded(model, mesh["dp"]))
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "dp", "tp"))
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 7))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    assert_shards_make_up(sharded(model, mesh["replicate", "dp"]), dtype_policy=DtypePolicy("bf16"))


def check_placements(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    pair = DeviceMesh("cpu", [1, 2])
    model = nn.Module()
    ways = [Replicate(), Shard(0), Shard(1), Shard(2)]
    for number, (first, second) in enumerate((a, b) for a in ways for b in ways):
        full = torch.randn(5, 3, 7)
        placed = distribute_tensor(full, mesh, [first, second])
        model.register_parameter(f"p{number}", nn.Parameter(placed))
    for name, value in (("flags", torch.rand(9) > 0.5), ("counts", torch.arange(5)), ("one", torch.ones(()))):
        placed = distribute_tensor(value, mesh, [Replicate(), Shard(0) if value.dim() else Replicate()])
        model.register_buffer(name, placed)
    model.register_buffer("nothing", distribute_tensor(torch.empty(0, 3), mesh, [Shard(0), Shard(1)]))
    sums = DTensor.from_local(torch.full((2, 3), 1.0), mesh, [Partial(), Replicate()])
    model.sums = nn.Parameter(sums)
    turned = torch.arange(12.0).reshape(4, 3).t()
    model.turned = nn.Parameter(DTensor.from_local(turned, mesh, [Shard(0), Shard(1)], run_check=False))
    gaps = torch.arange(24.0).reshape(4, 6)[:, ::2]
    model.gaps = nn.Parameter(DTensor.from_local(gaps, mesh, [Shard(0), Shard(1)], run_check=False))
    assert_shards_make_up(model, whole=("sums", "gaps"))
    assert "P(sum)" in weight_stream_from(model).shards.table.whole["sums"]
    part = nn.Module()
    part.weight = nn.Parameter(distribute_tensor(torch.randn(5, 3), pair, [Shard(0)]))
    table = weight_stream_from(part).shards.table
    assert [(s.name, s.shape) for s in table.storages] == {
        1: [("weight", (3, 3))], 2: [("weight", (2, 3))]
    }.get(rank, [])  # fmt: skip


def check_experts(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    for placements in (
        [Shard(1), Shard(0)],
        [Replicate(), Shard(0)],
        [Shard(0), Shard(0)],
        [Shard(2), Shard(1)],
    ):
        model = nn.Module()
        model.experts = nn.Module()
        for name, full in (("gate_up_proj", torch.randn(5, 6, 4)), ("down_proj", torch.randn(5, 4, 3))):
            placed = distribute_tensor(full, mesh, placements)
            model.experts.register_parameter(name, nn.Parameter(placed))
        for split in (True, False):
            assert_shards_make_up(model, split_experts=split, dtype_policy=DtypePolicy("bf16"))


def check_transformers_models(rank: int) -> None:
    for kind in ("qwen3tied", "qwen3moe"):
        model = sharded_transformer(make_tiny_model(kind, seed=5, dtype=torch.float32))
        assert_shards_make_up(model, split_experts=True, dtype_policy=DtypePolicy("bf16"))


class Worker(PolicyCheckpointEngineMixin):
    def __init__(self, model: nn.Module, policy: DtypePolicy | None = None, **engine_kwargs) -> None:
        from tests.recording_engine import RecordingEngine

        self.model, self.policy = model, policy
        backend = "tests.test_policy_select:RegionEngine"
        init = {"backend": backend, "bucket_size_bytes": 64, "engine_kwargs": engine_kwargs}
        group = {"train_world_size": dist.get_world_size(), "rollout_world_size": 1, "metadata": []}
        self.call("init_checkpoint_engine", init)
        self.call("init_checkpoint_engine_process_group", group)
        self.engine = RecordingEngine.made[-1]

    def weight_stream(self):
        return weight_stream_from(self.model, dtype_policy=self.policy)

    def call(self, method: str, kwargs: dict | None = None) -> dict:
        return self.checkpoint_engine_rpc(method, kwargs)


def check_one_rank_describes(rank: int) -> None:
    """If that entered a gather, it would wait there for the other ranks."""
    model = sharded(Small())
    worker = Worker(model, DtypePolicy("bf16"))
    if rank == 0:
        value = worker.call("describe_weights", {"sharding": "all"})["value"]
        assert value["whole"] == {}
        assert value["digest"] == worker.engine.memory.table.manifest
    dist.barrier()


def check_only_what_is_selected_is_gathered(rank: int) -> None:
    """Also by a rank that fails or stops: it owes the others no more than that."""
    reference = Small()
    rest = ["outer.bias", "norm.weight", "inner.bias"]
    for fault in ({}, {"fail_at": 0}, {"fail_at": 2}, {"stop_at": 1}, {"fail_at": -1}):
        mine = fault if rank == 1 else {}
        worker = Worker(sharded(copy.deepcopy(reference)), rest=rest, **mine)
        outcome = worker.call("send_weights_via_checkpoint_engine")
        assert ("error" in outcome) == ("fail_at" in mine)
        if not mine:
            assert outcome["value"]["tensors"] == 3
            assert list(worker.engine.sent) == [name for name in reference.state_dict() if name in rest]
            assert torch.equal(worker.engine.sent["norm.weight"], reference.norm.weight)
    worker = Worker(sharded(copy.deepcopy(reference)), FailsOnRank1(), rest=rest)
    for _ in range(2):
        outcome = worker.call("send_weights_via_checkpoint_engine")
        assert ("error" in outcome) == (rank == 1)
    worker = Worker(sharded(copy.deepcopy(reference)), rest=[])
    if rank == 1:
        assert worker.call("send_weights_via_checkpoint_engine")["value"]["tensors"] == 0
    dist.barrier()


ONE_MESH = ["check_fsdp", "check_other_ways_of_fsdp", "check_unsharded_copies"]
CHECKS = {
    1: [*ONE_MESH, "check_transformers_models"],
    2: [*ONE_MESH, "check_one_rank_describes", "check_only_what_is_selected_is_gathered"],
    4: [
        *ONE_MESH,
        "check_replicas",
        "check_fsdp_with_tensor_parallelism",
        "check_placements",
        "check_experts",
        "check_transformers_models",
    ],
}


faults = faults_of(__name__, CHECKS, timeout_s=120)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "check"), [(size, check) for size, checks in CHECKS.items() for check in checks]
)
def test_on_ranks(faults, world_size, check):
    fault = faults(world_size)[check]
    assert not fault, fault
