"""`weightsync doctor`: what of this machine is ready for a refit, what is not, and what to install."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from weightsync.cli.checks import Check, Status, run_checks

_STYLES = {"ok": "green", "note": "yellow", "missing": "yellow", "broken": "red"}


def doctor(
    transport: Annotated[
        str,
        typer.Option(
            help="The refit_transport to check for: nixl, mooncake, another name or a 'module:ClassName'."
        ),
    ] = "nixl",
    deep: Annotated[
        bool,
        typer.Option(
            "--deep", help="Import Ray and vLLM too, each in a process of its own (up to a minute)."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Say what of this machine is ready for a refit, and what to install.

    Exits with 1 where something that the transport needs is missing or broken.
    """
    checks = run_checks(transport, deep=deep)
    failed = [check.name for check in checks if check.fails]
    if as_json:
        typer.echo(json.dumps({"ok": not failed, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        _print_table(checks)
        typer.echo(
            f"{transport} cannot run here yet: {', '.join(failed)}"
            if failed
            else f"{transport} can run here."
        )
    if failed:
        raise typer.Exit(1)


def _print_table(checks: list[Check]) -> None:
    table = Table("check", "", box=None, pad_edge=False)
    table.add_column("found", overflow="fold")
    table.add_column("what to do", overflow="fold")
    for check in checks:
        table.add_row(check.name, _styled(check.status), check.detail, check.fix)
    Console().print(table)


def _styled(status: Status) -> str:
    return f"[{_STYLES[status]}]{status}[/]"
