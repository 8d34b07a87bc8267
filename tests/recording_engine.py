"""A checkpoint engine for tests: it keeps what it was told to do, and sends nowhere."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import torch

from weightsync.engines.base import CheckpointEngine

BACKEND = "tests.recording_engine:RecordingEngine"


class RecordingEngine(CheckpointEngine):
    """Records its calls and the values it was given; can be told to fail, to stop early, or to wait.

    Args:
        bucket_size: bytes; kept.
        fail_at: number of the item before which sending raises (`None`: never); -1 for the end of the stream.
        stop_at: number of items after which sending returns without consuming the rest.
        stats: what `refit_stats` returns.
        fail_close: whether `close` raises.
    """

    made: ClassVar[list[RecordingEngine]] = []

    def __init__(
        self,
        bucket_size: int,
        fail_at: int | None = None,
        stop_at: int | None = None,
        stats: dict[str, float] | None = None,
        fail_close: bool = False,
    ) -> None:
        self.bucket_size = bucket_size
        self.fail_at = fail_at
        self.stop_at = stop_at
        self.stats = stats or {}
        self.fail_close = fail_close
        self.calls: list[tuple[str, Any]] = []
        self.sent: dict[str, torch.Tensor] = {}
        self.manifest: Any = None
        self.gate: asyncio.Event | None = None
        RecordingEngine.made.append(self)

    def prepare(self) -> Any:
        self.calls.append(("prepare", None))
        return {"bucket_size": self.bucket_size}

    def init_policy_process_group(self, **arguments: Any) -> None:
        self.calls.append(("init_policy_process_group", arguments))

    def init_rollout_process_group(self, **arguments: Any) -> None:
        self.calls.append(("init_rollout_process_group", arguments))

    def finalize(self) -> None:
        self.calls.append(("finalize", None))

    async def send_weights(self, weights) -> None:
        self.calls.append(("send_weights", None))
        self.sent = {}
        self.manifest = getattr(weights, "manifest", None)
        if self.gate is not None:
            await self.gate.wait()
        while self.stop_at is None or len(self.sent) < self.stop_at:
            if self.fail_at == len(self.sent):
                raise RuntimeError("the wire broke")
            item = next(weights, None)
            if item is None:
                break
            self.sent[item[0]] = item[1].clone()
            del item
        if self.fail_at == -1:
            raise RuntimeError("the wire broke")
        await asyncio.sleep(0)

    async def receive_weight_batches(self):
        yield []

    def open_refit(self, *, epoch: int, version: int) -> None:
        self.calls.append(("open_refit", {"epoch": epoch, "version": version}))

    def abort_refit(self, error: BaseException) -> None:
        self.calls.append(("abort_refit", error))

    def refit_stats(self) -> dict[str, float]:
        return self.stats

    def close(self) -> None:
        self.calls.append(("close", None))
        if self.fail_close:
            raise RuntimeError("would not close")
