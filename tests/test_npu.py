"""Ascend NPUs, played: what is called of torch_npu, which has not been run here."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from weightsync.byte_digests import digest_bytes, digest_kind
from weightsync.capacity import total_memory_bytes
from weightsync.engines import buffers
from weightsync.errors import ConfigurationError, MissingDependencyError

NPU = SimpleNamespace(type="npu", index=2)
"""torch knows the name only where torch_npu has told it."""
GIB = 1 << 30


@pytest.fixture
def calls() -> list[str]:
    return []


@pytest.fixture
def npu(monkeypatch, calls):
    """A machine with four of them."""

    def call(name):
        return lambda *args: calls.append(" ".join([name, *(f"{each.type}:{each.index}" for each in args)]))

    runtime = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 4,
        current_device=lambda: 2,
        get_device_properties=lambda number: SimpleNamespace(total_memory=(60 + number) * GIB),
        set_device=call("set"),
        synchronize=call("wait"),
        empty_cache=call("empty"),
    )
    module = ModuleType("torch_npu")
    module.npu = runtime
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    monkeypatch.setattr(torch, "npu", runtime, raising=False)
    return runtime


@pytest.mark.parametrize(("device", "gib"), [("npu", 62), ("npu:0", 60), ("npu:3", 63)])
def test_the_memory_of_an_npu_is_its_own(npu, device, gib):
    assert total_memory_bytes(device) == gib * GIB


@pytest.mark.parametrize("device", ["npu:4", "npu:-1", "npu:x"])
def test_an_npu_that_is_not_there(npu, device):
    with pytest.raises(ConfigurationError, match=f"device is '{device}', but there are 4 of that kind"):
        total_memory_bytes(device)


def test_a_machine_without_an_npu_says_what_is_missing(npu, monkeypatch):
    npu.is_available = lambda: False
    with pytest.raises(ConfigurationError, match="this worker sees no Ascend NPU; set device: cpu"):
        total_memory_bytes("npu")
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(MissingDependencyError, match="needs torch_npu, which does not import here"):
        total_memory_bytes("npu")


def test_threads_waits_and_caches_are_the_npus(npu, calls):
    buffers.bind_thread(NPU)
    buffers.synchronize(NPU)
    buffers.await_readers(SimpleNamespace(device=NPU))
    buffers.overwrite(SimpleNamespace(device=NPU, fill_=lambda value: calls.append(f"fill {value}")), 7)
    buffers.give_back(NPU)
    assert calls == ["set npu:2", "wait npu:2", "wait npu:2", "fill 7", "wait npu:2", "empty"]


def test_buffers_on_an_npu_come_from_torch_although_cupy_is_there(npu, calls, monkeypatch):
    def cupy_is_no_help(*_):
        raise AssertionError("CuPy has no NPUs")

    monkeypatch.setattr(buffers.importlib.util, "find_spec", cupy_is_no_help)
    empty = torch.empty
    monkeypatch.setattr(
        buffers.torch, "empty", lambda n, *, dtype, device: calls.append(device.type) or empty(n, dtype=dtype)
    )
    assert buffers.allocate_bucket(64, NPU).shape == (64,)
    assert calls == ["npu"]


def test_a_device_that_torch_does_not_know_is_a_configuration_error():
    unknown = SimpleNamespace(type="npu", index=0)
    with pytest.raises(ConfigurationError, match="knows no npu device"):
        buffers.synchronize(unknown)


def test_what_is_on_an_npu_is_digested_there_as_on_any_device(monkeypatch):
    assert digest_kind(NPU) == digest_kind(torch.device("cuda")) == "fold-64"
    assert digest_kind(torch.device("cpu")) == "xxh3-64"

    class OnNpu(torch.Tensor):
        @property
        def device(self):
            return NPU

    data = torch.arange(100, dtype=torch.uint8)
    folded = []
    monkeypatch.setattr(
        "weightsync.byte_digests._folded_digest", lambda each: folded.append(each.numel()) or 5
    )
    assert digest_bytes(data.as_subclass(OnNpu)) == 5
    assert folded == [100]
