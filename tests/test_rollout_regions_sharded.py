"""A rollout module whose parameters are DTensors, on four real gloo ranks: each takes its shards only."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.policy_ranks import run_checks
from tests.region_engine import RegionEngine
from weightsync.rollout.module import ModuleLoader, named_state
from weightsync.rollout.module_state import local_pieces
from weightsync.rollout.receiver import RefitReceiver
from weightsync.tensors import TensorSpec, WeightManifest

pytestmark = pytest.mark.slow
RANKS = 4


class Block(nn.Module):
    """Sizes that four ranks do not divide, and tied weights."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6, bias=False)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(6, 3, bias=False)
        self.tied = nn.Linear(6, 3, bias=False)
        self.tied.weight = self.head.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def stream_of(seed: int):
    return [(name, tensor.detach().clone()) for name, tensor in named_state(Block(seed))]


def check_refits(model: nn.Module, whole: frozenset[str] = frozenset()) -> None:
    """Refit by regions, staged by regions and with whole tensors; each time all values must be those sent."""
    engine = RegionEngine(1 << 12)
    engine.stream = stream_of(1)
    loader = ModuleLoader(model)
    receiver = RefitReceiver(engine, loader)
    manifest = WeightManifest.build(TensorSpec.of(name, tensor) for name, tensor in engine.stream)
    receiver.memory = loader.layout(manifest, "auto")
    engine.use_memory(receiver.memory)
    table = receiver.memory.table
    assert set(table.whole) == whole, table.whole
    stored = {name: local(tensor) for name, tensor in named_state(model)}
    for storage in table.storages:
        assert storage.shape == tuple(stored[storage.name].shape)

    figures = receiver.receive(1)
    receiver.commit(1)
    own = {
        id(tensor): stored[n].nbytes
        for n, tensor in model.state_dict(keep_vars=True).items()
        if n not in whole
    }
    assert figures["copies"].get("whole", 0) + sum(own.values()) == figures["bytes"]
    assert "staged" not in figures["copies"], engine.handed
    assert_holds(model, 1)

    engine.stream = stream_of(2)
    receiver.receive(2, staged=True)
    assert_holds(model, 1)
    receiver.load_staged()
    receiver.commit(2)
    assert_holds(model, 2)

    engine.stream = stream_of(3)
    engine.also_whole = frozenset(manifest.names)
    receiver.receive(3)
    assert_holds(model, 3)
    assert dict(loader.served()).keys() == stored.keys()
    read_back = {name for name, _ in loader.originals()}
    assert read_back == {n for n, t in named_state(model) if tuple(stored[n].shape) == tuple(t.shape)}


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def assert_holds(model: nn.Module, seed: int) -> None:
    for (name, expected), (_, tensor) in zip(stream_of(seed), named_state(model), strict=True):
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(full, expected), name


def check_fully_sharded(rank: int) -> None:
    check_refits(fully_shard(Block(0), mesh=init_device_mesh("cpu", (RANKS,))))


def check_two_dimensions(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(Block(0), mesh["tp"], plan)
    check_refits(fully_shard(model, mesh=mesh["dp"]))


def check_columns_and_replicas(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    model = Block(0)
    place(model.up, "weight", mesh, [Shard(1), Replicate()])
    place(model.up, "bias", mesh, [Shard(0), Shard(0)])
    place(model.down, "weight", mesh, [Shard(1), Shard(0)])
    check_refits(model)


def check_part_of_a_mesh(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
    model = Block(0)
    place(model.up, "weight", mesh, [Shard(0)])
    check_refits(model)


def check_ranks_outside_the_mesh(rank: int) -> None:
    model = Block(0)
    place(model.up, "weight", DeviceMesh("cpu", [0, 1]), [Shard(0)])
    pieces = local_pieces(model.up.weight)
    assert [piece.box.shape for piece in pieces] == ([(5, 6)] if rank < 2 else [])


def check_partial_values_are_refused(rank: int) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    model = Block(0)
    model.up.bias = nn.Parameter(DTensor.from_local(torch.zeros(10), mesh, [Partial()]))
    manifest = WeightManifest.build(TensorSpec.of(name, tensor) for name, tensor in stream_of(1))
    table = ModuleLoader(model).layout(manifest, "all").table
    assert "no rank holds the values" in table.whole["up.bias"]
    assert set(table.whole) == {"up.bias"}


def place(module: nn.Module, name: str, mesh, placements) -> None:
    tensor = distribute_tensor(getattr(module, name).detach(), mesh, placements)
    setattr(module, name, nn.Parameter(tensor))


CHECKS = [name for name in dict(globals()) if name.startswith("check_") and name != "check_refits"]


@pytest.fixture(scope="module")
def passed(tmp_path_factory):
    return run_checks(__name__, CHECKS, RANKS, tmp_path_factory.mktemp("ranks"), 60)


@pytest.mark.parametrize("name", CHECKS)
def test_on_four_ranks(passed, name):
    assert passed[name] == ""
