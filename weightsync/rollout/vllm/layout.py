"""From what a model's loader did with a manifest to a rank's table: which box of which tensor goes where.

A parameter is filled by regions completely or not at all: what cannot be moved so takes every other tensor of
the same parameter with it, and those take their parameters, until nothing is left that is only half moved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from weightsync.config_sharding import BY_REGIONS
from weightsync.errors import ConfigurationError
from weightsync.layout.pieces import Piece
from weightsync.layout.strided import View, piece_from_copy
from weightsync.layout.tables import HeldBox, RankTable, TableBuilder
from weightsync.rollout.vllm.coverage import CASTABLE, CoverageReport
from weightsync.rollout.vllm.regions import Cover, Region
from weightsync.rollout.vllm.tracer import Write
from weightsync.tensors import dtype_name, list_names

_NOT_EXPERTS = "shard_weights: experts"


@dataclass(frozen=True)
class RankLayout:
    """What a rank stores, and how its storages differ from the parameters that are served.

    Attributes:
        table: storages are parameters as the model's loader knows them; their dtype is that of the tensors.
        casts: storages whose parameter has another dtype: they must never be written into it, byte by byte.
        fills: storages of which some elements come from no tensor and are zero: padding of a vocabulary.
        absent: tensors that this rank rightly stores nothing of: other ranks of its engine do.
    """

    table: RankTable
    casts: frozenset[str]
    fills: frozenset[str]
    absent: tuple[str, ...]


def rank_table(report: CoverageReport, parameters: Mapping[str, torch.Tensor], *, sharding: str) -> RankTable:
    """Return the table of `rank_layout`."""
    return rank_layout(report, parameters, sharding=sharding).table


def rank_layout(
    report: CoverageReport, parameters: Mapping[str, torch.Tensor], *, sharding: str
) -> RankLayout:
    """Say what this rank stores of every tensor of the manifest that was tried.

    Args:
        report: of the trial.
        parameters: of the trial model, each storage once.
        sharding: ``all`` and ``auto`` move whatever they can by regions, ``experts`` routed experts only.

    Raises:
        ConfigurationError: with ``experts``, routed experts that cannot be moved by regions.
    """
    if sharding not in BY_REGIONS:
        known = ", ".join(sorted(BY_REGIONS))
        raise ConfigurationError(f"shard_weights must be one of {known}, not {sharding!r}")
    sketch = _Sketch(report, parameters)
    if sharding == "experts":
        sketch.leave_to_others(report.experts)
    sketch.settle()
    if sharding == "experts":
        _require_experts(report, sketch)
    return sketch.layout()


class _Sketch:
    """Collects the reasons why tensors and parameters cannot be filled by regions, then builds the rest."""

    def __init__(self, report: CoverageReport, parameters: Mapping[str, torch.Tensor]) -> None:
        if report.manifest is None:
            raise ConfigurationError("this report is of no manifest: try one first")
        self._manifest = report.manifest
        self._absent = tuple(report.absent)
        self._reworked = report.reworked
        self._parameters = parameters
        self._shapes = {spec.name: tuple(spec.shape) for spec in report.manifest.tensors}
        self._writes: dict[str, list[Write]] = defaultdict(list)
        self._targets: dict[str, set[str]] = defaultdict(set)
        self._pieces: dict[str, list[tuple[str, Piece]]] = defaultdict(list)
        self.whole: dict[str, str] = {}
        for name, why in report.refused.items():
            self.whole[name] = f"the model refuses it: {why}"
        for write in report.writes:
            self._add(write)

    def _add(self, write: Write) -> None:
        self._writes[write.target].append(write)
        for name in write.sources:
            self._targets[name].add(write.target)
            found = self._piece(name, write)
            if isinstance(found, str):
                self.whole.setdefault(name, f"{write.target}: {found}")
            else:
                self._pieces[name].append((write.target, found))

    def _piece(self, name: str, write: Write) -> Piece | str:
        """Return what one write stores of a tensor, or why that is no box of it."""
        parameter = self._parameters.get(write.target)
        if parameter is None:
            return "it is a buffer, and only parameters are filled by regions"
        if write.read is None:
            return "its values are computed, not copied"
        piece = piece_from_copy(
            0, self._shapes[name], _view(write.read), _view(write.into), extent=parameter.numel()
        )
        if piece is None:
            return "what is read of the tensor is no box of it"
        return _in_order(piece) or piece

    def leave_to_others(self, experts: frozenset[str]) -> None:
        """Mark every tensor that does not go into routed experts."""
        for name in self._shapes:
            if self._targets[name] - experts:
                self.whole[name] = _NOT_EXPERTS

    def settle(self) -> None:
        """Find the parameters that cannot be filled so, and whatever goes down with them."""
        lost = list(self.whole)
        for target, writes in self._writes.items():
            reason = _why_not(writes, self._parameters.get(target))
            if target in self._reworked:
                reason = "its values are computed anew once it is loaded"
            if reason is not None:
                lost += self._give_up(target, reason)
        while lost:
            name = lost.pop()
            for target in sorted(self._targets[name]):
                lost += self._give_up(target, f"it is filled together with {name!r}")

    def _give_up(self, target: str, reason: str) -> list[str]:
        """Mark the tensors of a parameter; returns those that were not marked yet."""
        names = {name for write in self._writes[target] for name in write.sources}
        fresh = sorted(name for name in names if name not in self.whole)
        self.whole.update((name, f"{target}: {reason}") for name in fresh)
        return fresh

    def experts_left(self, experts: frozenset[str]) -> dict[str, str]:
        """Return the tensors of routed experts that cannot be moved by regions, with the reasons."""
        return {name: why for name, why in self.whole.items() if self._targets[name] & experts}

    def layout(self) -> RankLayout:
        """Return the layout of what can be moved by regions."""
        builder, storages = TableBuilder(self._manifest), {}
        casts, fills = set(), set()
        for target, parameter in self._parameters.items():
            writes = self._writes.get(target, [])
            copies = [write for write in writes if write.sources]
            if not copies or any(name in self.whole for write in copies for name in write.sources):
                continue
            dtype = copies[0].source_dtype or parameter.dtype
            storages[target] = builder.add_storage(target, tuple(parameter.shape), dtype_name(dtype))
            if dtype != parameter.dtype:
                casts.add(target)
            if sum(write.into.numel for write in copies) < parameter.numel():
                fills.add(target)
        for name, reason in self.whole.items():
            builder.need_whole(name, reason)
        for name, pieces in self._pieces.items():
            if name not in self.whole:
                builder.add(name, [_held(storages[target], piece) for target, piece in pieces])
        return RankLayout(builder.build(), frozenset(casts), frozenset(fills), self._absent)


def _held(storage: int, piece: Piece) -> HeldBox:
    return HeldBox(storage, piece.box, piece.offset, piece.strides)


def _view(region: Region) -> View:
    return View(region.shape, region.stride, region.offset)


def _in_order(piece: Piece) -> str | None:
    """Say why a box does not lie in runs of consecutive elements; `None` if it does."""
    sizes = zip(piece.box.shape, piece.strides or (), strict=False)
    strides = [stride for size, stride in sizes if size > 1]
    if strides != sorted(strides, reverse=True):
        return "it is stored transposed"
    if strides and strides[-1] != 1:
        return "its elements are stored apart from each other"
    return None


def _why_not(writes: Iterable[Write], parameter: torch.Tensor | None) -> str | None:
    """Say why a parameter cannot be filled by copying boxes into zeros; `None` if it can."""
    writes = list(writes)
    copies = [write for write in writes if write.sources]
    if not copies or parameter is None:
        return None  # nothing is stored by regions here; tensors that go into buffers are marked already
    if not _owns_its_storage(parameter):
        return "its memory is not one contiguous tensor of its own"
    dtypes = {write.source_dtype for write in copies}
    if len(dtypes) > 1:
        return "its tensors have different dtypes"
    source = copies[0].source_dtype
    if source != parameter.dtype and not {source, parameter.dtype} <= CASTABLE:
        return "its tensors have another dtype, which is no plain cast"
    return _gaps(writes, copies, parameter.numel())


def _gaps(writes: list[Write], copies: list[Write], total: int) -> str | None:
    copied = _cover(copies)
    twice = copied.written - copied.size()
    if twice:
        return f"{twice} of its elements are written twice"
    fills = [write for write in writes if not write.sources]
    if any(write.fill != 0 for write in fills):
        return "some of its elements are a constant that is not zero"
    done = _cover(writes).size()
    if done < total:
        return f"{done} of its {total} elements are written"
    if any(_covered_before(writes, index) for index, write in enumerate(writes) if not write.sources):
        return "some of its elements are overwritten by a constant"
    return None


def _covered_before(writes: list[Write], index: int) -> bool:
    """Whether a constant is written over what was copied before it."""
    before = _cover(write for write in writes[:index] if write.sources)
    size = before.size()
    before.add(writes[index].into)
    return before.size() < size + _cover([writes[index]]).size()


def _cover(writes: Iterable[Write]) -> Cover:
    cover = Cover()
    for write in writes:
        cover.add(write.into)
    return cover


def _owns_its_storage(parameter: torch.Tensor) -> bool:
    whole = parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()
    return parameter.is_contiguous() and parameter.storage_offset() == 0 and whole


def _require_experts(report: CoverageReport, sketch: _Sketch) -> None:
    """Refuse routed experts that would not move by regions: that is what ``experts`` asks for."""
    left = sketch.experts_left(report.experts)
    if left:
        name, why = next(iter(left.items()))
        raise ConfigurationError(
            f"shard_weights: experts cannot move {list_names(left)} by regions ({why}): write "
            "shard_weights: auto, which sends these whole, or none",
            tensor=name,
            phase="layout",
        )  # fmt: skip
