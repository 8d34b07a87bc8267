"""What a rollout rank answers when it is asked for its layout: plain data for the driver. No I/O."""

from __future__ import annotations

from typing import Any

import msgspec

from weightsync.engines.base import RankMemory
from weightsync.errors import ManifestError
from weightsync.layout.pieces import ABSENT
from weightsync.rollout.loader import RegionLoader
from weightsync.tensors import TensorSpec, WeightManifest


def decode_manifest(data: bytes) -> WeightManifest:
    """Read the tensors that will come, in the order of the stream.

    Raises:
        ManifestError: the bytes are damaged, or a name comes twice.
    """
    try:
        specs = msgspec.msgpack.decode(data, type=tuple[TensorSpec, ...])
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise ManifestError(f"the manifest is damaged: {error}", phase="layout") from error
    return WeightManifest.build(specs)


def describe(manifest: WeightManifest, memory: RankMemory, loader: RegionLoader) -> dict[str, Any]:
    """Return ``{"whole", "unread"}``; see ``docs/worker-protocol.md``."""
    table = memory.table
    nothing_of = (
        spec.name
        for spec, pattern in zip(manifest.tensors, table.pattern_of, strict=True)
        if pattern == ABSENT and spec.name not in table.whole and spec.nbytes
    )
    unread = [name for name in nothing_of if not loader.passes_over(name)]
    return {"whole": dict(table.whole), "unread": unread}
