"""Tensors as bytes: dtype names, flat bytes, digests, manifests, and streams that know theirs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.parameter import UninitializedParameter

from tests.streams import DTYPE_NAMES, DTYPES, random_tensor, reference_bytes, tensors
from weightsync.byte_digests import _folded_digest, digest_bytes, digest_kind
from weightsync.errors import ManifestError
from weightsync.tensors import (
    TensorMeta,
    TensorSpec,
    WeightManifest,
    WeightStream,
    dtype_from_name,
    dtype_name,
    flat_bytes,
    list_names,
    plain_tensor,
    tensor_from_bytes,
)

DIGESTS = pytest.mark.parametrize("digest", [digest_bytes, _folded_digest])


def raw(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


# dtype names


@pytest.mark.parametrize("name", DTYPE_NAMES)
def test_dtype_names_round_trip(name: str) -> None:
    dtype = dtype_from_name(name)
    assert dtype_name(dtype) == name
    assert str(dtype) == f"torch.{name}"


def test_every_dtype_of_torch_with_plain_bytes_has_a_name() -> None:
    every = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    named = set(DTYPES)
    unnamed = {str(dtype) for dtype in every - named}
    assert all(name.startswith(("torch.q", "torch.bits", "torch.int", "torch.uint")) for name in unnamed), (
        unnamed
    )
    assert not {"torch.int16", "torch.uint16", "torch.int32", "torch.uint64"} & unnamed


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint4x2, torch.bits8, torch.int4])
def test_dtypes_without_plain_bytes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ManifestError, match="no plain byte layout"):
        dtype_name(dtype)


@pytest.mark.parametrize("name", ["float99", "", "torch.float32", "bits8", "Tensor", "nn"])
def test_unknown_dtype_names_are_refused(name: str) -> None:
    with pytest.raises(ManifestError, match="unknown dtype"):
        dtype_from_name(name)


# flat bytes


@given(tensors())
def test_bytes_are_the_values_whatever_the_layout(tensor: torch.Tensor) -> None:
    flat = flat_bytes(tensor)
    assert (flat.dtype, flat.dim(), flat.requires_grad) == (torch.uint8, 1, False)
    assert flat.numpy().tobytes() == reference_bytes(tensor)


@given(tensors(), st.integers(0, 16))
def test_bytes_become_the_tensor_again_at_any_address(tensor: torch.Tensor, shift: int) -> None:
    flat = flat_bytes(tensor)
    place = torch.empty(flat.numel() + shift, dtype=torch.uint8)[shift:]
    again = tensor_from_bytes(place.copy_(flat), tensor.shape, tensor.dtype)
    assert (again.shape, again.dtype) == (tensor.shape, tensor.dtype)
    assert reference_bytes(again) == reference_bytes(tensor)


def test_plain_memory_is_viewed_not_copied() -> None:
    tensor = torch.arange(6.0).view(2, 3).requires_grad_()
    assert flat_bytes(tensor).data_ptr() == tensor.data_ptr()
    assert tensor_from_bytes(flat_bytes(tensor), (2, 3), torch.float32).data_ptr() == tensor.data_ptr()


def test_an_empty_slice_at_an_odd_place_becomes_a_tensor() -> None:
    assert tensor_from_bytes(torch.zeros(9, dtype=torch.uint8)[3:3], (0, 4), torch.bfloat16).shape == (0, 4)


def test_values_stay_what_they_are_in_their_own_dtype() -> None:
    bias = torch.tensor([1.0, 1.001, 1.002])
    assert tensor_from_bytes(flat_bytes(bias), (3,), torch.float32).tolist() == bias.tolist()


def test_one_element_left_by_a_step_is_sent() -> None:
    assert flat_bytes(torch.tensor([7, 8], dtype=torch.int16)[::2]).tolist() == [7, 0]


def test_channels_last_memory_is_sent_in_row_major_order() -> None:
    tensor = torch.arange(24.0).view(1, 2, 3, 4)
    assert torch.equal(flat_bytes(tensor.contiguous(memory_format=torch.channels_last)), flat_bytes(tensor))


class Tagged(torch.Tensor):
    """A subclass without memory of its own kind, as frameworks use to tag parameters."""

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return torch.Size((99,))


def test_a_tagged_subclass_is_sent_as_the_ordinary_tensor_it_is() -> None:
    tensor = torch.arange(3.0)
    plain = plain_tensor(tensor.as_subclass(Tagged))
    assert type(plain) is torch.Tensor
    assert plain.shape == (3,)
    assert type(flat_bytes(torch.nn.Parameter(tensor))) is torch.Tensor


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.empty(3, device="meta"), "no values yet"),
        (UninitializedParameter(), "no values yet"),
        (torch.eye(3).to_sparse(), "no plain bytes"),
        ([1.0], "a list is no tensor"),
        (None, "a NoneType is no tensor"),
    ],
)
def test_what_has_no_plain_bytes_is_refused(tensor: torch.Tensor, reason: str) -> None:
    with pytest.raises(ManifestError, match=reason):
        flat_bytes(tensor)


@pytest.mark.slow
def test_a_sharded_tensor_is_refused_with_what_to_send_instead() -> None:
    # DTensor needs a process group, and that belongs into a process of its own.
    code = (
        "import tempfile, torch, torch.distributed as dist\n"
        "from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor\n"
        "from weightsync.errors import ManifestError\n"
        "from weightsync.tensors import flat_bytes\n"
        "with tempfile.NamedTemporaryFile() as store:\n"
        "    dist.init_process_group('gloo', init_method=f'file://{store.name}', rank=0, world_size=1)\n"
        "    tensor = distribute_tensor(torch.ones(4), DeviceMesh('cpu', [0]), [Shard(0)])\n"
        "    try:\n"
        "        flat_bytes(tensor)\n"
        "    except ManifestError as error:\n"
        "        print(error)\n"
        "    print(flat_bytes(tensor.full_tensor()).numel())\n"
        "    dist.destroy_process_group()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "a DTensor" in done.stdout
    assert "full_tensor()" in done.stdout
    assert done.stdout.splitlines()[-1] == "16"


@pytest.mark.parametrize(("size", "shape"), [(11, (3,)), (13, (3,)), (0, (1,)), (4, (0,)), (24, (-2, -3))])
def test_data_of_another_length_than_the_shape_is_refused(size: int, shape: tuple[int, ...]) -> None:
    with pytest.raises(ManifestError, match="cannot be a tensor of shape"):
        tensor_from_bytes(torch.zeros(size, dtype=torch.uint8), shape, torch.float32)


# digests


@DIGESTS
@given(data=st.binary(min_size=1, max_size=70), place=st.integers(0), bit=st.integers(0, 7))
def test_a_flipped_bit_shows(digest, data: bytes, place: int, bit: int) -> None:
    tensor = raw(*data)
    changed = tensor.clone()
    changed[place % len(data)] ^= 1 << bit
    assert digest(changed) != digest(tensor)


@DIGESTS
@given(data=st.binary(min_size=2, max_size=70), places=st.tuples(st.integers(0), st.integers(0)))
def test_swapped_bytes_show(digest, data: bytes, places: tuple[int, int]) -> None:
    first, second = (place % len(data) for place in places)
    swapped = list(data)
    swapped[first], swapped[second] = swapped[second], swapped[first]
    assert (digest(raw(*swapped)) == digest(raw(*data))) == (bytes(swapped) == data)


@DIGESTS
@given(st.lists(st.binary(min_size=8, max_size=8), min_size=2, max_size=8, unique=True), st.randoms())
def test_swapped_blocks_show(digest, blocks: list[bytes], random) -> None:
    shuffled = blocks.copy()
    random.shuffle(shuffled)
    same = shuffled == blocks
    assert (digest(raw(*b"".join(shuffled))) == digest(raw(*b"".join(blocks)))) == same


@DIGESTS
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 2, *[0] * 12, 2, 1], [2, 1, *[0] * 12, 1, 2]),  # two swaps that a linear sum cancels out
        ([5, 5, 5], [6, 3, 6]),
        ([0] * 8, [0] * 9),
        ([0] * 8, [0] * 16),
        ([1, *[0] * 31], [*[0] * 31, 1]),
        ([*[0] * 8, *[7] * 8], [*[7] * 8, *[0] * 8]),
        ([0, 0, 128], [128, 0, 0]),
        ([1], [1, 0]),
    ],
)
def test_moved_zeros_and_cancelling_changes_show(digest, one: list[int], other: list[int]) -> None:
    assert digest(raw(*one)) != digest(raw(*other))


@DIGESTS
@pytest.mark.parametrize("place", [0, 1, (16 << 20) - 1, 16 << 20, (16 << 20) + 8, (17 << 20) + 4])
def test_a_flipped_bit_shows_anywhere_in_large_data(digest, place: int) -> None:
    data = random_tensor(torch.uint8, ((17 << 20) + 5,), seed=1)
    before = digest(data)
    data[place] ^= 1
    assert digest(data) != before


def test_swapped_pieces_show_in_the_folded_digest() -> None:
    data = random_tensor(torch.uint8, (32 << 20,), seed=2)
    assert _folded_digest(data) != _folded_digest(data.roll(16 << 20))


@DIGESTS
@given(data=st.binary(max_size=40), shift=st.integers(0, 9))
def test_a_digest_does_not_depend_on_the_address(digest, data: bytes, shift: int) -> None:
    moved = torch.empty(len(data) + shift, dtype=torch.uint8)[shift:]
    assert digest(moved.copy_(raw(*data))) == digest(raw(*data))


@DIGESTS
def test_digests_are_unsigned_64_bit_numbers(digest) -> None:
    values = [digest(random_tensor(torch.uint8, (size,), seed=size)) for size in range(1, 60)]
    assert all(0 <= value < 1 << 64 for value in values)
    assert len(set(values)) == len(values)
    assert digest(torch.empty(0, dtype=torch.uint8)) == digest(torch.empty(0, dtype=torch.uint8))


def test_digest_kinds_say_what_can_be_compared() -> None:
    assert digest_kind(torch.device("cpu")) == "xxh3-64"
    assert digest_kind(torch.device("cuda", 0)) == digest_kind(torch.device("cuda", 1)) == "fold-64"


# descriptions


@pytest.mark.parametrize("name", DTYPE_NAMES)
def test_sizes_in_bytes(name: str) -> None:
    tensor = random_tensor(dtype_from_name(name), (3, 5), seed=0)
    spec = TensorSpec.of("w", tensor)
    assert spec == TensorSpec("w", (3, 5), name)
    assert spec.nbytes == tensor.nbytes == TensorMeta("w", tensor.shape, tensor.dtype, 0, 1).nbytes


def test_a_scalar_and_an_empty_tensor_have_their_sizes() -> None:
    assert TensorSpec("s", (), "float64").nbytes == 8
    assert TensorSpec("e", (0, 4), "float64").nbytes == 0


def test_a_meta_knows_whether_it_is_the_whole_tensor_and_its_end() -> None:
    shape = torch.Size((10,))
    chunks = [(0, 10), (0, 4), (4, 4), (8, 2)]
    metas = [TensorMeta("w", shape, torch.int8, start, size) for start, size in chunks]
    assert [meta.is_whole for meta in metas] == [True, False, False, False]
    assert [meta.is_last for meta in metas] == [True, False, False, True]
    assert TensorMeta("e", torch.Size((0,)), torch.int8, 0, 0).is_whole


NAMES = ["", "mödel.層.weight", 'quote"d', "new\nline", "nul\0", "x" * 4096, "a.b.c", "😀"]


@pytest.mark.parametrize("codec", ["msgpack", "json"])
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_manifests_survive_the_wire(codec: str, dtype: str) -> None:
    manifest = WeightManifest.build(TensorSpec(name, (2, 0, 3), dtype) for name in NAMES)
    module = getattr(msgspec, codec)
    again = module.decode(module.encode(manifest), type=WeightManifest)
    assert again == manifest
    assert again.digest() == manifest.digest()
    assert json.loads(msgspec.json.encode(manifest))["tensors"][1] == ["mödel.層.weight", [2, 0, 3], dtype]


def test_a_manifest_counts_and_names() -> None:
    manifest = WeightManifest.build([TensorSpec("b", (3,), "bfloat16"), TensorSpec("a", (2, 2), "float32")])
    assert (len(manifest), manifest.names, manifest.nbytes) == (2, ["b", "a"], 22)
    assert (len(WeightManifest.build([])), WeightManifest.build([]).nbytes) == (0, 0)


def test_a_manifest_names_what_is_repeated() -> None:
    specs = [TensorSpec(name, (1,), "float32") for name in ("a", "b", "a")]
    with pytest.raises(ManifestError, match="repeated in the weight stream: 'a'") as caught:
        WeightManifest.build(specs)
    assert caught.value.context.tensor == "a"


@pytest.mark.parametrize(
    "other",
    [
        [("b", (1,), "float32"), ("a", (2,), "float32")],
        [("a", (2,), "float32")],
        [("a", (2,), "float16"), ("b", (1,), "float32")],
        [("a", (2, 1), "float32"), ("b", (1,), "float32")],
        [("a", (1,), "float32"), ("b", (2,), "float32")],
        [("a", (2,), "float32"), ("c", (1,), "float32")],
        [("ab", (2,), "float32"), ("", (1,), "float32")],
        [],
    ],
)
def test_the_manifest_digest_is_that_of_one_layout_in_one_order(other: list[tuple]) -> None:
    one = WeightManifest.build([TensorSpec("a", (2,), "float32"), TensorSpec("b", (1,), "float32")])
    assert one.digest() != WeightManifest.build(TensorSpec(*spec) for spec in other).digest()
    assert one.digest() == WeightManifest.build(one.tensors).digest()


def test_name_lists_are_bounded() -> None:
    assert list_names(["a", "b"]) == "'a', 'b'"
    assert list_names(f"n{i}" for i in range(8)) == "'n0', 'n1', 'n2', 'n3', 'n4' and 3 more"
    assert len(list_names(["x" * 5000] * 9)) < 1000


# streams


def recorded(log: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        for name in "abc":
            log.append(name)
            yield name, torch.zeros(1)
    finally:
        log.append("closed")


EMPTY = WeightManifest.build([])


def test_a_stream_makes_one_item_at_a_time() -> None:
    log: list[str] = []
    stream = WeightStream(EMPTY, recorded(log))
    assert log == []
    assert next(stream)[0] == "a"
    assert log == ["a"]
    assert [name for name, _ in stream] == ["b", "c"]
    assert log == ["a", "b", "c", "closed"]


def test_closing_a_stream_closes_its_generator_and_ends_it() -> None:
    log: list[str] = []
    stream = WeightStream(EMPTY, recorded(log))
    next(stream)
    stream.close()
    stream.close()
    assert log == ["a", "closed"]
    assert list(stream) == []


def test_closing_a_stream_over_a_list_ends_it_too() -> None:
    stream = WeightStream(EMPTY, [("a", torch.zeros(1)), ("b", torch.zeros(1))])
    next(stream)
    stream.close()
    assert list(stream) == []


def test_throwing_into_a_stream_closes_its_generator() -> None:
    log: list[str] = []
    stream = WeightStream(EMPTY, recorded(log))
    next(stream)
    with pytest.raises(KeyError, match="stop"):
        stream.throw(KeyError("stop"))
    assert log == ["a", "closed"]


def test_an_error_of_the_source_passes_through() -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(1)
        raise ZeroDivisionError("in the middle")

    stream = WeightStream(EMPTY, broken())
    next(stream)
    with pytest.raises(ZeroDivisionError, match="in the middle"):
        next(stream)
