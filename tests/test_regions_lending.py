"""What a policy rank packs, when its shards move between refits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.region_support import manifest_of, sharded
from weightsync.engines.regions.lending import Lender
from weightsync.engines.regions.plan import RegionPlan

MIB = 1 << 20


class Transport:
    """Notes what is lent."""

    def __init__(self) -> None:
        self.lent: list[list[torch.Tensor]] = []

    def lend(self, memory: Any) -> None:
        self.lent.append(list(memory))

    def keys(self) -> bytes:
        return b"keys"


@pytest.mark.parametrize("device", ["cpu", "meta"])  # the other one: nothing can be lent, all is packed
def test_what_is_packed_is_what_the_shards_hold_now(device):
    full = {"w": torch.arange(4096, dtype=torch.float32)}
    manifest = manifest_of(full, {"w": "bfloat16"})
    policy = sharded(manifest, full, 0, 1, {})
    rollout = sharded(manifest, full, 0, 1, {}, hold=False)
    plan = RegionPlan(manifest, (policy.table,), (rollout.table,))
    lender, buffer = Lender(Transport(), policy, torch.device(device)), torch.empty(MIB, dtype=torch.uint8)

    for change in (0.0, 1.0, 2.0):
        new = full["w"] + change
        policy.flats[0] = new.clone()  # other memory, and the old goes back to the allocator
        lender.take(policy)
        (bucket,) = lender.outgoing(plan, 0, [0], MIB).buckets
        lender.pack(0, 0, bucket, buffer, plan.dtypes)

        assert lender.lent.tolist() == [device == "cpu"]
        assert torch.equal(buffer[: 4096 * 2].view(torch.bfloat16), new.to(torch.bfloat16))


def test_shards_that_stay_are_lent_and_packed_through_the_same_views():
    full = {"w": torch.arange(4096, dtype=torch.float32)}
    manifest = manifest_of(full, {"w": "bfloat16"})
    policy = sharded(manifest, full, 0, 1, {})
    plan = RegionPlan(manifest, (policy.table,), (sharded(manifest, full, 0, 1, {}, hold=False).table,))
    transport = Transport()
    lender, buffer = Lender(transport, policy, torch.device("cpu")), torch.empty(MIB, dtype=torch.uint8)
    prepared = []
    for change in (0.0, 1.0):
        policy.flats[0] += change
        lender.take(policy)
        (bucket,) = lender.outgoing(plan, 0, [0], MIB).buckets
        lender.pack(0, 0, bucket, buffer, plan.dtypes)
        prepared.append(lender.stopwatch.seconds().get("prepare", 0.0))

    assert torch.equal(buffer[: 4096 * 2].view(torch.bfloat16), (full["w"] + 1.0).to(torch.bfloat16))
    assert len(transport.lent) == 1
    assert prepared[0] == prepared[1] > 0
