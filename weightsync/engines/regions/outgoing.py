"""What a policy rank gives in a refit by regions: which rows are read in place, and which are packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from weightsync.engines.regions.plan import Mask, RegionPlan
from weightsync.layout.regions import Ints
from weightsync.layout.rows import Rows, in_buckets, joined
from weightsync.tensors import dtype_from_name

_SAME = ("key", "source_storage", "source_offset", "nbytes", "count", "source_step", "dtype")
"""Rows that agree in these are packed once, whoever gets them; also the order in which they are."""


class Share(NamedTuple):
    """What one rollout rank reads of a packed bucket."""

    first: int
    """Its first row there, counted among all that are packed for this rank."""
    items: Ints
    """Which items of the bucket its rows are, shape ``(rows,)``."""


@dataclass(frozen=True)
class PackedBucket:
    """Rows that are packed into one buffer, for whoever gets some of them.

    Attributes:
        items: the rows; their targets are those of one of the ranks that get them.
        offsets: of each item in the buffer, shape ``(items,)``.
        shares: by rollout rank.
    """

    items: Rows
    offsets: Ints
    shares: Mapping[int, Share]

    @property
    def nbytes(self) -> int:
        """Bytes that are used of the buffer."""
        return int(self.offsets[-1] + self.items.packed_bytes[-1])


@dataclass(frozen=True)
class Outgoing:
    """All that one policy rank gives.

    Attributes:
        lent: by rollout rank, the rows that it reads where this rank has them, in order.
        buckets: what is packed, in order.
    """

    lent: Mapping[int, Rows]
    buckets: Sequence[PackedBucket]

    @classmethod
    def of(
        cls, plan: RegionPlan, sender: int, targets: Sequence[int], lent: Mask, bucket_size: int
    ) -> Outgoing:
        """Part the rows of a policy rank.

        Args:
            plan: of the refit.
            sender: the policy rank.
            targets: rollout ranks that take part.
            lent: which of the rank's storages can be read where they are, shape ``(storages,)``.
            bucket_size: bytes of a transfer buffer.
        """
        read, packed = {}, {}
        for target in targets:
            rows = plan.rows(target, sender)
            readable = plan.readable(rows, sender, lent)
            read[target] = rows.select(readable)
            packed[target] = rows.select(~readable).cut(bucket_size).in_order()
        return cls(read, _in_buckets(packed, bucket_size))


def _in_buckets(packed: Mapping[int, Rows], bucket_size: int) -> list[PackedBucket]:
    targets = [target for target, rows in packed.items() if len(rows)]
    if not targets:
        return []
    columns = [np.stack([getattr(packed[target], name) for name in _SAME], axis=1) for target in targets]
    unique, first, inverse = np.unique(
        np.concatenate(columns), axis=0, return_index=True, return_inverse=True
    )
    every = joined([packed[target] for target in targets]).select(first)
    ends = np.cumsum([len(each) for each in columns])
    places = dict(zip(targets, np.split(inverse.reshape(-1), ends[:-1]), strict=True))
    sizes = unique[:, _SAME.index("nbytes")] * unique[:, _SAME.index("count")]
    buckets = []
    for items, offsets in in_buckets(sizes, bucket_size):
        shares = {}
        for target, place in places.items():
            lo, hi = np.searchsorted(place, (items.start, items.stop))
            if lo < hi:
                shares[target] = Share(int(lo), place[lo:hi] - items.start)
        buckets.append(PackedBucket(every.select(items), offsets, shares))
    return buckets


class Packing:
    """Views through which a bucket is packed; made once, as long as source and buffer stay where they are.

    Args:
        bucket: what is packed.
        buffer: flat uint8.
        storage: returns a storage of this rank by index, flat.
        dtypes: names of those that `Rows.dtype` counts.
    """

    def __init__(
        self,
        bucket: PackedBucket,
        buffer: torch.Tensor,
        storage: Callable[[int], torch.Tensor],
        dtypes: Sequence[str],
    ) -> None:
        self._sources: list[torch.Tensor] = []
        self._targets: list[torch.Tensor] = []
        kinds = [dtype_from_name(name) for name in dtypes]
        items = bucket.items
        columns = (items.source_storage, items.source_offset, items.nbytes, items.count, items.source_step)
        every = (*columns, items.dtype, bucket.offsets)
        for row in np.stack(every, axis=1).tolist():
            index, start, nbytes, count, step, kind, offset = row
            dtype = kinds[kind]
            size, flat = dtype.itemsize, storage(index)
            at = flat.storage_offset() + start // size
            self._sources.append(flat.as_strided((count, nbytes // size), (step // size, 1), at))
            packed = buffer[offset : offset + count * nbytes]
            self._targets.append(packed.view(dtype).view(count, nbytes // size))

    def run(self) -> None:
        """Fill the buffer; casts on the way."""
        torch._foreach_copy_(self._targets, self._sources)
