"""Conformance: what is handed out stays valid as long as promised, and nothing grows from refit to refit."""

from __future__ import annotations

import gc
import os
import time
from dataclasses import dataclass

import psutil
import pytest

from weightsync.testing.crew import ThreadCrew
from weightsync.testing.oracle import check
from weightsync.testing.shared_files import left_behind, shared_files
from weightsync.testing.suite import Suite
from weightsync.testing.work import Plan

_REFITS = 30
_WARMING_UP = 8
_FEW = 6
"""Descriptors, threads and files that may come and go; a leak in each refit makes thirty."""
_FEW_BYTES = 24 << 20
_SETTLING_S = 3.0


class LifetimeCases(Suite):
    """One policy and one rollout rank in this process."""

    def test_a_batch_is_valid_until_the_next_one_is_asked_for(self, pair: ThreadCrew) -> None:
        """A loader that takes its time finds in it what it found at first."""
        pair.works(Plan("plain"), {("rollout", 0): Plan("plain", pace_s=0.03)})
        pair.works(Plan("mixed"), {("rollout", 0): Plan("mixed", pace_s=0.03)})

    @pytest.mark.slow
    def test_thirty_refits_leave_nothing_behind(self, pair: ThreadCrew) -> None:
        """Memory, descriptors, threads and shared memory are what they were."""
        _repeat(pair, _WARMING_UP)
        before = Figures.now()
        _repeat(pair, _REFITS)
        _require_flat(before, f"{_REFITS} refits")

    @pytest.mark.slow
    def test_connecting_anew_leaves_nothing_behind(self, pair: ThreadCrew) -> None:
        """The same when all ranks are finalized and join again, many times."""
        for rounds in (3, 12):
            before = Figures.now()
            for seed in range(rounds):
                pair.rejoin()
                pair.works(Plan("plain", seed=seed % 3))
        _require_flat(before, f"connecting {rounds} times")

    def test_ending_twice_is_harmless(self) -> None:
        """`finalize` before, between and after refits, twice; `close` twice, with and without a refit."""
        unused = self.make()
        unused.finalize()
        unused.close()
        unused.close()
        with self.crew_of((1, 1)) as crew:
            crew.all("finalize")
            crew.all("finalize")
            crew.join()
            crew.works(Plan())
            crew.all("finalize")
            crew.all("finalize")
            crew.recovers()
            crew.all("close")
            crew.all("close")

    @pytest.mark.slow
    def test_a_closed_engine_leaves_nothing_behind(self) -> None:
        """Its threads and descriptors are gone."""
        with self.crew_of((1, 1)) as crew:  # what a first use leaves for good in the process
            crew.works(Plan())
        before = Figures.now()
        for _ in range(_FEW):
            with self.crew_of((1, 1)) as crew:
                crew.works(Plan())
        _require_flat(before, f"{_FEW} engines a side, closed,")


@dataclass(frozen=True)
class Figures:
    """What must not grow."""

    rss: int
    descriptors: int
    threads: int
    shared: frozenset[str]

    @classmethod
    def now(cls) -> Figures:
        """Measure this process."""
        gc.collect()
        process = psutil.Process()
        return cls(
            rss=process.memory_info().rss,
            descriptors=process.num_fds(),
            threads=process.num_threads(),
            shared=shared_files(),
        )

    def growth_since(self, before: Figures) -> str:
        """Say what has grown; empty if nothing has."""
        more = {
            "descriptors": self.descriptors - before.descriptors,
            "threads": self.threads - before.threads,
            "files in /dev/shm": len(self.shared.intersection(left_behind(before.shared, [os.getpid()]))),
        }
        grown = [f"{count} more {what}" for what, count in more.items() if count >= _FEW]
        if self.rss - before.rss > _FEW_BYTES:
            grown.append(f"{(self.rss - before.rss) >> 20} MiB more memory")
        return ", ".join(grown)


def _require_flat(before: Figures, what: str) -> None:
    """Give what is being torn down a moment, then compare."""
    deadline = time.monotonic() + _SETTLING_S
    while (grown := Figures.now().growth_since(before)) and time.monotonic() < deadline:
        time.sleep(0.2)
    check(not grown, f"{what} left {grown}")


def _repeat(pair: ThreadCrew, count: int) -> None:
    for seed in range(count):
        pair.works(Plan("plain", seed=seed % 3))
