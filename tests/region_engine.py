"""A checkpoint engine that feeds a receiver by regions, from whole tensors in this process."""

from __future__ import annotations

import torch

from tests.rollout_engines import RecordingEngine
from weightsync.engines.base import ParameterBatch
from weightsync.errors import PeerLostError
from weightsync.layout.pieces import ABSENT
from weightsync.tensors import TensorSpec, WeightManifest, dtype_from_name


class RegionEngine(RecordingEngine):
    """Writes each storage of the rank's table from `stream`, box by box; then sends the rest whole.

    What is handed over lies in one buffer, which is filled with garbage before each use and after it.
    ``also_whole``: names that travel whole though this rank would take them by regions. ``fail_at``: the
    number of the storage at which it raises; ``lose``: a tensor of which nobody says that it has arrived.
    """

    def __init__(self, bucket_size: int = 1 << 20, also_whole=(), fail_at=None, lose="") -> None:
        super().__init__(bucket_size)
        self.memory = None
        self.also_whole = frozenset(also_whole)
        self.fail_at, self.lose = fail_at, lose
        self.in_place: list[str] = []
        self.handed: list[str] = []
        self.stats: dict[str, float] = {}
        self.on_write = None

    def use_memory(self, memory):
        self.memory = memory

    def refit_stats(self):
        return self.stats

    async def receive_weight_batches(self):
        items = self.weights()
        specs = tuple(TensorSpec.of(name, tensor) for name, tensor in items)
        if self.manifest_check is not None:
            self.manifest_check(WeightManifest(specs))
        self.in_place, self.handed, self.stats = [], [], {}
        table = self.memory.table
        whole = set(table.whole) | self.also_whole
        boxes = boxes_of(table, items, whole)
        for index, storage in enumerate(table.storages):
            if index == self.fail_at:
                raise PeerLostError("the policy rank is gone", peer="policy 0")
            yield self._move(index, storage, boxes.get(index, []))
            self.buffer.fill_(0xA5)
        arrived = [spec for spec in specs if spec.name not in whole and spec.name != self.lose]
        yield ParameterBatch(arrived=arrived)
        for batch in self._batches([(name, tensor) for name, tensor in items if name in whole]):
            self._count("whole", sum(tensor.nbytes for _, tensor in batch))
            yield self._pack(batch)
            self.buffer.fill_(0xA5)

    def _move(self, index, storage, boxes):
        live = self.memory.storage(index) if self.writes_in_place else None
        if not boxes:
            return ParameterBatch()
        nbytes = sum(source.nbytes for _, source, _ in boxes)
        if live is not None:
            assert live.is_contiguous() and live.shape == (storage.numel,)
            self.before_writing()
            if self.on_write is not None:
                self.on_write()
        target = live if live is not None else self._staging(storage)
        for held, source, _ in boxes:
            shape = tuple(hi - lo for lo, hi in zip(held.lo, held.hi, strict=True))
            target.as_strided(shape, held.strides, target.storage_offset() + held.offset).copy_(source)
        (self.in_place if live is not None else self.handed).append(storage.name)
        self._count("in_place" if live is not None else "staged", nbytes)
        if live is not None:
            return ParameterBatch(nbytes=nbytes)
        return ParameterBatch([(storage.name, target.view(storage.shape))], nbytes=nbytes)

    def _staging(self, storage):
        dtype = dtype_from_name(storage.dtype)
        self.buffer = torch.full((storage.nbytes,), 0xA5, dtype=torch.uint8)
        return self.buffer.view(dtype)

    def _count(self, way, nbytes):
        self.stats[f"bytes_{way}"] = self.stats.get(f"bytes_{way}", 0) + nbytes


def boxes_of(table, items, whole):
    """Return, by storage, the boxes with what they are to hold, and the tensor's name."""
    boxes: dict[int, list] = {}
    for (name, tensor), pattern, slots in zip(items, table.pattern_of, table.slots, strict=True):
        if pattern == ABSENT or name in whole:
            continue
        for held in table.patterns[pattern]:
            part = tensor[tuple(slice(lo, hi) for lo, hi in zip(held.lo, held.hi, strict=True))]
            boxes.setdefault(slots[held.slot], []).append((held, part, name))
    return boxes
