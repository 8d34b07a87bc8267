"""A rank's table, from what a loader did: what moves by regions, what does not, and why."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.table_oracle import differences
from tests.test_rollout_coverage import FULL, Fused
from weightsync.errors import ConfigurationError
from weightsync.rollout.vllm.coverage import RankPlace, build_report, meta_tensors
from weightsync.rollout.vllm.layout import rank_layout, rank_table
from weightsync.rollout.vllm.tracer import LoadTracer
from weightsync.rollout.vllm.trial import _feed
from weightsync.tensors import TensorSpec, WeightManifest

PLAIN = {name: shape for name, shape in FULL.items() if name not in ("steps", "scaled")}


def manifest_of(shapes, dtypes=None):
    return WeightManifest.build(
        TensorSpec(name, shape, (dtypes or {}).get(name, "float32")) for name, shape in shapes.items()
    )


def reported(model, manifest, place=RankPlace(), experts=()):
    parameters = dict(model.named_parameters())
    sources = meta_tensors(manifest)
    tracer = LoadTracer([*model.named_parameters(), *model.named_buffers()], sources)
    with tracer:
        refused = _feed(model, sources)
    tracer.note_replaced(model.named_parameters())
    report = build_report(manifest, tracer.writes, parameters, refused, place)
    report.reworked = frozenset(tracer.reworked)
    report.experts = frozenset(experts)
    return report, parameters


def layout_of(model, manifest, sharding="all", **more):
    report, parameters = reported(model, manifest, **more)
    return rank_layout(report, parameters, sharding=sharding)


def random_weights(manifest, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return {
        spec.name: torch.randn(spec.shape, generator=generator).to(getattr(torch, spec.dtype))
        for spec in manifest.tensors
    }


def on_host(make):
    """Make a model with memory, full of garbage."""
    model = make()
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(7)
    return model


class Straight(Fused):
    """Nothing is transposed, computed or in a buffer."""

    def load_weights(self, weights):
        for name, tensor in weights:
            if name == "down":
                rank = self.rank * (8 // self.size)
                self.down.data.copy_(tensor.view(6, 8)[:, rank : rank + 8 // self.size])
            elif name == "scaled":
                self.scaled.data.copy_(tensor)
            else:
                super().load_weights([(name, tensor)])


STRAIGHT = {**{n: s for n, s in FULL.items() if n != "steps"}, "down": (6, 8)}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_stores_what_its_loader_writes(size):
    manifest = manifest_of(STRAIGHT)
    weights = random_weights(manifest)
    for rank in range(size):
        layout = layout_of(Straight(rank, size), manifest, place=RankPlace(rank, size))
        assert layout.table.whole == {}
        assert layout.casts == frozenset()
        assert layout.fills == ({"embed"} if rank == size - 1 else frozenset())
        model = on_host(lambda rank=rank: Straight(rank, size))
        model.load_weights(weights.items())
        parameters = dict(model.named_parameters())
        assert [each.name for each in layout.table.storages] == ["qkv", "embed", "down", "scaled"]
        assert differences(layout, manifest, weights, parameters) == []


def test_the_table_survives_its_own_checks():
    manifest = manifest_of(STRAIGHT)
    report, parameters = reported(Straight(), manifest)
    table = rank_table(report, parameters, sharding="auto")
    assert type(table).decode(table.encode()) == table
    assert table.manifest == manifest.digest()


def test_reasons():
    layout = layout_of(Fused(), manifest_of(FULL, {"steps": "int64"}))
    assert layout.table.whole == {
        "down": "down: it is stored transposed",
        "scaled": "scaled: its values are computed, not copied",
        "steps": "steps: it is a buffer, and only parameters are filled by regions",
    }
    assert [each.name for each in layout.table.storages] == ["qkv", "embed"]


@pytest.mark.parametrize(
    ("rework", "reason"),
    [
        (lambda scaled: scaled.data.mul_(2), "its values are computed anew once it is loaded"),
        (lambda scaled: scaled.data.copy_(-scaled.exp()), "its values are computed anew once it is loaded"),
        (
            lambda scaled: torch.mul(scaled.data, 2, out=scaled.data),
            "its values are computed anew once it is loaded",
        ),
        (lambda scaled: setattr(scaled, "data", scaled.data[:3]), None),
    ],
    ids=["in place", "copied", "out", "cut"],
)
def test_what_is_computed_once_it_is_loaded(rework, reason):
    class Reworking(Straight):
        def load_weights(self, weights):
            super().load_weights(weights)
            rework(self.scaled)

    whole = layout_of(Reworking(), manifest_of(STRAIGHT)).table.whole
    assert whole["scaled"] == f"scaled: {reason}" if reason else "scaled" in whole


def test_what_is_put_in_the_place_of_a_parameter():
    class Replacing(Straight):
        def load_weights(self, weights):
            for name, tensor in weights:
                if name == "scaled":
                    self.scaled.data = tensor.float()
                elif name == "down":
                    self.down = torch.nn.Parameter(tensor * 2)
                else:
                    super().load_weights([(name, tensor)])

    report, parameters = reported(Replacing(), manifest_of(STRAIGHT))
    assert report.missing == {}
    assert rank_table(report, parameters, sharding="all").whole == {
        name: f"{name}: its values are computed, not copied" for name in ("scaled", "down")
    }


def test_parameters_that_insist_on_memory():
    class Insisting(Straight):
        def __init__(self):
            super().__init__()
            self.scaled = torch.nn.Parameter(torch.empty(4, device="cpu"))

    layout = layout_of(Insisting(), manifest_of(STRAIGHT))
    assert layout.table.whole == {}
    assert "scaled" in [each.name for each in layout.table.storages]


def test_tables_that_lie_beside_the_tensors_are_read():
    class Choosing(Straight):
        def load_weights(self, weights):
            for name, tensor in weights:
                order = torch.tensor([5, 2], device="cpu")[1:].to(tensor.device)
                rows = int(order[0]) if name == "embed" else 0
                super().load_weights(
                    [(name, tensor)] if rows == 0 else [(name, torch.cat([tensor] * rows)[:14])]
                )

    layout = layout_of(Choosing(), manifest_of(STRAIGHT))
    assert layout.table.whole == {"embed": "embed: its values are computed, not copied"}


def test_what_shares_a_parameter_goes_whole_together():
    class Doubling(Straight):
        def load_weights(self, weights):
            for name, tensor in weights:
                super().load_weights([(name, tensor * 2 if name == "k" else tensor)])

    whole = layout_of(Doubling(), manifest_of(STRAIGHT)).table.whole
    assert whole == {
        "k": "qkv: its values are computed, not copied",
        "q": "qkv: it is filled together with 'k'",
        "v": "qkv: it is filled together with 'k'",
    }


def test_and_takes_the_other_parameters_of_those_with_it():
    class Linked(Straight):
        """``v`` is also the scale's row, and ``q`` is computed."""

        def load_weights(self, weights):
            for name, tensor in weights:
                if name == "v":
                    self.scaled.data.copy_(tensor[0])
                if name != "scaled":
                    super().load_weights([(name, tensor + 1 if name == "q" else tensor)])

    shapes = {name: shape for name, shape in STRAIGHT.items() if name != "scaled"}
    layout = layout_of(Linked(), manifest_of(shapes))
    assert sorted(layout.table.whole) == ["k", "q", "v"]
    assert [each.name for each in layout.table.storages] == ["embed", "down"]


