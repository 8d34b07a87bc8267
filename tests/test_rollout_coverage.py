"""Regions, the load tracer and the coverage report, on loaders written out here."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.errors import ConfigurationError
from weightsync.rollout.vllm.coverage import RankPlace, build_report, meta_tensors
from weightsync.rollout.vllm.loader import VllmLoader
from weightsync.rollout.vllm.regions import Cover, Region, first_index, last_index
from weightsync.rollout.vllm.tracer import LoadTracer
from weightsync.rollout.vllm.trial import _feed
from weightsync.tensors import TensorSpec, WeightManifest


def elements(region):
    spots = torch.zeros(region.shape, dtype=torch.long) + region.offset
    for axis, (size, stride) in enumerate(zip(region.shape, region.stride, strict=True)):
        view = [1] * len(region.shape)
        view[axis] = size
        spots = spots + (torch.arange(size) * stride).view(view)
    return set(spots.reshape(-1).tolist())


def views(rng):
    """A few random views of one contiguous tensor."""
    shape = [rng.randint(1, 5) for _ in range(rng.randint(1, 4))]
    base = torch.arange(torch.Size(shape).numel()).view(shape)
    for _ in range(rng.randint(1, 5)):
        view = base
        for axis in range(view.ndim):
            start = rng.randrange(shape[axis])
            step = rng.choice([1, 1, 2])
            index = [slice(None)] * view.ndim
            index[axis] = slice(start, rng.randint(start, shape[axis]), step)
            view = view[tuple(index)] if rng.random() < 0.6 else view
        yield view.permute(rng.sample(range(view.ndim), view.ndim))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**9))
def test_cover_counts_distinct_elements(seed):
    cover, union, total = Cover(), set(), 0
    for view in views(random.Random(seed)):
        region = Region.of(view)
        assert elements(region) == set(view.reshape(-1).tolist())
        starts, length = region.runs()
        assert {s + i for s in starts.tolist() for i in range(length)} == elements(region)
        cover.add(region)
        union |= elements(region)
        total += region.numel
    assert cover.size() == len(union)
    assert cover.written == total


def test_expanded_views_count_once():
    cover = Cover()
    cover.add(Region.of(torch.zeros(1, 3).expand(4, 3)))
    assert (cover.size(), cover.written) == (3, 12)
    assert Cover().size() == 0


def test_corners():
    region = Region.of(torch.zeros(4, 6)[1:3, 2:5])
    assert first_index(region, (4, 6)) == (1, 2)
    assert last_index(region, (4, 6)) == (2, 4)


def test_large_regions_are_cheap():
    cover = Cover()
    whole = torch.empty(256, 4096, 7168, device="meta")
    for expert in range(256):
        cover.add(Region.of(whole[expert, :2048]))
        cover.add(Region.of(whole[expert, 2048:]))
    assert cover.size() == cover.written == whole.numel()


class Fused(torch.nn.Module):
    """A fused qkv, a padded embedding, a transposed and a scaled weight, sharded over ``size`` ranks."""

    def __init__(self, rank=0, size=1):
        super().__init__()
        self.rank, self.size = rank, size
        with torch.device("meta"):
            self.qkv = torch.nn.Parameter(torch.empty(12 // size, 4))
            self.embed = torch.nn.Parameter(torch.empty(16 // size, 4))
            self.head = self.embed
            self.down = torch.nn.Parameter(torch.empty(6, 8 // size))
            self.scaled = torch.nn.Parameter(torch.empty(4))
            self.register_buffer("steps", torch.empty((), dtype=torch.int64))

    def shard(self, tensor, axis):
        length = tensor.shape[axis] // self.size
        return tensor.narrow(axis, self.rank * length, length)

    def load_weights(self, weights):
        for name, tensor in weights:
            if name in ("q", "k", "v"):
                at = "qkv".index(name) * (4 // self.size)
                self.qkv.data[at : at + 4 // self.size].copy_(self.shard(tensor, 0))
            elif name == "embed":
                assert tensor.shape[0] == 14
                rows = tensor[self.rank * (16 // self.size) : (self.rank + 1) * (16 // self.size)]
                self.embed.data[: rows.shape[0]].copy_(rows)
                self.embed.data[rows.shape[0] :].fill_(0)
            elif name == "down":
                self.down.data.copy_(self.shard(tensor.t(), 1))
            elif name == "scaled":
                self.scaled.data.copy_(torch.exp(tensor) + 1)
                self.scaled.data.copy_(self.scaled.data * 2)
            elif name == "steps":
                self.steps.copy_(tensor)
            elif not name.endswith("inv_freq") and name != "head":
                raise KeyError(name)
        return set()


FULL = {
    "q": (4, 4), "k": (4, 4), "v": (4, 4), "embed": (14, 4), "down": (8, 6), "scaled": (4,), "steps": (),
}  # fmt: skip


def report_of(shapes, model=None, place=RankPlace(), dtypes=None):
    model = model or Fused()
    dtypes = {"steps": "int64", **(dtypes or {})}
    manifest = WeightManifest.build(TensorSpec(n, s, dtypes.get(n, "float32")) for n, s in shapes.items())
    sources = meta_tensors(manifest)
    tracer = LoadTracer([*model.named_parameters(), *model.named_buffers()], sources)
    with tracer:
        refused = _feed(model, sources)
    return build_report(manifest, tracer.writes, dict(model.named_parameters()), refused, place)


def problems(report):
    kinds = ("refused", "unused", "partly_read", "mistyped", "missing", "overlapping", "casts")
    return {kind: list(getattr(report, kind)) for kind in kinds if getattr(report, kind)}


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_a_complete_manifest_has_no_problems(size):
    for rank in range(size):
        report = report_of(FULL, Fused(rank, size), RankPlace(rank, size))
        assert problems(report) == {}
        assert report.written == {
            "qkv": 48 // size, "embed": 64 // size, "down": 48 // size, "scaled": 4,
        }  # fmt: skip


@pytest.mark.parametrize("name", ["q", "v", "embed", "down", "scaled"])
def test_every_omission_is_found(name):
    report = report_of({n: s for n, s in FULL.items() if n != name})
    target = "qkv" if name in "qv" else name
    assert problems(report) == {"missing": [target]}
    assert report.missing[target] == (
        "32 of 48 elements" if target == "qkv" else f"0 of {_size(name)} elements"
    )


def _size(name):
    return {"embed": 64, "down": 48, "scaled": 4}[name]


def test_unknown_names_are_all_found_and_loading_goes_on():
    report = report_of({"who": (1,), **FULL, "x.inv_freq": (2,), "what": (3,)})
    assert problems(report) == {"refused": ["who", "what"], "unused": ["x.inv_freq"]}
    assert report.refused["who"] == "float32[1], KeyError: 'who'"


def test_many_unknown_names_are_bounded():
    assert len(report_of({f"who{i}": (1,) for i in range(100)}).refused) == 20


@pytest.mark.parametrize(
    ("name", "shape"), [("q", (3, 4)), ("q", (4, 5)), ("embed", (15, 4)), ("down", (8, 7))]
)
def test_shapes_that_do_not_fit_are_refused(name, shape):
    assert name in problems(report_of({**FULL, name: shape}))["refused"]


def test_a_tensor_that_is_larger_than_what_is_read():
    class Narrowing(Fused):
        def load_weights(self, weights):
            super().load_weights((n, t[:4] if n == "q" else t) for n, t in weights)

    report = report_of({**FULL, "q": (8, 4)}, Narrowing())
    assert problems(report) == {"partly_read": ["q"]}
    assert "16 of 32 elements" in report.partly_read["q"]


def test_ranks_together_see_what_nobody_reads():
    class Narrowing(Fused):
        def shard(self, tensor, axis):
            length = 2 if axis == 0 else 4
            return tensor.narrow(axis, self.rank * length, length)

    for rank in (0, 1):
        place = RankPlace(rank, 2)
        assert problems(report_of(FULL, Narrowing(rank, 2), place)) == {}
        longer = report_of({**FULL, "q": (5, 4)}, Narrowing(rank, 2), place)
        assert problems(longer) == ({"partly_read": ["q"]} if rank == 1 else {})


def test_written_twice():
    class Careless(Fused):
        def load_weights(self, weights):
            super().load_weights(("q" if n == "k" else n, t) for n, t in weights)

    found = problems(report_of(FULL, Careless()))
    assert found == {"missing": ["qkv"], "overlapping": ["qkv"]}


def test_dtypes():
    report = report_of(FULL, dtypes={"q": "bfloat16", "k": "int8", "down": "float8_e4m3fn", "steps": "int32"})
    assert problems(report) == {"casts": ["q"], "mistyped": ["k", "down", "steps"]}
    assert report.casts["q"] == "bfloat16 to float32"


def vllm_config(**parallel):
    return SimpleNamespace(
        quant_config=None,
        speculative_config=None,
        parallel_config=SimpleNamespace(**{"enable_eplb": False, **parallel}),
    )


def test_experts_that_move_by_themselves_are_refused():
    VllmLoader(SimpleNamespace(vllm_config=vllm_config()))
    with pytest.raises(ConfigurationError, match="start vLLM with enable_eplb=False"):
        VllmLoader(SimpleNamespace(vllm_config=vllm_config(enable_eplb=True)))


def test_empty_tensors_need_no_reading():
    assert problems(report_of({**FULL, "nothing.inv_freq": (0, 4)})) == {}
