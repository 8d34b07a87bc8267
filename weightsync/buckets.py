"""Splitting a weight stream into bucket-sized pieces, placing them, and putting them together. No I/O.

The sending side runs ``place_chunks(split_weight_chunks(weights, bucket_size), bucket_size)`` and copies
each chunk to its place; the receiving side cuts the chunks out again with `unpack_bucket` and restores
whole tensors with `merge_weight_chunk_batches`. Every offset is aligned before the fit test, so what one
side places the other can view.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace

import torch

from weightsync.errors import ConfigurationError, IncompleteStreamError, ManifestError
from weightsync.tensors import ALIGNMENT, TensorMeta, dtype_name, flat_bytes, plain_tensor, tensor_from_bytes

Chunk = tuple[TensorMeta, torch.Tensor]


def align_up(offset: int, alignment: int = ALIGNMENT) -> int:
    """Return the next multiple of ``alignment`` at or after ``offset``."""
    return -(-offset // alignment) * alignment


def split_weight_chunks(
    weights: Iterable[tuple[str, torch.Tensor]], bucket_size: int
) -> Generator[Chunk, None, None]:
    """Cut every tensor of a stream into chunks of at most ``bucket_size`` bytes.

    Tensors are flattened and cut by bytes, so rows and elements may straddle a cut. An empty tensor gives
    one chunk of no bytes. Sizes are those of the tensor at hand, never of an earlier description.

    Args:
        weights: ``(name, tensor)`` pairs, any layout; consumed lazily, one item at a time.
        bucket_size: bytes; at least 1.

    Yields:
        The chunk's description (``offset`` still `None`) and its bytes, shape ``(chunk_size,)``, uint8.

    Raises:
        ManifestError: a name comes twice, or a tensor has no plain bytes.
        ConfigurationError: a bucket size below 1.
    """
    _require_bucket_size(bucket_size)
    seen: set[str] = set()
    for name, tensor in weights:
        if not isinstance(name, str):
            raise ManifestError(f"a tensor's name must be a string, got {name!r:.80}")
        if name in seen:
            raise ManifestError("the weight stream repeats a name", tensor=name)
        seen.add(name)
        yield from _split_tensor(name, tensor, bucket_size)
        del tensor  # or it would still be there while the source makes the next one


def _split_tensor(name: str, tensor: torch.Tensor, bucket_size: int) -> Generator[Chunk, None, None]:
    try:
        plain = plain_tensor(tensor)
        dtype_name(plain.dtype)
    except ManifestError as error:
        error.with_context(tensor=name)
        raise
    data = flat_bytes(plain)
    for start in range(0, max(data.numel(), 1), bucket_size):
        piece = data[start : start + bucket_size]
        yield TensorMeta(name, plain.shape, plain.dtype, start, piece.numel()), piece


def _require_bucket_size(bucket_size: int) -> None:
    if bucket_size < 1:
        raise ConfigurationError(f"a bucket must hold at least 1 byte, got {bucket_size}")


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one chunk goes: ``meta.offset`` bytes into bucket number ``bucket``."""

    bucket: int
    meta: TensorMeta
    data: torch.Tensor

    @property
    def end(self) -> int:
        """First byte of the bucket after this chunk."""
        return (self.meta.offset or 0) + self.meta.chunk_size


def place_chunks(chunks: Iterable[Chunk], bucket_size: int) -> Iterator[Placement]:
    """Give each chunk its bucket and its aligned offset, in stream order.

    A chunk that does not fit opens the next bucket; chunks of no bytes never do.

    Raises:
        ConfigurationError: a chunk is larger than a bucket, or a bucket size below 1.
    """
    _require_bucket_size(bucket_size)
    bucket, fill = 0, 0
    for meta, data in chunks:
        offset = align_up(fill)
        if meta.chunk_size > bucket_size:
            raise ConfigurationError(
                f"a chunk of {meta.chunk_size} bytes does not fit a bucket of {bucket_size}", tensor=meta.name
            )
        if meta.chunk_size and offset + meta.chunk_size > bucket_size:
            bucket, offset = bucket + 1, 0
        if meta.chunk_size:
            fill = offset + meta.chunk_size
        yield Placement(bucket, replace(meta, offset=min(offset, bucket_size)), data)
        del data  # or its tensor would still be there while the source makes the next one


