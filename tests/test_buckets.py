"""Split, place, unpack, merge: round trips through real buckets, and streams that are not whole."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.streams import (
    DTYPES,
    SHAPES,
    STRIDES,
    Named,
    fill_buckets,
    merged,
    random_tensor,
    reference_bytes,
    require_same,
    restride,
    round_trip,
    streams,
)
from weightsync.buckets import (
    Chunk,
    ChunkMerger,
    Placement,
    align_up,
    merge_weight_chunk_batches,
    place_chunks,
    split_weight_chunks,
    unpack_bucket,
)
from weightsync.errors import ConfigurationError, IncompleteStreamError, ManifestError
from weightsync.tensors import ALIGNMENT, TensorMeta

SIZES = st.one_of(
    st.sampled_from([1, 2, 3, 7, 64, 255, 256, 257, 511, 513, 1024, 4096]), st.integers(1, 9000)
)


def check(weights: list[Named], bucket_size: int) -> None:
    require_same(asyncio.run(round_trip(iter(weights), bucket_size)), weights)


def placements(weights: list[Named], bucket_size: int) -> list[Placement]:
    return list(place_chunks(split_weight_chunks(weights, bucket_size), bucket_size))


def chunks_of(*sizes: int, bucket_size: int = 4) -> list[Chunk]:
    """Return the chunks of ``uint8`` tensors a, b, c, ... of these sizes."""
    named = [(chr(97 + i), torch.arange(size, dtype=torch.uint8)) for i, size in enumerate(sizes)]
    return list(split_weight_chunks(named, bucket_size))


# round trips


@given(streams(), SIZES)
def test_any_stream_survives_any_bucket_size(weights: list[Named], bucket_size: int) -> None:
    check(weights, bucket_size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_in_every_shape_and_layout(dtype: torch.dtype) -> None:
    weights = [
        (f"{shape}.{how}", restride(random_tensor(dtype, shape, seed), how))
        for seed, shape in enumerate(SHAPES)
        for how in STRIDES
    ]
    for bucket_size in (1000, 1 << 20):
        check(weights, bucket_size)


@pytest.mark.parametrize("delta", [-1, 0, 1])
@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("how", STRIDES)
def test_tensors_about_a_multiple_of_the_bucket(how: str, times: int, delta: int) -> None:
    tensor = restride(random_tensor(torch.complex64, (24, 32), seed=times), how)
    size = tensor.numel() * tensor.element_size() // times + delta
    check([("before", torch.ones(3)), ("w", tensor), ("after", torch.ones(3))], size)


def test_one_bucket_of_a_thousandth_of_the_tensor() -> None:
    check([("w", random_tensor(torch.bfloat16, (512, 1024), seed=5))], 1024)


@pytest.mark.parametrize("order", [0, 1, 2])
def test_elements_straddle_cuts_in_any_order_of_dtypes(order: int) -> None:
    mixed = [(torch.float16, 3), (torch.float32, 2), (torch.float8_e4m3fn, 3), (torch.bfloat16, 5)]
    mixed += [(torch.bool, 1), (torch.int64, 1), (torch.complex128, 1), (torch.uint8, 0)]
    mixed = mixed[order:] + mixed[:order]
    weights = [(f"{i}", random_tensor(dtype, (size,), seed=i)) for i, (dtype, size) in enumerate(mixed)]
    for bucket_size in (1, 3, 5, 7, 13, 300):
        check(weights, bucket_size)


def test_views_of_one_memory_arrive_each_as_itself() -> None:
    fused = torch.arange(24.0).reshape(2, 3, 4)
    views = {"row": fused[:, 0, :], "t": fused[0].t(), "all": fused.expand(2, 2, 3, 4), "cut": fused[..., :3]}
    check(list(views.items()), 4096)
    check(list(views.items()), 10)


@pytest.mark.parametrize("bucket_size", [1, 256, 1 << 20])
@pytest.mark.parametrize("shapes", [[], [(0,)], [(0, 4), (4, 0), (2, 0, 3)]])
def test_streams_without_a_byte(shapes: list[tuple[int, ...]], bucket_size: int) -> None:
    weights = [(f"e{i}", torch.empty(shape, dtype=torch.bfloat16)) for i, shape in enumerate(shapes)]
    check(weights, bucket_size)
    assert {placement.end for placement in placements(weights, bucket_size)} <= {0}


def test_odd_names_arrive_as_they_are() -> None:
    names = ["", "mödel.層", 'quote"d', "new\nline", "nul\0", "x" * 4096, "a.b", "a.b.c", "😀"]
    check([(name, random_tensor(torch.float32, (5,), i)) for i, name in enumerate(names)], 16)


def test_ten_thousand_tiny_tensors() -> None:
    weights = [(f"layers.{i}.bias", torch.full((1 + i % 3,), i, dtype=torch.int32)) for i in range(10_000)]
    arrived = asyncio.run(round_trip(iter(weights), 1 << 20))
    assert [name for name, _ in arrived] == [name for name, _ in weights]
    assert all(torch.equal(got, sent) for (_, got), (_, sent) in zip(arrived, weights, strict=True))
    assert placements(weights, 1 << 20)[-1].bucket == 2  # 4096 of them fill a bucket


def test_a_large_tensor_among_small_ones() -> None:
    large = random_tensor(torch.float32, (1024, 1025), seed=3)
    check([("a", torch.ones(2)), ("large", large.t()), ("b", torch.ones(()))], 1 << 20)


# splitting


def test_sizes_are_taken_when_the_tensor_is_sent() -> None:
    parameter = torch.nn.Parameter(torch.empty(0))

    def weights() -> Iterator[Named]:
        parameter.data = torch.ones(5)
        yield "late", parameter

    [(meta, data)] = list(split_weight_chunks(weights(), 64))
    assert (meta.shape, meta.chunk_size, data.numel()) == ((5,), 20, 20)


def test_chunks_cover_each_tensor_once_in_order() -> None:
    metas = [meta for meta, _ in chunks_of(10, 0, 4)]
    assert [(meta.name, meta.chunk_offset, meta.chunk_size) for meta in metas] == [
        ("a", 0, 4), ("a", 4, 4), ("a", 8, 2), ("b", 0, 0), ("c", 0, 4),
    ]  # fmt: skip
    assert all(meta.offset is None for meta in metas)


def test_a_repeated_name_is_refused_by_the_sender() -> None:
    stream = split_weight_chunks([("w", torch.ones(1)), ("v", torch.ones(1)), ("w", torch.ones(1))], 64)
    assert [next(stream)[0].name, next(stream)[0].name] == ["w", "v"]
    with pytest.raises(ManifestError, match="repeats a name") as caught:
        next(stream)
    assert caught.value.context.tensor == "w"


@pytest.mark.parametrize("bad", [[1.0], torch.empty(2, device="meta"), torch.eye(2).to_sparse(), None])
def test_what_cannot_be_sent_is_named(bad: object) -> None:
    with pytest.raises(ManifestError) as caught:
        list(split_weight_chunks([("odd.weight", bad)], 64))  # type: ignore[list-item]
    assert caught.value.context.tensor == "odd.weight"


def test_a_name_must_be_a_string() -> None:
    with pytest.raises(ManifestError, match="must be a string, got 3"):
        list(split_weight_chunks([(3, torch.ones(1))], 64))  # type: ignore[list-item]


@pytest.mark.parametrize("size", [0, -1])
def test_a_bucket_of_no_bytes_is_refused(size: int) -> None:
    with pytest.raises(ConfigurationError, match="at least 1 byte"):
        list(split_weight_chunks([("w", torch.ones(1))], size))
    with pytest.raises(ConfigurationError, match="at least 1 byte"):
        list(place_chunks([], size))


# placing


@given(streams(), SIZES)
def test_places_are_aligned_apart_and_inside_their_bucket(weights: list[Named], bucket_size: int) -> None:
    bucket, fill, highest = 0, 0, -1
    for placement in placements(weights, bucket_size):
        offset, size = placement.meta.offset, placement.meta.chunk_size
        assert offset is not None
        assert 0 <= offset <= placement.end <= bucket_size
        assert placement.bucket in (bucket, bucket + 1)
        if placement.bucket != bucket:
            assert size > 0, "a chunk of no bytes opened a bucket"
            assert offset == 0
            assert align_up(fill) + size > bucket_size, "a bucket was opened although the chunk fitted"
            bucket, fill = placement.bucket, 0
        if size:
            assert offset % ALIGNMENT == 0
            assert offset >= fill
            fill, highest = placement.end, placement.bucket
    # Every bucket up to the last one carries bytes: none is opened for nothing.
    assert bucket == max(highest, 0)


def test_an_oversize_first_tensor_opens_no_empty_bucket() -> None:
    placed = placements([("w", torch.zeros(2500, dtype=torch.uint8))], 1000)
    assert [(each.bucket, each.meta.offset, each.end) for each in placed] == [
        (0, 0, 1000), (1, 0, 1000), (2, 0, 500),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "places"),
    [
        ([1000], [(0, 0)]),
        ([1, 1], [(0, 0), (0, 256)]),
        ([1, 744], [(0, 0), (0, 256)]),
        ([1, 745], [(0, 0), (1, 0)]),
        ([0, 1000, 0, 1, 0], [(0, 0), (0, 0), (0, 1000), (1, 0), (1, 256)]),
        ([769, 1], [(0, 0), (1, 0)]),
        ([256, 0, 256], [(0, 0), (0, 256), (0, 256)]),
    ],
)
def test_places_in_a_bucket_of_a_thousand_bytes(sizes: list[int], places: list[tuple[int, int]]) -> None:
    weights = [(f"{i}", torch.zeros(size, dtype=torch.uint8)) for i, size in enumerate(sizes)]
    assert [(each.bucket, each.meta.offset) for each in placements(weights, 1000)] == places


def test_a_chunk_larger_than_the_bucket_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="does not fit a bucket of 3") as caught:
        list(place_chunks(chunks_of(4, bucket_size=4), 3))
    assert caught.value.context.tensor == "a"


@pytest.mark.parametrize(("offset", "aligned"), [(0, 0), (1, 256), (255, 256), (256, 256), (257, 512)])
def test_alignment(offset: int, aligned: int) -> None:
    assert align_up(offset) == aligned


# memory


def test_the_source_is_never_run_ahead_and_nothing_is_kept() -> None:
    made: list[int] = []
    alive: list[weakref.ref[torch.UntypedStorage]] = []

    def weights() -> Iterator[Named]:
        for index in range(200):
            made.append(index)
            kept = sum(ref() is not None for ref in alive)
            assert kept == 0, f"{kept} earlier tensors are alive while tensor {index} is made"
            tensor = torch.full((64,), index, dtype=torch.int32)
            alive.append(weakref.ref(tensor.untyped_storage()))
            yield f"{index}", tensor
            del tensor

    stream = place_chunks(split_weight_chunks(weights(), 100), 100)
    assert made == []
    for placement in stream:
        assert made[-1] == int(placement.meta.name)
        assert len(made) == int(placement.meta.name) + 1
        del placement
    assert len(made) == 200


def test_bytes_in_the_making_never_exceed_a_bucket_and_the_largest_tensor() -> None:
    size = 4096
    weights = [(f"{i}", random_tensor(torch.uint8, (100 + i % 900,), i)) for i in range(1000)]
    weights.insert(500, ("large", random_tensor(torch.uint8, (10_000,), 0)))
    merger, peak = ChunkMerger(), 0
    for bucket, metas in fill_buckets(iter(weights), size):
        done = merger.feed(unpack_bucket(bucket, metas))
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for _, tensor in done
        }
        half = merger.bytes_in_the_making
        peak = max(peak, sum(storages.values()) + half)
    merger.require_complete()
    assert peak <= size + 10_000


def test_whole_tensors_are_views_of_the_bucket_and_merged_ones_own_their_memory() -> None:
    weights = [("whole", torch.ones(4)), ("cut", torch.ones(300))]
    merger, seen = ChunkMerger(), {}
    for bucket, metas in fill_buckets(weights, 1024):
        seen |= dict(merger.feed(unpack_bucket(bucket, metas)))
        bucket.fill_(0)
    assert seen["whole"].tolist() == [0.0] * 4
    assert seen["cut"].tolist() == [1.0] * 300


# unpacking


@pytest.mark.parametrize(
    ("offset", "size"), [(-1, 1), (0, 11), (10, 1), (11, 0), (0, -1), (None, 1), (2**62, 1)]
)
def test_a_chunk_outside_its_bucket_is_refused(offset: int | None, size: int) -> None:
    meta = TensorMeta("w", torch.Size((size,)) if size > 0 else torch.Size(()), torch.uint8, 0, size, offset)
    with pytest.raises(ManifestError, match="lies outside a bucket of 10 bytes") as caught:
        unpack_bucket(torch.zeros(10, dtype=torch.uint8), [meta])
    assert caught.value.context.tensor == "w"


# streams that are not what they should be


@given(streams(max_size=5), st.sampled_from([1, 5, 64, 300]), st.data())
def test_a_lost_chunk_is_never_silent(weights: list[Named], bucket_size: int, data: st.DataObject) -> None:
    chunks = list(split_weight_chunks(weights, bucket_size))
    if not chunks:
        return
    lost = data.draw(st.integers(0, len(chunks) - 1))
    rest = [each for index, each in enumerate(chunks) if index != lost]
    if chunks[lost][0].is_whole:
        assert [name for name, _ in asyncio.run(merged([rest]))] != [name for name, _ in weights]
    else:
        with pytest.raises(IncompleteStreamError):
            asyncio.run(merged([rest]))


@given(streams(max_size=5), st.sampled_from([1, 5, 64, 300]), st.data())
def test_a_repeated_chunk_is_refused(weights: list[Named], bucket_size: int, data: st.DataObject) -> None:
    chunks = list(split_weight_chunks(weights, bucket_size))
    if not chunks:
        return
    again = data.draw(st.integers(0, len(chunks) - 1))
    place = data.draw(st.integers(again, len(chunks)))
    with pytest.raises((IncompleteStreamError, ManifestError)):
        asyncio.run(merged([[*chunks[:place], chunks[again], *chunks[place:]]]))


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_stream_cut_inside_a_tensor_says_where_it_ended(cut: int) -> None:
    chunks = chunks_of(15)[:cut]
    with pytest.raises(IncompleteStreamError, match=f"ended at byte {4 * cut} of 15") as caught:
        asyncio.run(merged([chunks]))
    assert caught.value.context.tensor == "a"


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 2, 1), (2, 1, 0), (1, 2, 0), (2, 0, 1)])
def test_chunks_out_of_order_are_refused(order: tuple[int, ...]) -> None:
    chunks = chunks_of(12)
    with pytest.raises(IncompleteStreamError, match="expected"):
        asyncio.run(merged([[chunks[index] for index in order]]))


def test_a_chunk_of_another_tensor_between_two_of_one_is_refused() -> None:
    a0, a1, b0, b1 = chunks_of(8, 8)
    with pytest.raises(IncompleteStreamError, match="expected byte 4 of 'a', got byte 0 of 'b'"):
        asyncio.run(merged([[a0, b0, a1, b1]]))
    with pytest.raises(IncompleteStreamError, match="'a' ended at byte 4 of 8"):
        asyncio.run(merged([[a0, b1]]))


@pytest.mark.parametrize(
    "change",
    [{"name": "z"}, {"dtype": torch.int8}, {"shape": torch.Size((2, 4))}, {"shape": torch.Size((9,))}],
)
def test_a_chunk_with_another_description_is_refused(change: dict) -> None:
    (first, data), (second, rest) = chunks_of(8)
    with pytest.raises(IncompleteStreamError):
        asyncio.run(merged([[(first, data), (replace(second, **change), rest)]]))


@pytest.mark.parametrize(
    "change",
    [
        {"chunk_size": 3},
        {"chunk_size": 5},
        {"chunk_offset": -4},
        {"chunk_offset": 6},
        {"shape": torch.Size((3,))},
        {"shape": torch.Size((0,))},
    ],
)
def test_a_description_that_does_not_fit_its_bytes_is_refused(change: dict) -> None:
    [(meta, data)] = chunks_of(4)
    with pytest.raises((IncompleteStreamError, ManifestError)):
        asyncio.run(merged([[(replace(meta, **change), data)]]))


def test_a_chunk_of_no_bytes_belongs_to_an_empty_tensor_only() -> None:
    nothing = torch.empty(0, dtype=torch.uint8)
    meta = TensorMeta("w", torch.Size((4,)), torch.uint8, 0, 0)
    with pytest.raises(IncompleteStreamError, match="does not match its description"):
        ChunkMerger().feed([(meta, nothing)])


def test_an_impossible_shape_is_refused() -> None:
    meta = TensorMeta("w", (-2, -2), torch.uint8, 0, 4)  # type: ignore[arg-type]
    with pytest.raises(ManifestError, match=r"\[-2, -2\] is no shape"):
        ChunkMerger().feed([(meta, torch.zeros(4, dtype=torch.uint8))])


def test_a_repeated_name_is_refused_by_the_receiver() -> None:
    chunk = chunks_of(4)
    merger = ChunkMerger()
    merger.feed(chunk)
    with pytest.raises(ManifestError, match="repeats a name") as caught:
        merger.feed(chunk)
    assert caught.value.context.tensor == "a"


def test_a_batch_without_a_complete_tensor_is_not_passed_on() -> None:
    async def counts() -> list[int]:
        async def source() -> AsyncGenerator[list[Chunk], None]:
            for chunk in chunks_of(12, 4):
                yield [chunk]

        return [len(batch) async for batch in merge_weight_chunk_batches(source())]

    assert asyncio.run(counts()) == [1, 1]


def test_batches_are_merged_as_they_come_and_closing_closes_the_source() -> None:
    log: list[object] = []

    async def source() -> AsyncGenerator[list[Chunk], None]:
        try:
            for chunk in chunks_of(4, 4, 4):
                log.append(chunk[0].name)
                yield [chunk]
        finally:
            log.append("closed")

    async def take_one() -> None:
        stream = merge_weight_chunk_batches(source())
        batch = await anext(stream)
        assert [name for name, _ in batch] == ["a"]
        assert log == ["a"]
        await stream.aclose()
        assert log == ["a", "closed"]

    asyncio.run(take_one())


def test_an_error_of_the_source_passes_through() -> None:
    async def source() -> AsyncGenerator[list[Chunk], None]:
        yield chunks_of(4)
        raise ZeroDivisionError("in the middle")

    async def consume() -> None:
        async for _ in merge_weight_chunk_batches(source()):
            pass

    with pytest.raises(ZeroDivisionError, match="in the middle"):
        asyncio.run(consume())


def test_bytes_are_compared_so_that_nan_is_equal_to_itself() -> None:
    nan = torch.tensor([float("nan"), -float("nan"), float("inf")], dtype=torch.bfloat16)
    [(_, arrived)] = asyncio.run(round_trip([("w", nan)], 4))
    assert reference_bytes(arrived) == reference_bytes(nan)
