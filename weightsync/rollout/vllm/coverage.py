"""Does a manifest fill this rank's model? Answered before a byte is written, by the model's own loader.

The tracer says which region of which tensor lands where. From that follows which names the model refuses or
never looks at, which parameters (or parts of fused ones) nothing is written to, and which tensors have
another shape or dtype than the model takes. No rule about any architecture is needed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod

import torch

from weightsync.rollout.vllm.regions import Cover, Region, first_index, last_index
from weightsync.rollout.vllm.tracer import Write
from weightsync.tensors import WeightManifest, dtype_from_name, dtype_name

CASTABLE = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})
"""Dtypes among which a copy may cast."""


@dataclass(frozen=True)
class RankPlace:
    """Where this rank stands in its engine: what it may rightly leave unread depends on it."""

    tp_rank: int = 0
    tp_size: int = 1

    @property
    def reads_starts(self) -> bool:
        """Whether this rank's shards begin where the tensors begin."""
        return self.tp_rank == 0

    @property
    def reads_ends(self) -> bool:
        """Whether this rank's shards end where the tensors end."""
        return self.tp_rank == self.tp_size - 1


@dataclass
class CoverageReport:
    """What a manifest would do to this rank's model. Names map to an explanation."""

    refused: dict[str, str] = field(default_factory=dict)
    """Tensors at which ``load_weights`` raised: unknown, or of a shape that does not fit."""
    unused: list[str] = field(default_factory=list)
    """Tensors that no rank's model reads."""
    partly_read: dict[str, str] = field(default_factory=dict)
    """Tensors of which the model reads only a part, though the ranks together should read all."""
    mistyped: dict[str, str] = field(default_factory=dict)
    """Tensors whose dtype cannot become the parameter's."""
    missing: dict[str, str] = field(default_factory=dict)
    """Parameters that nothing, or not enough, is written to."""
    overlapping: dict[str, str] = field(default_factory=dict)
    """Parameters of which some elements are written twice."""
    casts: dict[str, str] = field(default_factory=dict)
    """Tensors that are cast on the way, between plain floating-point dtypes."""
    written: dict[str, int] = field(default_factory=dict)
    """Elements written, by parameter."""
    manifest: WeightManifest | None = None
    """What was tried."""
    writes: list[Write] = field(default_factory=list)
    """Everything that the loader wrote."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Of the parameters, before any processing."""
    reworked: frozenset[str] = frozenset()
    """Parameters whose values are computed anew once they are written."""
    absent: list[str] = field(default_factory=list)
    """Tensors that this rank rightly reads nothing of: other ranks of its engine do."""
    tied: frozenset[str] = frozenset()
    """Further names of parameters that have several."""
    experts: frozenset[str] = frozenset()
    """Parameters of routed experts."""


def build_report(
    manifest: WeightManifest,
    writes: Iterable[Write],
    parameters: Mapping[str, torch.Tensor],
    refused: Mapping[str, str],
    place: RankPlace,
) -> CoverageReport:
    """Account for every tensor of the manifest and every parameter of the model.

    Args:
        manifest: what would be sent.
        writes: what the model's loader did with it.
        parameters: the model's own, each storage once.
        refused: tensors at which the loader raised, with the reason.
        place: of this rank.
    """
    writes = list(writes)
    report = CoverageReport(refused=dict(refused), manifest=manifest, writes=writes)
    report.shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    _account_sources(report, manifest, writes, place)
    _account_parameters(report, writes, parameters)
    _account_dtypes(report, writes)
    return report


def _account_sources(
    report: CoverageReport, manifest: WeightManifest, writes: list[Write], place: RankPlace
) -> None:
    reads: dict[str, list[Region]] = defaultdict(list)
    transformed: set[str] = set()
    for write in writes:
        for name in write.sources:
            if write.read is None:
                transformed.add(name)
            else:
                reads[name].append(write.read)
    for spec in manifest.tensors:
        if spec.name in report.refused or spec.name in transformed:
            continue
        if spec.name not in reads:
            if spec.nbytes:
                report.unused.append(spec.name)
        elif reason := _unread(spec.shape, reads[spec.name], place):
            report.partly_read[spec.name] = f"{spec}: {reason}"


def _unread(shape: tuple[int, ...], regions: list[Region], place: RankPlace) -> str | None:
    """Say what this rank leaves unread that no other rank reads; `None` if nothing."""
    regions = [region for region in regions if region.numel]
    if not regions:
        return None
    if place.tp_size == 1:
        cover = Cover()
        for region in regions:
            cover.add(region)
        total = prod(shape)
        return f"the model reads {cover.size()} of {total} elements" if cover.size() < total else None
    # A shard is a box: the outer corners of the first and of the last rank's are those of the tensor.
    first = tuple(min(axis) for axis in zip(*(first_index(r, shape) for r in regions), strict=True))
    last = tuple(max(axis) + 1 for axis in zip(*(last_index(r, shape) for r in regions), strict=True))
    if place.reads_starts and any(first):
        return f"the model reads it from {list(first)} on"
    if place.reads_ends and last != shape:
        return f"the model reads it up to {list(last)} only"
    return None


def _account_parameters(
    report: CoverageReport, writes: list[Write], parameters: Mapping[str, torch.Tensor]
) -> None:
    filled: dict[str, Cover] = defaultdict(Cover)
    sent: dict[str, Cover] = defaultdict(Cover)
    for write in writes:
        filled[write.target].add(write.into)
        if write.sources:
            sent[write.target].add(write.into)
    for name, parameter in parameters.items():
        done, total = filled[name].size(), parameter.numel()
        if sent[name].written:
            report.written[name] = done
        if done < total or (total and not sent[name].written):
            report.missing[name] = f"{done if sent[name].written else 0} of {total} elements"
        twice = sent[name].written - sent[name].size()
        if twice:
            report.overlapping[name] = f"{twice} elements twice"


def _account_dtypes(report: CoverageReport, writes: list[Write]) -> None:
    for write in writes:
        source, target = write.source_dtype, write.target_dtype
        if source is None or source == target:
            continue
        text = f"{dtype_name(source)} to {dtype_name(target)}"
        accepted = {source, target} <= CASTABLE
        for name in write.sources:
            (report.casts if accepted else report.mistyped)[name] = text


def meta_tensors(manifest: WeightManifest) -> list[tuple[str, torch.Tensor]]:
    """Return tensors of the manifest's shapes and dtypes that have no memory."""
    return [
        (spec.name, torch.empty(spec.shape, dtype=dtype_from_name(spec.dtype), device="meta"))
        for spec in manifest.tensors
    ]
