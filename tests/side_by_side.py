"""How pytest-xdist spreads the tests over its workers: what stays together, and what comes first."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).parent.parent
VLLM, VLLM_IN_RAY = "vLLM", "vLLM in Ray"
LONGEST = (
    "test_rollout_vllm",
    "test_verify",
    "test_conformance",
    "test_deadlines_stalls",
    "test_engine_faults",
    "test_refit_faults",
    "test_engine_kimi_processes",
    "test_engine_errors",
    "test_cluster_ray",
    "test_drills",
    "test_synchronizer",
    "test_engine_collectives",
    "test_regions_engine",
    "test_engine_kimi",
)
"""Files that begin first, each with its group, so that no worker is left with a long one at the end."""


class Scheduling(LoadScopeScheduling):
    """The tests of a class, or of a file outside of classes, share fixtures and stay in one worker.

    Those that start a real vLLM, which takes all cores and gigabytes, are two such groups: at most two run at
    a time.
    """

    def _split_scope(self, nodeid: str) -> str:
        file, *within = nodeid.partition("[")[0].split("::")
        return _vllms_of(file) or "::".join((file, *within[:-1]))


def longest_first(path: Path) -> int:
    """Return a key that sorts the tests of files."""
    return LONGEST.index(path.stem) if path.stem in LONGEST else len(LONGEST)


@cache
def _vllms_of(file: str) -> str:
    """Return which group of tests of vLLM those of a file belong to, if any of them is one."""
    code = (ROOT / file).read_text(encoding="utf-8")
    if "mark.vllm" not in code:
        return ""
    return VLLM_IN_RAY if "mark.ray" in code else VLLM
