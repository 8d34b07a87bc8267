"""The parameter server: every policy rank keeps its share in host memory, and rollout ranks read it there.

It is the topology of the `checkpoint-engine` package, on this package's own transports: that package's
parameter server needs GPUs and hands the weights to a worker of its own, so it is not used.
"""

from __future__ import annotations

from typing import Any

import torch

from weightsync.engines.held import HoldingCheckpointEngine
from weightsync.engines.ipc import ONE_HOST, IpcTransport
from weightsync.engines.nixl import NixlTransport
from weightsync.engines.nixl_params import backend_params
from weightsync.engines.transport import BucketTransport
from weightsync.errors import ConfigurationError

_BACKEND = "UCX"
TRANSPORTS = ("nixl", "ipc")


class KimiCheckpointEngine(HoldingCheckpointEngine):
    """Each of *N* policy ranks packs 1/*N* of the bytes into host memory, and serves them from there.

    The policy side waits for nobody while it packs. That takes 1/*N* of the model's bytes of host memory on
    each policy rank, page-locked with ``transport: nixl`` where there is a GPU, and two buckets on each
    rollout rank. Rollout ranks that come later are given the same version without the trainer, see
    `join_late`.

    Args:
        bucket_size: bytes of a bucket, at least 1 MiB.
        device: must be ``"cpu"``: the buffers are in host memory on all ranks.
        transport: ``"nixl"``, by which receivers read into two buffers of their own, on any host; or
            ``"ipc"``, by which they load from the policy ranks' own pages, on one host.
        common: keywords of `BucketedCheckpointEngine`.
    """

    transport_name = "kimi_ckpt_engine"
    topologies = ("stripes",)
    default_topology = "stripes"
    why_these_topologies = "every policy rank keeps a share for all rollout ranks"

    def __init__(
        self, bucket_size: int, *, device: str = "cpu", transport: str = "nixl", **common: Any
    ) -> None:
        super().__init__(bucket_size, **common)
        if device != "cpu":
            raise ConfigurationError(
                f"{self.transport_name} keeps the weights in host memory: write device: cpu, not {device!r}"
            )
        if transport not in TRANSPORTS:
            raise ConfigurationError(f"transport must be one of {', '.join(TRANSPORTS)}, got {transport!r}")
        self._moves_by = transport
        if transport == "ipc":
            self.lacks = {**self.lacks, "hosts": ONE_HOST}

    def make_transport(self) -> BucketTransport:
        """Make one over host memory."""
        host = torch.device("cpu")
        if self._moves_by == "ipc":
            return IpcTransport(host)
        return NixlTransport(host, _BACKEND, backend_params(_BACKEND, None))
