"""Weight streams for property tests: every plain dtype, shape and stride, and the way through buckets."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable

import torch
from hypothesis import strategies as st

from weightsync.buckets import (
    Chunk,
    merge_weight_chunk_batches,
    place_chunks,
    split_weight_chunks,
    unpack_bucket,
)
from weightsync.tensors import dtype_from_name

DTYPE_NAMES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
    "float4_e2m1fn_x2",
)  # fmt: skip
DTYPES = tuple(dtype_from_name(name) for name in DTYPE_NAMES)
SHAPES = ((), (1,), (3,), (0,), (0, 4), (4, 0), (2, 0, 3), (3, 5), (2, 3, 4), (7, 1, 9), (33, 17))
STRIDES = ("plain", "transposed", "expanded", "stepped", "columns", "offset", "conjugated", "negated", "grad")

Named = tuple[str, torch.Tensor]


def random_tensor(dtype: torch.dtype, shape: Iterable[int], seed: int) -> torch.Tensor:
    """Return a tensor of random bytes (NaNs and subnormals included; booleans are 0 or 1)."""
    size = torch.Size(tuple(shape))
    generator = torch.Generator().manual_seed(seed)
    top = 2 if dtype is torch.bool else 256
    count = size.numel() * dtype.itemsize
    raw = torch.randint(0, top, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(size) if count else torch.empty(size, dtype=dtype)


def restride(tensor: torch.Tensor, how: str) -> torch.Tensor:
    """Return a view of ``tensor`` with another memory layout; as it is where the layout does not apply."""
    if how == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, -1)
    if how == "expanded":
        return tensor.unsqueeze(0).expand(3, *tensor.shape)
    if how == "stepped" and tensor.dim():
        return tensor[::2]
    if how == "columns" and tensor.dim() > 1:
        return tensor[..., 1:3]
    if how == "offset" and tensor.dim():
        return tensor[1:]
    if how == "conjugated" and tensor.is_complex():
        return tensor.conj()
    if how == "negated" and tensor.is_complex() and tensor.dtype is not torch.complex32:
        return tensor.conj().imag
    if how == "grad" and (tensor.dtype.is_complex or tensor.dtype in (torch.float32, torch.bfloat16)):
        return tensor.clone().requires_grad_()
    return tensor


def reference_bytes(tensor: torch.Tensor) -> bytes:
    """Return the values' bytes element by element: slow, and independent of the code under test."""
    if tensor.numel() == 0:
        return b""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype)
    plain.copy_(tensor.detach())
    return plain.view(-1).view(torch.uint8).numpy().tobytes()


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Draw a tensor of any dtype, shape and layout."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(SHAPES))
    return restride(random_tensor(dtype, shape, draw(st.integers(0, 999))), draw(st.sampled_from(STRIDES)))


@st.composite
def streams(draw: st.DrawFn, max_size: int = 8) -> list[Named]:
    """Draw a stream of uniquely named tensors."""
    names = draw(st.lists(st.text(max_size=12), unique=True, max_size=max_size))
    return [(name, draw(tensors())) for name in names]


def fill_buckets(weights: Iterable[Named], bucket_size: int) -> list[tuple[torch.Tensor, list]]:
    """Do what a sender does: split, place, and copy into buckets of real memory."""
    buckets: list[tuple[torch.Tensor, list]] = []
    for placement in place_chunks(split_weight_chunks(weights, bucket_size), bucket_size):
        if placement.bucket == len(buckets):
            buckets.append((torch.full((bucket_size,), 0xA5, dtype=torch.uint8), []))
        bucket, metas = buckets[placement.bucket]
        bucket[placement.meta.offset : placement.end].copy_(placement.data)
        metas.append(placement.meta)
    return buckets


async def batches_of(buckets: Iterable[list[Chunk]]) -> AsyncGenerator[list[Chunk], None]:
    """Yield chunk batches as a transport does."""
    for chunks in buckets:
        yield chunks


async def merged(batches: Iterable[list[Chunk]]) -> list[Named]:
    """Do what a receiver does, keeping copies of what it is handed."""
    source = batches_of(batches)
    return [
        (name, tensor.clone()) async for batch in merge_weight_chunk_batches(source) for name, tensor in batch
    ]


async def round_trip(weights: Iterable[Named], bucket_size: int) -> list[Named]:
    """Send a stream through buckets and return what arrives."""
    return await merged(unpack_bucket(bucket, metas) for bucket, metas in fill_buckets(weights, bucket_size))


def require_same(received: list[Named], sent: list[Named]) -> None:
    """Check names, order, shapes, dtypes and bytes."""
    assert [name for name, _ in received] == [name for name, _ in sent]
    for (name, got), (_, expected) in zip(received, sent, strict=True):
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype), name
        assert got.is_contiguous(), name
        assert not got.requires_grad, name
        assert reference_bytes(got) == reference_bytes(expected), name
