"""A whole update that waits in host memory until it is loaded. No I/O."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import torch

from weightsync.capacity import host_memory_bytes
from weightsync.engines.base import ParameterBatch
from weightsync.errors import ConfigurationError
from weightsync.layout.tables import RankTable
from weightsync.rollout.loader import Batch
from weightsync.tensors import WeightManifest


class StagedWeights:
    """Copies of the tensors of one refit, in the order in which they came.

    Args:
        limit_bytes: of all copies; by default what the host has free.

    Attributes:
        nbytes: host memory that the copies take.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        free = min(psutil.virtual_memory().available, host_memory_bytes())
        self._limit = free if limit_bytes is None else limit_bytes
        self._batches: list[Batch] = []
        self.nbytes = 0

    def require_room(self, manifest: WeightManifest, table: RankTable | None = None) -> None:
        """Refuse an update that does not fit, before any of it comes.

        Args:
            manifest: of the update.
            table: what this rank stores of it, where it comes by regions.

        Raises:
            ConfigurationError: it is larger than the limit.
        """
        if table is None:
            self._require(manifest.nbytes)
            return
        whole = sum(spec.nbytes for spec in manifest.tensors if spec.name in table.whole)
        self._require(whole + sum(storage.nbytes for storage in table.storages))

    def keep(self, batch: Batch) -> None:
        """Copy a batch, whose tensors are only borrowed.

        Raises:
            ConfigurationError: there is no room for it.
        """
        self._require(self.nbytes + sum(tensor.nbytes for _, tensor in batch))
        if batch:
            copies = [(name, _copy(tensor)) for name, tensor in batch]
            self._batches.append(ParameterBatch(copies) if isinstance(batch, ParameterBatch) else copies)
        self.nbytes += sum(tensor.nbytes for _, tensor in batch)

    def take(self) -> Iterator[Batch]:
        """Yield the batches, and let go of each when the next one is asked for."""
        self._batches.reverse()
        while self._batches:
            yield self._batches.pop()
        self.nbytes = 0

    def _require(self, nbytes: int) -> None:
        if nbytes > self._limit:
            raise ConfigurationError(
                f"commit: staged needs {nbytes} bytes of host memory on this worker, {self._limit} are free: "
                "write commit: in_place",
                phase="stage",
            )


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return copy.copy_(tensor)
