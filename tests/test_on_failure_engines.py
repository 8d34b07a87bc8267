"""``on_failure: continue`` and ``commit: staged`` over real engines and modules, all in this process."""

from __future__ import annotations

import threading
import time

import pytest
import torch

pytest.importorskip("nixl")

from tests.local_job import LocalJob
from tests.mooncake_support import NEEDS_MOONCAKE
from tests.test_synchronizer_nixl import Trainer, model
from weightsync.cluster.local import LocalPolicyGroup, LocalRolloutGroup
from weightsync.errors import ConfigurationError, RefitError, WorkerFencedError
from weightsync.rollout.module import ModuleLoader, ModuleRolloutWorker
from weightsync.synchronizer import CheckpointEngineWeightSynchronizer

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(120)]


class BrokenLoader(ModuleLoader):
    """Raises in its second batch, as long as it is told to."""

    breaks = False

    def begin(self):
        super().begin()
        self.batches = 0

    def load(self, batch):
        super().load(batch)
        self.batches += 1
        if self.breaks and self.batches == 2:
            raise ValueError("loader broke")


class Host(ModuleRolloutWorker):
    def __init__(self):
        super().__init__(model(9))
        self.loader = BrokenLoader(self.model)
        self._endpoint._make_loader = lambda: self.loader


@pytest.fixture
def job(request):
    """Three trainers of one model, and three modules that serve it."""
    settings = {"trainers": 3, "rollout": 3, "make_host": Host, "lifecycle": {"on_failure": "continue"}}
    with LocalJob(**settings | getattr(request, "param", {})) as made:
        yield made


ALL = [
    {"transport": "nixl", "topology": "pairs"},
    {"transport": "nixl", "topology": "ring"},
    {"transport": "nixl", "topology": "tree"},
    {"transport": "nixl", "topology": "stripes"},
    {"transport": "nixl", "topology": "star", "release_after_refit": True},
    {"transport": "gloo"},
    {"transport": "ipc", "topology": "auto"},
    {"transport": "kimi_ckpt_engine"},
]


def cases(settings, *topologies):
    """Return these settings, and those of Mooncake in some topologies."""
    each = [*settings, *({"transport": "mooncake", "topology": topology} for topology in topologies)]
    marks = {"mooncake": (pytest.mark.slow, *NEEDS_MOONCAKE)}
    return [
        pytest.param(kw, id="-".join(map(str, kw.values())), marks=marks.get(kw["transport"], ()))
        for kw in each
    ]


@pytest.mark.parametrize("job", cases(ALL, "pairs", "ring"), indirect=True)
def test_a_loader_that_breaks_costs_its_own_engine_only(job):
    job.sync()
    job.hosts[1].loader.breaks = True
    started = time.monotonic()
    report = job.sync()
    assert time.monotonic() - started < 10
    assert report.ok == (0, 2)
    assert [(each.rank, each.record.kind, each.version) for each in report.failed] == [
        (1, "ValueError", None)
    ]
    assert job.serves(0, 2)
    assert job.serves(2, 2)
    with pytest.raises(WorkerFencedError):
        job.hosts[1].require_serving()
    job.hosts[1].loader.breaks = False
    assert job.sync().failed == ()
    assert all(job.serves(rank, 3) for rank in range(3))


@pytest.fixture
def staged_job(request):
    lifecycle = {"on_failure": "fail", "commit": "staged"}
    with LocalJob(trainers=3, rollout=3, make_host=Host, lifecycle=lifecycle, **request.param) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("staged_job", cases(ALL[3:], "pairs"), indirect=True)
def test_a_staged_refit_that_fails_leaves_the_old_version_serving_without_a_pause(staged_job):
    job = staged_job
    report = job.sync()
    assert report.staged_bytes == report.bytes > 0
    assert report.paused_s < report.seconds["total"]
    assert all(job.serves(rank, 1) for rank in range(3))
    old = [{name: value.clone() for name, value in host.model.state_dict().items()} for host in job.hosts]
    pauses = []
    for host in job.hosts:
        host.control_pause = pauses.append
    job.trainers[0].break_at = 2
    with pytest.raises(RefitError, match="gather failed") as caught:
        job.sync()
    assert caught.value.serving == {0: 1, 1: 1, 2: 1}
    assert pauses == []
    for host, was in zip(job.hosts, old, strict=True):
        host.require_serving()
        assert all(torch.equal(value, was[name]) for name, value in host.model.state_dict().items())
        del host.control_pause
    job.trainers[0].break_at = None
    job.sync()
    assert all(job.serves(rank, 2) for rank in range(3))


@pytest.mark.parametrize("lifecycle", [{"on_failure": "continue"}, {"commit": "staged"}])
def test_colocated_engines_have_neither(lifecycle):
    generation = {"colocated": {"enabled": True}, "refit_transport": None, "refit_lifecycle": lifecycle}
    with pytest.raises(ConfigurationError, match="colocated"):
        CheckpointEngineWeightSynchronizer(
            LocalPolicyGroup([Trainer(model(0), 0)]),
            LocalRolloutGroup([Host()]),
            {"policy": {"generation": generation}},
        )


HASTY = {"lifecycle": {"on_failure": "continue", "connect_s": 2, "stall_s": 1.5, "silence_s": 1}}


@pytest.mark.slow
@pytest.mark.parametrize("job", [{"topology": "ring", **HASTY}], indirect=True)
def test_two_engines_that_hang_are_replaced_one_after_the_other(job):
    job.sync()
    wake = threading.Event()
    for rank in (0, 2):
        job.hosts[rank].loader.load = lambda batch: wake.wait(30)
    report = job.sync()
    assert report.ok == (1,)
    assert job.serves(1, 2)
    assert job.sync().ok == (1,)
    for rank in (2, 0):
        job.hosts[rank] = Host()
        report = job.synchronizer.replace_rollout(rank, job.hosts[rank])
        assert (report.version, report.ok) == (3, (rank,))
    assert job.sync().ok == (0, 1, 2)
    assert all(job.serves(rank, 4) for rank in range(3))
    wake.set()


@pytest.mark.parametrize("job", [{"topology": "star"}], indirect=True)
def test_an_engine_that_was_left_out_may_be_removed(job):
    job.sync()
    job.hosts[0].loader.breaks = True
    assert job.sync().ok == (1, 2)
    job.synchronizer.remove_rollout(0)
    del job.hosts[0]
    assert job.sync().ok == (0, 1)
    assert all(job.serves(rank, 3) for rank in range(2))
