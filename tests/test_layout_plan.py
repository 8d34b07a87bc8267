"""The oracle of the planner: real bytes, moved as the descriptors say, from shards that torch has cut."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from weightsync.errors import ConfigurationError, ManifestError
from weightsync.layout.descriptors import Compiler, count_descriptors
from weightsync.layout.holdings import Replicated, Sharded, dtensor_pieces, placements_from_torch
from weightsync.layout.pieces import Piece, TensorInfo, layout_from_pieces
from weightsync.layout.plan import make_plan
from weightsync.layout.regions import Box
from weightsync.tensors import flat_bytes

ITEMSIZE = 8


def local_tensor(whole, mesh_shape, coordinate, placements):
    """Cut a tensor as torch's own placements do."""
    for size, index, placed in zip(mesh_shape, coordinate, placements, strict=True):
        if isinstance(placed, Replicate):
            continue
        parts, _ = placed._split_tensor(whole, size, with_padding=False)
        whole = parts[index]
    return whole


@st.composite
def sides(draw, name):
    """A mesh, shuffled ranks of a larger world, and placements for each of some shapes."""
    mesh_shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3), label=f"{name} mesh"))
    ranks = draw(st.integers(prod(mesh_shape), prod(mesh_shape) + 2))
    order = draw(st.permutations(range(ranks)))[: prod(mesh_shape)]
    return np.array(order, np.int64).reshape(mesh_shape), ranks


def placements(draw, shape, mesh):
    found = []
    for _ in range(mesh.ndim):
        kinds = ["replicate"] + (["shard", "strided"] if shape else [])
        kind = draw(st.sampled_from(kinds))
        dim = draw(st.integers(0, len(shape) - 1)) if kind != "replicate" else 0
        if kind == "replicate":
            found.append(Replicate())
        elif kind == "shard":
            found.append(Shard(dim))
        else:
            found.append(_StridedShard(dim, split_factor=draw(st.integers(1, 3))))
    return found


@st.composite
def problems(draw):
    shapes = draw(st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=4))
    policy, rollout = draw(sides("policy")), draw(sides("rollout"))
    each = [
        (shape, placements(draw, shape, policy[0]), placements(draw, shape, rollout[0])) for shape in shapes
    ]
    return policy, rollout, each


def execute(plan, sources, targets, rollout_ranks):
    """Copy bytes as the descriptors say; count how often each target byte is written."""
    written = {
        rank: {name: np.zeros(len(data), int) for name, data in targets[rank].items()} for rank in targets
    }
    compiler = Compiler(plan)
    for rank in range(rollout_ranks):
        memory, counts = pack(plan.rollout, rank, targets.get(rank, {})), None
        counts = np.zeros(len(memory), int)
        rows = compiler.compile(rank)
        flat = rows.runs()
        assert flat.total_bytes == rows.total_bytes == int(plan.links[:, rank].sum())
        for source, read, write, nbytes in zip(
            *(each.tolist() for each in (flat.source, flat.source_offset, flat.target_offset, flat.nbytes)),
            strict=True,
        ):
            memory[write : write + nbytes] = pack(plan.policy, source, sources[source])[read : read + nbytes]
            counts[write : write + nbytes] += 1
        for name, start in plan.rollout.virtual_addresses(rank).items():
            size = plan.rollout.storage_bytes(rank)[name]
            targets[rank][name][:] = memory[start : start + size]
            written[rank][name][:] = counts[start : start + size]
    return written


def pack(layout, rank, storages):
    """Lay storages out at their virtual addresses."""
    addresses, sizes = layout.virtual_addresses(rank), layout.storage_bytes(rank)
    memory = np.zeros(max((addresses[name] + sizes[name] for name in sizes), default=0), np.uint8)
    for name, start in addresses.items():
        assert len(storages[name]) == sizes[name]
        memory[start : start + sizes[name]] = storages[name]
    return memory


