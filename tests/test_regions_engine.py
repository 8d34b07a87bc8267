"""Refit by regions through real NIXL engines: every world size and cut, in place and handed over."""

from __future__ import annotations

import pytest
import torch

from tests.region_support import Regions, manifest_of, sharded

pytestmark = pytest.mark.nixl


def weights(seed=0, dtype=torch.bfloat16):
    make = torch.Generator().manual_seed(seed)
    shapes = {
        "embed": (384, 64),
        "q": (96, 64),
        "o": (64, 96),
        "norm": (64,),
        "down": (64, 200),
        "head": (384, 64),
    }
    return {name: torch.randn(shape, generator=make).to(dtype) for name, shape in shapes.items()}


ROWS = {"embed": 0, "q": 0, "o": 0, "norm": 0, "down": 0, "head": 0}
SERVED = {"embed": 0, "q": 0, "o": 1, "norm": None, "down": 1, "head": 0}


def check_served(rollout, full, dims, manifest):
    for rank, memory in enumerate(rollout):
        want = sharded(manifest, full, rank, len(rollout), dims)
        for index, storage in enumerate(memory.table.storages):
            got = memory.served(index)
            expected = want.flats[index].view(storage.shape)
            sent = next(s.dtype for s in manifest.tensors if s.name == storage.name)
            assert torch.equal(got, expected.to(getattr(torch, sent))), (rank, storage.name)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("verify", ["full", "off"])
@pytest.mark.parametrize(
    "world",
    [(1, 1), (2, 4), *(pytest.param(each, marks=pytest.mark.slow) for each in [(1, 3), (3, 1), (4, 2)])],
)
def test_every_rank_gets_its_part_of_every_tensor(world, verify, in_place):
    full = weights()
    manifest = manifest_of(full)
    policy = [sharded(manifest, full, r, world[0], ROWS) for r in range(world[0])]
    rollout = [
        sharded(manifest, full, r, world[1], SERVED, hold=False, in_place=in_place) for r in range(world[1])
    ]
    with Regions(policy, rollout, verify=verify) as crew:
        assert crew.refit(full) == [{}] * world[1]
        check_served(rollout, full, SERVED, manifest)
        later = weights(1)
        for rank, memory in enumerate(policy):
            for index, flat in enumerate(memory.flats):
                flat.copy_(sharded(manifest, later, rank, world[0], ROWS).flats[index])
        crew.refit(later)
        check_served(rollout, later, SERVED, manifest)
        stats = crew.rollout[0].refit_stats()
        assert stats["bytes"] == sum(s.nbytes for s in rollout[0].table.storages)
        assert (stats["bytes_in_place"] > 0) == in_place


def test_what_is_cast_or_cannot_move_by_regions():
    full = weights(dtype=torch.float32)
    manifest = manifest_of(full, {name: "bfloat16" for name in full if name != "norm"})
    whole = ("down", "norm")
    policy = [sharded(manifest, full, r, 2, ROWS, whole=whole if r else ("norm",)) for r in range(2)]
    served = {name: t.to(torch.bfloat16) if name != "norm" else t for name, t in full.items()}
    rollout = [sharded(manifest, served, r, 3, SERVED, whole=("norm",), hold=False) for r in range(3)]
    with Regions(policy, rollout) as crew:
        got = crew.refit(served)
    for rank, each in enumerate(got):
        assert set(each) == set(whole)
        assert all(torch.equal(each[name], served[name]) for name in whole)
        want = sharded(manifest, served, rank, 3, SERVED, whole=("norm",))
        for index, storage in enumerate(rollout[rank].table.storages):
            if storage.name not in whole:
                assert torch.equal(rollout[rank].flats[index], want.flats[index]), storage.name


KINDS = ("bool", "uint8", "int64", "float8_e4m3fn", "float16", "float64", "complex64")


def test_every_kind_of_tensor_with_scalars_and_empty_ones():
    make, full, dims, served_dims = torch.Generator().manual_seed(0), {}, {}, {}
    for kind in KINDS:
        dtype = getattr(torch, kind)
        for name, shape, dim, served in (
            ("w", (16, 24), 0, 1),
            ("s", (), None, None),
            ("e", (0, 4), None, None),
        ):
            count = torch.Size(shape).numel() * dtype.itemsize
            data = torch.randint(0, 2, (count,), dtype=torch.uint8, generator=make)
            full[f"{kind}.{name}"] = data.view(dtype).view(shape)
            dims[f"{kind}.{name}"], served_dims[f"{kind}.{name}"] = dim, served
    manifest = manifest_of(full)
    policy = [sharded(manifest, full, r, 2, dims) for r in range(2)]
    rollout = [sharded(manifest, full, r, 3, served_dims, hold=False) for r in range(3)]
    with Regions(policy, rollout) as crew:
        crew.refit(full)
    for rank, memory in enumerate(rollout):
        want = sharded(manifest, full, rank, 3, served_dims)
        for got, expected, storage in zip(memory.flats, want.flats, memory.table.storages, strict=True):
            assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8)), storage.name


def test_long_runs_are_read_where_they_are():
    full = {"wide": torch.randn(6, 20_000, generator=torch.Generator().manual_seed(0))}
    manifest = manifest_of(full)
    policy = [sharded(manifest, full, r, 2, {"wide": 0}) for r in range(2)]
    for in_place in (True, False):
        rollout = [
            sharded(manifest, full, r, 2, {"wide": 1}, hold=False, in_place=in_place) for r in range(2)
        ]
        with Regions(policy, rollout) as crew:
            crew.refit(full)
            assert crew.policy[0].refit_stats()["bytes_packed"] == 0
        check_served(rollout, full, {"wide": 1}, manifest)
