"""Digests of whole sets of weights: one for each tensor, and one of them all. No I/O.

A tensor's digest is order-sensitive in its bytes. That of a set binds names, shapes, dtypes and these, in the
order of names: the same weights have the same digest in whatever order they came.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
import xxhash

from weightsync.byte_digests import digest_bytes, digest_bytes_as, digest_kind
from weightsync.tensors import TensorSpec, flat_bytes

OFF = "off"


@dataclass
class WeightDigest:
    """Digests of named tensors.

    Attributes:
        kind: how a tensor's bytes are digested, see `digest_kind`; digests of different kinds do not compare.
        tensors: ``{name: (shape, dtype, digest)}``.
    """

    kind: str = OFF
    tensors: dict[str, tuple[tuple[int, ...], str, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, torch.Tensor]], kind: str | None = None) -> WeightDigest:
        """Digest tensors, one at a time; ``kind``: as on another device than that of the first."""
        made = cls(kind or OFF)
        for name, tensor in tensors:
            made.add(name, tensor)
            del tensor
        return made

    def add(self, name: str, tensor: torch.Tensor, digest: int | None = None) -> None:
        """Enter a tensor; ``digest`` of its bytes, where that is known already."""
        if self.kind == OFF:
            self.kind = digest_kind(tensor.device)
        if digest is None:
            data = flat_bytes(tensor)
            same = digest_kind(data.device) == self.kind
            digest = digest_bytes(data) if same else digest_bytes_as(self.kind, data)
        spec = TensorSpec.of(name, tensor)
        self.tensors[name] = (spec.shape, spec.dtype, f"{digest:016x}")

    def total(self) -> str:
        """Return the digest of them all, with its kind."""
        entries = sorted(self.tensors.items())
        return f"{self.kind}:{xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(entries))}"

    def to_dict(self, *, tensors: bool) -> dict[str, Any]:
        """Return ``{"kind", "count", "total"}`` as plain data, and on demand ``tensors``."""
        plain: dict[str, Any] = {"kind": self.kind, "count": len(self.tensors), "total": self.total()}
        if tensors:
            plain["tensors"] = {
                name: [list(shape), dtype, digest] for name, (shape, dtype, digest) in self.tensors.items()
            }
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> WeightDigest:
        """Rebuild what `to_dict` gave with ``tensors``."""
        entries = {
            str(name): (tuple(shape), str(dtype), str(digest))
            for name, (shape, dtype, digest) in plain["tensors"].items()
        }
        return cls(str(plain["kind"]), entries)
