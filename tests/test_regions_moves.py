"""Refits by regions of weights that move to other memory while engines come and go."""

from __future__ import annotations

import pytest

pytest.importorskip("nixl")

from tests.local_job import LocalJob

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(60)]


def move(model):
    """Give all weights other memory, as an offload and its return do; returns the old, lest it be reused."""
    old = [parameter.data for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return old


@pytest.mark.slow
def test_weights_that_have_moved_are_found_also_after_engines_have_come_and_gone():
    with LocalJob(rollout=2, shard_weights="all", topology="auto") as job:
        job.sync()
        kept = [move(job.trained)]
        job.sync()
        assert job.all_serve(2)
        assert job.add().copies["whole"] == 0
        assert job.all_serve(2)
        job.sync()
        assert job.all_serve(3)
        kept.append(move(job.trained))
        job.add()
        job.remove(0)  # two changes, and no refit between them for those that stay
        report = job.sync()
        assert job.all_serve(4)
        assert set(report.bytes_by_rank.values()) == {9_212_000}
        assert len(kept) == 2
