"""Digests of rows: of the bytes that one row moves, in order, wherever they lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import xxhash

from weightsync.byte_digests import digest_bytes
from weightsync.layout.rows import Rows


def digest_row(flat: torch.Tensor, offset: int, nbytes: int, count: int, step: int) -> int:
    """Return the digest of a row's bytes.

    Args:
        flat: the storage that it lies in, contiguous.
        offset: of the first run, in bytes.
        nbytes: of one run.
        count: of runs.
        step: bytes from one run to the next.
    """
    data = flat.view(torch.uint8)
    if count == 1:
        return digest_bytes(data[offset : offset + nbytes])
    runs = data.as_strided((count, nbytes), (step, 1), data.storage_offset() + offset)
    return digest_bytes(runs.contiguous().view(-1))


class RowDigests:
    """Digests of rows of the same storages, for as long as these stay where they are.

    Args:
        storage: returns a storage by index, contiguous.
    """

    def __init__(self, storage: Callable[[int], torch.Tensor]) -> None:
        self._storage = storage
        self._flats: dict[int, tuple[torch.Tensor, memoryview | None]] = {}

    def of(self, storage: int, offset: int, nbytes: int, count: int, step: int) -> int:
        """Return the digest of a row; see `digest_row`."""
        known = self._flats.get(storage)
        if known is None:
            flat = self._storage(storage).view(torch.uint8)
            known = self._flats[storage] = flat, flat.numpy().data if flat.device.type == "cpu" else None
        flat, host = known
        if host is not None and count == 1:
            # As `digest_bytes`, without a view of a tensor for each row.
            return xxhash.xxh3_64_intdigest(host[offset : offset + nbytes])
        return digest_row(flat, offset, nbytes, count, step)


def first_difference(
    rows: Rows, part: slice, digests: Sequence[int], arrived: RowDigests, is_checked: Callable[[int], bool]
) -> int | None:
    """Return the first row that has not arrived as it was sent; `None` if all have.

    Args:
        rows: all that one rank gives in one way.
        part: those that have arrived.
        digests: as they were sent, by row.
        arrived: of the storages that they went into.
        is_checked: whether the digest of a row counts.
    """
    some = rows.select(part)
    columns = (some.target_storage, some.target_offset, some.nbytes, some.count, some.target_step)
    for row, place in enumerate(np.stack(columns, axis=1).tolist(), start=part.start):
        if is_checked(row) and arrived.of(*place) != digests[row]:
            return row
    return None
