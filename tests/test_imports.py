"""The rooms of the package: imports run downwards, heavy packages stay out, every module has a docstring."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import weightsync
from tests.package_code import parse_package

ROOT = Path(weightsync.__file__).parent
MODULES = {
    ".".join(("weightsync", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}
TREES = dict(parse_package())

# A module may import what has its own rank or a lower one. The longest matching prefix counts.
RANKS = {
    "weightsync.errors": 0,
    "weightsync.names": 1,
    "weightsync.entry_points": 1,
    "weightsync.class_paths": 1,
    "weightsync.signatures": 1,
    "weightsync.tensors": 1,
    "weightsync.byte_digests": 1,
    "weightsync.digests": 1,
    "weightsync.outcomes": 1,
    "weightsync.capacity": 1,
    "weightsync.config": 1,
    "weightsync.config_models": 1,
    "weightsync.config_scopes": 1,
    "weightsync.config_selection": 1,
    "weightsync.config_settings": 1,
    "weightsync.config_sharding": 1,
    "weightsync.config_source": 1,
    "weightsync.topology": 1,
    "weightsync.buckets": 2,
    "weightsync.layout": 2,
    "weightsync.cluster": 2,
    "weightsync.control": 3,
    "weightsync.engines": 4,
    "weightsync.policy": 5,
    "weightsync.rollout": 5,
    "weightsync.testing": 5,
    "weightsync.cluster.ray": 6,
    "weightsync.cluster.local": 6,
    "weightsync.cluster.private_ray": 6,
    "weightsync.attendance": 7,
    "weightsync.connection": 7,
    "weightsync.crew": 7,
    "weightsync.failures": 7,
    "weightsync.lifecycle": 7,
    "weightsync.membership": 7,
    "weightsync.report": 7,
    "weightsync.shares": 7,
    "weightsync.progress": 7,
    "weightsync.status": 7,
    "weightsync.synchronizer": 7,
    "weightsync.versions": 7,
    "weightsync.benchmarking": 8,
    "weightsync.verification": 8,
    "weightsync.drills": 8,
    "weightsync.cli": 9,
    "weightsync.__main__": 9,
}
DRIVER = 7
# These wrap a package, so importing them may import it.
ADAPTERS = (
    "weightsync.cluster.ray",
    "weightsync.benchmarking",
    "weightsync.verification",
    "weightsync.drills",
    "weightsync.rollout.vllm",
    "weightsync.testing",
    "weightsync.cli",
)
CORE = [name for name in MODULES if not name.startswith(ADAPTERS)]
HEAVY = ("ray", "vllm", "nixl", "nixl_cu12", "nixl_cu13", "transformers", "cupy", "matplotlib")


def rank(module: str) -> int:
    """Return the rank of the longest prefix of ``module`` that has one."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        known = RANKS.get(".".join(parts[:length]))
        if known is not None:
            return known
    raise AssertionError(
        f"{module} is in no room: give it a rank in this test, and a line in docs/architecture.md"
    )


def imported(name: str) -> set[str]:
    """Return the modules of this package that a module imports, wherever in it the import stands."""
    found: set[str] = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively in line {node.lineno}"
            whole = f"{node.module}."
            found |= {
                whole + alias.name if whole + alias.name in MODULES else str(node.module)
                for alias in node.names
            }
    return {each for each in found if each in MODULES and each not in (name, "weightsync")}


def at_import(name: str) -> set[str]:
    """Return the modules of this package that importing a module imports."""
    top = ast.Module(body=[], type_ignores=[])
    queue = list(TREES[name].body)
    while queue:
        node = queue.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            top.body.append(node)
        queue.extend(ast.iter_child_nodes(node))
    whole = TREES[name]
    try:
        TREES[name] = top
        return imported(name)
    finally:
        TREES[name] = whole


@pytest.mark.parametrize("name", [name for name in MODULES if name != "weightsync"])
def test_imports_run_downwards(name: str) -> None:
    upwards = sorted(each for each in imported(name) if rank(each) > rank(name))
    assert upwards == [], f"{name} (rank {rank(name)}) imports upwards"


def test_the_driver_knows_workers_by_protocol_only() -> None:
    rooms = ("engines", "policy", "rollout", "testing", "control", "cluster.ray", "cluster.local")
    concrete = tuple(f"weightsync.{room}" for room in rooms)
    for name in MODULES:
        if name != "weightsync" and rank(name) == DRIVER:
            assert sorted(each for each in imported(name) if each.startswith(concrete)) == [], name


def test_imports_have_no_cycle() -> None:
    TopologicalSorter({name: at_import(name) for name in MODULES}).prepare()


@pytest.mark.slow
def test_the_core_needs_no_heavy_package() -> None:
    code = (
        "import importlib, sys\n"
        f"for name in {CORE!r}:\n"
        "    importlib.import_module(name)\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_is_for(name: str) -> None:
    assert ast.get_docstring(TREES[name]), f"{name} has no docstring"


@pytest.mark.parametrize("name", MODULES)
def test_no_assert_no_bare_except_no_pickle(name: str) -> None:
    for node in ast.walk(TREES[name]):
        where = f"{name}, line {getattr(node, 'lineno', 0)}"
        assert not isinstance(node, ast.Assert), f"{where}: python -O would drop this check"
        assert not (isinstance(node, ast.ExceptHandler) and node.type is None), f"{where}: a bare except"
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        forbidden = {"pickle", "cloudpickle", "dill", "marshal"} & {each.split(".")[0] for each in names}
        assert not forbidden, f"{where}: {forbidden} must not cross a socket"
