"""`weightsync verify --live` and `--flips`: what runs against the policy, and flipped bits counted."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from weightsync.cluster.private_ray import private_ray
from weightsync.verification.flips import count_flips
from weightsync.verification.live import LiveReport
from weightsync.verification.scenario import Verification, VerifySettings

_ACTORS = 3
Checkpoints = Callable[[str, Path, str], tuple[Path, Path]]


def show_live(
    models: list[str], dtype: str, device: str, checkpoints: Checkpoints, *, as_json: bool = False
) -> None:
    """Refit each model once, compare it while it runs, change the policy, and compare again.

    Exits with 1 unless the first comparison passes and the second does not.
    """
    console, found = Console(stderr=as_json), {}
    for name in models:
        with (
            tempfile.TemporaryDirectory(prefix="weightsync-verify-") as scratch,
            private_ray(_ACTORS, log_to_driver=False) as ray,
        ):
            checkpoint, other = checkpoints(name, Path(scratch), dtype)
            settings = VerifySettings(
                checkpoint=checkpoint, other_checkpoint=other, dtype=dtype, device=device
            )
            found[name] = list(Verification(ray, settings, Path(scratch)).live())
        for title, report in zip(("after the refit", "after a change"), found[name], strict=True):
            console.print(f"{name}, {title}: {'equal' if report.passed else 'DIFFERENT'}\n{report}")
    right = all(_is_right(reports) for reports in found.values())
    if as_json:
        typer.echo(json.dumps({name: _plain(reports) for name, reports in found.items()}, indent=2))
    else:
        console.print(
            "Every engine serves what the policy has, and a change is noticed."
            if right
            else "[bold red]Not every engine serves what the policy has, or a change went unnoticed."
        )
    if not right:
        raise typer.Exit(1)


def show_flips(places: int, *, as_json: bool = False) -> None:
    """Flip bits with each mode of ``verify``. Exits with 1 if ``full`` missed one."""
    counts = {mode: count_flips(places, verify=mode) for mode in ("full", "sample", "off")}
    if as_json:
        typer.echo(
            json.dumps({mode: [asdict(each) for each in row] for mode, row in counts.items()}, indent=2)
        )
    else:
        table = Table("verify", "place", "flipped", "seen")
        for mode, row in counts.items():
            for each in row:
                table.add_row(mode, each.place, str(each.flipped), str(each.seen))
        Console().print(table)
    if any(each.missed for each in counts["full"]):
        raise typer.Exit(1)


def _is_right(reports: list[LiveReport]) -> bool:
    after_refit, after_change = reports
    return after_refit.passed and after_refit.is_proven and not after_change.passed


def _plain(reports: list[LiveReport]) -> dict[str, Any]:
    after_refit, after_change = reports
    return {"after_refit": after_refit.to_dict(), "after_change": after_change.to_dict()}
