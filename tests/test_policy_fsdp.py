"""Weight streams of sharded models, on real gloo ranks; one process group serves all checks of a size."""

import copy
import importlib
import tempfile
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing.reductions import StorageWeakRef

from tests.policy_ranks import faults_of
from tests.recording_engine import BACKEND, RecordingEngine
from weightsync.errors import ConfigurationError, ManifestError
from weightsync.policy import (
    DtypePolicy,
    PolicyCheckpointEngineMixin,
    fsdp_weights,
    module_weights,
    weight_stream_from,
)
from weightsync.policy.fsdp import gather_full
from weightsync.policy.plan import plan_stream
from weightsync.testing.tiny_models import make_tiny_model


class Small(nn.Module):
    """Five rows: uneven over two ranks, and over four with one empty shard."""

    def __init__(self, width: int = 5):
        super().__init__()
        self.inner = nn.Linear(3, width)
        self.norm = nn.BatchNorm1d(width, momentum=0.5)
        self.outer = nn.Linear(width, 2)
        self.register_buffer("inv_freq", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.norm(F.relu(self.inner(x))))


def sharded(model: nn.Module, mesh=None, **options) -> nn.Module:
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for child in [child for child in model.children() if list(child.parameters(recurse=False))]:
        fully_shard(child, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def assert_streams(stream, expected: dict[str, torch.Tensor]) -> None:
    """Consume a stream and compare it, name by name, with full tensors."""
    assert stream.manifest.names == list(expected)
    count = 0
    for spec, (name, tensor) in zip(stream.manifest.tensors, stream, strict=True):
        assert type(tensor) is torch.Tensor
        assert (spec.name, spec.shape) == (name, tuple(tensor.shape))
        assert torch.equal(tensor, expected[name]), name
        count += 1
    assert count == len(expected)


def persistent(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(batch).square().sum().backward()
    optimizer.step()


def check_three_optimizer_steps(rank: int) -> None:
    reference = Small()
    model = sharded(copy.deepcopy(reference))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, foreach=False) for m in (reference, model)]
    before = persistent(reference)
    for step in range(3):
        batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        for one, optimizer in zip((reference, model), optimizers, strict=True):
            train_step(one, optimizer, batch)
        after = persistent(reference)
        assert all(not torch.equal(before[name], after[name]) for name in after)
        assert_streams(weight_stream_from(model), after)
        before = after


def check_uneven_and_empty_shards(rank: int) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shapes = [(5,), (5, 3), (1, 2), (3, 5, 2), (0, 4), (2, 7)]
    model, expected = nn.Module(), {}
    for number, shape in enumerate(shapes):
        for dim in range(len(shape)):
            full = torch.randn(shape)
            name = f"p{number}_{dim}"
            model.register_parameter(name, nn.Parameter(distribute_tensor(full, mesh, [Shard(dim)])))
            expected[name] = full
    model.register_parameter("same", nn.Parameter(distribute_tensor(torch.ones(5), mesh, [Replicate()])))
    model.register_parameter("plain", nn.Parameter(torch.full((2,), 3.0)))
    expected |= {"same": torch.ones(5), "plain": torch.full((2,), 3.0)}
    assert_streams(weight_stream_from(model), expected)
    policy = DtypePolicy("bf16", {"plain": "keep"})
    cast = {name: tensor.bfloat16() if name != "plain" else tensor for name, tensor in expected.items()}
    assert_streams(weight_stream_from(model, dtype_policy=policy), cast)


def check_manifest_needs_no_collective(rank: int) -> None:
    model = sharded(Small())
    if rank == 0:
        manifest = fsdp_weights(model).manifest
        assert manifest.names == list(Small().state_dict())
        assert manifest.tensors[0].shape == (5, 3)
    dist.barrier()


def check_refused_as_plain(rank: int) -> None:
    with pytest.raises(ConfigurationError, match="weight_stream_from"):
        module_weights(sharded(Small()))


def check_forward_without_backward(rank: int) -> None:
    """The root then shows unsharded bfloat16 copies, which do not follow the optimizer."""
    reference = nn.Linear(3, 5)
    model = fully_shard(
        copy.deepcopy(reference),
        mesh=init_device_mesh("cpu", (dist.get_world_size(),)),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        reshard_after_forward=False,
    )
    with torch.no_grad():
        model(torch.ones(2, 3))
    assert model.weight.dtype == torch.bfloat16
    assert_streams(weight_stream_from(model), persistent(reference))


