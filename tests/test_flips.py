"""Which flipped bits are seen, and which chunks are digested."""

from __future__ import annotations

import pytest
import torch

from tests.engine_crew import MIB, Crew, assert_same, make_engine, some_weights
from weightsync.engines.ipc import IPCCheckpointEngine
from weightsync.engines.sampling import SAMPLE, ChunkChecks
from weightsync.errors import ConfigurationError, DigestError
from weightsync.tensors import TensorSpec
from weightsync.verification.flips import FlipCount, count_flips, require_all_seen

SPEC = TensorSpec("w", (10 * MIB,), "uint8")


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_of_a_thousand_flipped_bits_every_one_is_seen():
    counts = count_flips(1000, transport="ipc")
    assert [(each.place, each.flipped, each.seen) for each in counts] == [
        ("sent", 334, 334), ("received", 333, 333), ("served", 333, 333),
    ]  # fmt: skip
    require_all_seen(counts)


@pytest.mark.nixl
@pytest.mark.parametrize(("transport", "verify"), [("nixl", "full"), ("ipc", "sample"), ("ipc", "off")])
def test_what_is_seen_depends_on_the_mode(transport, verify):
    if transport == "nixl":
        pytest.importorskip("nixl")
    counts = {each.place: each for each in count_flips(36, transport=transport, verify=verify, seed=3)}
    on_the_way = counts["sent"].seen + counts["received"].seen
    assert {"full": on_the_way == 24, "sample": 0 < on_the_way < 24, "off": on_the_way == 0}[verify]
    assert counts["served"].seen == 12


def test_what_was_missed_is_an_error():
    with pytest.raises(DigestError, match="not seen: 2 of 9 sent"):
        require_all_seen([FlipCount("sent", 9, 7, 1.0), FlipCount("served", 9, 9, 1.0)])
    with pytest.raises(ConfigurationError, match="at least 3"):
        count_flips(2)
    with pytest.raises(ConfigurationError, match="moves no buckets"):
        count_flips(3, transport="naive")


def test_a_sample_has_the_first_and_the_last_chunk_and_about_one_in_sixteen():
    checks = ChunkChecks("sample")
    checks.last = 7
    chosen = {
        epoch: {
            (ordinal, offset)
            for ordinal in range(8)
            for offset in range(0, 10 * MIB, MIB // 16)
            if checks.wants(epoch, ordinal, SPEC, offset, MIB // 16)
        }
        for epoch in (1, 2)
    }
    for each in chosen.values():
        assert {(0, 0), (7, 10 * MIB - MIB // 16)} <= each
        assert 0.7 < len(each) * SAMPLE / (8 * 160) < 1.3
    assert chosen[1] != chosen[2]
    again = ChunkChecks("sample")
    again.last = 7
    assert again.wants(1, *next((o, SPEC, at) for o, at in chosen[1]), MIB // 16)


def test_modes():
    assert ChunkChecks("full").wants(1, 3, SPEC, 5, 1)
    assert not ChunkChecks("off").wants(1, 0, SPEC, 0, 1)
    cpu = torch.device("cpu")
    kinds = [ChunkChecks(mode).kind(cpu) for mode in ("full", "sample", "off")]
    assert kinds == ["xxh3-64", "xxh3-64/16", "off"]
    with pytest.raises(ConfigurationError, match="'full', 'sample' or 'off', got 'some'"):
        make_engine(engine=IPCCheckpointEngine, verify="some")


@pytest.mark.parametrize("manifest", [True, False])
@pytest.mark.parametrize("topology", ["star", "stripes"])
def test_sampled_refits_arrive(manifest, topology):
    with Crew(2, 2, engine=IPCCheckpointEngine, verify="sample", topology=topology) as crew:
        for epoch in (1, 2):
            crew.open(epoch, epoch)
            sent = some_weights(epoch)
            for received in crew.refit(sent, manifest=manifest):
                assert_same(sorted(received), sorted(sent))
        figures = crew.rollout[0].refit_stats()
        assert figures["seconds_verify"] >= 0
