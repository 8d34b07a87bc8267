"""Runs checks on several real processes joined by gloo, once for a whole test module."""

from __future__ import annotations

import importlib
import multiprocessing as mp
import os
import queue
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

COLLECTIVE_TIMEOUT_S = 40.0


def run_checks(
    module: str, names: list[str], world_size: int, folder: Path, timeout_s: float
) -> dict[str, str]:
    """Run functions ``name(rank)`` of a module on every rank, one after the other, in one process group.

    Returns:
        By name: the empty string where all ranks passed, else why not. A rank leaves at its first failure,
        which makes the checks after it fail as well.
    """
    context = mp.get_context("spawn")
    results: Any = context.Queue()
    arguments = (module, names, world_size, str(folder / "rendezvous"), results)
    ranks = [context.Process(target=_rank_main, args=(rank, *arguments)) for rank in range(world_size)]
    for process in ranks:
        process.start()
    try:
        return _collect(results, ranks, names, time.monotonic() + timeout_s)
    finally:
        for process in ranks:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


def faults_of(module: str, checks: dict[int, list[str]], *, timeout_s: float) -> Any:
    """Return a fixture: a function that runs all checks of a world size, once, and gives each one's fault."""

    @pytest.fixture(scope="module")
    def faults(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, str]]:
        done: dict[int, dict[str, str]] = {}

        def of(world_size: int) -> dict[str, str]:
            if world_size not in done:
                folder: Path = tmp_path_factory.mktemp("ranks")
                done[world_size] = run_checks(module, checks[world_size], world_size, folder, timeout_s)
            return done[world_size]

        return of

    return faults


def _collect(results: Any, ranks: list[Any], names: list[str], deadline: float) -> dict[str, str]:
    passed: dict[str, int] = dict.fromkeys(names, 0)
    faults = dict.fromkeys(names, "")
    running = len(ranks)
    while running and time.monotonic() < deadline:
        try:
            rank, name, fault = results.get(timeout=1.0)
        except queue.Empty:
            continue
        if name is None:
            running -= 1
        elif fault:
            faults[name] += f"rank {rank}: {fault}"
        else:
            passed[name] += 1
    missing = "not passed on every rank: an earlier check failed, or the time ran out"
    return {name: faults[name] or ("" if passed[name] == len(ranks) else missing) for name in names}


def _rank_main(
    rank: int, module: str, names: list[str], world_size: int, rendezvous: str, results: Any
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
    for name in names:
        fault = _fault(getattr(importlib.import_module(module), name), rank)
        results.put((rank, name, fault))
        if fault:
            break
    results.put((rank, None, ""))
    results.close()
    results.join_thread()
    # A check that failed may have left collectives open, over which an orderly end would hang.
    os._exit(0)


def _fault(check: Callable[[int], None], rank: int) -> str:
    try:
        torch.manual_seed(0)
        check(rank)
    except Exception:  # noqa: BLE001 - reported by the parent
        return traceback.format_exc()
    return ""
