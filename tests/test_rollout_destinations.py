"""Which parameters of a vLLM worker are written in place; around plain modules, without vLLM itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from weightsync.errors import ConfigurationError, ManifestError
from weightsync.layout.regions import Box
from weightsync.layout.tables import HeldBox, TableBuilder
from weightsync.rollout.vllm import destinations as module
from weightsync.rollout.vllm import loader
from weightsync.rollout.vllm.destinations import VllmDestinations
from weightsync.rollout.vllm.layout import RankLayout
from weightsync.tensors import TensorSpec, WeightManifest


class Model(nn.Module):
    """One linear layer that is packed, one that is not, a norm, and an embedding with its tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Linear(4, 6)
        self.plain = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(4)
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight


@pytest.fixture(autouse=True)
def rules(monkeypatch):
    packed = lambda layer: "it is packed" if getattr(layer, "is_packed", False) else None  # noqa: E731
    monkeypatch.setattr(module, "why_not_as_loaded", packed)
    monkeypatch.setattr(module, "_bare", lambda layer: layer)


def make(model, casts=(), fills=(), only=None, **options):
    model.packed.is_packed = True
    parameters = {n: p for n, p in model.named_parameters() if only is None or n in only}
    manifest = WeightManifest.build(TensorSpec.of(name, p) for name, p in parameters.items())
    builder = TableBuilder(manifest)
    for name, parameter in parameters.items():
        index = builder.add_storage(name, parameter.shape, "float32")
        shape = (5, *parameter.shape[1:]) if name in fills else parameter.shape
        builder.add(name, [HeldBox(index, Box.whole(shape))])
    layout = RankLayout(builder.build(), frozenset(casts), frozenset(fills), ())
    return VllmDestinations(manifest, layout, lambda: model, **options)


def index(memory, name):
    return [storage.name for storage in memory.table.storages].index(name)


def test_a_layer_is_written_in_place_completely_or_not_at_all():
    model = Model()
    memory = make(model)
    assert memory.handed_over == {"packed.weight": "it is packed", "packed.bias": "it is packed"}
    flat = memory.storage(index(memory, "plain.weight"))
    assert flat.shape == (24,)
    assert flat.data_ptr() == model.plain.weight.data_ptr()
    assert memory.storage(index(memory, "packed.bias")) is None
    in_place = memory.layers_in_place()
    assert {id(layer) for layer in in_place} == {
        id(layer) for layer in (model.plain, model.norm, model.embed, model.head)
    }


def test_memory_that_may_be_exchanged_is_never_written_in_place():
    memory = make(Model(), why_none_in_place="it sleeps")
    assert set(memory.handed_over.values()) == {"it sleeps"}
    assert [memory.storage(i) for i in range(len(memory.table.storages))] == [None] * 7
    assert memory.layers_in_place() == []


@pytest.mark.parametrize(("sleeps", "on_cpu"), [(True, False), (True, True), (False, False)])
def test_an_engine_that_may_sleep_exchanges_its_memory(monkeypatch, sleeps, on_cpu):
    monkeypatch.setattr(loader, "is_cpu_platform", lambda: on_cpu)
    config = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=sleeps))
    assert bool(loader._why_memory_is_exchanged(config)) == (sleeps and not on_cpu)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"casts": ["plain.bias"]}, "its tensors have another dtype"),
        ({"fills": ["plain.bias"]}, "it is padded"),
    ],
)
def test_one_parameter_that_is_not_as_its_tensors_are_takes_its_layer_along(options, reason):
    memory = make(Model(), **options)
    assert memory.handed_over["plain.weight"] == memory.handed_over["plain.bias"] == reason


def test_parameters_that_turn_out_to_share_memory_are_handed_over():
    model = Model()
    model.norm.bias = nn.Parameter(model.norm.weight.detach())
    memory = make(model)
    assert memory.handed_over["norm.bias"] == "another parameter shares its memory"


def test_what_is_served_in_another_form_is_handed_over():
    model = Model()
    memory = make(model)
    number = index(memory, "plain.weight")
    model.plain.weight = nn.Parameter(torch.zeros(4, 6).t())
    assert memory.storage(number) is None
    model.plain.weight = nn.Parameter(torch.zeros(6, 4, dtype=torch.bfloat16))
    assert memory.storage(number) is None
    model.plain.weight = nn.Parameter(torch.empty(6, 4, device="meta"))
    assert memory.storage(number) is None
    model.plain.weight = nn.Parameter(torch.zeros(6, 4))
    assert memory.storage(number).data_ptr() == model.plain.weight.data_ptr()


def test_a_model_that_runs_without_a_parameter_that_its_loader_fills():
    model = Model()
    memory = make(model)
    del model.plain.bias
    with pytest.raises(ConfigurationError, match=r"no parameter 'plain\.bias'.*shard_weights: none"):
        memory.live("plain.bias")
    del model.norm
    with pytest.raises(ConfigurationError, match=r"no parameter 'norm\.bias'"):
        memory.live("norm.bias")


def test_elements_of_no_tensor_become_zero():
    memory = make(Model(), fills=["embed.weight"])
    came, place = torch.full((8, 4), 7.0), torch.full((8, 4), 3.0)
    memory.copier("embed.weight")(place, came)
    assert place[:5].eq(7).all()
    assert place[5:].eq(0).all()
    assert came.eq(7).all()
    memory.copier("norm.weight")(place[0], torch.ones(4))
    assert place[0].eq(1).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("norm.weight", torch.ones(5)),
        ("norm.weight", torch.ones(4, dtype=torch.float64)),
        ("norm.scale", torch.ones(4)),
    ],
)
def test_what_does_not_fit_the_table_is_refused(name, value):
    memory = make(Model())
    memory.require_fit("norm.weight", torch.ones(4))
    with pytest.raises(ManifestError, match="where this rank stores") as caught:
        memory.require_fit(name, value)
    assert caught.value.context.tensor == name


def test_a_layer_of_which_only_some_parameters_move_by_regions_may_be_in_place():
    model = Model()
    memory = make(model, only=["plain.weight", "packed.weight"])
    assert memory.handed_over == {"packed.weight": "it is packed"}
    assert [id(layer) for layer in memory.layers_in_place()] == [id(model.plain)]