def cut(tensors, mesh, which):
    """Return the local tensors of each rank, as bytes."""
    held = {int(rank): {} for rank in mesh.reshape(-1)}
    for coordinate in np.ndindex(*mesh.shape):
        for name, (whole, *both) in tensors.items():
            local = local_tensor(whole, mesh.shape, coordinate, both[which])
            held[int(mesh[coordinate])][name] = flat_bytes(local).numpy().copy()
    return held


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(problems())
def test_every_element_comes_once_from_a_rank_that_holds_it(problem):
    (policy_mesh, policy_ranks), (rollout_mesh, rollout_ranks), each = problem
    tensors, first = {}, 1
    for index, (shape, ours, theirs) in enumerate(each):
        count = prod(shape)
        tensors[f"t{index}"] = (torch.arange(first, first + count).reshape(shape), ours, theirs)
        first += count
    infos = [TensorInfo(name, tuple(whole.shape), ITEMSIZE) for name, (whole, *_) in tensors.items()]
    policy, rollout = (
        layout_from_pieces(
            side, ranks, infos,
            {
                name: dtensor_pieces(tuple(value[0].shape), mesh, placements_from_torch(value[1 + which]))
                for name, value in tensors.items()
            },
        )
        for side, ranks, mesh, which in (
            ("policy", policy_ranks, policy_mesh, 0), ("rollout", rollout_ranks, rollout_mesh, 1),
        )
    )  # fmt: skip
    plan = make_plan(policy, rollout)
    sources, expected = cut(tensors, policy_mesh, 0), cut(tensors, rollout_mesh, 1)
    targets = {
        rank: {name: np.zeros_like(data) for name, data in held.items()} for rank, held in expected.items()
    }
    written = execute(plan, sources, targets, rollout_ranks)
    for rank, held in expected.items():
        for name, data in held.items():
            assert np.array_equal(targets[rank][name], data), (rank, name)
            assert (written[rank][name] == 1).all(), (rank, name)
    rows, runs = count_descriptors(plan)
    for rank in range(rollout_ranks):
        made = Compiler(plan).compile(rank)
        assert len(made) <= rows[rank]
        assert made.total_runs <= runs[rank]
    copies = list(plan.copies())
    assert len(copies) == plan.regions
    assert sum(copy.nbytes for copy in copies) == sum(
        len(d) for held in expected.values() for d in held.values()
    )
    assert {copy.source for copy in copies} <= set(policy_mesh.reshape(-1).tolist())


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_overlapping_holdings_are_cut_into_cells(data):
    """Policy ranks may report any boxes at all: what they hold together is enough."""
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    info = TensorInfo("w", shape, 2)

    def box():
        spans = [sorted((data.draw(st.integers(0, n - 1)), data.draw(st.integers(1, n)))) for n in shape]
        return Box(tuple(a for a, _ in spans), tuple(max(b, a + 1) for a, b in spans))

    holders = [Piece(rank, box()) for rank in range(data.draw(st.integers(0, 4)))]
    holders.append(Piece(4, Box.whole(shape)))
    wanted = [Piece(rank, box()) for rank in range(3)]
    plan = make_plan(
        layout_from_pieces("policy", 5, [info], {"w": holders}),
        layout_from_pieces("rollout", 3, [info], {"w": wanted}),
    )
    held = {piece.rank: piece.box for piece in holders}
    counts = {piece.rank: np.zeros(shape, int) for piece in wanted}
    for copy in plan.copies():
        assert held[copy.source].contains(copy.box)
        counts[copy.target][tuple(slice(a, b) for a, b in zip(copy.box.lo, copy.box.hi, strict=True))] += 1
    for piece in wanted:
        expected = np.zeros(shape, int)
        expected[tuple(slice(a, b) for a, b in zip(piece.box.lo, piece.box.hi, strict=True))] = 1
        assert np.array_equal(counts[piece.rank], expected)


def test_what_no_rank_holds_is_named():
    info = TensorInfo("w", (4, 4), 2)
    policy = layout_from_pieces("policy", 2, [info], {"w": [Piece(0, Box((0, 0), (2, 4)))]})
    rollout = layout_from_pieces("rollout", 2, [info], {"w": [Piece(1, Box((1, 0), (4, 2)))]})
    with pytest.raises(ManifestError, match=r"no policy rank holds \[2:4, 0:2\].*rollout rank 1.*'w'"):
        make_plan(policy, rollout)
    nothing = layout_from_pieces("policy", 2, [info], {})
    with pytest.raises(ManifestError, match=r"no policy rank holds \[1:4, 0:2\]"):
        make_plan(nothing, rollout)
    empty = layout_from_pieces("rollout", 2, [info], {})
    assert make_plan(policy, empty).regions == 0


def test_sides_must_have_the_same_tensors():
    one, other = TensorInfo("w", (4,), 2), TensorInfo("w", (4,), 4)
    with pytest.raises(ManifestError, match="of 2 bytes an element, the rollout side 'w'"):
        make_plan(layout_from_pieces("policy", 1, [one], {}), layout_from_pieces("rollout", 1, [other], {}))
    with pytest.raises(ManifestError, match="0 tensors, the rollout side 1"):
        make_plan(layout_from_pieces("policy", 1, [], {}), layout_from_pieces("rollout", 1, [one], {}))


def test_layouts_are_checked():
    info = TensorInfo("w", (4,), 2)
    with pytest.raises(ConfigurationError, match=r"\[0:5\] is outside a tensor of shape \[4\]"):
        layout_from_pieces("policy", 1, [info], {"w": [Piece(0, Box((0,), (5,)))]})
    with pytest.raises(ConfigurationError, match="policy rank 3 of 2"):
        layout_from_pieces("policy", 2, [info], {"w": [Piece(3, Box((0,), (4,)))]})
    with pytest.raises(ManifestError, match="manifest lacks"):
        layout_from_pieces("policy", 2, [info], {"v": []})
    with pytest.raises(ConfigurationError, match="redistribute"):
        placements_from_torch([Partial()])
    with pytest.raises(ConfigurationError, match="1 placements do not fit a mesh of 2"):
        dtensor_pieces((4,), np.arange(4).reshape(2, 2), [Replicated()])
    with pytest.raises(ConfigurationError, match="cannot be sharded along 1"):
        dtensor_pieces((4,), np.arange(4), [Sharded(1)])


def test_a_large_tensor_is_shared_out_among_all_that_hold_it():
    infos = [TensorInfo("embed", (1 << 12, 1 << 10), 2), TensorInfo("norm", (1 << 10,), 2)]

    def whole(side, ranks):
        pieces = {info.name: [Piece(rank, Box.whole(info.shape)) for rank in range(ranks)] for info in infos}
        return layout_from_pieces(side, ranks, infos, pieces)

    plan = make_plan(whole("policy", 4), whole("rollout", 1))
    boxes = sorted((copy.box.lo[0], copy.box.hi[0]) for copy in plan.copies() if copy.tensor == "embed")
    assert boxes == [(0, 1 << 10), (1 << 10, 2 << 10), (2 << 10, 3 << 10), (3 << 10, 4 << 10)]
    assert plan.links.sum() == sum(info.nbytes for info in infos)
    assert plan.links.max() - plan.links.min() <= infos[1].nbytes
