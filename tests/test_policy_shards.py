"""The boxes and the memory of local shards, worked out in one process."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.shard_oracle import assembled, plan_covers
from weightsync.errors import ManifestError
from weightsync.layout.tables import RankTable
from weightsync.policy import DtypePolicy, weight_stream_from
from weightsync.policy.entries import StateEntry
from weightsync.policy.experts import Slice, split_fused_experts, whole
from weightsync.policy.local_views import LocalView
from weightsync.policy.planned import Piece, PlannedEntry
from weightsync.policy.shards import LocalShards, NoShards, _build
from weightsync.tensors import TensorSpec, WeightManifest, dtype_name


def local_part(full: torch.Tensor, mesh, coordinate, placements) -> torch.Tensor:
    """Cut a tensor as torch's own placements do, without a process group."""
    for size, index, placed in zip(mesh, coordinate, placements, strict=True):
        if not isinstance(placed, Replicate):
            full = placed._split_tensor(full, size, with_padding=False, contiguous=True)[0][index]
    return full


def in_memory_order(tensor: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Return the same values with the dimensions in another order in memory."""
    back = [order.index(dim) for dim in range(tensor.dim())]
    return tensor.permute(order).contiguous().permute(back)


def described(
    full: torch.Tensor, slices: tuple[Slice, ...], view: LocalView
) -> tuple[WeightManifest, RankTable]:
    """Return the manifest of a tensor's slices, and the table of a rank that has this of the tensor."""
    dtype = dtype_name(full.dtype)
    pieces = tuple(
        Piece(TensorSpec(each.name, tuple(each.shape), dtype), each.name, each.cut, each.window)
        for each in slices
    )
    manifest = WeightManifest.build(piece.spec for piece in pieces)
    entry = StateEntry("w", nn.Module(), "w", is_buffer=False)
    return manifest, _build(manifest, [PlannedEntry(entry, full.shape, pieces)], {"w": view})


def rank_of(full: torch.Tensor, slices: tuple[Slice, ...], mesh, coordinate, placements, order):
    """Return the table and the storages of one place of a mesh."""
    local = in_memory_order(local_part(full, mesh, coordinate, placements), order)
    seen = LocalView.of(local)
    view = replace(seen, shape=tuple(full.shape), mesh=mesh, coordinate=coordinate, placements=placements)
    manifest, table = described(full, slices, view)
    flat = local.as_strided((local.numel(),), (1,))
    return manifest, table, [flat] if table.storages else []


@st.composite
def placed_tensors(draw: st.DrawFn, shape: tuple[int, ...]):
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    placements = []
    for _ in mesh:
        dim = draw(st.integers(0, len(shape) - 1))
        factor = st.builds(lambda n, dim=dim: _StridedShard(dim, split_factor=n), st.integers(2, 3))
        placements.append(draw(st.just(Replicate()) | st.just(Shard(dim)) | factor))
    return mesh, tuple(placements), draw(st.permutations(range(len(shape))).map(tuple))


shapes = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_boxes_are_where_torch_puts_the_values(data):
    shape = data.draw(shapes)
    mesh, placements, order = data.draw(placed_tensors(shape))
    full = torch.arange(torch.Size(shape).numel()).reshape(shape)
    ranks = [
        rank_of(full, whole("w", full.shape), mesh, place, placements, order)
        for place in itertools.product(*map(range, mesh))
    ]
    manifest = ranks[0][0]
    found = assembled(manifest, [(table, memory) for _, table, memory in ranks])
    assert torch.equal(found["w"], full)
    plan_covers(manifest, [table for _, table, _ in ranks])


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(st.data())
def test_experts_are_cut_out_of_any_shard(data):
    experts, width, hidden = (data.draw(st.integers(1, 5)) for _ in range(3))
    sizes = {
        "experts.gate_up_proj": torch.Size((experts, 2 * width, hidden)),
        "experts.down_proj": torch.Size((experts, hidden, width)),
    }
    name = data.draw(st.sampled_from(sorted(sizes)))
    mesh, placements, order = data.draw(placed_tensors(sizes[name]))
    full = torch.arange(sizes[name].numel()).reshape(sizes[name])
    slices = split_fused_experts(name, sizes)
    ranks = [
        rank_of(full, slices, mesh, place, placements, order)
        for place in itertools.product(*map(range, mesh))
    ]
    found = assembled(ranks[0][0], [(table, memory) for _, table, memory in ranks])
    assert found.keys() == {each.name for each in slices}
    for each in slices:
        assert torch.equal(found[each.name], each.cut(full)), each.name


@pytest.mark.parametrize(
    ("placed", "reason"),
    [
        (Partial(), "no rank holds the values"),
        (Shard(0), "its local tensor has shape [4, 3], but as it is placed [2, 3]"),
    ],
)
def test_what_no_rank_holds_is_sent_whole(placed, reason):
    """A partial sum, and a local tensor that its placements do not explain."""
    full = torch.ones(4, 3)
    view = LocalView((4, 3), (4, 3), (3, 1), torch.float32, (2,), (0,), (placed,))
    _, table = described(full, whole("w", full.shape), view)
    assert reason in table.whole["w"]
    assert (table.storages, table.pattern_of) == ((), (-1,))


def test_a_rank_outside_the_mesh_has_nothing():
    view = LocalView((4, 3), (0,), (1,), torch.float32, (2,), None, (Shard(0),))
    assert view.boxes() == []


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5, dtype=torch.float64)
        self.register_buffer("scale", torch.tensor(2.5))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("none", torch.empty(0, 4))
        self.across = nn.Parameter(torch.randn(3, 4).t())
        self.gaps = nn.Parameter(torch.randn(4, 6)[:, ::2])
        self.spread = nn.Parameter(torch.randn(4, 1).expand(4, 3))
        self.register_buffer("turned", torch.randn(3, dtype=torch.complex64).conj())


