"""`weightsync faults`: every fault, to everyone, at every place of a refit, over every transport."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from weightsync.drills.fault_cells import ACTORS, FAULTS, PHASES, Verdict, make_cells
from weightsync.drills.fault_matrix import FaultMatrix
from weightsync.drills.stage import Deadlines
from weightsync.errors import ConfigurationError

_MOST = 8
_COMMITS = ("in_place", "staged")
_THEN = ("fail", "continue")
_NEEDS = {"nixl": "nixl", "ipc": "", "gloo": "", "mooncake": "mooncake", "kimi_ckpt_engine": "nixl"}


def faults(
    *,
    transports: Annotated[
        str, typer.Option(help="Transports, with commas between them; by default all that can run here.")
    ] = "",
    actors: Annotated[str, typer.Option(help="Whom the faults strike.")] = ",".join(ACTORS),
    faults: Annotated[str, typer.Option(help="What happens to them.")] = ",".join(FAULTS),
    phases: Annotated[str, typer.Option(help="Where in the refit.")] = ",".join(PHASES),
    policy_ranks: Annotated[int, typer.Option(min=1, max=_MOST, help="Number of policy ranks.")] = 2,
    rollout_ranks: Annotated[int, typer.Option(min=2, max=_MOST, help="Number of rollout ranks.")] = 2,
    commit: Annotated[str, typer.Option(help="How: in_place or staged.")] = _COMMITS[0],
    on_failure: Annotated[str, typer.Option(help="Whether the others go on: fail or continue.")] = _THEN[0],
    as_json: Annotated[bool, typer.Option("--json", help="Print the cells as JSON.")] = False,
) -> None:
    """Break refits in every way, and see that each ends in time, says why, and is followed by a good one.

    Every worker, and the driver, is a process of its own. In each cell one fault strikes one of them; then
    whoever is gone is replaced, and the next refit must bring the right weights. Exits with 1 if a cell
    failed.
    """
    console = Console(stderr=as_json)
    wanted = _chosen("--transports", transports, tuple(_NEEDS)) if transports else _those_here()
    cells = list(
        make_cells(
            wanted,
            _chosen("--actors", actors, ACTORS),
            _chosen("--faults", faults, FAULTS),
            _chosen("--phases", phases, PHASES),
        )
    )
    matrix = FaultMatrix(
        policy_ranks=policy_ranks,
        rollout_ranks=rollout_ranks,
        deadlines=Deadlines(),
        commit=_chosen("--commit", commit, _COMMITS)[0],
        on_failure=_chosen("--on-failure", on_failure, _THEN)[0],
    )
    verdicts = []
    for verdict in matrix.run(cells):
        verdicts.append(verdict)
        if verdict.counts:
            console.print(_line(verdict), soft_wrap=True)
    if as_json:
        typer.echo(json.dumps([verdict.to_dict() for verdict in verdicts], indent=2))
    else:
        console.print(_table(verdicts))
    if not all(verdict.passed for verdict in verdicts if verdict.counts):
        raise typer.Exit(1)


def _line(verdict: Verdict) -> str:
    result = "[green]passed" if verdict.passed else f"[bold red]FAILED[/] ({escape(verdict.detail)})"
    return f"{verdict.cell}: {verdict.outcome} in {verdict.seconds:.1f} s, {result}"


def _those_here() -> list[str]:
    """Return the transports whose packages are installed."""
    return [name for name, package in _NEEDS.items() if not package or find_spec(package) is not None]


def _chosen(option: str, text: str, known: Sequence[str]) -> list[str]:
    chosen = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [part for part in chosen if part not in known]
    if unknown or not chosen:
        raise ConfigurationError(f"{option} must be some of {', '.join(known)}; got {text!r}")
    return chosen


def _table(verdicts: Sequence[Verdict]) -> Table:
    """Return the shares of cells that passed, by transport and fault."""
    kinds = list(dict.fromkeys(verdict.cell.fault for verdict in verdicts))
    table = Table("transport", *kinds, "all", "not applicable")
    for transport in dict.fromkeys(verdict.cell.transport for verdict in verdicts):
        row = [verdict for verdict in verdicts if verdict.cell.transport == transport]
        shares = [_share([each for each in row if each.cell.fault == kind]) for kind in kinds]
        table.add_row(transport, *shares, _share(row), str(sum(not each.counts for each in row)))
    return table


def _share(verdicts: Sequence[Verdict]) -> str:
    counted = [verdict for verdict in verdicts if verdict.counts]
    passed = sum(verdict.passed for verdict in counted)
    text = f"{passed} of {len(counted)}"
    return text if passed == len(counted) else f"[bold red]{text}"