def check_offloaded_parameters(rank: int) -> None:
    reference = Small()
    model = sharded(copy.deepcopy(reference), offload_policy=CPUOffloadPolicy(pin_memory=False))
    assert_streams(weight_stream_from(model), persistent(reference))


def freed(memories: list[StorageWeakRef]) -> bool:
    """Whether memory is given back; gloo's threads let go of it a moment after a collective ended."""
    deadline = time.monotonic() + 10
    while not all(memory.expired() for memory in memories):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def check_nothing_earlier_is_held(rank: int) -> None:
    """Neither the gathered tensor nor its cast, when the next is gathered."""
    model = sharded(Small())
    for policy in (DtypePolicy(), DtypePolicy("bf16")):
        earlier: list[StorageWeakRef] = []

        def gather(tensor: torch.Tensor, earlier=earlier) -> torch.Tensor:
            assert freed(earlier)
            full = gather_full(tensor)
            earlier.append(StorageWeakRef(full.untyped_storage()))
            return full

        stream = plan_stream(model, gather, {"dtype_policy": policy, "include_buffers": False})
        for _ in range(len(stream.manifest)):
            _, tensor = next(stream)
            earlier.append(StorageWeakRef(tensor.untyped_storage()))
            del tensor
        assert len(earlier) == 12
        assert next(stream, None) is None
        assert freed(earlier)


