"""Splitting a weight stream into bucket-sized pieces, placing them, and putting them together. No I/O.

The sending side runs ``place_chunks(split_weight_chunks(weights, bucket_size), bucket_size)`` and copies
each chunk to its place; the receiving side cuts the chunks out again with `unpack_bucket` and restores
whole tensors with `merge_weight_chunk_batches`. Every offset is aligned before the fit test, so what one
side places the other can view.

Several senders may have a share of the chunks each: all of them run `place_chunks` over the same stream,
and so agree on who sends what without a word; the receiver's merger is then told of several ``sources``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

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
    """Where one chunk goes: ``meta.offset`` bytes into bucket number ``bucket`` of an ``owner``."""

    bucket: int
    meta: TensorMeta
    data: torch.Tensor
    owner: int = 0
    opens: bool = False
    """Whether it is the first of another bucket than the owner's first one."""

    @property
    def end(self) -> int:
        """First byte of the bucket after this chunk."""
        return (self.meta.offset or 0) + self.meta.chunk_size


def largest_chunk(bucket_size: int, owners: int) -> int:
    """Return the bytes at which to cut tensors, so that the owners' shares come out alike."""
    if owners == 1:
        return bucket_size
    return max(bucket_size // owners // ALIGNMENT * ALIGNMENT, min(bucket_size, ALIGNMENT))


def place_chunks(chunks: Iterable[Chunk], bucket_size: int, owners: int = 1) -> Iterator[Placement]:
    """Give each chunk its owner, its bucket and its aligned offset, in stream order.

    A chunk goes to the owner with the fewest bytes so far. One that does not fit opens the owner's next
    bucket; chunks of no bytes never do.

    Raises:
        ConfigurationError: a chunk is larger than a bucket, or a bucket size below 1.
    """
    _require_bucket_size(bucket_size)
    shares = [0] * owners
    buckets, fills = [0] * owners, [0] * owners
    for meta, data in chunks:
        if meta.chunk_size > bucket_size:
            raise ConfigurationError(
                f"a chunk of {meta.chunk_size} bytes does not fit a bucket of {bucket_size}", tensor=meta.name
            )
        owner = min(range(owners), key=shares.__getitem__)
        offset = align_up(fills[owner])
        opens = meta.chunk_size > 0 and offset + meta.chunk_size > bucket_size
        if opens:
            buckets[owner], offset = buckets[owner] + 1, 0
        if meta.chunk_size:
            fills[owner] = offset + meta.chunk_size
            shares[owner] += meta.chunk_size
        placed = replace(meta, offset=min(offset, bucket_size))
        yield Placement(buckets[owner], placed, data, owner, opens)
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


class PartsMemory(Protocol):
    """Where tensors are put together that came in several chunks."""

    def take(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return memory, shape ``(nbytes,)``, uint8. Raises `RuntimeError` if there is not so much."""

    def give_back(self, data: torch.Tensor) -> None:
        """Take back what `take` returned: its tensor is not used any more."""


class FreshMemory:
    """New memory for each tensor, which owns it."""

    def take(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Allocate."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def give_back(self, data: torch.Tensor) -> None:
        """Do nothing: it is gone when nothing refers to it."""


class ChunkMerger:
    """Restores whole tensors from the chunks of one stream.

    Tensors that came in one chunk are views of the bucket, others of ``memory``; both are valid until the
    next `feed`.

    Args:
        sources: how many senders have a share of the chunks. With one, they are to come in stream order and
            at most one tensor is in the making; with more, in any order.
        limit_bytes: what the tensors in the making may take in all, whatever a sender says of their size;
            `None`: all that there is.
        memory: for those tensors.
    """

    def __init__(
        self, sources: int = 1, *, limit_bytes: int | None = None, memory: PartsMemory | None = None
    ) -> None:
        self._ordered = sources == 1
        self._limit_bytes = limit_bytes
        self._memory = memory or FreshMemory()
        self._handed_out: list[torch.Tensor] = []
        self._partial: dict[str, _Partial] = {}
        self._begun: set[str] = set()

    def feed(self, chunks: Iterable[Chunk]) -> list[tuple[str, torch.Tensor]]:
        """Take one bucket's chunks; return the tensors that they complete.

        Raises:
            IncompleteStreamError: a chunk is missing, repeated or out of order.
            ManifestError: a name comes twice, or a description is impossible.
        """
        while self._handed_out:
            self._memory.give_back(self._handed_out.pop())
        return [done for meta, data in chunks if (done := self._take(meta, data)) is not None]

    @property
    def bytes_in_the_making(self) -> int:
        """Memory of the tensors that are not whole yet."""
        return sum(partial.data.numel() for partial in self._partial.values())

    def _take(self, meta: TensorMeta, data: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        _require_described(meta, data)
        partial = self._partial.get(meta.name)
        if self._ordered:
            self._require_next(meta, partial)
        if partial is None:
            self._begin(meta)
        if meta.is_whole:
            return meta.name, tensor_from_bytes(data, meta.shape, meta.dtype)
        if partial is None:
            self._require_room(meta)
            partial = self._partial[meta.name] = _Partial(meta, self._allocate(meta, data.device))
        partial.fill(meta, data)
        if partial.filled < meta.nbytes:
            return None
        del self._partial[meta.name]
        self._handed_out.append(partial.data)
        return meta.name, tensor_from_bytes(partial.data, meta.shape, meta.dtype)

    def _require_room(self, meta: TensorMeta) -> None:
        needed = self.bytes_in_the_making + meta.nbytes
        if self._limit_bytes is not None and needed > self._limit_bytes:
            raise ManifestError(
                f"a tensor of {meta.nbytes} bytes, shape {list(meta.shape)}, does not fit the "
                f"{self._limit_bytes} bytes of memory here",
                tensor=meta.name,
            )

    def _allocate(self, meta: TensorMeta, device: torch.device) -> torch.Tensor:
        try:
            return self._memory.take(meta.nbytes, device)
        except RuntimeError as error:
            raise ManifestError(
                f"no memory for a tensor of {meta.nbytes} bytes, shape {list(meta.shape)}: {error}",
                tensor=meta.name,
            ) from error

    def _begin(self, meta: TensorMeta) -> None:
        if min(meta.shape, default=0) < 0:
            raise ManifestError(f"{list(meta.shape)} is no shape", tensor=meta.name)
        if meta.name in self._begun:
            raise ManifestError("the stream repeats a name", tensor=meta.name)
        self._begun.add(meta.name)

    def _require_next(self, meta: TensorMeta, partial: _Partial | None) -> None:
        expected = partial or next(iter(self._partial.values()), None)
        at = expected.filled if expected else 0
        if meta.chunk_offset != at:
            place = f"byte {at} of {expected.meta.name!r}" if expected else "a tensor's first byte"
            raise IncompleteStreamError(
                f"expected {place}, got byte {meta.chunk_offset} of {meta.name!r}", tensor=meta.name
            )
        if expected is not None and partial is None:
            raise expected.ended()

    def require_complete(self) -> None:
        """Check that no tensor is half done.

        Raises:
            IncompleteStreamError: the stream ended inside a tensor.
        """
        for partial in self._partial.values():
            raise IncompleteStreamError(
                f"the stream ended at byte {partial.filled} of {partial.meta.nbytes}",
                tensor=partial.meta.name,
            )


class _Partial:
    """A tensor in the making."""

    def __init__(self, meta: TensorMeta, data: torch.Tensor) -> None:
        self.meta = meta
        self.data = data
        self.filled = 0
        self._ends: dict[int, int] = {}
        """Of each chunk that has come: its first byte, and the one after its last."""

    def fill(self, meta: TensorMeta, data: torch.Tensor) -> None:
        if (meta.shape, meta.dtype) != (self.meta.shape, self.meta.dtype):
            raise self.ended()
        start, end = meta.chunk_offset, meta.chunk_offset + meta.chunk_size
        if any(start < other_end and other < end for other, other_end in self._ends.items()):
            raise IncompleteStreamError(f"bytes {start} to {end} came twice", tensor=meta.name)
        self._ends[start] = end
        self.data[start:end].copy_(data)
        self.filled += meta.chunk_size

    def ended(self) -> IncompleteStreamError:
        name = self.meta.name
        return IncompleteStreamError(
            f"{name!r} ended at byte {self.filled} of {self.meta.nbytes}", tensor=name
        )


def _require_described(meta: TensorMeta, data: torch.Tensor) -> None:
    fits = meta.chunk_offset + meta.chunk_size <= meta.nbytes and (meta.chunk_size > 0) == (meta.nbytes > 0)
    if data.numel() != meta.chunk_size or not fits:
        raise IncompleteStreamError(
            f"a chunk of {data.numel()} bytes does not match its description", tensor=meta.name
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
