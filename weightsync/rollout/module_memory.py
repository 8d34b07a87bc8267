"""What one rank stores of a module's tensors: its part in a refit by regions. No communication."""

from __future__ import annotations

import torch

from weightsync.config_sharding import BY_REGIONS
from weightsync.errors import ConfigurationError, ManifestError
from weightsync.layout.tables import HeldBox, RankTable, TableBuilder
from weightsync.rollout.module_state import find_tensor, identity, local_pieces, local_tensor, named_state
from weightsync.tensors import TensorSpec, WeightManifest, dtype_from_name

_EXPERTS = "experts"


class ModuleMemory:
    """The `RankMemory` of a module. Tensors are looked up at each use: they may be replaced in between.

    Args:
        model: the module.
        manifest: of the refits; it fits the module.
        sharding: ``"experts"``, ``"all"`` or ``"auto"``.

    Attributes:
        manifest: see above.
        ties: names of the manifest whose tensors have come under an earlier name.

    Raises:
        ConfigurationError: an unknown ``sharding``.
    """

    def __init__(self, model: torch.nn.Module, manifest: WeightManifest, sharding: str) -> None:
        if sharding not in BY_REGIONS:
            raise ConfigurationError(
                f"shard_weights: {sharding!r} is unknown; write one of {', '.join(BY_REGIONS)}"
            )
        self.manifest = manifest
        self._model = model
        self.ties: set[str] = set()
        self._table = self._make_table(manifest, sharding)

    @property
    def table(self) -> RankTable:
        """Where this rank's boxes of the tensors are; see `RankMemory`."""
        return self._table

    def storage(self, index: int) -> torch.Tensor | None:
        """Return the live memory; `None` of a tensor that is strided or has none. See `RankMemory`."""
        entry = self._table.storages[index]
        tensor = local_tensor(find_tensor(self._model, entry.name))
        as_told = (tuple(tensor.shape), tensor.dtype) == (entry.shape, dtype_from_name(entry.dtype))
        if tensor.is_meta or not as_told or not tensor.is_contiguous():
            return None
        return tensor.view(-1)

    @torch.no_grad()
    def load(self, name: str, value: torch.Tensor) -> None:
        """Copy a whole local tensor into its place.

        Raises:
            ManifestError: it has another shape or dtype than this rank's.
        """
        place = local_tensor(find_tensor(self._model, name))
        if (place.shape, place.dtype) != (value.shape, value.dtype):
            raise ManifestError(
                f"got {TensorSpec.of(name, value)} where this rank stores {TensorSpec.of(name, place)}",
                tensor=name, phase="load",
            )  # fmt: skip
        place.copy_(value)

    def _make_table(self, manifest: WeightManifest, sharding: str) -> RankTable:
        builder, seen = TableBuilder(manifest), set()
        tensors = dict(named_state(self._model))
        for spec in manifest.tensors:
            tensor = tensors.get(spec.name)
            if tensor is None:
                continue
            key = identity(tensor)
            reason = _why_whole(spec.name, tensor, sharding)
            if reason is not None:
                builder.need_whole(spec.name, reason)
            elif key in seen:
                self.ties.add(spec.name)
            else:
                seen.add(key)
                local = local_tensor(tensor)
                index = builder.add_storage(spec.name, local.shape, spec.dtype)
                pieces = local_pieces(tensor)
                builder.add(spec.name, [HeldBox(index, p.box, p.offset, p.strides) for p in pieces])
        return builder.build()


def _why_whole(name: str, tensor: torch.Tensor, sharding: str) -> str | None:
    if sharding == "experts" and _EXPERTS not in name.split("."):
        return "shard_weights: experts moves only those of routed experts by regions"
    try:
        local_pieces(tensor)
    except ConfigurationError as error:
        return error.message
    return None
