"""A plugin as its author would write it from the design document: weights through queues in one process."""

import asyncio
import queue
import uuid
from collections.abc import AsyncGenerator, Generator
from typing import Any

import torch

from weightsync.engines.base import CheckpointEngine

_Batch = list[tuple[str, torch.Tensor]] | None
_QUEUES: dict[str, queue.Queue[_Batch]] = {}
_WAIT_S = 30


class MyCheckpointEngine(CheckpointEngine):
    """Paired transfer: policy rank i feeds rollout rank i, batch by batch of at most a bucket."""

    def __init__(self, bucket_size: int, transport: str) -> None:
        self.bucket_size = bucket_size
        self.transport = transport
        self.queue: queue.Queue[_Batch] | None = None

    def prepare(self) -> Any:
        """Allocate or register buffers and return Ray-serializable metadata."""
        return {"queue": f"{self.transport}-{uuid.uuid4().hex}"}

    def get_target_weight_layout(self) -> dict[str, Any] | None:
        """Return this policy rank's destination layout, if sharding weights."""
        return None

    def init_policy_process_group(
        self,
        *,
        worker_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: list[Any],
    ) -> None:
        """Connect a policy worker to its transfer peer."""
        if worker_rank < rollout_world_size:
            self.queue = _QUEUES.setdefault(
                metadata[train_world_size + worker_rank]["queue"], queue.Queue(maxsize=2)
            )

    def init_rollout_process_group(
        self,
        *,
        rollout_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: list[Any],
    ) -> None:
        """Connect a rollout worker to its transfer peer."""
        self.queue = _QUEUES.setdefault(
            metadata[train_world_size + rollout_rank]["queue"], queue.Queue(maxsize=2)
        )

    def finalize(self) -> None:
        """Release per-refit state if the backend owns any."""

    async def send_weights(
        self,
        weights: Generator[tuple[str, torch.Tensor], None, None],
    ) -> None:
        """Send `(name, tensor)` weights from the policy side."""
        batch: list[tuple[str, torch.Tensor]] = []
        size = 0
        for name, tensor in weights:
            if self.queue is None:
                continue  # no peer: only drain
            if batch and size + tensor.nbytes > self.bucket_size:
                await asyncio.to_thread(self.queue.put, batch, timeout=_WAIT_S)
                batch, size = [], 0
            batch.append((name, tensor.detach().clone()))
            size += tensor.nbytes
        if self.queue is not None:
            await asyncio.to_thread(self.queue.put, batch, timeout=_WAIT_S)
            await asyncio.to_thread(self.queue.put, None, timeout=_WAIT_S)

    async def receive_weight_batches(
        self,
    ) -> AsyncGenerator[list[tuple[str, torch.Tensor]], None]:
        """Yield `(name, tensor)` batches on the generation side."""
        assert self.queue is not None
        while (batch := await asyncio.to_thread(self.queue.get, timeout=_WAIT_S)) is not None:
            yield batch
