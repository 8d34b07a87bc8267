"""The soak: what it looks at, what it calls growth, and a short one."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from multiprocessing.shared_memory import SharedMemory

import pytest
from typer.testing import CliRunner

from weightsync.cli import app as cli
from weightsync.drills.holdings import LIMITS, growth, holdings_of
from weightsync.drills.soak import Grown, Soaked
from weightsync.testing.shared_files import left_behind, shared_files


def test_descriptors_sockets_and_shared_memory_of_a_process_are_counted():
    before = holdings_of(os.getpid())
    memory = os.memfd_create("weightsync-test")
    left, right = os.pipe()
    try:
        after = holdings_of(os.getpid())
    finally:
        for each in (memory, left, right):
            os.close(each)
    assert after.descriptors == before.descriptors + 3
    assert after.shared_memory == before.shared_memory + 1
    assert after.sockets == before.sockets
    assert growth(before, after) == {"descriptors": 3, "shared_memory": 1}


def test_growth_within_the_limits_is_none():
    before = holdings_of(os.getpid())
    after = replace(
        before,
        rss_mib=before.rss_mib + LIMITS.rss_mib,
        descriptors=before.descriptors + LIMITS.descriptors,
        threads=before.threads + LIMITS.threads,
    )
    assert growth(before, after) == {}
    assert growth(before, replace(after, threads=after.threads + 1)) == {"threads": LIMITS.threads + 1}


def test_files_left_in_shared_memory_are_found_and_those_in_use_elsewhere_are_not_blamed():
    before = shared_files()
    memory = SharedMemory(create=True, size=16)
    try:
        assert memory.name not in left_behind(before, ())  # this process uses it, and is no part of the job
        assert memory.name in left_behind(before, [os.getpid()])
    finally:
        memory.close()
        memory.unlink()
    assert memory.name not in left_behind(before, [os.getpid()])


def test_what_has_grown_fails_the_soak_and_is_named():
    before = holdings_of(os.getpid())
    flat = Grown("driver", before, before)
    grown = Grown("policy rank 0", before, replace(before, sockets=before.sockets + 5))
    assert Soaked(10, 0, 1.0, (flat,), ()).passed
    assert not Soaked(10, 0, 1.0, (flat,), ("weightsync-1",)).passed
    soaked = Soaked(10, 0, 1.0, (flat, grown), ())
    assert not soaked.passed
    assert soaked.to_dict()["processes"][1]["beyond"] == {"sockets": 5}


@pytest.mark.slow
def test_nothing_grows_over_sixty_refits_some_of_which_fail():
    line = "soak --transport ipc --refits 60 --warm-up 20 --fail-every 10 --json"
    result = CliRunner().invoke(cli._build("soak"), line.split())
    assert result.exit_code == 0, result.output
    soaked = json.loads(result.stdout)
    assert (soaked["refits"], soaked["failed"], soaked["left_behind"]) == (60, 6, [])
    assert [each["process"] for each in soaked["processes"]] == [
        "policy rank 0", "policy rank 1", "rollout rank 0", "rollout rank 1", "driver",
    ]  # fmt: skip
    assert all(each["beyond"] == {} for each in soaked["processes"])
