"""Checkpoint engines that feed a receiver inside one process. Every batch lies in one reused buffer."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from weightsync.engines.base import CheckpointEngine
from weightsync.errors import DigestError
from weightsync.tensors import TensorSpec, WeightManifest, flat_bytes, tensor_from_bytes

ALIGN = 256


class RecordingEngine(CheckpointEngine):
    """Yields what `stream` holds and records every call. A released batch is overwritten."""

    def __init__(self, bucket_size: int, announce: bool = True, per_batch: int = 0) -> None:
        self.bucket_size = bucket_size
        self.announce = announce
        self.per_batch = per_batch
        self.stream: list[tuple[str, torch.Tensor]] = []
        self.manifest: WeightManifest | None = None
        self.fail_after: int | None = None
        self.calls: list[str] = []
        self.errors: list[BaseException] = []
        self.buffer = torch.empty(0, dtype=torch.uint8)

    def prepare(self):
        self.calls.append("prepare")
        return {"address": "here", "pair": [1, 2]}

    def init_policy_process_group(self, **kwargs):
        raise AssertionError("a rollout engine")

    def init_rollout_process_group(self, *, rollout_rank, train_world_size, rollout_world_size, metadata):
        self.calls.append(f"rank {rollout_rank} of {train_world_size}+{rollout_world_size}: {metadata}")

    def finalize(self):
        self.calls.append("finalize")

    async def send_weights(self, weights):
        raise AssertionError("a rollout engine")

    def open_refit(self, *, epoch, version):
        self.calls.append(f"open {epoch} {version}")

    def abort_refit(self, error):
        self.calls.append("abort")
        self.errors.append(error)

    def weights(self):
        return self.stream

    async def receive_weight_batches(self):
        items = self.weights()
        if self.announce and self.manifest_check is not None:
            self.calls.append("manifest")
            specs = tuple(TensorSpec.of(name, tensor) for name, tensor in items)
            self.manifest_check(self.manifest or WeightManifest(specs))
        for i, batch in enumerate(self._batches(items)):
            if i == self.fail_after:
                raise DigestError("bytes arrived changed", bucket=i)
            self.calls.append("batch")
            yield self._pack(batch)
            self.calls.append("released")
            self.buffer.fill_(0xFF)
        self.calls.append("end")

    def _batches(self, items):
        batch, fill = [], 0
        for name, tensor in items:
            size = -(-tensor.numel() * tensor.element_size() // ALIGN) * ALIGN
            full = len(batch) == self.per_batch if self.per_batch else fill + size > self.bucket_size
            if batch and full:
                yield batch
                batch, fill = [], 0
            batch.append((name, tensor))
            fill += size
        if batch:
            yield batch

    def _pack(self, batch):
        need = sum(t.numel() * t.element_size() + ALIGN for _, t in batch)
        if self.buffer.numel() < need:
            self.buffer = torch.empty(need, dtype=torch.uint8)
        views, offset = [], 0
        for name, tensor in batch:
            data = flat_bytes(tensor)
            place = self.buffer[offset : offset + data.numel()]
            place.copy_(data)
            views.append((name, tensor_from_bytes(place, tensor.shape, tensor.dtype)))
            offset += -(-data.numel() // ALIGN) * ALIGN
        return views


class FileEngine(RecordingEngine):
    """Sends the ``model.safetensors`` of the directory ``source``, in an order shuffled by ``seed``.

    ``drop`` names tensors left out, ``rename`` and ``transpose`` spoil some, ``dtype`` casts all,
    ``fuse_experts`` sends experts as 3-D tensors, and ``fail_after`` raises at that batch.
    """

    def __init__(
        self,
        bucket_size: int,
        source: str,
        seed: int = 0,
        announce: bool = True,
        drop: list[str] = (),
        rename: dict[str, str] | None = None,
        transpose: list[str] = (),
        dtype: str = "",
        fuse_experts: bool = False,
        fail_after: int | None = None,
    ) -> None:
        super().__init__(bucket_size, announce)
        self.fuse_experts = fuse_experts
        self.source, self.seed, self.drop = Path(source), seed, tuple(drop)
        self.rename, self.transpose = dict(rename or {}), tuple(transpose)
        self.dtype = dtype
        self.fail_after = fail_after

    def spoilt(self, name, tensor):
        tensor = tensor.t().contiguous() if name in self.transpose else tensor
        return tensor.to(getattr(torch, self.dtype)) if self.dtype else tensor

    def weights(self):
        from safetensors.torch import load_file

        state = load_file(self.source / "model.safetensors")
        items = [(self.rename.get(n, n), self.spoilt(n, t)) for n, t in state.items() if n not in self.drop]
        items = fused_experts(items) if self.fuse_experts else items
        random.Random(self.seed).shuffle(items)
        return items


def fused_experts(items):
    """Turn per-expert names into the fused ones that transformers has in memory."""
    state = dict(items)
    blocks = sorted({name.split(".experts.")[0] for name in state if ".experts." in name})
    for block in blocks:
        count = len([n for n in state if n.startswith(f"{block}.experts.")]) // 3
        parts = {
            part: [state.pop(f"{block}.experts.{e}.{part}.weight") for e in range(count)]
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        pairs = zip(parts["gate_proj"], parts["up_proj"], strict=True)
        state[f"{block}.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        state[f"{block}.experts.down_proj"] = torch.stack(parts["down_proj"])
    return list(state.items())
