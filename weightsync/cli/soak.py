"""`weightsync soak`: thousands of refits in a row, and whether anything that a process holds has grown."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from weightsync.drills.holdings import LIMITS
from weightsync.drills.soak import Grown, Soak, Soaked

_MOST = 16
_LINES = 20


def soak(
    *,
    refits: Annotated[int, typer.Option(min=1, help="Refits after the warm-up.")] = 2000,
    transport: Annotated[str, typer.Option(help="What moves the weights.")] = "nixl",
    topology: Annotated[str, typer.Option(help="Who sends to whom.")] = "auto",
    policy_ranks: Annotated[int, typer.Option(min=1, max=_MOST, help="Number of policy ranks.")] = 2,
    rollout_ranks: Annotated[int, typer.Option(min=1, max=_MOST, help="Number of rollout ranks.")] = 2,
    fail_every: Annotated[
        int, typer.Option(min=0, help="After so many refits one more comes that fails; 0: none does.")
    ] = 0,
    warm_up: Annotated[int, typer.Option(min=1, help="Refits before the first look.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Refit a small model thousands of times, and look at what every process holds.

    Each worker, and the driver, is a process of its own. After each refit every rollout rank's weights are
    compared with the policy's, byte for byte. Memory, descriptors, threads, sockets and shared memory are
    looked at after the warm-up and at the end. Exits with 1 if one of them has grown by more than it may.
    """
    console = Console(stderr=as_json)
    every = max(1, refits // _LINES)

    def say(number: int) -> None:
        if number % every == 0:
            console.print(f"refit {number}")

    drill = Soak(
        transport, topology, policy_ranks=policy_ranks, rollout_ranks=rollout_ranks, fail_every=fail_every,
        say=say,
    )  # fmt: skip
    soaked = drill.run(refits, warm_up=warm_up)
    if as_json:
        typer.echo(json.dumps(soaked.to_dict(), indent=2))
    else:
        _show(console, soaked)
    if not soaked.passed:
        raise typer.Exit(1)


def _show(console: Console, soaked: Soaked) -> None:
    names = list(LIMITS.to_dict())
    table = Table("process", *(name.replace("_", " ") for name in names), "result")
    for each in soaked.processes:
        table.add_row(each.process, *(_cell(each, name) for name in names),
                      "[bold red]has grown" if each.beyond else "flat")  # fmt: skip
    console.print(table)
    limits = ", ".join(f"{name.replace('_', ' ')} {limit:g}" for name, limit in LIMITS.to_dict().items())
    console.print(f"Before and after; it may grow by: {limits}.")
    console.print(
        f"{soaked.refits} refits and {soaked.failed} that were to fail in {soaked.seconds:.0f} s, all with "
        f"the right weights. Left in /dev/shm: {', '.join(soaked.left_behind) or 'nothing'}."
    )


def _cell(each: Grown, name: str) -> str:
    text = f"{each.before.to_dict()[name]:g} -> {each.after.to_dict()[name]:g}"
    return f"[bold red]{text}" if name in each.beyond else text
