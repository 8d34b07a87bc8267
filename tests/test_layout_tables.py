"""Tables of ranks: damaged and hostile ones are refused with typed errors, and cost no memory."""

from __future__ import annotations

import random
import tracemalloc
import zlib

import msgspec
import numpy as np
import pytest
import torch

from weightsync.errors import ConfigurationError, ManifestError, WeightSyncError
from weightsync.layout import tables
from weightsync.layout.joining import join_tables
from weightsync.layout.regions import Box
from weightsync.layout.tables import Held, HeldBox, RankTable, Storage, TableBuilder
from weightsync.tensors import TensorSpec, WeightManifest

SPECS = [
    TensorSpec("q", (8, 4), "float32"),
    TensorSpec("k", (4, 4), "float32"),
    TensorSpec("x", (3,), "int8"),
]
MANIFEST = WeightManifest.build(SPECS)


def a_table() -> RankTable:
    builder = TableBuilder(MANIFEST)
    qk = builder.add_storage("qk", (12, 4), "float32")
    builder.add("q", [HeldBox(qk, Box((0, 0), (8, 4)))])
    builder.add("k", [HeldBox(qk, Box((0, 0), (4, 4)), 32)])
    builder.need_whole("x", "it is small")
    return builder.build()


def changed(**fields) -> RankTable:
    return msgspec.structs.replace(a_table(), **fields)


def with_box(**fields) -> RankTable:
    table = a_table()
    first = msgspec.structs.replace(table.patterns[0][0], **fields)
    return changed(patterns=((first,), *table.patterns[1:]))


def test_what_is_encoded_comes_back():
    assert RankTable.decode(a_table().encode()) == a_table()


