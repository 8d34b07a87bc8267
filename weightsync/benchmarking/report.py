"""A benchmark's figures as tables."""

from __future__ import annotations

from collections.abc import Iterable

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from weightsync.benchmarking.run import BenchResult
from weightsync.benchmarking.trial import MIB, Measurement

_SHORTEST_S = 0.0005


def print_result(console: Console, result: BenchResult) -> None:
    """Print the figures, the phases, and what could not be measured and why."""
    ran = [each for each in result.measurements if each.ran]
    console.print(_summary(result))
    if ran:
        console.print(_figures(result, ran))
        console.print(_phases(ran))
    for each in result.measurements:
        if each.unavailable:
            console.print(f"[dim]cannot run here:[/] {each.title}: {each.unavailable}", highlight=False)
    for each in result.measurements:
        if each.error:
            console.print(f"[bold red]FAILED[/] {each.title}: {each.error}", highlight=False, markup=True)


def _summary(result: BenchResult) -> str:
    settings = result.settings
    ranks = f"{settings.policy_ranks} policy and {settings.rollout_ranks} rollout"
    return (
        f"{result.nbytes / 1e9:.3f} GB (Qwen3-0.6B with {settings.layers} layers, random values) "
        f"from {ranks} ranks; buckets of {settings.bucket_mib} MiB, verify {settings.verify}; "
        f"{result.machine['cores']} cores, {result.machine['gpus'] or 'no'} GPU; "
        f"medians of {settings.repeats} refits, each right after a plain copy, whose speed is a ratio of 1"
    )


def _figures(result: BenchResult, ran: Iterable[Measurement]) -> Table:
    table = Table(box=SIMPLE_HEAD, collapse_padding=True)
    table.add_column("what", no_wrap=True)
    for column in ("GB", "s", "GB/s", "ratio", "range", "extra MiB"):
        table.add_column(column, justify="right", no_wrap=True)
    seconds = result.copy_seconds
    if seconds is not None:
        size = f"{result.nbytes / 1e9:.3f}"
        table.add_row(
            "one plain copy", size, f"{seconds:.3f}", f"{result.nbytes / seconds / 1e9:.2f}", "1", "", "0"
        )
    kind = "baseline"
    for each in ran:
        if each.kind != kind:
            table.add_section()
            kind = each.kind
        table.add_row(
            each.title,
            f"{each.bytes / 1e9:.3f}",
            f"{each.seconds:.3f}",
            f"{each.gb_per_s:.2f}",
            f"[bold]{each.ratio:.2f}[/]",
            f"{min(each.ratios):.2f}-{max(each.ratios):.2f}",
            f"{each.extra_bytes / MIB:.0f}",
        )
    return table


def _phases(ran: Iterable[Measurement]) -> Table:
    table = Table("what", "policy, seconds", "rollout, seconds", box=SIMPLE_HEAD, collapse_padding=True)
    for each in ran:
        table.add_row(each.title, *(_phase_text(each.phases.get(side, {})) for side in ("policy", "rollout")))
    return table


def _phase_text(phases: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.3f}" for name, seconds in phases.items() if seconds >= _SHORTEST_S)
