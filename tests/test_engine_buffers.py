"""Transfer buffers on machines with a GPU, played: what is called there, and in which order."""

from __future__ import annotations

import gc
import importlib.machinery
import logging
import sys
import threading
import weakref
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.engine_crew import MIB, Crew, some_weights
from weightsync.engines import buffers
from weightsync.engines.parts import KeptParts
from weightsync.errors import ConfigurationError, TransportError

CUDA = torch.device("cuda", 3)


class PlayedCupy(ModuleType):
    """A CuPy that allocates in host memory, or fails as told."""

    uint8 = torch.uint8

    def __init__(self, calls: list, *, available: object = True, broken: Exception | None = None) -> None:
        super().__init__("cupy")
        self.__spec__ = importlib.machinery.ModuleSpec("cupy", None)
        self._calls, self._available, self._broken = calls, available, broken
        self.cuda = SimpleNamespace(is_available=self._is_available, Device=self._device)

    def _is_available(self):
        if isinstance(self._available, Exception):
            raise self._available
        return self._available

    def _device(self, index):
        calls = self._calls

        class Device:
            def __enter__(self):
                calls.append(f"cupy enters {index}")

            def __exit__(self, *_):
                calls.append(f"cupy leaves {index}")

        return Device()

    def empty(self, nbytes, dtype):
        if self._broken is not None:
            raise self._broken
        self._calls.append(f"cupy {nbytes}")
        return torch.empty(nbytes, dtype=dtype)


@pytest.fixture
def calls() -> list:
    return []


@pytest.fixture
def cupy(monkeypatch, calls):
    def install(**how):
        module = PlayedCupy(calls, **how)
        monkeypatch.setitem(sys.modules, "cupy", module)
        return module

    return install


@pytest.fixture
def torch_empty(monkeypatch, calls):
    real = torch.empty

    def empty(nbytes, *, dtype, device):
        calls.append(f"torch {nbytes} on {device}")
        return real(nbytes, dtype=dtype)

    monkeypatch.setattr(buffers.torch, "empty", empty)
    yield
    monkeypatch.undo()


def test_cuda_buffers_come_from_cupy_where_it_is_installed(cupy, calls):
    cupy()
    buffer = buffers.allocate_bucket(64, CUDA)
    assert (buffer.shape, buffer.dtype) == ((64,), torch.uint8)
    assert calls == ["cupy enters 3", "cupy 64", "cupy leaves 3"]


def test_a_cupy_that_sees_no_gpu_leaves_it_to_torch_and_says_so(cupy, calls, torch_empty, caplog):
    cupy(available=False)
    with caplog.at_level(logging.WARNING):
        assert buffers.allocate_bucket(64, CUDA).numel() == 64
    assert calls == ["torch 64 on cuda:3"]
    assert [r.message for r in caplog.records] == [
        "CuPy is installed and sees no GPU: the transfer buffer on cuda:3 comes from torch"
    ]


@pytest.mark.parametrize(
    "how",
    [
        {"available": RuntimeError("driver too old")},
        {"broken": MemoryError("driver too old")},
    ],
    ids=["while asked for devices", "while allocating"],
)
def test_any_other_trouble_of_cupy_is_a_configuration_error(cupy, how):
    cupy(**how)
    with pytest.raises(ConfigurationError, match=r"CuPy is installed and cannot .* driver too old; mend it"):
        buffers.allocate_bucket(64, CUDA)


def test_a_cupy_that_cannot_be_imported_is_a_configuration_error(monkeypatch, tmp_path):
    (tmp_path / "cupy.py").write_text("raise ImportError('libcudart.so.12 is missing')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    with pytest.raises(ConfigurationError, match=r"libcudart\.so\.12 is missing"):
        buffers.allocate_bucket(64, CUDA)


# Giving back.


@pytest.fixture
def caches(monkeypatch, calls):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("torch's cache"))
    monkeypatch.setattr(
        torch.accelerator, "empty_host_cache", lambda: calls.append("torch's host cache"), raising=False
    )


def test_cuda_memory_goes_back_to_the_driver(cupy, calls, caches):
    module = cupy()
    for pool in ("memory_pool", "pinned_memory_pool"):
        freed = SimpleNamespace(free_all_blocks=lambda pool=pool: calls.append(pool))
        setattr(module, f"get_default_{pool}", lambda freed=freed: freed)
    buffers.give_back(CUDA)
    assert calls == [
        "cupy enters 3", "memory_pool", "cupy leaves 3", "pinned_memory_pool", "torch's cache",
    ]  # fmt: skip


def test_cuda_memory_of_torch_goes_back_where_cupy_is_not_used(monkeypatch, calls, caches):
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    buffers.give_back(CUDA)
    assert calls == ["torch's cache"]


def test_pinned_memory_goes_back_where_there_is_a_gpu(monkeypatch, calls, caches):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    buffers.give_back(torch.device("cpu"))
    assert calls == ["torch's host cache"]


def test_without_a_gpu_there_is_nothing_to_give_back(calls, caches):
    buffers.give_back(torch.device("cpu"))
    assert calls == []


