"""Refits by regions that go wrong, through real NIXL engines: typed errors, and then a good refit."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest
import torch

from tests.engine_crew import make_engine
from tests.region_support import Regions, Stream, manifest_of, sharded, take
from weightsync.engines.base import ParameterBatch
from weightsync.engines.nixl_agent import NixlRead
from weightsync.engines.regions.lending import Lender
from weightsync.engines.regions.receiver import RegionReceiver
from weightsync.engines.regions.sender import RegionSender
from weightsync.errors import (
    DigestError,
    LifecycleError,
    ManifestError,
    PeerAbortedError,
    ProtocolError,
    TransportError,
    WeightSyncError,
)

pytestmark = pytest.mark.nixl

DIMS = {"a": 0, "b": 1, "c": None}
SHAPES = {"a": (96, 64), "b": (64, 96), "c": (64,)}


def some(seed=0, dtype=torch.float32, shapes=SHAPES):
    make = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=make).to(dtype) for name, shape in shapes.items()}


def crew(policy=1, rollout=2, *, packed=False, in_place=True, shapes=SHAPES, dims=DIMS, **settings):
    """Engines whose rows are lent, or all packed: what is cast on its way is."""
    full = some(shapes=shapes)
    manifest = manifest_of(full, dict.fromkeys(full, "bfloat16") if packed else {})
    dims_held = dict.fromkeys(shapes, 0)
    senders = [sharded(manifest, full, r, policy, dims_held) for r in range(policy)]
    served = {name: t.to(torch.bfloat16) if packed else t for name, t in full.items()}
    receivers = [
        sharded(manifest, served, r, rollout, dims, hold=False, in_place=in_place) for r in range(rollout)
    ]
    made = Regions(senders, receivers, **settings)
    made.full = full
    return made


def set_weights(made, full):
    for rank, memory in enumerate(made.memories[0]):
        want = sharded(memory.manifest, full, rank, len(made.policy), dict.fromkeys(full, 0))
        for flat, new in zip(memory.flats, want.flats, strict=True):
            flat.copy_(new)


def check_good_refit(made, seed=5, dims=DIMS, ranks=None):
    """The next refit works, with other values."""
    manifest = made.memories[0][0].manifest
    full = some(seed, shapes={spec.name: spec.shape for spec in manifest.tensors})
    set_weights(made, full)
    made.refit(full)
    check_served(made, full, dims, ranks)


def check_served(made, full, dims=DIMS, ranks=None):
    manifest = made.memories[0][0].manifest
    for rank in range(len(made.rollout)) if ranks is None else ranks:
        memory = made.memories[1][rank]
        want = sharded(manifest, full, rank, len(made.rollout), dims)
        for index, storage in enumerate(memory.table.storages):
            expected = want.flats[index].view(storage.shape)
            assert torch.equal(memory.served(index), expected.to(memory.served(index).dtype)), storage.name


def all_failed(outcomes, kind, where):
    """Every rank has a typed error; those in ``where`` of this kind. Returns the first of those."""
    assert all(isinstance(each, WeightSyncError) for each in outcomes), outcomes
    found = [outcomes[index] for index in where]
    assert all(isinstance(each, kind) for each in found), found
    return found[0]


# What comes damaged.


def flip(flat):
    data = flat.view(torch.uint8)
    data[3] ^= 1


def test_a_lent_byte_that_changes_is_found(monkeypatch):
    original = RegionSender._digests_of

    def changed(self, *args):
        values = original(self, *args)
        values[0] ^= 1
        return values

    with crew(rollout=1) as made:
        monkeypatch.setattr(RegionSender, "_digests_of", changed)
        error = all_failed(made.attempt(made.full), DigestError, [1])
        assert error.context.tensor in SHAPES
        monkeypatch.undo()
        check_good_refit(made)


def test_a_packed_byte_that_changes_is_found(monkeypatch):
    original = RegionSender._messages

    def changed(self, seq, slot, bucket):
        messages = original(self, seq, slot, bucket)
        flip(self._buffers[slot])
        return messages

    with crew(packed=True) as made:
        monkeypatch.setattr(RegionSender, "_messages", changed)
        outcomes = made.attempt(made.full)
        assert any(isinstance(each, DigestError) for each in outcomes[1:]), outcomes
        assert isinstance(outcomes[0], WeightSyncError)
        monkeypatch.undo()
        check_good_refit(made)


def test_a_byte_that_changes_in_the_receivers_memory_is_found(monkeypatch):
    original = RegionReceiver._fetch

    def changed(self, incoming, number, place):
        original(self, incoming, number, place)
        flip(self._borrower._flats[0])

    with crew(rollout=1) as made:
        monkeypatch.setattr(RegionReceiver, "_fetch", changed)
        error = all_failed(made.attempt(made.full), DigestError, [1])
        assert error.context.tensor == made.memories[1][0].table.storages[0].name
        monkeypatch.undo()
        check_good_refit(made)


# What a sender should not say.


def with_offset(message, value):
    offsets = np.frombuffer(message.offsets, np.int64).copy()
    offsets[-1] = value
    return msgspec.structs.replace(message, offsets=offsets.tobytes())


FORGED = {
    "an offset far outside": lambda m: with_offset(m, 2**63 - 1),
    "an offset just outside": lambda m: with_offset(m, m.nbytes - 1),
    "a negative offset": lambda m: with_offset(m, -256),
    "an unknown buffer": lambda m: msgspec.structs.replace(m, slot=7),
    "more bytes than a buffer has": lambda m: msgspec.structs.replace(m, nbytes=1 << 40),
    "rows out of order": lambda m: msgspec.structs.replace(m, first=m.first + 1),
    "more rows than are read": lambda m: msgspec.structs.replace(
        m, offsets=m.offsets + m.offsets[-8:], digests=m.digests + m.digests[-8:]
    ),
    "fewer digests than rows": lambda m: msgspec.structs.replace(m, digests=m.digests[:-8]),
    "half a row": lambda m: msgspec.structs.replace(m, offsets=m.offsets[:-1]),
    "no rows": lambda m: msgspec.structs.replace(m, offsets=b"", digests=b""),
}


@pytest.mark.slow
def test_buckets_that_cannot_be_are_refused(monkeypatch):
    original = RegionSender._messages

    with crew(packed=True, rollout=1, verify="off") as made:
        for seed, (what, forge) in enumerate(FORGED.items()):

            def forged(self, seq, slot, bucket, forge=forge):
                return {t: forge(m) for t, m in original(self, seq, slot, bucket).items()}

            with monkeypatch.context() as patch:
                patch.setattr(RegionSender, "_messages", forged)
                outcomes = made.attempt(made.full)
            assert isinstance(outcomes[1], ProtocolError), (what, outcomes)
            assert isinstance(outcomes[0], PeerAbortedError), (what, outcomes)
            check_good_refit(made, seed)


def test_more_digests_than_rows_are_refused(monkeypatch):
    original = RegionSender._digests_of

    with crew(rollout=1) as made:
        monkeypatch.setattr(
            RegionSender, "_digests_of", lambda *a: np.append(original(*a), np.zeros(9, np.uint64))
        )
        all_failed(made.attempt(made.full), ProtocolError, [1])
        monkeypatch.undo()
        check_good_refit(made)


# Memory that moves, and connections that break.


def moved(memory):
    memory.flats = [flat.clone() for flat in memory.flats]


def test_shards_that_move_are_found_again_after_a_broken_read_and_by_a_newcomer(monkeypatch):
    with crew() as made:
        made.refit(made.full)
        moved(made.memories[0][0])
        check_good_refit(made, 1)
        original = NixlRead.has_ended

        def broken(self):
            raise TransportError("the link is down")

        monkeypatch.setattr(NixlRead, "has_ended", broken)
        all_failed(made.attempt(made.full), TransportError, [1])
        monkeypatch.setattr(NixlRead, "has_ended", original)
        check_good_refit(made, 2)
        made.rollout[1].close()
        made.rollout[1] = make_engine(1 << 20, shard_weights="auto", topology="auto")
        made.rollout[1].use_memory(made.memories[1][1])
        update(made, 1)
        check_good_refit(made, 3)


def update(made, new):
    """A rollout rank is replaced by another process; all others keep what they have."""
    entries = [engine._session.own.to_dict() for engine in made.policy]
    entries += [
        engine.prepare() if rank == new else engine._session.own.to_dict()
        for rank, engine in enumerate(made.rollout)
    ]
    worlds = {
        "train_world_size": len(made.policy), "rollout_world_size": len(made.rollout), "metadata": entries,
    }  # fmt: skip
    for rank, engine in enumerate(made.policy):
        engine.update_process_group(rank=rank, **worlds)
    for rank, engine in enumerate(made.rollout):
        if rank == new:
            engine.init_rollout_process_group(rollout_rank=rank, **worlds)
        else:
            engine.update_process_group(rank=rank, **worlds)


def test_shards_that_move_there_and_back():
    with crew(rollout=1) as made:
        first = list(made.memories[0][0].flats)
        made.refit(made.full)
        moved(made.memories[0][0])
        check_good_refit(made, 1)
        made.memories[0][0].flats = first
        check_good_refit(made, 2)


def test_storages_that_share_memory():
    """Tied weights, and views that overlap: registered once, or NIXL crashes."""
    full = some(shapes={"embed": (64, 32), "head": (64, 32), "part": (16, 32)})
    full |= {"head": full["embed"].clone(), "part": full["embed"][8:24].clone()}
    manifest = manifest_of(full)
    policy, rollout = [[sharded(manifest, full, 0, 1, {}, hold=hold)] for hold in (True, False)]
    for (memory,) in (policy, rollout):
        whole = memory.flats[0]
        memory.flats[1:] = whole, whole[8 * 32 : 24 * 32]
    with Regions(policy, rollout) as made:
        made.refit(full)
        assert torch.equal(rollout[0].flats[0].view(64, 32), full["embed"])
        for memories in made.memories:
            memories[0].flats = [flat.clone() for flat in memories[0].flats]
        made.refit(full)
        assert torch.equal(rollout[0].flats[1].view(64, 32), full["embed"])


@pytest.mark.parametrize("side", [0, 1])
def test_memory_of_another_size_is_refused_before_anything_is_written(side):
    with crew(rollout=1) as made:
        memory = made.memories[side][0]
        whole = memory.flats[0]
        memory.flats[0] = whole[:-1].clone()
        served = [flat.clone() for flat in made.memories[1][0].flats]
        all_failed(made.attempt(made.full), ManifestError, [side])
        assert all(map(torch.equal, served, made.memories[1][0].flats))
        memory.flats[0] = whole
        check_good_refit(made)


def test_other_tensors_than_were_told_of_are_refused():
    with crew(rollout=1) as made:
        memory = made.memories[0][0]
        table = memory.table
        memory.table = msgspec.structs.replace(table, manifest="00" * 16)
        all_failed(made.attempt(made.full), ManifestError, [0])
        memory.table = table
        check_good_refit(made)


@pytest.mark.slow
@pytest.mark.parametrize("alone", [False, True])
def test_a_policy_rank_that_fails_before_tensors_go_whole(monkeypatch, alone):
    """Also one that no rank reads regions of: the others wait for it, in step."""
    full = some()
    manifest = manifest_of(full)
    regions = {name: each for name, each in full.items() if name != "c"}
    policy = [sharded(manifest, full, r, 2, {"a": 0, "b": 0}, whole=("c",)) for r in range(2)]
    if alone:
        policy = [sharded(manifest, each, 0, 1, {}, whole=("c",)) for each in (regions, {})]
    rollout = [sharded(manifest, full, r, 2, DIMS, whole=("c",), hold=False) for r in range(2)]
    original = Lender.take

    def fails(self, memory):
        if memory is policy[1]:
            raise LifecycleError("the weights are gone")
        return original(self, memory)

    with Regions(policy, rollout) as made:
        monkeypatch.setattr(Lender, "take", fails)
        outcomes = made.attempt(full)
        assert all(isinstance(each, WeightSyncError) for each in outcomes), outcomes
        assert all("the weights are gone" in str(each) for each in outcomes), outcomes
        monkeypatch.undo()
        got = made.refit(full)
        assert all(torch.equal(each["c"], full["c"]) for each in got)


@pytest.mark.slow
def test_rollout_ranks_that_come_and_go():
    dims = dict.fromkeys(SHAPES)
    with crew(policy=2, rollout=1, dims=dims) as made:
        made.refit(made.full)
        manifest = made.memories[0][0].manifest
        for seed in range(2):
            joined = make_engine(1 << 20, shard_weights="auto", topology="auto")
            made.rollout.append(joined)
            made.memories[1].append(sharded(manifest, made.full, 0, 1, dims, hold=False))
            joined.use_memory(made.memories[1][1])
            update(made, 1)
            check_good_refit(made, 2 * seed + 1, dims)
            made.rollout.pop().close()
            made.memories[1].pop()
            update(made, None)
            check_good_refit(made, 2 * seed + 2, dims)


# The consumer.


def test_large_parameters_are_not_overwritten_while_they_are_looked_at():
    shapes = {f"w{i}": (520 + i, 1024) for i in range(3)}
    dims = dict.fromkeys(shapes)

    async def slowly(engine, memory):
        async for batch in engine.receive_weight_batches():
            await asyncio.sleep(0.2)
            memory.handed |= {name: tensor.clone() for name, tensor in batch}

    with crew(rollout=1, in_place=False, shapes=shapes, dims=dims) as made:
        made.refit(made.full, receive=slowly)
        check_served(made, made.full, dims)


@pytest.mark.slow
def test_a_reader_that_goes_on_is_not_given_up_however_long_it_takes_in_all():
    shapes = {f"w{i}": (500, 1024) for i in range(5)}
    dims = dict.fromkeys(shapes)

    async def slowly(engine, memory):
        async for batch in engine.receive_weight_batches():
            await asyncio.sleep(0.4)
            memory.handed |= {name: tensor.clone() for name, tensor in batch}

    with crew(rollout=1, in_place=False, shapes=shapes, dims=dims, stall_s=1.0) as made:
        made.refit(made.full, receive=slowly)  # one batch a tensor: twice as long as anybody may be silent
        check_served(made, made.full, dims)


@pytest.mark.slow
def test_buckets_smaller_than_a_row_and_rows_that_two_ranks_get():
    shapes = {"big": (3000, 300), "c": (70_000,), "d": (70_001,)}
    dims = dict.fromkeys(shapes)
    with crew(rollout=2, packed=True, in_place=False, shapes=shapes, dims=dims) as made:
        made.refit(made.full)
        check_served(made, made.full, dims)
        packed = sum(each.numel() for each in made.full.values()) * 2
        assert made.policy[0].refit_stats()["bytes_packed"] < packed + 4096


@pytest.mark.slow
def test_a_consumer_that_fails_in_the_middle():
    shapes = {f"w{i}": (300, 1024) for i in range(6)}
    dims = dict.fromkeys(shapes)

    async def fails(engine, memory):
        batches = engine.receive_weight_batches()
        try:
            async for batch in batches:
                assert isinstance(batch, ParameterBatch)
                raise ValueError("the load failed")
        except ValueError as error:
            engine.abort_refit(error)
            raise
        finally:
            await batches.aclose()

    with crew(policy=2, rollout=1, in_place=False, packed=True, shapes=shapes, dims=dims) as made:
        sent, other, received = made.attempt(made.full, receive=fails)
        assert isinstance(received, ValueError)
        for each in (sent, other):
            assert isinstance(each, WeightSyncError)
            assert "the load failed" in str(each)
        check_good_refit(made, dims=dims)


def test_released_parameters_are_poisoned():
    kept = []

    async def keeps(engine, memory):
        async for batch in engine.receive_weight_batches():
            kept.extend(tensor for _, tensor in batch)

    with crew(rollout=1, in_place=False, poison_released=True) as made:
        made.refit(made.full, receive=keeps)
        assert len(kept) == 3
        assert all(torch.isnan(each).all() for each in kept)
        check_good_refit(made)


@pytest.mark.slow
def test_a_consumer_may_take_longer_for_all_than_for_each_batch():
    shapes = {f"w{i}": (500, 512) for i in range(6)}
    dims = dict.fromkeys(shapes)

    async def slowly(engine, memory):
        async for batch in engine.receive_weight_batches():
            memory.handed |= {name: tensor.clone() for name, tensor in batch}
            await asyncio.sleep(0.6)

    with crew(rollout=1, in_place=False, shapes=shapes, dims=dims, stall_s=1.2) as made:
        made.refit(made.full, receive=slowly)
        check_served(made, made.full, dims)


# The lifecycle.


@pytest.mark.slow
def test_some_receivers_only():
    with crew(rollout=3) as made:
        for engine in (*made.policy, made.rollout[0], made.rollout[2]):
            engine.open_refit(epoch=1, version=1, receivers=[0, 2])

        async def work():
            memory = made.memories
            sends = [
                e.send_weights(Stream(m.manifest, made.full, m))
                for e, m in zip(made.policy, memory[0], strict=True)
            ]
            return await asyncio.gather(*sends, *(take(made.rollout[r], memory[1][r]) for r in (0, 2)))

        asyncio.run(asyncio.wait_for(work(), 20))
        check_served(made, made.full, ranks=(0, 2))
        assert not any(flat.any() for flat in made.memories[1][1].flats)
        for engine in (*made.policy, *made.rollout):
            engine.open_refit(epoch=2, version=2)
        check_good_refit(made)


@pytest.mark.slow
@pytest.mark.parametrize("between", ["prepare twice", "release_after_refit"])
def test_engines_are_prepared_again(between):
    with crew(release_after_refit=between == "release_after_refit") as made:
        made.refit(made.full)
        for engine in (*made.policy, *made.rollout):
            engine.finalize()
            if between == "prepare twice":
                engine.prepare()
        moved(made.memories[0][0])
        made.connect()
        check_good_refit(made)


@pytest.mark.slow
def test_a_policy_rank_that_is_closed_in_the_middle(monkeypatch):
    original = Lender.pack

    def closes(self, *args):
        raise LifecycleError("the engine was closed during a refit")

    with crew(packed=True) as made:
        monkeypatch.setattr(Lender, "pack", closes)
        outcomes = made.attempt(made.full)
        error = all_failed(outcomes, LifecycleError, [0])
        assert "closed" in str(error)
        assert all("closed" in str(each) for each in outcomes[1:])
        monkeypatch.setattr(Lender, "pack", original)
        check_good_refit(made)


@pytest.mark.slow
def test_ranks_that_have_nothing_take_part():
    full = some()
    manifest = manifest_of(full)
    policy = [sharded(manifest, full, 0, 1, DIMS), sharded(manifest, {}, 1, 1, DIMS)]
    rollout = [sharded(manifest, full, 0, 1, DIMS, hold=False), sharded(manifest, {}, 1, 1, DIMS)]
    with Regions(policy, rollout) as made:
        made.refit(full)
        for index, storage in enumerate(rollout[0].table.storages):
            assert torch.equal(rollout[0].served(index), full[storage.name])


def test_one_that_never_asks_again_is_left_behind():
    async def stops(engine, memory):
        async for _ in engine.receive_weight_batches():
            break

    with crew(rollout=1) as made:
        sent, _ = made.attempt(made.full, receive=stops)
        assert isinstance(sent, PeerAbortedError)
        assert "stopped before the end" in str(sent)
        check_good_refit(made)