def test_plain_tensors_are_lent_as_they_lie():
    model = Mixed()
    stream = weight_stream_from(model, dtype_policy=DtypePolicy("bf16"), rename="m.{}".format)
    shards = stream.shards
    table: RankTable = shards.table
    assert sorted(table.whole) == ["m.gaps", "m.spread", "m.turned"]
    assert "strides [6, 2]" in table.whole["m.gaps"]
    assert [storage.name for storage in table.storages] == [
        "across", "scale", "mask", "linear.weight", "linear.bias"
    ]  # fmt: skip
    across = shards.storage(0)
    assert (across.shape, across.is_contiguous(), across.requires_grad) == ((12,), True, False)
    assert across.data_ptr() == model.across.data_ptr()
    assert shards.storage(3).dtype == torch.float64
    found = assembled(stream.manifest, [(table, [shards.storage(i) for i in range(len(table.storages))])])
    for name, tensor in stream:
        if name not in table.whole and tensor.numel():
            assert torch.equal(found[name], tensor), name
            assert found[name].dtype == tensor.dtype


def test_the_memory_is_that_of_the_moment():
    model = nn.Linear(3, 5)
    shards = weight_stream_from(model).shards
    before = shards.storage(0)
    with torch.no_grad():
        model.weight.add_(1)
    assert torch.equal(before.view(5, 3), model.weight)
    model.weight = nn.Parameter(torch.zeros(5, 3))
    assert shards.storage(0).data_ptr() == model.weight.data_ptr() != before.data_ptr()
    for other in (torch.zeros(5, 4), torch.zeros(5, 3).bfloat16(), torch.zeros(3, 5).t()):
        model.weight = nn.Parameter(other)
        with pytest.raises(ManifestError, match="its shard is") as caught:
            shards.storage(0)
        assert caught.value.context.tensor == "weight"


def test_one_table_as_long_as_nothing_changes():
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    first = weight_stream_from(model).shards.table
    with torch.no_grad():
        model[0].weight.add_(1)
    assert weight_stream_from(model).shards.table is first
    renamed = weight_stream_from(model, rename="x.{}".format).shards.table
    assert renamed.manifest != first.manifest
    assert weight_stream_from(model).shards.table == first
    model[1].weight = nn.Parameter(torch.zeros(5, 2).t())
    assert weight_stream_from(model).shards.table != first


def test_nothing_is_looked_at_before_it_is_wanted(monkeypatch):
    def fail(*_):
        raise AssertionError("looked at")

    monkeypatch.setattr(LocalView, "of", fail)
    stream = weight_stream_from(nn.Linear(2, 3))
    assert isinstance(stream.shards, LocalShards)
    assert len(dict(stream)) == 2


def test_a_rank_that_does_not_say_where_its_tensors_are():
    manifest = WeightManifest.build([TensorSpec("w", (4, 3), "float32")])
    memory = NoShards(manifest)
    assert memory.table.whole == {"w": "the weight stream is a plain generator"}
    assert memory.table.storages == ()
    with pytest.raises(ManifestError):
        memory.storage(0)