def test_a_cast_is_a_copy_in_the_tensors_own_dtype():
    manifest = manifest_of(STRAIGHT, dict.fromkeys(("q", "k", "v"), "bfloat16"))
    layout, weights = layout_of(Straight(), manifest), random_weights(manifest)
    assert layout.table.whole == {}
    assert layout.casts == {"qkv"}
    assert {each.name: each.dtype for each in layout.table.storages}["qkv"] == "bfloat16"
    model = on_host(Straight)
    model.load_weights(weights.items())
    assert differences(layout, manifest, weights, dict(model.named_parameters())) == []


@pytest.mark.parametrize(
    ("dtypes", "reason"),
    [
        ({"q": "bfloat16"}, "its tensors have different dtypes"),
        ({"q": "int8", "k": "int8", "v": "int8"}, "its tensors have another dtype, which is no plain cast"),
    ],
)
def test_dtypes_that_do_not_go_together(dtypes, reason):
    whole = layout_of(Straight(), manifest_of(STRAIGHT, dtypes)).table.whole
    assert whole == dict.fromkeys("qkv", f"qkv: {reason}")


class Padding(Straight):
    """Fills the embedding's padding with ``value``, before or after the copy."""

    value, before, rows = 0, False, slice(14, 16)

    def load_weights(self, weights):
        for name, tensor in weights:
            if name != "embed":
                super().load_weights([(name, tensor)])
                continue
            if self.before:
                self.embed.data[self.rows].fill_(self.value)
            self.embed.data[:14].copy_(tensor)
            if not self.before:
                self.embed.data[self.rows].fill_(self.value)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, None),
        ({"before": True}, None),
        ({"before": True, "rows": slice(0, 16)}, None),
        ({"value": 1}, "some of its elements are a constant that is not zero"),
        ({"rows": slice(13, 16)}, "some of its elements are overwritten by a constant"),
        ({"rows": slice(15, 16)}, "60 of its 64 elements are written"),
    ],
)
def test_padding(settings, reason):
    make = type("Padded", (Padding,), settings)
    manifest = manifest_of(STRAIGHT)
    layout, weights = layout_of(make(), manifest), random_weights(manifest)
    assert layout.table.whole == ({"embed": f"embed: {reason}"} if reason else {})
    model = on_host(make)
    model.load_weights(weights.items())
    assert differences(layout, manifest, weights, dict(model.named_parameters())) == []