@pytest.mark.nixl
def test_an_engine_gives_back_once_nothing_refers_to_its_buffers(monkeypatch):
    alive: list[int] = []
    freed = []

    def gone(device):
        gc.collect()
        freed.append((device.type, sum(ref() is not None for ref in alive)))

    monkeypatch.setattr("weightsync.engines.memory.give_back", gone)
    with Crew(release_after_refit=True) as crew:
        alive = [weakref.ref(buffer) for buffer in crew.policy[0]._memory.buffers]
        crew.refit(some_weights())
        crew.policy[0].finalize()
        assert freed == [("cpu", 0)]
        crew.policy[0].finalize()
        assert len(freed) == 1


# Waiting for the device.


class PlayedBuffer:
    """A buffer whose device, and what is done to it, are told by the test."""

    def __init__(self, calls: list, device: torch.device, *, pinned: bool = False) -> None:
        self._calls, self.device, self._pinned = calls, device, pinned

    def is_pinned(self) -> bool:
        return self._pinned

    def fill_(self, value: int) -> None:
        self._calls.append(f"fill {value}")


@pytest.fixture
def devices(monkeypatch, calls):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append(f"wait for {device}"))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: calls.append("wait for the accelerator"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)


def test_readers_of_a_cuda_buffer_are_waited_for(calls, devices):
    buffers.await_readers(PlayedBuffer(calls, CUDA))
    assert calls == ["wait for cuda:3"]


def test_copies_from_a_pinned_buffer_are_waited_for(calls, devices):
    buffers.await_readers(PlayedBuffer(calls, torch.device("cpu"), pinned=True))
    assert calls == ["wait for the accelerator"]


def test_nobody_copies_late_from_plain_memory(monkeypatch, calls, devices):
    buffers.await_readers(PlayedBuffer(calls, torch.device("cpu")))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    buffers.await_readers(PlayedBuffer(calls, torch.device("cpu"), pinned=True))
    assert calls == []


def test_an_overwritten_cuda_buffer_is_overwritten_when_the_call_returns(calls, devices):
    buffers.overwrite(PlayedBuffer(calls, CUDA), 255)
    assert calls == ["fill 255", "wait for cuda:3"]


@pytest.mark.nixl
def test_a_slot_is_given_back_after_its_readers_and_the_overwriting(monkeypatch, calls):
    monkeypatch.setattr("weightsync.engines.inlet.await_readers", lambda _: calls.append("readers"))
    monkeypatch.setattr("weightsync.engines.inlet.overwrite", lambda _, value: calls.append(value))
    with Crew(poison_released=True) as crew:
        crew.refit(some_weights(count=3))
    assert calls == ["readers", 255]


# Threads.


def test_a_thread_is_bound_to_the_buffers_device(monkeypatch, calls):
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    buffers.bind_thread(torch.device("cpu"))
    buffers.bind_thread(CUDA)
    assert calls == [CUDA]


@pytest.mark.nixl
def test_the_engine_s_threads_bind_themselves(monkeypatch):
    bound = set()

    def bind(device):
        bound.add((threading.current_thread().name, device.type))

    for room in ("pump", "nixl_ticker"):
        monkeypatch.setattr(f"weightsync.engines.{room}.bind_thread", bind)
    with Crew() as crew:
        crew.refit(some_weights(count=3))
    assert bound == {("weightsync-receive", "cpu"), ("weightsync-nixl-progress", "cpu")}


# Memory for tensors that are larger than a bucket.


def test_memory_for_parts_is_used_again_and_never_twice_at_once():
    parts, cpu = KeptParts(poisons=False), torch.device("cpu")
    first, second = parts.take(5 * MIB, cpu), parts.take(3 * MIB, cpu)
    assert first.data_ptr() != second.data_ptr()
    addresses = {first.data_ptr(), second.data_ptr()}
    parts.give_back(first)
    parts.give_back(second)
    smaller, larger = parts.take(2 * MIB, cpu), parts.take(4 * MIB, cpu)
    assert (smaller.numel(), larger.numel()) == (2 * MIB, 4 * MIB)
    assert {smaller.data_ptr(), larger.data_ptr()} == addresses
    parts.begin()
    assert parts.take(5 * MIB, cpu).data_ptr() in addresses


def test_memory_for_parts_that_is_too_small_is_not_kept_beside_a_larger_one():
    parts, cpu = KeptParts(poisons=False), torch.device("cpu")
    parts.give_back(parts.take(2 * MIB, cpu))
    parts.take(3 * MIB, cpu)
    assert parts._free == []


def test_released_memory_for_parts_is_poisoned_where_that_is_asked_for():
    parts = KeptParts(poisons=True)
    data = parts.take(MIB, torch.device("cpu")).fill_(1)
    parts.give_back(data)
    assert data.unique().tolist() == [255]


def test_an_impossible_tensor_is_a_typed_error():
    with pytest.raises(TransportError, match="bytes"):
        KeptParts(poisons=False).take(1 << 60, torch.device("cpu"))
