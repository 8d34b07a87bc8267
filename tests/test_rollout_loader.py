"""The vLLM loader's own state, around a fake model; `test_rollout_vllm` has real ones."""

from __future__ import annotations

from collections import namedtuple
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from weightsync.errors import ManifestError
from weightsync.rollout.vllm import loader as loader_module
from weightsync.rollout.vllm.coverage import CoverageReport
from weightsync.rollout.vllm.loader import VllmLoader
from weightsync.rollout.vllm.reload import _detached
from weightsync.tensors import TensorSpec, WeightManifest


class FakeModel(torch.nn.Module):
    """Notes the names that it is given; its ``load_weights`` fills nothing."""

    def __init__(self):
        super().__init__()
        self.names = []

    def load_weights(self, weights):
        self.names.append([name for name, _ in weights])


class FakeTrial:
    """Calls every name that begins with ``spare`` unused, and every other one written."""

    def try_manifest(self, manifest):
        names = [spec.name for spec in manifest.tensors]
        unused = [name for name in names if name.startswith("spare")]
        return CoverageReport(unused=unused, written={name: 1 for name in names if name not in unused})


@pytest.fixture
def loader(monkeypatch):
    config = SimpleNamespace(
        quant_config=None,
        speculative_config=None,
        model_config=None,
        parallel_config=SimpleNamespace(enable_eplb=False),
    )
    model = FakeModel()
    runner = SimpleNamespace(get_model=lambda: model)
    made = VllmLoader(SimpleNamespace(vllm_config=config, model_runner=runner), allow_unused=["spare*"])
    made._trial = FakeTrial()
    monkeypatch.setattr(made, "_context", nullcontext)
    for name in ("begin_reload", "finish_reload", "abandon_reload"):
        monkeypatch.setattr(loader_module.reload, name, lambda *args: None)
    monkeypatch.setattr(loader_module.reload, "detach_deferred", lambda *args: 0)
    monkeypatch.setattr(loader_module.reload, "unloaded_parameters", lambda model: ["w"])
    monkeypatch.setattr(loader_module, "repack_embeddings", lambda model, written: None)
    return made


def manifest(*names):
    return WeightManifest.build(TensorSpec(name, (1,), "float32") for name in names)


def batch(*names):
    return [(name, torch.zeros(1)) for name in names]


@pytest.mark.slow
def test_what_a_manifest_calls_unused_is_not_loaded(loader):
    loader.check_manifest(manifest("w", "spare"))
    loader.begin()
    loader.load(batch("w", "spare"))
    assert loader.model.names == [["w"]]
    with pytest.raises(ManifestError, match="took nothing for 'w'"):
        loader.finish()


@pytest.mark.parametrize("end", ["finish", "abort"])
def test_a_stream_without_a_manifest_is_not_judged_by_an_earlier_one(loader, end, monkeypatch):
    loader.check_manifest(manifest("w", "spare"))
    loader.begin()
    with monkeypatch.context() as patch:
        patch.setattr(loader_module.reload, "unloaded_parameters", lambda model: [])
        getattr(loader, end)()
    loader.begin()
    loader.load(batch("x", "spare"))
    assert loader.model.names == [["x", "spare"]]
    loader.finish()


def test_a_manifest_that_was_made_of_what_came_counts_for_its_own_refit_only(loader):
    loader.begin()
    loader.check_manifest(manifest("w"))
    with pytest.raises(ManifestError, match="took nothing for 'w'"):
        loader.finish()
    loader.abort()
    loader.begin()
    loader.finish()


def test_borrowed_tensors_are_copied_out_of_any_container():
    pair = namedtuple("Pair", "first second")
    buffer = torch.arange(8.0)
    storages = {buffer.untyped_storage().data_ptr()}
    value = pair(buffer[2:4], {"rest": [buffer[4:5], (1, torch.ones(2))]})
    detached, size = _detached(value, storages)
    buffer.fill_(-1)
    assert size == 3 * 4
    assert type(detached) is pair
    assert detached.first.tolist() == [2.0, 3.0]
    assert detached.second["rest"][0].tolist() == [4.0]
    assert detached.second["rest"][1][1] is value.second["rest"][1][1]
