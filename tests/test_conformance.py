"""Every built-in engine, and a plugin written from the design document alone, through the shipped suite.

An engine is one class here. Its first topology goes through all of `EngineConformance`, the others through
the part for which several ranks are needed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.mooncake_support import real_mooncake
from tests.plugin_example import MyCheckpointEngine
from weightsync.errors import ConfigurationError
from weightsync.testing import EngineConformance
from weightsync.testing.cases_faults import PairFaultCases, SeveralFaultCases
from weightsync.testing.cases_streams import StreamCases
from weightsync.testing.cases_topologies import TopologyCases
from weightsync.testing.conformance import TopologyConformance

PAGE = Path(__file__).parent.parent / "docs" / "plugins.md"


def fast(**settings):
    """Short deadlines on this machine's own addresses, and further settings."""
    deadlines = {"connect_s": 3.0, "stall_s": 4.0, "silence_s": 2.0}
    return {"device": "cpu", "bind_host": "127.0.0.1", **deadlines, **settings}


class Fast:
    settings = fast()
    collective_s = 0.4


@pytest.mark.nixl
class TestNixl(Fast, EngineConformance):
    engine = "nixl"


@pytest.mark.slow
@pytest.mark.nixl
class TestNixlByRegions(Fast, EngineConformance):
    """Streams that do not say where their tensors are: all go whole, as without sharding."""

    engine = "nixl"
    settings = fast(shard_weights="auto")


@pytest.mark.exhaustive
@pytest.mark.nixl
class TestNixlStar(Fast, TopologyConformance):
    engine = "nixl"
    settings = fast(topology="star")


@pytest.mark.slow
@pytest.mark.nixl
class TestNixlRing(Fast, TopologyConformance):
    engine = "nixl"
    settings = fast(topology="ring")


@pytest.mark.slow
@pytest.mark.nixl
class TestNixlTree(Fast, TopologyConformance):
    engine = "nixl"
    settings = fast(topology="tree")


@pytest.mark.slow
@pytest.mark.nixl
class TestNixlStripes(Fast, TopologyConformance):
    engine = "nixl"
    settings = fast(topology="stripes")


class TestIPC(Fast, EngineConformance):
    engine = "ipc"


@pytest.mark.exhaustive
class TestIPCStar(Fast, TopologyConformance):
    engine = "ipc"
    settings = fast(topology="star")


@pytest.mark.slow
class TestIPCStripes(Fast, TopologyConformance):
    engine = "ipc"
    settings = fast(topology="stripes")


@pytest.mark.slow
class TestGloo(Fast, EngineConformance):
    engine = "gloo"


@pytest.mark.slow
@real_mooncake
class TestMooncake(Fast, EngineConformance):
    engine = "mooncake"


@pytest.mark.exhaustive
@real_mooncake
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
class TestMooncakeStar(Fast, TopologyCases):
    engine = "mooncake"
    settings = fast(topology="star")


@real_mooncake
@pytest.mark.slow
class TestMooncakeRing(Fast, TopologyConformance):
    engine = "mooncake"
    settings = fast(topology="ring")


@pytest.mark.exhaustive
@real_mooncake
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
class TestMooncakeTree(Fast, TopologyCases):
    engine = "mooncake"
    settings = fast(topology="tree")


@real_mooncake
@pytest.mark.slow
class TestMooncakeStripes(Fast, TopologyConformance):
    engine = "mooncake"
    settings = fast(topology="stripes")


@pytest.mark.slow
@pytest.mark.nixl
class TestKimi(Fast, EngineConformance):
    engine = "kimi_ckpt_engine"


@pytest.mark.slow
class TestKimiOverIPC(Fast, EngineConformance):
    engine = "kimi_ckpt_engine"
    settings = fast(transport="ipc")


class TestNaive(Fast, EngineConformance):
    engine = "naive"


# A plugin.


class DeclaredPlugin(MyCheckpointEngine):
    """What its author adds: what it cannot do, and that it says so."""

    lacks = dict.fromkeys(
        ("processes", "hosts", "losses", "checks", "latecomers"),
        "its queues are in one process, and unchecked",
    )

    def refuses(self, *, train_world_size, rollout_world_size):
        if rollout_world_size > train_world_size:
            return "policy rank i feeds rollout rank i: use as many policy ranks"
        return None

    def init_policy_process_group(self, **place):
        self.require_fit(**place)
        super().init_policy_process_group(**place)

    def init_rollout_process_group(self, **place):
        self.require_fit(**place)
        super().init_rollout_process_group(**place)

    def require_fit(self, *, train_world_size, rollout_world_size, **_):
        reason = self.refuses(train_world_size=train_world_size, rollout_world_size=rollout_world_size)
        if reason:
            raise ConfigurationError(reason)


class TestPlugin(EngineConformance):
    engine = DeclaredPlugin
    settings = dict(transport="custom")  # noqa: C408, RUF012


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
class TestFolderEngineOfThePages(StreamCases, TopologyCases, PairFaultCases, SeveralFaultCases):
    """As it stands in docs/plugins.md."""

    engine = "folder_engine:FolderEngine"

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def module(cls, tmp_path_factory):
        folder = tmp_path_factory.mktemp("plugin")
        cls.settings = {"folder": str(folder / "refits"), "timeout_s": 2.0}
        (code,) = re.findall(r"```python\n([^`]*class FolderEngine.*?)```", PAGE.read_text(), re.DOTALL)
        (folder / "folder_engine.py").write_text(code)
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(folder))
            yield
        sys.modules.pop("folder_engine", None)
