"""Shared memory between processes: what is there when, who may map it, and what remains of it."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import signal
from dataclasses import dataclass

import msgspec
import pytest
import torch

from tests.engine_crew import MIB, noise
from tests.own_files import left_by_tests
from weightsync.engines import shared_memory
from weightsync.engines.shared_memory import Address, Home, MappedBlock, SharedBlock
from weightsync.errors import ConfigurationError, LifecycleError, PeerLostError, TransportError
from weightsync.testing.shared_files import shared_files

CONTEXT = multiprocessing.get_context("forkserver")
HERE = Home.here()
NOBODY = 65534


@pytest.fixture
def block():
    block = SharedBlock(5 * MIB + 7)
    yield block
    block.free()


def mapped(address: Address, home: Home = HERE) -> MappedBlock:
    return MappedBlock(address, home, "policy rank 0")


def pages_of(block: SharedBlock) -> int:
    """Bytes of memory that a block takes."""
    return os.stat(f"/proc/self/fd/{block.address.fd}").st_blocks * 512


def mappings() -> list[str]:
    with open("/proc/self/maps") as maps:
        return [line for line in maps if "/memfd:weightsync-" in line]


# In one process.


def test_no_page_exists_before_it_is_touched(block):
    assert pages_of(block) == 0
    assert block.tensor.shape == (5 * MIB + 7,)
    assert block.tensor.dtype is torch.uint8
    block.touch()
    assert 5 * MIB < pages_of(block) < 6 * MIB
    assert block.tensor.sum() == 0


def test_touching_keeps_the_contents(block):
    data = noise(5 * MIB + 7)
    block.tensor.copy_(data)
    block.touch()
    block.touch()
    assert torch.equal(block.tensor, data)
    assert torch.equal(mapped(block.address).read(), data)


@pytest.mark.parametrize("refused", ["collapse", "all advice"])
def test_kernels_without_huge_pages_have_small_ones(block, monkeypatch, refused):
    real = shared_memory._advise

    def advise(address, nbytes, advice):
        if refused == "all advice" or advice == shared_memory._COLLAPSE:
            return False
        return real(address, nbytes, advice)

    monkeypatch.setattr(shared_memory, "_advise", advise)
    block.tensor[3] = 9
    block.touch()
    assert pages_of(block) > 5 * MIB
    assert (block.tensor[3], block.tensor.sum()) == (9, 9)


def test_no_memory_for_the_pages_is_an_error_not_a_signal(block, monkeypatch):
    def fails(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shared_memory, "_advise", lambda *_: False)
    monkeypatch.setattr(shared_memory.os, "posix_fallocate", fails)
    with pytest.raises(TransportError, match="no memory for a transfer buffer of 5242887 bytes"):
        block.touch()


def test_kernels_that_do_not_know_the_seal_against_execution(monkeypatch):
    real, seen = os.memfd_create, []

    def create(name, flags):
        seen.append(flags)
        if flags & shared_memory._NOEXEC_SEAL:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(name, flags)

    monkeypatch.setattr(shared_memory.os, "memfd_create", create)
    block = SharedBlock(64)
    assert len(seen) == 2
    block.tensor.fill_(3)
    assert mapped(block.address).read().tolist() == [3] * 64
    block.free()


def test_no_descriptor_for_a_block_is_an_error_that_says_so(monkeypatch):
    def create(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(shared_memory.os, "memfd_create", create)
    with pytest.raises(TransportError, match=r"cannot make shared memory .* Too many open files"):
        SharedBlock(64)


def test_a_reader_s_writes_stay_with_it_and_are_gone_at_the_next_read(block):
    block.tensor.fill_(1)
    reader, other = mapped(block.address), mapped(block.address)
    reader.read()[:MIB].fill_(9)
    assert block.tensor.unique().tolist() == [1]
    assert other.read().unique().tolist() == [1]
    block.tensor.fill_(2)
    assert reader.read().unique().tolist() == [2]
    assert other.read().unique().tolist() == [2]


def test_a_tensor_outlives_what_it_came_from(block):
    block.tensor.fill_(4)
    reader = mapped(block.address)
    own, seen = block.tensor, reader.read()[5:10]
    block.free()
    reader.free()
    gc.collect()
    own.fill_(6)
    assert seen.tolist() == [6] * 5
    with pytest.raises(LifecycleError):
        reader.read()
    assert len(mappings()) == 2
    del own, seen
    gc.collect()
    assert mappings() == []


def test_nothing_accumulates():
    def fds():
        return len(os.listdir("/proc/self/fd"))

    before = fds()
    for _ in range(50):
        block = SharedBlock(MIB)
        block.touch()
        reader = mapped(block.address)
        reader.read()
        reader.free()
        reader.free()
        block.free()
        block.free()
    del block, reader
    gc.collect()
    assert fds() == before
    assert mappings() == []


# What is not, or no longer, the block.


def test_a_freed_block_is_gone(block):
    block.free()
    with pytest.raises(PeerLostError, match=rf"the memory of process {os.getpid()} is gone"):
        mapped(block.address)


def test_a_number_that_another_block_has_taken_is_noticed(block):
    block.free()
    other = SharedBlock(5 * MIB + 7)
    assert other.address.fd == block.address.fd
    with pytest.raises(PeerLostError):
        mapped(block.address)
    other.free()


def test_a_number_that_a_pipe_has_taken_is_noticed_and_nobody_waits(block, tmp_path):
    block.free()
    os.mkfifo(tmp_path / "fifo")
    fifo = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    assert fifo == block.address.fd
    with pytest.raises(PeerLostError):
        mapped(block.address)
    os.close(fifo)


@pytest.mark.parametrize(
    "change", [{"nbytes": 5 * MIB}, {"nbytes": 6 * MIB}, {"token": "0" * 32}, {"fd": 9999}, {"pid": 2**22}],
    ids=str,
)  # fmt: skip
def test_an_address_that_does_not_fit_is_refused(block, change):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(PeerLostError) as caught:
        mapped(msgspec.structs.replace(block.address, **change))
    assert caught.value.context.peer == "policy rank 0"
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"boot": "x", "host": "far"}, r"on one host: policy rank 0 is on 'far'.*refit_transport: nixl"),
        ({"pid_namespace": "pid:[7]"}, r"in one PID namespace: .*pid:\[7\].*refit_transport: nixl"),
    ],
    ids=["host", "container"],
)
def test_who_cannot_share_memory_is_told_so(change, words):
    HERE.require_common(HERE, "policy rank 0")
    with pytest.raises(ConfigurationError, match=words):
        HERE.require_common(msgspec.structs.replace(HERE, **change), "policy rank 0")


# In several processes.


@dataclass
class Child:
    """A process that runs a function with one end of a pipe."""

    act: object
    arguments: tuple = ()

    def __enter__(self) -> Child:
        self.pipe, far = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=self.act, args=(far, *self.arguments), daemon=True)
        self.process.start()
        far.close()
        return self

    def hear(self):
        assert self.pipe.poll(30)
        return self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10)

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.pipe.close()


def own(pipe, nbytes: int) -> None:
    """Make a block, and fill it with what is said."""
    block = SharedBlock(nbytes)
    block.touch()
    pipe.send(block.address)
    while (value := pipe.recv()) is not None:
        block.tensor.fill_(value)
        pipe.send(value)


def read(pipe, address: Address, user: int | None) -> None:
    """Map a block and say what is in it, or why not."""
    if user is not None:
        os.setuid(user)
    try:
        block = mapped(address)
    except (ConfigurationError, PeerLostError) as error:
        pipe.send(error)
        return
    pipe.send(block.read().unique().tolist())
    pipe.recv()


@pytest.mark.slow
def test_another_process_s_memory_is_read_in_place_and_outlives_it():
    before = shared_files()
    with Child(own, (3 * MIB,)) as owner:
        address = owner.hear()
        reader = mapped(address)
        for value in (1, 2):
            owner.pipe.send(value)
            owner.hear()
            assert reader.read().unique().tolist() == [value]
        os.kill(owner.process.pid, signal.SIGSTOP)
        assert reader.read().unique().tolist() == [2]
        owner.kill()
        assert reader.read().unique().tolist() == [2]
        with pytest.raises(PeerLostError):
            mapped(address)
    reader.free()
    assert mappings() == []
    assert left_by_tests(before) == []


@pytest.mark.slow
def test_a_killed_reader_leaves_the_owner_its_memory(block):
    block.tensor.fill_(5)
    with Child(read, (block.address, None)) as reader:
        assert reader.hear() == [5]
    block.tensor.fill_(6)
    with Child(read, (block.address, None)) as reader:
        assert reader.hear() == [6]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_may_not_map_and_is_told_why(block):
    with Child(read, (block.address, NOBODY)) as reader:
        error = reader.hear()
    assert isinstance(error, ConfigurationError)
    assert "under one user: policy rank 0 runs as user 0, this worker as 65534" in str(error)
    assert "refit_transport: nixl" in str(error)
