"""Seeded weight streams for tests of engines: every kind that has ever been dropped, cut or turned round.

Each function takes the bucket's size in bytes and a seed, and returns ``(name, tensor)`` pairs with unique
names. The same arguments give the same bytes, so that two processes can agree on a stream by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

import torch

Pairs = list[tuple[str, torch.Tensor]]

DTYPE_NAMES = (
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16",
    "float32", "float64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
    "float8_e8m0fnu", "float4_e2m1fn_x2", "complex32", "complex64", "complex128",
)  # fmt: skip
"""Every dtype with plain bytes; those that this torch lacks are left out of the streams."""


@lru_cache(maxsize=4)
def make_stream(kind: str, bucket_size: int, seed: int) -> tuple[tuple[str, torch.Tensor], ...]:
    """Return a stream of `STREAMS`. It is kept for the next caller, who must not change it.

    Args:
        kind: one of `STREAMS`.
        bucket_size: bytes; the stream's sizes are chosen around it.
        seed: of its values. ``mixed`` also takes its names and shapes from it.
    """
    return tuple(STREAMS[kind](bucket_size, seed))


def noise(nbytes: int, seed: int) -> torch.Tensor:
    """Return random bytes, shape ``(nbytes,)``, uint8."""
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def of_dtype(dtype: torch.dtype, shape: Iterable[int], seed: int) -> torch.Tensor:
    """Return a tensor of random bytes: NaNs, infinities and subnormals included; booleans are 0 or 1."""
    size = torch.Size(tuple(shape))
    data = noise(size.numel() * dtype.itemsize, seed)
    return (data % 2 if dtype is torch.bool else data).view(dtype).view(size)


def _plain(bucket: int, seed: int) -> Pairs:
    rows = bucket // 2048
    return [(f"layers.{i}.weight", of_dtype(torch.bfloat16, (rows, 256), seed * 100 + i)) for i in range(12)]


def _layouts(bucket: int, seed: int) -> Pairs:
    block = of_dtype(torch.float32, (2, 3, 4), seed)
    wide = of_dtype(torch.float32, (bucket // 4096, 1300), seed + 1)
    matrix = of_dtype(torch.bfloat16, (60, 100), seed + 2)
    return [
        ("middle", block[:, 0, :]),
        ("transposed", matrix.t()),
        ("expanded", matrix[:, :1].expand(60, 33)),
        ("expanded scalar", block[0, 0, 0].expand(3, 4)),
        ("column slice", matrix[:, :3]),
        ("stepped", of_dtype(torch.int64, (99,), seed + 3)[1::2]),
        ("permuted", block.permute(2, 1, 0)),
        ("offset by one byte", noise(1001, seed + 4)[1:]),
        ("transposed, larger than a bucket", wide.t()),
        ("stepped, of a larger one", wide[:, ::2]),
        ("channels last", of_dtype(torch.float16, (2, 3, 8, 8), seed).to(memory_format=torch.channels_last)),
        ("parameter", torch.nn.Parameter(torch.rand(5, 5, generator=torch.Generator().manual_seed(seed)))),
    ]


def _lazy_bits(bucket: int, seed: int) -> Pairs:
    numbers = of_dtype(torch.complex64, (bucket // 16, 3), seed)
    small = of_dtype(torch.complex128, (7,), seed + 1)
    return [
        ("conjugated", numbers.conj()),
        ("conjugated and transposed", numbers.conj().t()),
        ("negated", numbers.conj().imag),
        ("conjugated, small", small.conj()),
        ("negated, small", small.conj().imag[::2]),
        ("complex", small),
    ]


def _scalars(bucket: int, seed: int) -> Pairs:
    return [
        ("scalar", of_dtype(torch.float32, (), seed)),
        ("empty", torch.empty(0)),
        ("no rows", torch.empty(0, 4, dtype=torch.bfloat16)),
        ("one byte", torch.tensor([True])),
        ("no columns", torch.empty(4, 0, dtype=torch.int64)),
        ("empty slice", of_dtype(torch.bfloat16, (9,), seed)[3:3]),
        ("scalar at the end", of_dtype(torch.int64, (), seed + 1)),
    ]


def _dtypes(bucket: int, seed: int) -> Pairs:
    found = [(name, getattr(torch, name)) for name in DTYPE_NAMES if hasattr(torch, name)]
    # Twice: from the narrow to the wide, then narrow and wide in turn, with odd counts, so that every
    # dtype comes after one that leaves it misaligned.
    turns = [pair for both in zip(found, reversed(found), strict=True) for pair in both]
    return [
        (f"{i}.{name}", of_dtype(dtype, (3 + i % 7,), seed + i))
        for i, (name, dtype) in enumerate([*found, *turns])
    ]


def _oversize(bucket: int, seed: int) -> Pairs:
    sizes = (3 * bucket + 1, 1, bucket, bucket - 1, 2, bucket + 1, 255, 3 * bucket, 257, 0, 256)
    return [(f"{i}: {nbytes} bytes", noise(nbytes, seed + i)) for i, nbytes in enumerate(sizes)]


def _wide(bucket: int, seed: int) -> Pairs:
    """Itemsizes that no odd bucket is a multiple of, across its end."""
    return [
        ("complex128", of_dtype(torch.complex128, (bucket // 9,), seed)),
        ("byte", noise(1, seed)),
        ("float64", of_dtype(torch.float64, (bucket // 8 + 1,), seed + 1)),
        ("bfloat16", of_dtype(torch.bfloat16, (bucket // 2 + 3,), seed + 2)),
        ("int64", of_dtype(torch.int64, (bucket // 8 - 1,), seed + 3)),
    ]


def _tied(bucket: int, seed: int) -> Pairs:
    storage = of_dtype(torch.float32, (bucket // 1024, 200), seed)
    return [
        ("embed_tokens.weight", storage),
        ("lm_head.weight", storage),
        ("a part of it", storage[3:5]),
        ("the same transposed", storage.t()),
    ]


def _tiny(bucket: int, seed: int) -> Pairs:
    values = of_dtype(torch.int16, (10_000, 2), seed)
    return [(f"t{i}", values[i]) for i in range(len(values))]


def _nothing(bucket: int, seed: int) -> Pairs:
    return []


def _only_empty(bucket: int, seed: int) -> Pairs:
    return [(f"e{i}", torch.empty(0, i, dtype=torch.float16)) for i in range(20)]


def _names(bucket: int, seed: int) -> Pairs:
    names = (
        "ünïcode.重み.🦆", "with space", "quote'\"s", "new\nline", "tab\t", "nul\0byte", "a" * 4096, " ",
        "percent %s {brace}", "../../etc", "\u202eright to left", "e\u0301", "\u00e9",
        "model.layers.0.weight",
        "重" * 1365,
    )  # fmt: skip
    return [(name, of_dtype(torch.float32, (i + 1,), seed + i)) for i, name in enumerate(names)]


def _mixed(bucket: int, seed: int) -> Pairs:
    """Something of each kind in about four buckets. Every third seed has other names and shapes."""
    era = seed // 3
    rows = bucket // 4096 + era
    parts = {
        "plain": [(f"{i}", of_dtype(torch.bfloat16, (rows, 512 + 64 * i), seed + i)) for i in range(8)],
        "large": [("weight", noise(bucket + 1 + era, seed))],
        "dtypes": _dtypes(bucket, seed)[era % 2 :: 2],
        "layouts": [pair for pair in _layouts(bucket, seed) if pair[1].nbytes < bucket // 4],
        "scalars": _scalars(bucket, seed),
        "names": _names(bucket, seed),
        "lazy": _lazy_bits(bucket // 64, seed),
    }
    pairs = [(f"{era}.{part}.{name}", tensor) for part, some in parts.items() for name, tensor in some]
    return pairs[1::2] + pairs[::2]


STREAMS: Mapping[str, Callable[[int, int], Pairs]] = {
    "plain": _plain,
    "layouts": _layouts,
    "conjugated and negated": _lazy_bits,
    "scalars and empty ones": _scalars,
    "all dtypes": _dtypes,
    "around the bucket": _oversize,
    "wide items": _wide,
    "tied": _tied,
    "10,000 tiny ones": _tiny,
    "nothing": _nothing,
    "only empty ones": _only_empty,
    "odd names": _names,
    "mixed": _mixed,
}
"""Every kind of stream, by name."""
