"""How pytest-xdist spreads the tests over its workers: what stays together, and what comes first."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).parent.parent
VLLM = "vLLM"
LONGEST = (
    "test_rollout_vllm",
    "test_verify",
    "test_demo_run",
    "test_colocated",
    "test_ipc_vllm",
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
    "test_engine_kimi",
)
"""Files that begin first, so that no worker is left with a long one at the end."""


class Scheduling(LoadScopeScheduling):
    """The tests of a class, or of a file outside of classes, share fixtures and stay in one worker.

    Those that start a real vLLM stay in one together: each takes all cores, and gigabytes.
    """

    def _split_scope(self, nodeid: str) -> str:
        file, *within = nodeid.partition("[")[0].split("::")
        return VLLM if _starts_vllm(file) else "::".join((file, *within[:-1]))


def longest_first(path: Path) -> int:
    """Return a key that sorts the tests of files."""
    return LONGEST.index(path.stem) if path.stem in LONGEST else len(LONGEST)


@cache
def _starts_vllm(file: str) -> bool:
    return "mark.vllm" in (ROOT / file).read_text(encoding="utf-8")
