"""The Python in README.md and docs/ is real: it compiles, every name exists, and the plugin example runs."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from weightsync.cluster.local import LocalPolicyGroup, LocalRolloutGroup
from weightsync.config import load_refit_config
from weightsync.errors import RefitError
from weightsync.policy import PolicyCheckpointEngineMixin, weight_stream_from
from weightsync.rollout.module import ModuleRolloutWorker
from weightsync.synchronizer import CheckpointEngineWeightSynchronizer

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced code blocks of one language."""
    return re.findall(
        rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


PYTHON = [
    pytest.param(page, code, id=f"{page.name}-{number}")
    for page in PAGES
    for number, code in enumerate(blocks(page, "python"))
    if page.name != "worker-protocol.md"
]
YAML = [
    pytest.param(code, id=f"{page.name}-{number}")
    for page in PAGES
    for number, code in enumerate(blocks(page, "yaml"))
    if "refit_transport" in code
]


def test_the_readme_shows_python_and_a_configuration() -> None:
    assert len(blocks(ROOT / "README.md", "python")) == 1
    assert len(blocks(ROOT / "README.md", "yaml")) == 1


@pytest.mark.parametrize(("page", "code"), PYTHON)
def test_python_compiles_and_its_names_exist(page: Path, code: str) -> None:
    tree = ast.parse(code, page.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "weightsync":
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                assert hasattr(module, alias.name), f"{page.name}: {node.module} has no {alias.name}"


@pytest.mark.parametrize("code", YAML)
def test_configurations_are_accepted(code: str) -> None:
    load_refit_config(yaml.safe_load(code))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def model(seed: int) -> torch.nn.Module:
    """Make a small module of random values."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.BatchNorm1d(48), torch.nn.Linear(48, 8))


class Trainer(PolicyCheckpointEngineMixin):
    """A policy worker with a whole copy of the model."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.model = model(seed=1)
        self.fails = False

    def weight_stream(self) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield the weights; fail after the first where asked to."""
        for number, item in enumerate(weight_stream_from(self.model)):
            if self.fails and number == 1:
                raise ValueError("out of disk")
            yield item


@pytest.fixture
def folder_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Write the plugin of docs/plugins.md to a module; gives its class path."""
    code = next(
        each for each in blocks(ROOT / "docs" / "plugins.md", "python") if "class FolderEngine" in each
    )
    (tmp_path / "folder_engine.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "folder_engine:FolderEngine"
    sys.modules.pop("folder_engine", None)


def test_the_plugin_of_the_docs_refits(folder_engine: str, tmp_path: Path) -> None:
    settings = {
        "update_weights_bucket_memory_ratio": 0.001,
        "folder": str(tmp_path / "refit"),
        "timeout_s": 20,
    }
    generation = {
        "refit_transport": folder_engine,
        "refit_cfg": {folder_engine: {**settings, "device": "cpu"}},
    }
    config: dict[str, Any] = {"policy": {"generation": generation}}
    trainers = [Trainer(rank) for rank in range(2)]
    hosts = [ModuleRolloutWorker(model(seed=2)) for _ in range(3)]
    with CheckpointEngineWeightSynchronizer(
        LocalPolicyGroup(trainers), LocalRolloutGroup(hosts), config, progress=False
    ) as synchronizer:
        synchronizer.init_communicator()
        report = synchronizer.sync_weights()
        assert report.version == 1
        assert_same(trainers[0].model, hosts)

        trainers[0].fails = True
        with pytest.raises(RefitError, match="ValueError: out of disk"):
            synchronizer.sync_weights()

        trainers[0].fails = False
        with torch.no_grad():
            for trainer in trainers:
                trainer.model[0].weight.mul_(-2)
        synchronizer.sync_weights()
        assert_same(trainers[0].model, hosts)
        for host in hosts:
            host.require_serving()


def assert_same(trained: torch.nn.Module, hosts: list[ModuleRolloutWorker]) -> None:
    """Check every tensor of every served module."""
    for host in hosts:
        served = host.model.state_dict()
        assert all(torch.equal(served[name], tensor) for name, tensor in trained.state_dict().items())
