"""Tests beside each other: what stays in one worker, and whose files in /dev/shm are whose."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys

import pytest

from tests.own_files import left_by_tests
from weightsync.testing.shared_files import left_behind, shared_files

side_by_side = pytest.importorskip("tests.side_by_side", reason="needs pytest-xdist")
HOLDER = """
import mmap, sys
with open(sys.argv[1], "w+b") as file:
    file.truncate(10)
    mapped = mmap.mmap(file.fileno(), 10)
print("mapped", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("nodeid", "scope"),
    [
        ("tests/test_tensors.py::test_a", "tests/test_tensors.py"),
        ("tests/test_tensors.py::test_a[b::c-1]", "tests/test_tensors.py"),
        ("tests/test_conformance.py::TestIPC::test_a[x]", "tests/test_conformance.py::TestIPC"),
        ("tests/test_verify.py::test_a", side_by_side.VLLM_IN_RAY),
        ("tests/test_ipc_vllm.py::test_a", side_by_side.VLLM),
    ],
)
def test_what_shares_fixtures_or_starts_a_vllm_stays_in_one_worker(nodeid, scope):
    assert side_by_side.Scheduling._split_scope(None, nodeid) == scope


def test_the_files_that_begin_first_are_there():
    folder = side_by_side.ROOT / "tests"
    assert [name for name in side_by_side.LONGEST if not (folder / f"{name}.py").is_file()] == []


def test_files_that_another_job_uses_are_not_left_and_those_that_nobody_uses_are():
    before, name = shared_files(), f"weightsync-test-{os.getpid()}"
    command = [sys.executable, "-c", HOLDER, f"/dev/shm/{name}"]
    try:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
            assert holder.stdout.readline() == b"mapped\n"
            assert name not in left_behind(before, [os.getpid()])
            assert name in left_by_tests(before, patience_s=0)  # it is a child of the test's
            holder.kill()
        assert name in left_behind(before, [os.getpid()])
    finally:
        os.unlink(f"/dev/shm/{name}")
    assert left_by_tests(before) == []


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="needs a worker of pytest-xdist")
def test_semaphores_carry_the_name_of_their_worker():
    before = shared_files()
    made = multiprocessing.get_context("spawn").Semaphore()
    own = f"sem.mp-{os.environ['PYTEST_XDIST_WORKER']}-"
    assert any(name.startswith(own) for name in shared_files() - before)
    del made
