"""Boxes, strided views, and how senders are chosen."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.layout.balance import deal, level_counts
from weightsync.layout.regions import Box, disjoint_cells, uncovered
from weightsync.layout.strided import View, piece_from_copy


@st.composite
def shapes_and_boxes(draw, most=4):
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    spans = st.tuples(*(st.tuples(st.integers(0, n), st.integers(0, n)) for n in shape))
    boxes = draw(st.lists(spans, min_size=1, max_size=most))
    return shape, [Box(tuple(a for a, _ in box), tuple(b for _, b in box)) for box in boxes]


def elements(box, shape):
    mask = np.zeros(shape, bool)
    if box.numel:
        mask[tuple(slice(a, b) for a, b in zip(box.lo, box.hi, strict=True))] = True
    return mask


@settings(max_examples=200, deadline=None)
@given(shapes_and_boxes())
def test_boxes_are_sets_of_elements(drawn):
    shape, boxes = drawn
    first, last = boxes[0], boxes[-1]
    assert elements(first, shape).sum() == first.numel
    both = first.intersection(last)
    expected = elements(first, shape) & elements(last, shape)
    assert np.array_equal(elements(both, shape) if both else np.zeros(shape, bool), expected)
    assert first.contains(last) == (not (elements(last, shape) & ~elements(first, shape)).any())
    parts = first.difference(last)
    assert all(part.numel for part in parts)
    total = sum((elements(part, shape).astype(int) for part in parts), np.zeros(shape, int))
    assert np.array_equal(total, (elements(first, shape) & ~elements(last, shape)).astype(int))


@settings(max_examples=200, deadline=None)
@given(shapes_and_boxes())
def test_gaps_and_cells(drawn):
    shape, boxes = drawn
    union = sum((elements(box, shape) for box in boxes), np.zeros(shape, bool))
    gaps = sum(
        (elements(gap, shape).astype(int) for gap in uncovered(Box.whole(shape), boxes)), np.zeros(shape, int)
    )
    assert np.array_equal(gaps, (~union).astype(int))
    seen = np.zeros(shape, int)
    for cell, holders in disjoint_cells([box for box in boxes if box.numel]):
        seen += elements(cell, shape)
        kept = [box for box in boxes if box.numel]
        assert holders == [i for i, box in enumerate(kept) if box.contains(cell)]
    assert np.array_equal(seen, union.astype(int))


def view_of(tensor):
    return View(tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset())


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_copy_of_views_becomes_a_piece(data):
    """Any chain of narrow, select and transpose is a box; the piece says where each element lands."""
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    read = whole
    for dim in range(len(shape)):
        start = data.draw(st.integers(0, shape[dim] - 1))
        read = read.narrow(dim, start, data.draw(st.integers(1, shape[dim] - start)))
    read = read.permute(data.draw(st.permutations(range(read.ndim))))
    if data.draw(st.booleans()):
        read = read.unsqueeze(data.draw(st.integers(0, read.ndim)))
    parameter = torch.full((3, *read.shape, 2), -1)
    into = parameter[1, ..., 1]
    into.copy_(read)
    piece = piece_from_copy(7, shape, view_of(read), view_of(into), extent=parameter.numel())
    assert piece.rank == 7
    assert piece.box.numel == read.numel()
    flat = parameter.reshape(-1)
    for index in np.ndindex(*piece.box.shape):
        at = piece.offset + sum(i * s for i, s in zip(index, piece.strides, strict=True))
        source = tuple(i + lo for i, lo in zip(index, piece.box.lo, strict=True))
        assert flat[at] == whole[source]


def test_flattened_views_and_views_that_are_no_box():
    whole = torch.zeros(4, 6)
    flat = piece_from_copy(0, (4, 6), view_of(whole.view(-1)), View((24,), (2,), 5), extent=60)
    assert (flat.box, flat.offset, flat.strides) == (Box((0, 0), (4, 6)), 5, (12, 2))
    rows = piece_from_copy(0, (4, 6), view_of(whole[1:3].view(-1)), View((12,), (1,), 0), extent=12)
    assert (rows.box, rows.strides) == (Box((1, 0), (3, 6)), (6, 1))
    for odd in (whole.view(-1)[3:15], whole[:, ::2], whole[0].expand(4, 6)):
        assert piece_from_copy(0, (4, 6), view_of(odd), view_of(odd.contiguous()), extent=24) is None


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(0, 50), st.integers(1, 5))
def test_levels_are_as_low_as_can_be(loads, copies, nbytes):
    counts = level_counts(np.array(loads, float), copies, nbytes)
    assert counts.sum() == copies
    assert (counts >= 0).all()
    greedy = list(loads)
    for _ in range(copies):
        greedy[greedy.index(min(greedy))] += nbytes
    assert max(np.array(loads) + counts * nbytes) <= max(*greedy, *loads) + 1e-6


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 12), st.integers(1, 9), st.integers(1, 5), st.integers(0, 20), st.data())
def test_copies_are_dealt_as_counted(tensors, entries, senders, turn, data):
    total = tensors * entries
    cuts = sorted(data.draw(st.lists(st.integers(0, total), min_size=senders - 1, max_size=senders - 1)))
    counts = np.diff([0, *cuts, total])
    dealt = deal(counts, tensors, entries, turn)
    assert dealt.shape == (tensors, entries)
    assert np.array_equal(np.bincount(dealt.reshape(-1), minlength=senders), counts)


@pytest.mark.parametrize(
    ("tensors", "entries", "senders"), [(64, 32, 16), (65, 32, 16), (4, 32, 16), (30, 7, 4)]
)
def test_each_entry_is_spread_over_the_senders(tensors, entries, senders):
    counts = level_counts(np.zeros(senders), tensors * entries, 1.0)
    dealt = deal(counts, tensors, entries)
    assert counts.max() - counts.min() <= 1
    for entry in range(entries):
        share = np.bincount(dealt[:, entry], minlength=senders)
        assert share.max() - share.min() <= 2
