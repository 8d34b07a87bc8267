"""CUDA IPC as far as it shows without a GPU: torch's private calls are there, and are called as they want."""

from __future__ import annotations

import ast
import inspect
import os
import textwrap

import msgspec
import pytest
import torch
from torch.multiprocessing import reductions

from tests.engine_crew import MIB
from tests.test_engine_ipc import POLICY, WAIT, bucket, from_policy
from weightsync.engines import cuda_ipc
from weightsync.engines.cuda_ipc import CudaAddress, CudaBlock, Handle, MappedCudaBlock
from weightsync.engines.ipc import IpcTransport
from weightsync.engines.transport import SLOTS
from weightsync.errors import ConfigurationError, LifecycleError, PeerLostError

SIZE = MIB


def targets_of(function, call: str) -> list[str]:
    """The names that a function gives to what a call returns."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            name = getattr(node.value.func, "attr", "")
            if name == call and isinstance(node.targets[0], ast.Tuple):
                return [element.id for element in node.targets[0].elts]
    raise AssertionError(f"{function.__name__} does not call {call}")


def arguments_of(function, call: str) -> list[str]:
    """The names that a function hands to a call."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == call:
            return [argument.id for argument in node.args]
    raise AssertionError(f"{function.__name__} does not call {call}")


PARTS = list(Handle.__struct_fields__)


def test_torch_shares_storages_as_the_handle_says():
    told = targets_of(reductions.reduce_tensor, "_share_cuda_")
    assert ["storage_device", *told[1:]] == [
        {"storage_handle": "handle"}.get(part, part) if "handle" in told else part for part in PARTS
    ]
    assert arguments_of(reductions.rebuild_cuda_tensor, "_new_shared_cuda") == PARTS


def test_torch_counts_readers_as_the_handle_says():
    counted = arguments_of(reductions.rebuild_cuda_tensor, "_release_ipc_counter")
    assert counted == ["ref_counter_handle", "ref_counter_offset"]
    assert list(inspect.signature(torch.UntypedStorage._release_ipc_counter).parameters) == [
        "args", "device", "kwargs",
    ]  # fmt: skip
    for name in ("_share_cuda_", "_new_shared_cuda", "_release_ipc_counter_cuda"):
        assert callable(getattr(torch.UntypedStorage, name))


HANDLE = Handle(1, b"h" * 64, SIZE, 512, b"/torch_1_2_0", 3, b"e" * 64, True)
"""As torch would give it for a storage on the sender's GPU 1."""


class PlayedGpus:
    """Two GPUs in host memory, and what was asked of torch."""

    def __init__(self, monkeypatch, *, uuids=("GPU-a", "GPU-b"), peers=True) -> None:
        self.calls: list = []
        self.memory = torch.arange(SIZE, dtype=torch.int64).to(torch.uint8)
        self.real_empty = torch.empty
        self.refused: RuntimeError | None = None
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
        monkeypatch.setattr(cuda_ipc, "_uuid", lambda index: uuids[index])
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: peers)
        monkeypatch.setattr(cuda_ipc, "_private", lambda _: self)
        monkeypatch.setattr(cuda_ipc.torch, "empty", self.empty)

    def empty(self, *size, dtype, device=None):
        self.calls.append(("empty", size[0], str(device)))
        return self.real_empty(*size, dtype=dtype)

    def _share_cuda_(self):
        if self.refused:
            raise self.refused
        return msgspec.structs.astuple(HANDLE)

    def _new_shared_cuda(self, *arguments):
        if self.refused:
            raise self.refused
        self.calls.append(("open", *arguments))
        return self.memory.untyped_storage()

    def _release_ipc_counter(self, *arguments, device):
        self.calls.append(("release", *arguments))


def test_a_gpu_block_says_where_it_is_and_gives_back_its_count(monkeypatch):
    gpus = PlayedGpus(monkeypatch)
    block = CudaBlock(SIZE, torch.device("cuda", 1))
    block.touch()
    assert gpus.calls == [("empty", SIZE, "cuda:1")]
    assert block.address == CudaAddress(os.getpid(), "GPU-b", HANDLE)
    assert block.address.nbytes == SIZE
    plain = msgspec.to_builtins(block.address, builtin_types=(bytes,))
    assert msgspec.convert(plain, CudaAddress) == block.address
    block.free()
    block.free()
    assert [call for call in gpus.calls if call[0] == "release"] == [("release", b"/torch_1_2_0", 3)]


def test_gpu_memory_that_torch_cannot_share_says_what_to_write(monkeypatch):
    PlayedGpus(monkeypatch).refused = RuntimeError("invalid argument")
    with pytest.raises(ConfigurationError, match=r"invalid argument; write device: cpu, or .*expandable"):
        CudaBlock(SIZE, torch.device("cuda", 0))


def test_a_gpu_block_is_opened_on_the_same_gpu_whatever_its_number_here(monkeypatch):
    gpus = PlayedGpus(monkeypatch, uuids=("GPU-b", "GPU-a"))
    block = MappedCudaBlock(CudaAddress(7, "GPU-b", HANDLE), torch.device("cuda", 0), "policy rank 0")
    assert gpus.calls[0] == ("open", 0, *msgspec.structs.astuple(HANDLE)[1:])
    assert torch.equal(block.read(), gpus.memory)
    block.free()
    with pytest.raises(LifecycleError):
        block.read()


@pytest.mark.parametrize(
    ("world", "words"),
    [
        ({"uuids": ("GPU-a", "GPU-c")}, "is on GPU-b, which this worker does not see .*CUDA_VISIBLE_DEVICES"),
        ({"peers": False}, "needs peer access: cuda:0 of this worker cannot read GPU-b, where policy rank 0"),
    ],
    ids=["unseen", "unreachable"],
)
def test_a_gpu_that_cannot_be_reached_is_refused_with_the_reason(monkeypatch, world, words):
    PlayedGpus(monkeypatch, **world)
    with pytest.raises(ConfigurationError, match=words):
        MappedCudaBlock(CudaAddress(7, "GPU-b", HANDLE), torch.device("cuda", 0), "policy rank 0")


def test_gpu_memory_that_is_gone_is_a_lost_peer(monkeypatch):
    PlayedGpus(monkeypatch).refused = RuntimeError("invalid resource handle")
    with pytest.raises(PeerLostError, match="process 7 cannot be opened: invalid resource handle"):
        MappedCudaBlock(CudaAddress(7, "GPU-b", HANDLE), torch.device("cuda", 0), "policy rank 0")


def test_the_transport_moves_gpu_buckets_with_the_same_calls(monkeypatch):
    gpus = PlayedGpus(monkeypatch)
    gpu = torch.device("cuda", 1)
    sender, receiver = IpcTransport(gpu), IpcTransport(gpu)
    sender.allocate(SIZE)
    receiver.connect(from_policy(sender.describe()))
    sender.open(sending=True, **WAIT)
    assert torch.equal(receiver.fetch(POLICY, bucket(1, 100), 0, **WAIT), gpus.memory[:100])
    sender.extend()
    payload = sender.publish(SLOTS, SIZE)
    assert torch.equal(receiver.fetch(POLICY, bucket(SLOTS, 100, payload), 0, **WAIT), gpus.memory[:100])
    receiver.close()
    sender.close()
    assert len([call for call in gpus.calls if call[0] == "release"]) == SLOTS + 1
