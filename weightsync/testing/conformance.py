"""`EngineConformance`: the tests that any checkpoint engine is put through, built in or a plugin."""

from __future__ import annotations

import pytest

from weightsync.testing.cases_faults import PairFaultCases, SeveralFaultCases
from weightsync.testing.cases_latecomers import LatecomerCases
from weightsync.testing.cases_lifetime import LifetimeCases
from weightsync.testing.cases_processes import PairProcessCases, SeveralProcessCases
from weightsync.testing.cases_streams import StreamCases
from weightsync.testing.cases_topologies import TopologyCases


@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
class TopologyConformance(TopologyCases, SeveralFaultCases, SeveralProcessCases):
    """The part of `EngineConformance` that several ranks a side are needed for.

    For another topology of an engine that passes all of it in one.
    """


class EngineConformance(
    StreamCases, PairFaultCases, LifetimeCases, LatecomerCases, PairProcessCases, TopologyConformance
):
    """Subclass it in a test module, and pytest runs every test on your engine::

        class TestMyEngine(EngineConformance):
            engine = "my_pkg.refit:MyCheckpointEngine"
            settings = {"device": "cpu"}
            bucket_size = 1 << 20

    It uses an engine's public contract alone. Tests of what an engine cannot do by nature are skipped where
    its class declares that in `CheckpointEngine.lacks`, or its `refuses` gives a reason. Tests that take long
    are marked ``slow``: ``-m "not slow"`` leaves them out.
    """
