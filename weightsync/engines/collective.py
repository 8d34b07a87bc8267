"""The collective engines, over gloo, NCCL or HCCL: one engine, the library a parameter.

`collective_transport` moves the buckets, `collective_backends` has what differs between the libraries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from weightsync.engines.bucketed import BucketedCheckpointEngine
from weightsync.engines.collective_backends import (
    CollectiveBackend,
    GlooBackend,
    HCCLBackend,
    NCCLBackend,
)
from weightsync.engines.collective_transport import CollectiveTransport
from weightsync.engines.transport import BucketTransport

__all__ = ["GlooCheckpointEngine", "HCCLCheckpointEngine", "NCCLCheckpointEngine"]


class CollectiveCheckpointEngine(BucketedCheckpointEngine):
    """Policy rank 0 broadcasts to all rollout ranks, staged in two buffers on each of them.

    Args:
        bucket_size: bytes of each of the two transfer buffers, at least 1 MiB.
        device: where the buffers are; each library has one kind of device, which is the default.
        rebuild_group: form a new process group for each refit, rather than keep it for as long as it works.
        common: keywords of `BucketedCheckpointEngine`.
    """

    topologies = ("star",)
    default_topology = "star"
    why_these_topologies = "a broadcast has one sender, policy rank 0"
    lacks: Mapping[str, str] = {
        "latecomers": "a broadcast needs all ranks at once, and the sender keeps nothing after it",
    }
    backend: ClassVar[type[CollectiveBackend]]

    def __init__(
        self, bucket_size: int, *, device: str | None = None, rebuild_group: bool = False, **common: Any
    ) -> None:
        super().__init__(bucket_size, **common)
        self._backend = self.backend(device)
        self._rebuild_group = rebuild_group

    def make_transport(self) -> BucketTransport:
        """Nothing is connected yet."""
        return CollectiveTransport(
            self._backend,
            bind_host=self._bind_host,
            advertise_host=self._advertise_host,
            rebuild_group=self._rebuild_group,
            limit_s=self._deadlines.total_s,
        )


class GlooCheckpointEngine(CollectiveCheckpointEngine):
    """Broadcast over TCP between buffers in host memory, see `CollectiveCheckpointEngine`."""

    transport_name = "gloo"
    backend = GlooBackend


class NCCLCheckpointEngine(CollectiveCheckpointEngine):
    """Broadcast between GPUs with NCCL, see `CollectiveCheckpointEngine`. It has not been run."""

    transport_name = "nccl"
    backend = NCCLBackend


class HCCLCheckpointEngine(CollectiveCheckpointEngine):
    """Broadcast between Ascend NPUs with HCCL, see `CollectiveCheckpointEngine`. It has not been run."""

    transport_name = "hccl"
    backend = HCCLBackend