STORAGE = Storage("qk", (12, 4), "float32")
REFUSED = {
    "two storages of one name": changed(storages=(STORAGE, STORAGE)),
    "an unknown dtype": changed(storages=(Storage("qk", (12, 4), "float31"),)),
    "a storage beyond all memory": changed(storages=(Storage("qk", (2**40, 2**40), "float32"),)),
    "many storages beyond all memory": changed(
        storages=(STORAGE, *(Storage(f"s{i}", (2**53,), "float32") for i in range(9)))
    ),
    "an unknown pattern": changed(pattern_of=(0, 7, -1)),
    "fewer slots than tensors": changed(slots=((0,), (0,))),
    "an unknown storage": changed(slots=((0,), (3,), ())),
    "a storage of an absent tensor": changed(slots=((0,), (0,), (0,))),
    "no storage": changed(slots=((), (0,), ())),
    "an unknown slot": with_box(slot=1),
    "a far slot": with_box(slot=2**61),
    "a box beyond its storage": with_box(offset=17),
    "a far box": with_box(offset=2**61),
    "far strides": with_box(strides=(2**61, 2**61)),
    "sides of several lengths": with_box(hi=(8,)),
    "too few strides": with_box(strides=(1,)),
    "a box turned round": with_box(lo=(8, 0), hi=(0, 4)),
    "a box of nothing": with_box(hi=(0, 4)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_table_that_contradicts_itself_is_refused(what):
    with pytest.raises(ConfigurationError, match="damaged"):
        RankTable.decode(REFUSED[what].encode())


MISFITS = {
    "a box beyond its tensor": (with_box(hi=(12, 4)), "policy"),
    "a box of other dimensions": (with_box(lo=(0,), hi=(8,), strides=(1,)), "policy"),
    "an unknown tensor that is to be whole": (changed(whole={"y": "why not"}), "policy"),
    "fewer tensors than there are": (changed(pattern_of=(0, 1), slots=((0,), (0,))), "policy"),
    "a storage of another dtype": (changed(storages=(Storage("qk", (24, 4), "bfloat16"),)), "rollout"),
    "a box that overlaps itself": (with_box(strides=(1, 1)), "rollout"),
    "a box in one place": (with_box(strides=(0, 0)), "rollout"),
}


@pytest.mark.parametrize("what", MISFITS)
def test_a_table_that_does_not_fit_the_manifest_is_refused(what):
    table, side = MISFITS[what]
    good, bad = a_table(), RankTable.decode(table.encode())
    with pytest.raises(ConfigurationError):
        join_tables(side, MANIFEST, [good, bad])


def test_a_table_of_other_tensors_is_refused():
    with pytest.raises(ManifestError, match="other tensors"):
        join_tables("policy", WeightManifest.build(SPECS[:2]), [a_table()])


def test_what_is_cast_may_be_held_in_another_dtype():
    held = RankTable.decode(changed(storages=(Storage("qk", (12, 4), "float64"),)).encode())
    assert join_tables("policy", MANIFEST, [held]).ranks == 1


def test_ranks_that_lie_alike_are_joined_as_if_each_were_alone():
    ranks = [with_box(hi=(4 + 2 * (rank % 2), 4)) for rank in range(4)] + [changed(whole={})]
    layout = join_tables("policy", MANIFEST, ranks)
    pattern = layout.patterns[int(layout.pattern_of[0])]
    assert pattern.rank.tolist() == [0, 1, 2, 3, 4]
    assert pattern.hi[:, 0].tolist() == [4, 6, 4, 6, 8]
    assert layout.storages[0] == ("qk",)
    assert np.flatnonzero(layout.pattern_of == -1).tolist() == [2]


WRONG = [None, -1, 2**62, 2**64 - 1, 1.5, "x" * 99, b"\xff" * 9, [], [[]] * 9, {}, [0] * 70]


def mutations(count):
    rng = random.Random(7)
    data = zlib.decompress(a_table().encode())
    for _ in range(count):
        kind = rng.randrange(3)
        if kind == 0:
            yield data[: rng.randrange(len(data))]
        elif kind == 1:
            part = bytearray(data)
            for _ in range(rng.choice([1, 2, 6])):
                part[rng.randrange(len(part))] = rng.choice(
                    [0, 0x7F, 0xC0, 0xDD, 0xDF, 0xFF, rng.randrange(256)]
                )
            yield bytes(part)
        else:
            yield msgspec.msgpack.encode(confused(msgspec.msgpack.decode(data), rng))


def confused(tree, rng):
    if not isinstance(tree, (dict, list)) or not tree or rng.random() < 0.2:
        return rng.choice(WRONG)
    keys = list(tree) if isinstance(tree, dict) else range(len(tree))
    key = rng.choice(keys)
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    copy[key] = confused(tree[key], rng)
    return copy


def test_damaged_tables_are_refused_or_harmless():
    refused = 0
    for data in mutations(4000):
        try:
            table = RankTable.decode(zlib.compress(data))
            for side in ("policy", "rollout"):
                join_tables(side, MANIFEST, [table])
        except WeightSyncError as error:
            assert isinstance(error, (ConfigurationError, ManifestError))
            refused += 1
    assert refused > 3000


@pytest.mark.parametrize("claim", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"])
@pytest.mark.parametrize("name", ["storages", "patterns", "pattern_of", "slots", "whole", "manifest"])
def test_a_table_that_claims_to_be_huge_costs_nothing(name, claim):
    tracemalloc.start()
    try:
        with pytest.raises(ConfigurationError):
            RankTable.decode(zlib.compress(b"\x81" + msgspec.msgpack.encode(name) + claim))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_bytes_that_unpack_to_very_many_are_refused(monkeypatch):
    monkeypatch.setattr(tables, "MAX_TABLE_BYTES", 1 << 20)
    bomb = zlib.compress(b"\xc6\x10\x00\x00\x00" + bytes(1 << 28), 9)
    tracemalloc.start()
    try:
        with pytest.raises(ConfigurationError):
            RankTable.decode(bomb)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("data", [b"", b"x", a_table().encode()[:-3], a_table().encode() + b"x"])
def test_bytes_that_were_cut_or_added_to_are_refused(data):
    with pytest.raises(ConfigurationError, match="damaged"):
        RankTable.decode(data)


def test_the_fields_of_a_box_are_bounded():
    for value in (-1, 2**62):
        data = msgspec.msgpack.encode([[0], [value], 0, [1], 0])
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(data, type=Held)
    assert torch.iinfo(torch.int64).max > 2**62
