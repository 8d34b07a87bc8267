"""The pipeline over every topology: bytes, shares, forwarding, and failures that pass along the edges."""

from __future__ import annotations

import asyncio

import pytest
import torch

from tests.engine_crew import MIB, Crew, assert_same, collect, noise, plain, run, some_weights, stream_of
from weightsync.engines.nixl import NixlTransport
from weightsync.errors import (
    ConfigurationError,
    IncompleteStreamError,
    ManifestError,
    PeerAbortedError,
    WeightSyncError,
)

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(60)]

WIDE = ("star", "ring", "tree", "stripes")


def by_name(pairs):
    return sorted(pairs, key=lambda pair: pair[0])


def awkward() -> list[tuple[str, torch.Tensor]]:
    """Empty, tiny, exactly a bucket, more than three; strided; several dtypes."""
    return [
        ("empty", torch.empty(0, 4)),
        ("scalar", torch.tensor(3.5, dtype=torch.float64)),
        ("bucket", noise(MIB, 1)),
        ("large", noise(3 * MIB + 1, 2)),
        ("strided", noise(4096, 3).view(torch.int16).reshape(32, 64).t()),
        ("bool", noise(100, 4) > 127),
        *some_weights(count=5),
        ("last empty", torch.empty(0, dtype=torch.int8)),
    ]


@pytest.mark.parametrize("topology", WIDE)
@pytest.mark.parametrize(
    ("train", "generation"),
    [(1, 3), *(pytest.param(*each, marks=pytest.mark.slow) for each in [(2, 4), (3, 2)])],
)
def test_every_rank_gets_every_byte_in_each_of_two_refits(topology, train, generation):
    with Crew(train, generation, topology=topology) as crew:
        for manifest, sent in ((True, awkward()), (False, some_weights(count=7))):
            for received in crew.refit(sent, manifest=manifest):
                assert_same(by_name(received), by_name([(n, t.contiguous()) for n, t in sent]))


def test_ranks_forward_from_the_buffer_that_they_received_into(monkeypatch):
    published = []
    publish = NixlTransport.publish

    def watching(self, slot, nbytes):
        published.append((self, self._buffers[slot][:16].clone()))
        return publish(self, slot, nbytes)

    monkeypatch.setattr(NixlTransport, "publish", watching)
    with Crew(1, 3, topology="ring") as crew:
        crew.refit([("w", noise(MIB, 5))])
        senders = [engine._memory.require() for engine in crew.engines]
    assert [senders.index(transport) for transport, _ in published] == [0, 1, 2]
    for _, head in published:
        assert torch.equal(head, noise(MIB, 5)[:16])


def test_shares_are_balanced_by_bytes_and_cover_one_large_tensor():
    with Crew(3, 2, topology="stripes") as crew:
        crew.refit([("embedding", noise(12 * MIB, 6)), ("norm", noise(64, 7))])
        moved = [engine.refit_stats()["bytes_moved"] for engine in crew.policy]
        assert all(engine.refit_stats()["bytes"] == 12 * MIB + 64 for engine in crew.engines)
    assert sum(moved) >= 12 * MIB + 64
    assert max(moved) - min(moved) <= MIB // 3


def test_a_sender_with_another_stream_is_found_out():
    with Crew(2, 1, topology="stripes") as crew:
        weights = some_weights(count=6)
        streams = [plain(weights), plain([*weights[:-1], ("stranger", weights[-1][1])])]
        outcomes = crew.attempt(streams)
        assert all(isinstance(outcome, WeightSyncError) for outcome in outcomes)
        assert isinstance(outcomes[2], (ManifestError, IncompleteStreamError))
        promised = [stream_of(weights, manifest=True), stream_of(weights[:-1], manifest=True)]
        outcomes = crew.attempt(promised)
        assert isinstance(outcomes[2], ManifestError)
        assert "promises other weights than the others" in str(outcomes[2])
        assert_same(by_name(crew.refit(weights)[0]), by_name(weights))


@pytest.mark.parametrize("topology", WIDE)
def test_a_failure_of_any_rank_reaches_all_with_its_reason_and_the_next_refit_works(topology):
    async def fail(engine):
        received = []
        async for batch in engine.receive_weight_batches():
            received += batch
            if engine is failing:
                error = ValueError("this model does not like it")
                engine.abort_refit(error)
                raise error
        return received

    # More than all buffers on the way take, so that nobody is done before it hears of the failure.
    weights = some_weights(count=40)
    with Crew(2, 3, topology=topology) as crew:
        for failing in crew.rollout:
            outcomes = crew.attempt([plain(weights) for _ in crew.policy], fail)
            for engine, outcome in zip(crew.engines, outcomes, strict=True):
                if engine is crew.policy[1] and topology != "stripes" and outcome is None:
                    continue  # it sends nothing, and may have been through its stream before
                assert isinstance(outcome, ValueError if engine is failing else PeerAbortedError)
                assert "this model does not like it" in str(outcome)
        for received in crew.refit(some_weights()):
            assert_same(by_name(received), by_name(some_weights()))


@pytest.mark.parametrize("topology", ["ring", "tree"])
def test_a_slow_rank_slows_the_others_and_spoils_nothing(topology):
    async def slowly(engine):
        received = []
        async for batch in engine.receive_weight_batches():
            if engine is slow:
                await asyncio.sleep(0.02)
            received += [(name, tensor.clone()) for name, tensor in batch]
        return received

    with Crew(1, 3, topology=topology, poison_released=True) as crew:
        slow = crew.rollout[1]
        sent = some_weights(count=24)
        for received in crew.attempt([plain(sent)], slowly)[1:]:
            assert_same(received, sent)


def test_world_sizes_that_do_not_fit_are_refused_with_the_reason():
    with Crew(1, 1) as crew:
        reason = crew.policy[0].refuses(train_world_size=1, rollout_world_size=2)
        assert "write topology: auto" in reason
        assert crew.policy[0].refuses(train_world_size=2, rollout_world_size=1) is None
        metadata = [crew.policy[0].prepare(), crew.rollout[0].prepare(), {}]
        with pytest.raises(ConfigurationError, match="write topology: auto"):
            crew.policy[0].init_policy_process_group(
                worker_rank=0, train_world_size=1, rollout_world_size=2, metadata=metadata
            )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"topology": "mesh"},
            "nixl has no topology 'mesh'; write one of pairs, star, ring, tree, stripes, auto",
        ),
        ({"fan_out": 0}, "fan_out must be a whole number of at least 1, got 0"),
        ({"fan_out": True}, "fan_out must be"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        Crew(**settings)


def test_ranks_of_a_stripe_may_be_closed_during_a_refit():
    with Crew(2, 2, topology="stripes", stall_s=2.0) as crew:

        async def closing():
            work = asyncio.gather(
                *(engine.send_weights(plain(some_weights(count=40))) for engine in crew.policy),
                collect(crew.rollout[0]),
                stop_early(crew.rollout[1]),
                return_exceptions=True,
            )
            return await work

        async def stop_early(engine):
            batches = engine.receive_weight_batches()
            await anext(batches)
            await batches.aclose()
            return "stopped"

        outcomes = run(closing())
        assert outcomes.pop() == "stopped"
        for outcome in outcomes:
            assert isinstance(outcome, PeerAbortedError)
            assert "the consumer stopped before the end" in str(outcome)