class FailsOnRank1(DtypePolicy):
    """A policy whose cast of one weight fails, on one rank only."""

    def apply(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == "norm.weight" and dist.get_rank() == 1:
            raise MemoryError("no room for the cast")
        return super().apply(name, tensor)


class Worker(PolicyCheckpointEngineMixin):
    def __init__(self, model: nn.Module, policy: DtypePolicy | None = None, **engine_kwargs):
        self.model, self.policy = model, policy
        init = {"backend": BACKEND, "bucket_size_bytes": 64, "engine_kwargs": engine_kwargs}
        group = {"train_world_size": dist.get_world_size(), "rollout_world_size": 1, "metadata": []}
        self.call("init_checkpoint_engine", init)
        self.call("init_checkpoint_engine_process_group", group)
        self.engine = RecordingEngine.made[-1]

    def weight_stream(self):
        return weight_stream_from(self.model, dtype_policy=self.policy)

    def call(self, method: str, kwargs: dict | None = None) -> dict:
        outcome = self.checkpoint_engine_rpc(method, kwargs)
        assert outcome["rank"] == dist.get_rank()
        return outcome

    def send(self) -> dict:
        return self.call("send_weights_via_checkpoint_engine")


def assert_sends(worker: Worker, expected: dict[str, torch.Tensor]) -> None:
    assert worker.send()["value"]["tensors"] == len(expected)
    assert all(torch.equal(worker.engine.sent[name], tensor) for name, tensor in expected.items())


def check_a_local_failure_leaves_nobody_in_a_collective(rank: int) -> None:
    reference = Small()
    worker = Worker(sharded(copy.deepcopy(reference)), FailsOnRank1())
    for _ in range(2):
        outcome = worker.send()
        if rank == 1:
            assert outcome["error"]["kind"] == "MemoryError"
            assert "norm.weight" in outcome["error"]["traceback"]
            assert list(worker.engine.sent) == ["inner.weight", "inner.bias"]
        else:
            assert outcome["value"]["tensors"] == len(reference.state_dict())
    worker.policy = None
    assert_sends(worker, persistent(reference))


def check_an_engine_that_fails_or_stops_on_one_rank(rank: int) -> None:
    reference = Small()
    model = sharded(copy.deepcopy(reference))
    for fault in ({"fail_at": 0}, {"fail_at": 3}, {"fail_at": -1}, {"stop_at": 0}, {"stop_at": 2}):
        worker = Worker(model, **(fault if rank == 1 else {}))
        outcome = worker.send()
        if rank != 1:
            assert outcome["value"]["tensors"] == len(reference.state_dict())
        elif "fail_at" in fault:
            assert outcome["error"]["message"] == "the wire broke"
            assert worker.engine.calls[-1][0] == "abort_refit"
        worker.engine.fail_at = worker.engine.stop_at = None
        assert_sends(worker, persistent(reference))


def check_a_shape_that_changed_on_one_rank(rank: int) -> None:
    model = sharded(Small())
    stream = fsdp_weights(model)
    if rank == 1:
        model.norm.running_mean = torch.zeros(6)
        with pytest.raises(ManifestError, match=r"running_mean"):
            for _ in stream:
                pass
        stream.close()
    else:
        assert sum(1 for _ in stream) == len(stream.manifest)


def saved_checkpoint(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return what the unsharded model would save; transformers saves on rank 0 alone."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        model.save_pretrained(folder[0])
        dist.barrier()
        saved = {name: tensor.clone() for name, tensor in load_file(f"{folder[0]}/model.safetensors").items()}
        dist.barrier()
    return saved


def sharded_transformer(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def check_transformers_models(rank: int) -> None:
    """After each of three steps the stream is the checkpoint that the unsharded model would save."""
    tokens = torch.randint(0, 512, (2, 6), generator=torch.Generator().manual_seed(1))
    for kind in ("qwen3", "qwen3tied", "qwen3moe"):
        reference = make_tiny_model(kind, seed=5, dtype=torch.float32)
        model = sharded_transformer(copy.deepcopy(reference))
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (reference, model)]
        before = saved_checkpoint(reference)
        for _ in range(3):
            for one, optimizer in zip((reference, model), optimizers, strict=True):
                optimizer.zero_grad()
                one(input_ids=tokens, labels=tokens).loss.backward()
                optimizer.step()
            after = saved_checkpoint(reference)
            sent = dict(weight_stream_from(model, split_experts=True))
            assert sent.keys() == after.keys()
            assert ("lm_head.weight" in sent) == (kind != "qwen3tied")
            for name, tensor in after.items():
                torch.testing.assert_close(sent[name], tensor, rtol=1e-5, atol=1e-6)
                assert "experts" in name or not torch.equal(tensor, before[name]), name
            before = after


def check_two_dimensional_meshes(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for width in (8, 5, 3, 2, 1):
        reference = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 7))
        model = copy.deepcopy(reference)
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        sharded(model, mesh["dp"])
        assert_streams(weight_stream_from(model), persistent(reference))
    for placements in ([Shard(0), Shard(1)], [Shard(1), Shard(0)], [Replicate(), Shard(0)], [Shard(0)] * 2):
        full = torch.randn(5, 7)
        single = nn.Module()
        single.weight = nn.Parameter(distribute_tensor(full, mesh, placements))
        assert_streams(weight_stream_from(single), {"weight": full})


def check_sharded_experts(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    gate_up, down = torch.randn(5, 6, 4), torch.randn(5, 4, 3)
    model = nn.Module()
    model.experts = nn.Module()
    for name, full in (("gate_up_proj", gate_up), ("down_proj", down)):
        placed = distribute_tensor(full, mesh, [Shard(1), Shard(0)])
        model.experts.register_parameter(name, nn.Parameter(placed))
    expected = {}
    for expert in range(5):
        expected[f"experts.{expert}.gate_proj.weight"] = gate_up[expert, :3]
        expected[f"experts.{expert}.up_proj.weight"] = gate_up[expert, 3:]
    expected |= {f"experts.{expert}.down_proj.weight": down[expert] for expert in range(5)}
    assert_streams(weight_stream_from(model, split_experts=True), expected)


COMMON = ["check_uneven_and_empty_shards", "check_three_optimizer_steps"]
CHECKS = {
    2: [
        *COMMON,
        "check_manifest_needs_no_collective",
        "check_refused_as_plain",
        "check_forward_without_backward",
        "check_offloaded_parameters",
        "check_nothing_earlier_is_held",
        "check_a_local_failure_leaves_nobody_in_a_collective",
        "check_an_engine_that_fails_or_stops_on_one_rank",
        "check_a_shape_that_changed_on_one_rank",
        "check_transformers_models",
    ],
    4: [
        *COMMON,
        "check_two_dimensional_meshes",
        "check_sharded_experts",
        "check_an_engine_that_fails_or_stops_on_one_rank",
    ],
}


faults = faults_of(__name__, CHECKS, timeout_s=200)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "check"), [(size, check) for size, checks in CHECKS.items() for check in checks]
)
def test_on_ranks(faults, world_size, check):
    fault = faults(world_size)[check]
    assert not fault, fault


def test_an_offloaded_shard_goes_to_the_device_of_its_mesh(monkeypatch):
    moves: list[str] = []

    class Mesh:
        device_type = "meta"

    class Shards(torch.Tensor):
        device_mesh = Mesh()

        def detach(self):
            return self

        def to(self, device):
            moves.append(device)
            return self

        def full_tensor(self):
            return torch.ones(3)

    monkeypatch.setattr(importlib.import_module("weightsync.policy.fsdp"), "DTensor", Shards)
    assert torch.equal(gather_full(torch.zeros(1).as_subclass(Shards)), torch.ones(3))
    assert moves == ["meta"]