def unpack_bucket(bucket: torch.Tensor, metas: Iterable[TensorMeta]) -> list[Chunk]:
    """Cut the chunks out of a received bucket, as views.

    Raises:
        ManifestError: a chunk lies outside the bucket.
    """
    chunks = []
    for meta in metas:
        start = -1 if meta.offset is None else meta.offset
        if start < 0 or meta.chunk_size < 0 or start + meta.chunk_size > bucket.numel():
            raise ManifestError(
                f"a chunk at {meta.offset}+{meta.chunk_size} lies outside a bucket of {bucket.numel()} bytes",
                tensor=meta.name,
            )
        chunks.append((meta, bucket[start : start + meta.chunk_size]))
    return chunks


class ChunkMerger:
    """Restores whole tensors from the chunks of one stream, fed in stream order.

    At most one tensor is in the making; it owns its memory, whole tensors are views of the bucket.
    """

    def __init__(self) -> None:
        self._meta: TensorMeta | None = None
        self._data: torch.Tensor | None = None
        self._filled = 0
        self._begun: set[str] = set()

    def feed(self, chunks: Iterable[Chunk]) -> list[tuple[str, torch.Tensor]]:
        """Take one bucket's chunks; return the tensors that they complete.

        Raises:
            IncompleteStreamError: a chunk is missing, repeated or out of order.
            ManifestError: a name comes twice, or a description is impossible.
        """
        return [done for meta, data in chunks if (done := self._take(meta, data)) is not None]

    def _take(self, meta: TensorMeta, data: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        self._require_next(meta, data)
        if self._meta is None:
            self._begin(meta)
        if meta.is_whole:
            return meta.name, tensor_from_bytes(data, meta.shape, meta.dtype)
        if self._data is None:
            self._meta = meta
            self._data = torch.empty(meta.nbytes, dtype=torch.uint8, device=data.device)
        self._data[meta.chunk_offset : meta.chunk_offset + meta.chunk_size].copy_(data)
        self._filled += meta.chunk_size
        if not meta.is_last:
            return None
        merged = tensor_from_bytes(self._data, meta.shape, meta.dtype)
        self._meta, self._data, self._filled = None, None, 0
        return meta.name, merged

    def _begin(self, meta: TensorMeta) -> None:
        if min(meta.shape, default=0) < 0:
            raise ManifestError(f"{list(meta.shape)} is no shape", tensor=meta.name)
        if meta.name in self._begun:
            raise ManifestError("the stream repeats a name", tensor=meta.name)
        self._begun.add(meta.name)

    def _require_next(self, meta: TensorMeta, data: torch.Tensor) -> None:
        fits = meta.chunk_offset + meta.chunk_size <= meta.nbytes and (meta.chunk_size > 0) == (
            meta.nbytes > 0
        )
        if data.numel() != meta.chunk_size or not fits:
            raise IncompleteStreamError(
                f"a chunk of {data.numel()} bytes does not match its description", tensor=meta.name
            )
        if meta.chunk_offset != self._filled:
            expected = (
                f"byte {self._filled} of {self._meta.name!r}" if self._meta else "a tensor's first byte"
            )
            raise IncompleteStreamError(
                f"expected {expected}, got byte {meta.chunk_offset} of {meta.name!r}", tensor=meta.name
            )
        if self._meta is not None and (meta.name, meta.shape, meta.dtype) != (
            self._meta.name, self._meta.shape, self._meta.dtype,
        ):  # fmt: skip
            raise IncompleteStreamError(
                f"{self._meta.name!r} ended at byte {self._filled} of {self._meta.nbytes}",
                tensor=self._meta.name,
            )

    def require_complete(self) -> None:
        """Check that no tensor is half done.

        Raises:
            IncompleteStreamError: the stream ended inside a tensor.
        """
        if self._meta is not None:
            raise IncompleteStreamError(
                f"the stream ended at byte {self._filled} of {self._meta.nbytes}", tensor=self._meta.name
            )


async def merge_weight_chunk_batches(
    chunk_batches: AsyncGenerator[list[Chunk], None],
) -> AsyncGenerator[list[tuple[str, torch.Tensor]], None]:
    """Turn batches of chunks into batches of whole tensors, bucket by bucket.

    A batch that completes no tensor is not passed on. Whole tensors are views of their bucket, valid
    until the next batch is asked for; tensors merged from several chunks own their memory. Closing this
    generator closes ``chunk_batches``.

    Raises:
        IncompleteStreamError: a chunk is missing, or the stream ends inside a tensor.
        ManifestError: a name comes twice, or a description is impossible.
    """
    merger = ChunkMerger()
    async with aclosing(chunk_batches):
        async for chunks in chunk_batches:
            tensors = merger.feed(chunks)
            if tensors:
                yield tensors
    merger.require_complete()
