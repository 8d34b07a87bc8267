"""What `weightsync plan` found: as a table, as JSON, and as a picture of the traffic."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from weightsync.errors import ConfigurationError, MissingDependencyError
from weightsync.layout.descriptors import count_descriptors
from weightsync.layout.estimate import (
    Received,
    Seconds,
    Traffic,
    count_received,
    predict_seconds,
    traffic,
)
from weightsync.layout.families import ModelTensors
from weightsync.layout.pieces import Layout
from weightsync.layout.plan import ReshardPlan, make_plan

_GIB = 1 << 30
_MAX_RANGES = 2


@dataclass(frozen=True)
class PlanReport:
    """A plan and its figures.

    Attributes:
        model: what is sent.
        settings: what was asked for.
        plan: the copies.
        received: of each rollout rank.
        least: bytes that each rollout rank stores; `None` where that is not known.
        traffic: sums over links.
        seconds: predicted.
        descriptors: rows of descriptors that each rollout rank reads by, before neighbours are joined.
        runs: contiguous runs that these rows stand for, likewise.
        notes: what to tell.
    """

    model: ModelTensors
    settings: Mapping[str, Any]
    plan: ReshardPlan
    received: Received
    least: list[int] | None
    traffic: Traffic
    seconds: Seconds
    descriptors: list[int]
    runs: list[int]
    notes: tuple[str, ...] = field(default=())

    @classmethod
    def make(
        cls,
        *,
        model: ModelTensors,
        policy: Layout,
        rollout: Layout,
        least: Layout | None,
        settings: Mapping[str, Any],
        notes: tuple[str, ...] = (),
    ) -> PlanReport:
        """Plan, and count.

        Raises:
            ManifestError: no policy rank holds what a rollout rank stores.
        """
        plan = make_plan(policy, rollout)
        descriptors, runs = count_descriptors(plan)
        return cls(
            model=model,
            settings=settings,
            plan=plan,
            received=count_received(rollout, settings["bucket_bytes"]),
            least=None if least is None else least.held_bytes().tolist(),
            traffic=traffic(plan),
            seconds=predict_seconds(plan, settings["link_gbps"]),
            descriptors=descriptors.tolist(),
            runs=runs.tolist(),
            notes=(*model.notes, *notes),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        sources, targets = np.nonzero(self.plan.links)
        sizes = self.plan.links[sources, targets]
        rows = zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True)
        return {
            "model": {
                "family": self.model.family,
                "tensors": len(self.model.tensors),
                "bytes": self.model.nbytes,
            },
            **self.settings,
            "tensors_per_rank": self.received.tensors,
            "bytes_per_rank": self.received.nbytes,
            "batches_per_rank": self.received.batches,
            "least_bytes_per_rank": self.least,
            "sent_per_rank": self.traffic.sent.tolist(),
            "imbalance": {"sent": self.traffic.imbalance, "received": self.traffic.receive_imbalance},
            "links": [{"source": s, "target": t, "bytes": n} for s, t, n in rows],
            "copies": self.plan.regions,
            "descriptors_per_rank": self.descriptors,
            "runs_per_rank": self.runs,
            "seconds": asdict(self.seconds),
            "notes": list(self.notes),
        }


def print_report(report: PlanReport, console: Console | None = None) -> None:
    """Print a plan as tables."""
    console = console or Console()
    settings = report.settings
    console.print(
        f"{report.model.family}: {len(report.model.tensors)} tensors, {_gib(report.model.nbytes)}; "
        f"{settings['policy_ranks']} policy ranks ({settings['policy']}) to {settings['rollout_ranks']} "
        f"rollout ranks ({settings['rollout']}), shard {settings['shard']}"
    )
    console.print(_rank_table(report))
    console.print(_link_table(report))
    console.print(_second_table(report))
    for note in report.notes:
        console.print(f"Note: {note}.")


def _rank_table(report: PlanReport) -> Table:
    table = Table("ranks", "tensors", "received", "least", "batches", "descriptors", "runs")
    received = report.received
    least: list[int | None] = [None] * len(received.tensors) if report.least is None else [*report.least]
    rows = list(zip(received.tensors, received.nbytes, least, received.batches, strict=True))
    for ranks in _alike(rows):
        tensors, nbytes, possible, batches = rows[ranks[0]]
        table.add_row(
            _ranges(ranks),
            str(tensors),
            _gib(nbytes),
            "" if possible is None else _gib(possible),
            str(batches),
            _most([report.descriptors[rank] for rank in ranks]),
            _most([report.runs[rank] for rank in ranks]),
        )
    return table


def _alike(rows: Sequence[Hashable]) -> list[list[int]]:
    """Return the indices of equal rows, together."""
    found: dict[Hashable, list[int]] = {}
    for index, row in enumerate(rows):
        found.setdefault(row, []).append(index)
    return list(found.values())


def _ranges(ranks: list[int]) -> str:
    """Return a short text for a list of ascending ranks: ``0-7, 32-39 and 48 more``."""
    cuts = [0, *(i for i in range(1, len(ranks)) if ranks[i] != ranks[i - 1] + 1), len(ranks)]
    spans = [ranks[a:b] for a, b in pairwise(cuts)]
    shown = [str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans[:_MAX_RANGES]]
    rest = sum(len(span) for span in spans[_MAX_RANGES:])
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def _most(counts: list[int]) -> str:
    most = max(counts)
    return f"{most / 1e6:.1f} M" if most >= 1e6 else str(most)


def _link_table(report: PlanReport) -> Table:
    table = Table("links", "copies", "mean link", "busiest link", "senders' imbalance", "receivers'")
    found = report.traffic
    table.add_row(
        str(found.links),
        str(report.plan.regions),
        _gib(found.mean_link),
        _gib(found.largest_link),
        f"{found.imbalance:.3f}",
        f"{found.receive_imbalance:.3f}",
    )
    return table


def _second_table(report: PlanReport) -> Table:
    table = Table(
        f"predicted at {report.settings['link_gbps']:g} Gbit/s a rank", "seconds", "against the plan"
    )
    for name, value in asdict(report.seconds).items():
        if value is None:
            table.add_row(name, "too few policy ranks", "")
        else:
            planned = report.seconds.planned
            table.add_row(name, f"{value:.3f}", f"{value / planned:.1f} x" if planned else "")
    return table


def _gib(size: float) -> str:
    return f"{size / _GIB:.2f} GiB" if size >= _GIB / 10 else f"{size / (1 << 20):.2f} MiB"


def write_png(report: PlanReport, path: Path) -> None:
    """Draw the bytes of each link, and what each rank sends and receives.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        ConfigurationError: the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("--png needs matplotlib: pip install 'weightsync[demo]'") from error
    figure = Figure(figsize=(12, 7), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(2, 1))
    heat = figure.add_subplot(grid[:, 0])
    image = heat.imshow(
        report.plan.links / _GIB, aspect="auto", cmap="Blues", interpolation="nearest", vmin=0
    )
    heat.set(
        title="GiB from each policy rank to each rollout rank", xlabel="rollout rank", ylabel="policy rank"
    )
    figure.colorbar(image, ax=heat, label="GiB")
    for row, (title, values, label) in enumerate(
        (
            ("Sent", report.traffic.sent, "policy rank"),
            ("Received", report.traffic.received, "rollout rank"),
        )
    ):
        axes = figure.add_subplot(grid[row, 1])
        axes.bar(np.arange(len(values)), values / _GIB, width=1.0, color="#3b6ea8")
        axes.set(title=title, xlabel=label, ylabel="GiB", xlim=(-0.5, len(values) - 0.5))
        axes.spines[["top", "right"]].set_visible(False)
    settings = report.settings
    figure.suptitle(
        f"{report.model.family}: policy {settings['policy']} on {settings['policy_ranks']}, rollout "
        f"{settings['rollout']} on {settings['rollout_ranks']}, shard {settings['shard']}"
    )
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error}") from error
