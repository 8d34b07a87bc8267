"""Where a vLLM worker takes its parts of the tensors: into what is served, or through vLLM's reload.

A parameter is written in place only where vLLM's kernels compute with it as the model's loader filled it. A
layer that is packed, shuffled or processed otherwise is handed over, and vLLM's own reload processes it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

import torch

from weightsync.errors import ConfigurationError, ManifestError
from weightsync.layout.pieces import ABSENT
from weightsync.layout.tables import Held, RankTable, Storage
from weightsync.rollout.vllm.canonical import why_not_as_loaded
from weightsync.rollout.vllm.layout import RankLayout
from weightsync.tensors import TensorSpec, WeightManifest, dtype_from_name


class VllmDestinations:
    """The `RankMemory` of a vLLM worker.

    Args:
        manifest: of the refits.
        layout: what its model's loader makes of it.
        model: returns the model as the worker holds it now.
        why_none_in_place: why nothing at all is to be written in place, if that is so.

    Attributes:
        manifest: see above.
        handed_over: storages that are not written in place, with the reason.
    """

    def __init__(
        self,
        manifest: WeightManifest,
        layout: RankLayout,
        model: Callable[[], torch.nn.Module],
        *,
        why_none_in_place: str | None = None,
    ) -> None:
        self.manifest = manifest
        self._why_none_in_place = why_none_in_place
        self._layout = layout
        self._model = model
        self._index = {entry.name: index for index, entry in enumerate(layout.table.storages)}
        self._covered: dict[str, list[Held]] = {}
        self.handed_over = self._find_handed_over()

    @property
    def table(self) -> RankTable:
        """Which boxes this rank stores; see `RankMemory`."""
        return self._layout.table

    def storage(self, index: int) -> torch.Tensor | None:
        """Return a parameter that is served as it is loaded, else `None`; see `RankMemory`."""
        entry = self.table.storages[index]
        if entry.name in self.handed_over:
            return None
        parameter = self.live(entry.name)
        return parameter.view(-1) if _misfit(parameter, entry) is None else None

    def live(self, name: str) -> torch.Tensor:
        """Return a parameter as it is served now."""
        layer, last = self.owner(name)
        tensor: torch.Tensor = getattr(layer, last)
        return tensor.detach()

    def owner(self, name: str) -> tuple[torch.nn.Module, str]:
        """Return the layer of a parameter, and the parameter's name within it.

        Raises:
            ConfigurationError: the model that runs is not made as its own loader says.
        """
        path, _, last = name.rpartition(".")
        try:
            layer = _descend(self._model(), path)
            getattr(layer, last)
        except AttributeError as error:
            raise ConfigurationError(
                f"the model that runs has no parameter {name!r}, which its loader fills: "
                "write shard_weights: none",
                tensor=name,
            ) from error
        return layer, last

    def layers_in_place(self) -> list[torch.nn.Module]:
        """Return the layers whose parameters are written in place, and those that share all of theirs."""
        ours = {
            id(self.owner(name)[0]): self.owner(name)[0]
            for name in self._index
            if name not in self.handed_over
        }
        parameters = {id(p) for layer in ours.values() for p in layer.parameters(recurse=False)}
        for layer in self._model().modules():
            mine = list(layer.parameters(recurse=False))
            if mine and all(id(parameter) in parameters for parameter in mine):
                ours[id(layer)] = layer
        return list(ours.values())

    def require_fit(self, name: str, value: torch.Tensor) -> None:
        """Check that a parameter that was handed over is one of this rank's.

        Raises:
            ManifestError: unknown, or of another shape or dtype than the table says.
        """
        entry = self.table.storages[self._index[name]] if name in self._index else None
        if entry is None or (tuple(value.shape), value.dtype) != (entry.shape, dtype_from_name(entry.dtype)):
            wanted = "nothing of that name" if entry is None else f"{entry.dtype}{list(entry.shape)}"
            raise ManifestError(
                f"got {TensorSpec.of(name, value)} where this rank stores {wanted}", tensor=name, phase="load"
            )

    def copier(self, name: str) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """Return what copies a whole parameter from transfer memory; elements of no tensor become zero."""
        boxes = self._boxes(name) if name in self._layout.fills else None

        def copy_parameter(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
            if boxes is None or param.is_meta:  # on meta, vLLM counts what is copied: count the padding, too
                param.data.copy_(loaded_weight)
                return
            param.data.zero_()
            for box in boxes:
                _box(param.data, box).copy_(_box(loaded_weight, box))

        return copy_parameter

    def _boxes(self, name: str) -> list[Held]:
        if name not in self._covered:
            self._covered[name] = list(_held_in(self.table, self._index[name]))
        return self._covered[name]

    def _find_handed_over(self) -> dict[str, str]:
        layers: dict[int, list[Storage]] = defaultdict(list)
        owners: dict[int, torch.nn.Module] = {}
        for entry in self.table.storages:
            layer, _ = self.owner(entry.name)
            owners[id(layer)] = layer
            layers[id(layer)].append(entry)
        addresses = Counter(self.live(entry.name).data_ptr() for entry in self.table.storages if entry.numel)
        found: dict[str, str] = {}
        for key, entries in layers.items():
            reason = self._why_none_in_place or why_not_as_loaded(owners[key])
            for entry in entries:
                reason = reason or self._why_not(entry, addresses)
            if reason is not None:  # a layer is written in place completely, or not at all
                found.update((entry.name, reason) for entry in entries)
        return found

    def _why_not(self, entry: Storage, addresses: Counter[int]) -> str | None:
        parameter = self.live(entry.name)
        if entry.name in self._layout.casts:
            return "its tensors have another dtype"
        if entry.name in self._layout.fills:
            return "it is padded"
        if entry.numel and addresses[parameter.data_ptr()] > 1:
            return "another parameter shares its memory"
        return _misfit(parameter, entry)


def _misfit(parameter: torch.Tensor, entry: Storage) -> str | None:
    """Say why a parameter that is served is not what its loader filled."""
    if tuple(parameter.shape) != entry.shape or parameter.dtype != dtype_from_name(entry.dtype):
        return "it is served in another form"
    if parameter.is_meta or not parameter.is_contiguous():
        return "its memory is not contiguous"
    return None


def _descend(model: torch.nn.Module, path: str) -> torch.nn.Module:
    module = _bare(model)
    for part in path.split(".") if path else ():
        module = _bare(getattr(module, part))
    return module


def _bare(module: torch.nn.Module) -> torch.nn.Module:
    """Return the layer within one that adds LoRA to it."""
    from vllm.lora.layers import BaseLayerWithLoRA

    while isinstance(module, BaseLayerWithLoRA):
        module = module.base_layer
    return module


def _held_in(table: RankTable, storage: int) -> Iterator[Held]:
    for pattern, slots in zip(table.pattern_of, table.slots, strict=True):
        if pattern != ABSENT and storage in slots:
            yield from (held for held in table.patterns[pattern] if slots[held.slot] == storage)


def _box(tensor: torch.Tensor, held: Held) -> torch.Tensor:
    sizes = tuple(hi - lo for lo, hi in zip(held.lo, held.hi, strict=True))
    return tensor.as_strided(sizes, held.strides, tensor.storage_offset() + held.offset)
