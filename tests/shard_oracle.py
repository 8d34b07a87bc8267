"""Puts tensors together from the tables of all policy ranks, box by box: slow, and plain to read."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weightsync.layout.joining import join_tables, tensor_infos
from weightsync.layout.pieces import ABSENT, Layout, LayoutBuilder, Piece
from weightsync.layout.plan import ReshardPlan, make_plan
from weightsync.layout.regions import Box
from weightsync.layout.tables import RankTable
from weightsync.tensors import WeightManifest, dtype_from_name


def assembled(
    manifest: WeightManifest, ranks: Sequence[tuple[RankTable, Sequence[torch.Tensor]]]
) -> dict[str, torch.Tensor]:
    """Return every tensor that is not ``whole`` on any rank, cast as it is sent.

    Raises:
        AssertionError: an element that no rank holds, or that two ranks hold differently.
    """
    for table, memory in ranks:
        assert RankTable.decode(table.encode()) == table
        for storage, flat in zip(table.storages, memory, strict=True):
            assert (storage.numel, storage.dtype) == (flat.numel(), str(flat.dtype).removeprefix("torch."))
    whole = {name for table, _ in ranks for name in table.whole}
    return {
        spec.name: _one(index, manifest, ranks)
        for index, spec in enumerate(manifest.tensors)
        if spec.name not in whole
    }


def _one(index: int, manifest: WeightManifest, ranks: Sequence[tuple[RankTable, Sequence[torch.Tensor]]]):
    spec = manifest.tensors[index]
    full = torch.zeros(spec.shape, dtype=dtype_from_name(spec.dtype))
    known = torch.zeros(spec.shape, dtype=torch.bool)
    for table, memory in ranks:
        pattern = table.pattern_of[index]
        for held in table.patterns[pattern] if pattern != ABSENT else ():
            box = Box(held.lo, held.hi)
            flat = memory[table.slots[index][held.slot]]
            values = flat.as_strided(box.shape, held.strides, flat.storage_offset() + held.offset)
            at = tuple(slice(lo, hi) for lo, hi in zip(box.lo, box.hi, strict=True))
            sent = values.to(full.dtype)
            seen = known[at]
            assert torch.equal(full[at][seen], sent[seen]), f"{spec.name}: ranks differ"
            full[at] = sent
            known[at] = True
    assert bool(known.all()), f"{spec.name}: nobody holds {int((~known).sum())} elements"
    return full


def plan_covers(manifest: WeightManifest, tables: Sequence[RankTable], parts: int = 3) -> ReshardPlan:
    """Plan a refit of rollout ranks that cut every tensor along its last dimension, as well as it goes."""
    whole = {name for table in tables for name in table.whole}
    plan = make_plan(
        join_tables("policy", manifest, tables, without=whole), _by_columns(manifest, parts, whole)
    )
    wanted = sum(spec.nbytes for spec in manifest.tensors if spec.name not in whole)
    assert int(plan.links.sum()) == wanted
    return plan


def _by_columns(manifest: WeightManifest, parts: int, without: set[str]) -> Layout:
    builder = LayoutBuilder("rollout", parts)
    for info in tensor_infos(manifest):
        pieces = [] if info.name in without else list(_columns(info.shape, parts))
        if pieces:
            builder.add_pieces(info, pieces)
        else:
            builder.add(info, ABSENT)
    return builder.build()


def _columns(shape: tuple[int, ...], parts: int):
    whole = Box.whole(shape)
    if not whole.numel:
        return
    if not shape:
        yield Piece(0, whole)
        return
    size = shape[-1]
    for part in range(parts):
        lo, hi = part * size // parts, (part + 1) * size // parts
        if lo < hi:
            yield Piece(part, Box((*whole.lo[:-1], lo), (*whole.hi[:-1], hi)))
