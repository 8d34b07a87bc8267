"""Rows, buckets and batches against an oracle: refits carried out on plain memory, message by message."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.row_oracle import carry_out, filled, promised
from weightsync.engines.regions import plan as plan_module
from weightsync.engines.regions.incoming import Incoming
from weightsync.engines.regions.plan import RegionPlan
from weightsync.errors import ConfigurationError
from weightsync.layout import rows as rows_module
from weightsync.layout.holdings import Replicated, Sharded, box_pieces, local_ranges
from weightsync.layout.regions import Box, contiguous_strides
from weightsync.layout.rows import Rows, in_buckets
from weightsync.layout.tables import HeldBox, RankTable, TableBuilder
from weightsync.tensors import TensorSpec, WeightManifest, dtype_from_name, flat_bytes

WIDER = {"uint8": ["uint8", "int16"], "bfloat16": ["bfloat16", "float32"], "float32": ["float32", "float64"],
         "float64": ["float64"]}  # fmt: skip


@st.composite
def placements(draw, shape, mesh):
    found = []
    for _ in mesh:
        kind = draw(st.sampled_from(["whole", "cut", "strided"] if shape else ["whole"]))
        if kind == "whole":
            found.append(Replicated())
        else:
            dim = draw(st.integers(0, len(shape) - 1))
            found.append(Sharded(dim, draw(st.integers(2, 3)) if kind == "strided" else 1))
    return tuple(found)


@st.composite
def sides(draw, manifest, side):
    """Tables of one side: storages of one tensor or of several, twice stored, transposed, with gaps."""
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    idle = draw(st.integers(0, 1))
    world = prod(mesh) + idle
    plans = []
    for spec in manifest.tensors:
        dtype = spec.dtype if side == "rollout" else draw(st.sampled_from(WIDER[spec.dtype]))
        plans.append(
            (
                spec, dtype, draw(placements(spec.shape, mesh)),
                draw(st.integers(0, 1)),  # of which storage shared by several tensors, if of any
                draw(st.booleans()),  # stored twice
                draw(st.booleans()),  # transposed
                draw(st.integers(0, 3)),  # elements of a gap before it
                draw(st.sampled_from([None, 0, 1])) if side == "rollout" else None,  # experts: one owner
            )
        )  # fmt: skip
    fused, turned, spare = draw(st.booleans()), draw(st.booleans()), draw(st.sampled_from([0, 2]))
    whole = draw(st.sets(st.sampled_from([s.name for s in manifest.tensors]), max_size=1))
    tables = []
    for rank in range(world):
        builder = TableBuilder(manifest)
        if rank < prod(mesh):
            _fill(builder, plans, rank, mesh, (fused, turned, spare))
        if rank == 0 or draw(st.booleans()):
            for name in whole:
                builder.need_whole(name, "the test wants it so")
        tables.append(builder.build())
    return tuple(RankTable.decode(table.encode()) for table in tables)


def _fill(builder, plans, rank, mesh, how):
    fused, turned, spare = how
    coordinate = np.unravel_index(rank, mesh)
    ends, boxes = {}, {}
    for spec, dtype, placed, group, twice, transposed, gap, owner in plans:
        boxes[spec.name] = []
        if owner is not None and rank % 2 != owner and prod(mesh) > 1:
            continue
        ranges = local_ranges(spec.shape, mesh, [int(c) for c in coordinate], placed)
        pieces = box_pieces(rank, ranges)
        local = tuple(sum(hi - lo for lo, hi in runs) for runs in ranges)
        homes = [f"shared.{group}.{dtype}" if fused else f"{spec.name}.at"]
        homes += [f"{spec.name}.again"] if twice else []
        for home in homes:
            start = ends.get((home, dtype), 0) + gap
            ends[home, dtype] = start + prod(local)
            for piece in pieces:
                offset, strides = piece.offset, piece.strides
                if transposed:
                    back = contiguous_strides(local[::-1])[::-1]
                    offset = sum(a * b for a, b in zip(_index(offset, local), back, strict=True))
                    strides = back
                boxes[spec.name].append((home, dtype, piece.box, start + offset, strides))
    order = list(ends.items())[:: -1 if turned else 1]
    index = {key: builder.add_storage(key[0], (end + spare,), key[1]) for key, end in order}
    for name, each in boxes.items():
        builder.add(name, [HeldBox(index[h, d], box, at, steps) for h, d, box, at, steps in each])


def _index(offset, shape):
    return [int(i) for i in np.unravel_index(offset, shape)] if prod(shape) and shape else [0] * len(shape)


@st.composite
def problems(draw):
    shapes = draw(st.lists(st.lists(st.integers(0, 8), max_size=3).map(tuple), min_size=1, max_size=5))
    kinds = [draw(st.sampled_from(sorted(WIDER))) for _ in shapes]
    manifest = WeightManifest.build(
        TensorSpec(f"t{i}", s, k) for i, (s, k) in enumerate(zip(shapes, kinds, strict=True))
    )
    policy, rollout = draw(sides(manifest, "policy")), draw(sides(manifest, "rollout"))
    return manifest, policy, rollout


def values_of(manifest):
    full, first = {}, 1
    for spec in manifest.tensors:
        count = prod(spec.shape)
        numbers = (torch.arange(first, first + count) % 251).to(dtype_from_name(spec.dtype))
        full[spec.name], first = numbers.view(spec.shape), first + count
    return full


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(problems(), st.data())
def test_every_promised_element_is_written_once_with_its_value(problem, data):
    manifest, policy, rollout = problem
    plan = RegionPlan(manifest, policy, rollout)
    check_closed(plan)
    full = values_of(manifest)
    bucket_size = data.draw(st.sampled_from([64, 272, 1000, 4096]), label="bucket")
    masks = st.lists(st.booleans(), min_size=40, max_size=40)
    lent = [np.array(data.draw(masks)[: len(t.storages)], bool) for t in policy]
    in_place = [np.array(data.draw(masks)[: len(t.storages)], bool) for t in rollout]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "READABLE_RUN", data.draw(st.sampled_from([1, 8, 64]), label="run"))
        flats = [filled(table, manifest, full) for table in policy]
        receivers = carry_out(plan, flats, lent, in_place, bucket_size)
    for receiver, table in zip(receivers, rollout, strict=True):
        check_arrivals(receiver.incoming, table, manifest)
        check_memory(receiver, table, manifest, full, plan.whole)
        arrived = [spec.name for batch in receiver.incoming.batches for spec in batch.arrived]
        assert sorted(arrived) == sorted(s.name for s in manifest.tensors if s.name not in plan.whole)


def check_arrivals(incoming, table, manifest):
    """A tensor has arrived when all storages that it goes into are filled, and not before."""
    slots = dict(zip((spec.name for spec in manifest.tensors), table.slots, strict=True))
    filled_by = {index: n for n, batch in enumerate(incoming.batches) for index in batch.storages}
    for number, batch in enumerate(incoming.batches):
        for spec in batch.arrived:
            assert all(filled_by[slot] <= number for slot in slots[spec.name]), spec.name


def check_closed(plan):
    """No storage is filled by regions in part."""
    for table in plan.rollout:
        ways = {}
        for spec, slots in zip(plan.manifest.tensors, table.slots, strict=True):
            for slot in slots:
                ways.setdefault(slot, set()).add(spec.name in plan.whole)
        assert all(len(each) == 1 for each in ways.values())


def check_memory(receiver, table, manifest, full, whole):
    want = filled(table, manifest, full)
    counts = promised(table, whole, manifest)
    for index, (flat, count) in enumerate(zip(want, counts, strict=True)):
        start, size = int(receiver.base[index]), int(receiver.sizes[index])
        each = count.repeat_interleave(flat.element_size()).numpy()
        assert np.array_equal(receiver.counts[start : start + size], each), table.storages[index].name
        got = receiver.memory[start : start + size]
        assert np.array_equal(got[each > 0], flat_bytes(flat).numpy()[each > 0]), table.storages[index].name
    assert receiver.counts.sum() == sum(
        int(c.sum()) * w.element_size() for c, w in zip(counts, want, strict=True)
    )


@st.composite
def some_rows(draw):
    count = draw(st.integers(1, 5))
    columns = []
    for _ in range(count):
        nbytes = draw(st.integers(1, 3200))
        runs = draw(st.integers(1, 9))
        step = nbytes + draw(st.integers(0, 80)) if runs > 1 else 0
        columns.append((0, draw(st.integers(0, 3)), draw(st.integers(0, 50)) * 16, 0,
                        draw(st.integers(0, 50)) * 16, nbytes, runs, step, step, 0, 0))  # fmt: skip
    return Rows(*np.array(columns, np.int64).T)


def bytes_of(rows):
    """The pairs of source and target bytes that rows copy, in order."""
    every = rows.single()
    return [
        (storage, source + i, target + i)
        for storage, source, target, nbytes in zip(
            every.source_storage.tolist(), every.source_offset.tolist(),
            every.target_offset.tolist(), every.nbytes.tolist(),
            strict=True,
        )
        for i in range(nbytes)
    ]  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(some_rows(), st.integers(16, 3000))
def test_rows_that_are_cut_copy_the_same_bytes_and_fit(rows, limit):
    cut = rows.cut(limit)
    assert bytes_of(cut) == bytes_of(rows)
    assert (cut.packed_bytes <= limit).all()
    assert cut.total_bytes == rows.total_bytes


def test_runs_a_little_shorter_than_an_odd_limit_are_not_lost():
    columns = (0, 0, 0, 0, 0, 98, 3, 100, 100, 0, 0)
    rows = Rows(*(np.array([value], np.int64) for value in columns))
    assert bytes_of(rows.cut(100)) == bytes_of(rows)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 700), max_size=30))
def test_buckets_hold_every_item_once_in_order_aligned_and_apart(sizes):
    seen = []
    for items, offsets in in_buckets(np.array(sizes, np.int64), 700):
        seen += list(range(items.start, items.stop))
        mine = sizes[items]
        assert (offsets % 256 == 0).all()
        assert all(a + n <= b for a, n, b in zip(offsets, mine, offsets[1:], strict=False))
        assert offsets[-1] + mine[-1] <= 700
    assert seen == list(range(len(sizes)))


def test_a_bucket_has_no_more_items_than_its_message_can_name(monkeypatch):
    monkeypatch.setattr(rows_module, "MOST_IN_A_BUCKET", 3)
    found = [items for items, _ in in_buckets(np.full(8, 4, np.int64), 1 << 20)]
    assert [(items.start, items.stop) for items in found] == [(0, 3), (3, 6), (6, 8)]


def test_box_of_nothing_is_left_out():
    manifest = WeightManifest.build([TensorSpec("empty", (0, 4), "float32")])
    builder = TableBuilder(manifest)
    builder.add("empty", [HeldBox(builder.add_storage("e", (0, 4), "float32"), Box((0, 0), (0, 4)))])
    table = builder.build()
    plan = RegionPlan(manifest, (table,), (table,))
    assert len(plan.rows(0)) == 0


@pytest.mark.parametrize("dim", [0, 1])
def test_regions_that_overlap_in_a_storage_are_refused(dim):
    manifest = WeightManifest.build([TensorSpec("a", (4, 4), "float32"), TensorSpec("b", (4, 4), "float32")])
    builder = TableBuilder(manifest)
    at = builder.add_storage("fused", (8, 4), "float32")
    strides = (4, 1) if dim == 0 else (1, 4)
    builder.add("a", [HeldBox(at, Box.whole((4, 4)), 0, strides)])
    builder.add("b", [HeldBox(at, Box.whole((4, 4)), 15, strides)])
    table = builder.build()
    plan = RegionPlan(manifest, (table,), (table,))
    lent = np.ones(1, bool)
    with pytest.raises(ConfigurationError, match="two regions in one place of 'fused'"):
        Incoming.of(plan, 0, {0: lent}, lent, 1 << 20)
