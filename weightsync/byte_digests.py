"""Digests of a tensor's flat bytes: 64 bits, order-sensitive, computed where the bytes are. No I/O."""

from __future__ import annotations

import torch
import xxhash

from weightsync.tensors import tensor_from_bytes


def digest_bytes(data: torch.Tensor) -> int:
    """Return a 64-bit order-sensitive digest of flat ``uint8`` data on any device.

    Host memory is hashed in place (XXH3), device memory folded on the device, so both ends of a transfer
    must hash on the same kind of device: see `digest_kind`.
    """
    if data.numel() == 0:
        return 0
    if data.device.type == "cpu":
        return int(xxhash.xxh3_64_intdigest(data.numpy().data))
    return _folded_digest(data)


def digest_bytes_as(kind: str, data: torch.Tensor) -> int:
    """Return the digest of `digest_bytes` as a device of that kind computes it, wherever the data is."""
    if data.numel() == 0:
        return 0
    return _folded_digest(data) if kind == "fold-64" else digest_bytes(data.cpu())


def digest_kind(device: torch.device) -> str:
    """Name the digest that `digest_bytes` computes for a device; peers compare only equal kinds."""
    return "xxh3-64" if device.type == "cpu" else "fold-64"


def _folded_digest(data: torch.Tensor) -> int:
    """Order-sensitive digest made of torch operations, so that device memory is not copied to the host.

    The sum, in wrapping 64-bit arithmetic, of a hash of each 8-byte word and its position. For a given
    position the hash is one-to-one, so that one changed word always shows; it is not linear, because
    in a linear one many moved bytes cancel out.
    """
    digest = torch.zeros((), dtype=torch.int64, device=data.device)
    for start in range(0, data.numel(), _FOLD_BYTES):
        words = _words(data[start : start + _FOLD_BYTES])
        position = torch.arange(words.numel(), device=data.device, dtype=torch.int64)
        digest += _mix(words ^ ((position + start // 8 + 1) * _FOLD_STEP)).sum()
    return (int(digest) ^ (data.numel() * _FOLD_FACTOR)) & _MASK_64


def _words(data: torch.Tensor) -> torch.Tensor:
    """Return bytes as ``int64`` words, the last one filled up with zeros (the digest counts the length)."""
    if data.numel() % 8:
        data = torch.nn.functional.pad(data, (0, -data.numel() % 8))
    return tensor_from_bytes(data, (data.numel() // 8,), torch.int64)


def _mix(words: torch.Tensor) -> torch.Tensor:
    # The masks make arithmetic shifts logical; with the sign bits the step would not be one-to-one.
    words = (words ^ ((words >> 30) & ((1 << 34) - 1))) * _FOLD_FACTOR
    words = (words ^ ((words >> 27) & ((1 << 37) - 1))) * _FOLD_FACTOR_2
    return words ^ ((words >> 31) & ((1 << 33) - 1))


_FOLD_BYTES = 16 << 20
_FOLD_STEP = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, and as a signed 64-bit number, which torch takes
_FOLD_FACTOR = 0x2545F4914F6CDD1D
_FOLD_FACTOR_2 = 0x5851F42D4C957F2D
_MASK_64 = (1 << 64) - 1
