"""What one policy rank holds of the tensors of a stream, and the memory it is in. No collectives, no copies.

The boxes of a DTensor follow from its placements and this rank's place in its mesh. A plain tensor counts as
held whole by each rank that has it: that all of them hold the same values is taken for granted, as it is
where every rank sends its own copy. So what differs from rank to rank (say, running statistics of batches
that are not synchronised) may come from any of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
from torch import nn

from weightsync.errors import ConfigurationError, ManifestError
from weightsync.layout.regions import Box
from weightsync.layout.tables import HeldBox, RankTable, TableBuilder
from weightsync.policy.experts import Window
from weightsync.policy.local_views import LocalView, local_tensor
from weightsync.policy.planned import PlannedEntry
from weightsync.tensors import LocalMemory, WeightManifest, WeightStream, dtype_name


class LocalShards:
    """The memory of one rank, for a refit by regions: a `weightsync.engines.base.RankMemory`.

    A storage is the local tensor of a parameter or buffer, under its name in the model and in the dtype in
    which it is stored; the manifest says in which one it is sent. Nothing is looked at before it is wanted.

    Args:
        model: whose tensors these are.
        manifest: of the stream.
        planned: what the stream is made of.
    """

    def __init__(self, model: nn.Module, manifest: WeightManifest, planned: Sequence[PlannedEntry]) -> None:
        self._model = model
        self.manifest = manifest
        self._planned = tuple(planned)
        self._entries = {item.entry.name: item.entry for item in planned}
        self._views: dict[str, LocalView] = {}
        self._table: RankTable | None = None

    @property
    def table(self) -> RankTable:
        """Which boxes are where: the same object for the model's next stream, as long as nothing changes.

        Raises:
            ManifestError: a tensor was removed from the model.
        """
        if self._table is None:
            self._views = {name: LocalView.of(entry.tensor()) for name, entry in self._entries.items()}
            known = _TABLES.get(self._model)
            if known is None or known[0] != self.manifest or known[1] != self._views:
                known = self.manifest, self._views, _build(self.manifest, self._planned, self._views)
                _TABLES[self._model] = known
            self._table = known[2]
        return self._table

    def storage(self, index: int) -> torch.Tensor:
        """Return the live memory of a local tensor, flat.

        Raises:
            ManifestError: the tensor is no longer what it was when the table was made.
        """
        name = self.table.storages[index].name
        tensor = self._entries[name].tensor()
        now = LocalView.of(tensor)
        if now != self._views[name]:
            raise ManifestError(
                f"its shard is {now}, but was {self._views[name]} when the stream was made", tensor=name
            )
        local = local_tensor(tensor).detach().as_subclass(torch.Tensor)
        return local.as_strided((local.numel(),), (1,))


class NoShards:
    """The memory of a rank that does not say where its tensors are: all of them are sent whole."""

    def __init__(self, manifest: WeightManifest) -> None:
        self.manifest = manifest

    @cached_property
    def table(self) -> RankTable:
        """Nothing, with the reason for every tensor."""
        builder = TableBuilder(self.manifest)
        for name in self.manifest.names:
            builder.need_whole(name, "the weight stream is a plain generator")
        return builder.build()

    def storage(self, index: int) -> torch.Tensor | None:
        """Raise: there are none."""
        raise ManifestError(f"this rank has no storage {index}")


def memory_of(weights: WeightStream) -> LocalMemory:
    """Return where this rank has the tensors of a stream, also if the stream does not say it."""
    return weights.shards or NoShards(weights.manifest)


def described(weights: Iterable[tuple[str, torch.Tensor]]) -> tuple[WeightManifest, LocalMemory]:
    """Return a stream's manifest and this rank's memory, and give the stream up: nothing of it was begun.

    Raises:
        ConfigurationError: the weights have no manifest.
    """
    if not isinstance(weights, WeightStream):
        raise ConfigurationError(
            f"the weights are a plain {type(weights).__name__}, which does not say what comes: return "
            "weightsync.policy.weight_stream_from(model) from weight_stream(), or a "
            "weightsync.tensors.WeightStream with its manifest, or write shard_weights: none"
        )
    weights.select(())  # closing it takes part in no gather from now on
    return weights.manifest, memory_of(weights)


_TABLES: WeakKeyDictionary[nn.Module, tuple[WeightManifest, dict[str, LocalView], RankTable]] = (
    WeakKeyDictionary()
)
"""The last table of each model, with what it follows from."""


def _build(
    manifest: WeightManifest, planned: Iterable[PlannedEntry], views: dict[str, LocalView]
) -> RankTable:
    builder = TableBuilder(manifest)
    for item in planned:
        name = item.entry.name
        view = views[name]
        try:
            boxes = view.boxes()
        except ConfigurationError as error:
            for piece in item.pieces:
                builder.need_whole(piece.spec.name, error.message)
            continue
        if not boxes:
            continue
        storage = builder.add_storage(name, view.local, dtype_name(view.dtype))
        for piece in item.pieces:
            builder.add(piece.spec.name, _cut(boxes, view.strides, piece.window, storage))
    return builder.build()


def _cut(
    boxes: Iterable[tuple[Box, int]], strides: Sequence[int], window: Window, storage: int
) -> list[HeldBox]:
    """Return the parts of boxes that are in a window, as boxes of the slice that the window shows."""
    found = []
    for box, offset in boxes:
        common = box.intersection(window.box)
        if common is None:
            continue
        at = offset + sum((a - b) * step for a, b, step in zip(common.lo, box.lo, strides, strict=True))
        lo, hi = (
            window.kept([a - b for a, b in zip(corner, window.box.lo, strict=True)])
            for corner in (common.lo, common.hi)
        )
        found.append(HeldBox(storage, Box(lo, hi), at, window.kept(strides)))
    return found
