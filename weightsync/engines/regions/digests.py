"""Digests of rows: of the bytes that one row moves, in order, wherever they lie."""

from __future__ import annotations

import torch

from weightsync.tensors import digest_bytes


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