def test_written_twice_refused_and_missing():
    class Careless(Straight):
        def load_weights(self, weights):
            super().load_weights(("q" if name == "k" else name, tensor) for name, tensor in weights)

    shapes = {**STRAIGHT, "who": (3,), "scaled": (5,)}
    layout = layout_of(Careless(), manifest_of(shapes))
    assert layout.table.whole == {
        "q": "qkv: 16 of its elements are written twice",
        "k": "qkv: 16 of its elements are written twice",
        "v": "qkv: 16 of its elements are written twice",
        "who": "the model refuses it: float32[3], KeyError: 'who'",
        "scaled": layout.table.whole["scaled"],
    }
    assert layout.table.whole["scaled"].startswith("the model refuses it: float32[5], RuntimeError")


def test_what_a_rank_reads_nothing_of_is_told():
    report, parameters = reported(Straight(), manifest_of({**STRAIGHT, "x.inv_freq": (2,)}))
    report.absent = ["x.inv_freq"]
    layout = rank_layout(report, parameters, sharding="all")
    assert layout.absent == ("x.inv_freq",)
    assert layout.table.whole == {}


def test_parameters_that_are_views_are_left_whole():
    class Sharing(Straight):
        def __init__(self):
            super().__init__()
            with torch.device("meta"):
                self.qkv = torch.nn.Parameter(torch.empty(20, 4)[4:16])

    whole = layout_of(Sharing(), manifest_of(STRAIGHT)).table.whole
    assert whole["q"] == "qkv: its memory is not one contiguous tensor of its own"


def test_experts_only():
    manifest = manifest_of(STRAIGHT)
    layout = layout_of(Straight(), manifest, "experts", experts=["qkv"])
    assert layout.table.whole == dict.fromkeys(("embed", "down", "scaled"), "shard_weights: experts")
    assert [each.name for each in layout.table.storages] == ["qkv"]


def test_experts_that_would_be_whole_are_refused():
    with pytest.raises(
        ConfigurationError, match=r"'down' by regions .*stored transposed.*write shard_weights: auto"
    ):
        layout_of(Fused(), manifest_of(PLAIN), "experts", experts=["down"])


@pytest.mark.parametrize("sharding", ["none", "some"])
def test_unknown_shardings(sharding):
    with pytest.raises(ConfigurationError, match="shard_weights must be one of all, auto, experts"):
        layout_of(Straight(), manifest_of(STRAIGHT), sharding)


def test_a_report_without_a_manifest():
    report, parameters = reported(Straight(), manifest_of(STRAIGHT))
    report.manifest = None
    with pytest.raises(ConfigurationError, match="of no manifest"):
        rank_layout(report, parameters, sharding="all")


class Drawn(torch.nn.Module):
    """Parameters that are put together of slices of tensors, as a seed says."""

    def __init__(self, seed):
        super().__init__()
        rng = random.Random(seed)
        self.steps, self.shapes = [], {}
        for index in range(rng.randint(1, 4)):
            rows, columns = rng.randint(1, 6), rng.randint(1, 6)
            with torch.device("meta"):
                self.register_parameter(f"p{index}", torch.nn.Parameter(torch.empty(rows, columns)))
            self._fill(rng, f"p{index}", rows, columns)

    def _fill(self, rng, target, rows, columns):
        axis = rng.randrange(2)
        sizes = (rows, columns)
        cuts = sorted({0, sizes[axis], *(rng.randint(0, sizes[axis]) for _ in range(3))})
        for start, end in pairwise(cuts):
            name = f"{target}.{start}"
            shape = [rows, columns]
            shape[axis] = end - start
            flat = rng.random() < 0.3
            before, after = rng.randint(0, 2), rng.randint(0, 2)
            # What is read is a slice of a longer tensor, as on one of several ranks.
            whole = list(shape)
            whole[0] += before + after
            self.shapes[name] = (whole[0] * whole[1],) if flat else tuple(whole)
            self.steps.append((name, target, axis, start, end, before, tuple(whole)))

    def load_weights(self, weights):
        tensors = dict(weights)
        for name, target, axis, start, end, before, whole in self.steps:
            if name in tensors:
                rows = end - start if axis == 0 else self.get_parameter(target).shape[0]
                part = tensors[name].view(whole)[before : before + rows]
                self.get_parameter(target).data.narrow(axis, start, end - start).copy_(part)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9))
def test_drawn_models_are_filled_as_they_load(seed):
    model = Drawn(seed)
    manifest = manifest_of(model.shapes)
    layout, weights = layout_of(model, manifest, place=RankPlace(1, 3)), random_weights(manifest)
    host = on_host(lambda: Drawn(seed))
    host.load_weights(weights.items())
    assert differences(layout, manifest, weights, dict(host.named_parameters())) == []
    # Flat tensors of which a part of the rows is read may be no box; all others are.
    whole = {name for name in layout.table.whole if len(model.shapes[name]) == 2}
    shared = {target for name, target, *_ in model.steps if name in layout.table.whole}
    assert {target for name, target, *_ in model.steps if name in whole} <= shared
    assert len(layout.table.storages) == len(dict(model.named_parameters())) - len(shared)
