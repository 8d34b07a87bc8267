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
        counted = [each for each in ran if each.received_bytes]
        if counted:
            console.print(_received(counted))
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
        f"from {ranks} ranks{_parallel(settings.rollout_tp)}; "
        f"buckets of {settings.bucket_mib} MiB, verify {settings.verify}; "
        f"{result.machine['cores']} cores, {result.machine['gpus'] or 'no'} GPU; "
        f"medians of {settings.repeats} refits, each right after a plain copy, whose speed is a ratio of 1"
    )


def _parallel(rollout_tp: int) -> str:
    return f", {rollout_tp} of which share each parameter" if rollout_tp > 1 else ""


def _figures(result: BenchResult, ran: Iterable[Measurement]) -> Table:
    table = Table(box=SIMPLE_HEAD, collapse_padding=True)
    table.add_column("what", no_wrap=True)
    for column in ("GB", "s", "GB/s", "ratio", "range", "connect\nMiB", "refits\nMiB"):
        table.add_column(column, justify="right", no_wrap=True)
    seconds = result.copy_seconds
    if seconds is not None:
        size, speed = f"{result.stored_bytes / 1e9:.3f}", f"{result.stored_bytes / seconds / 1e9:.2f}"
        table.add_row("one plain copy", size, f"{seconds:.3f}", speed, "1", "", "0", "0")
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
            f"{each.connect_bytes / MIB:.0f}",
            f"{each.refit_bytes / MIB:.0f}",
        )
    return table


def _received(counted: Iterable[Measurement]) -> Table:
    table = Table(box=SIMPLE_HEAD, collapse_padding=True)
    table.add_column("what", no_wrap=True)
    for column in (
        "received\n/ least",
        "in\nplace",
        "staged",
        "whole",
        "plan\nms",
        "register\nms",
        "prepare\nms",
    ):
        table.add_column(column, justify="right")
    for each in counted:
        total = sum(each.copies_by_bytes.values())
        copies = [each.copies_by_bytes.get(kind, 0) for kind in ("in_place", "staged", "whole")]
        table.add_row(
            each.title,
            _share_text(each),
            *(f"{nbytes / total:.0%}" if total else "" for nbytes in copies),
            *(_once_text(each.made_once.get(phase, {})) for phase in ("plan", "register", "prepare")),
        )
    table.caption = (
        "of all rollout ranks; milliseconds in connecting + the first refit + a later one, at most"
    )
    return table


def _share_text(each: Measurement) -> str:
    if each.receives_least:
        return "1"
    return f"{sum(each.received_bytes) / sum(each.least_bytes):.3f}"


def _once_text(seconds: dict[str, float]) -> str:
    return " + ".join(f"{value * 1e3:.1f}" for value in seconds.values()) if any(seconds.values()) else ""


def _phases(ran: Iterable[Measurement]) -> Table:
    table = Table("what", "policy, seconds", "rollout, seconds", box=SIMPLE_HEAD, collapse_padding=True)
    for each in ran:
        table.add_row(each.title, *(_phase_text(each.phases.get(side, {})) for side in ("policy", "rollout")))
    return table


def _phase_text(phases: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.3f}" for name, seconds in phases.items() if seconds >= _SHORTEST_S)
