"""The `weightsync` command. A subcommand's module is imported only when it is the one asked for.

So ``weightsync --help`` is fast and works without vLLM, Ray and NIXL, and each command's options are
written once, in the module that implements it: a plain function with typer annotations.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import typer

from weightsync import __version__
from weightsync.errors import WeightSyncError


class Command(NamedTuple):
    """Where a subcommand is implemented, and its line in ``weightsync --help``."""

    module: str
    function: str
    summary: str


COMMANDS = {
    "demo": Command(
        "weightsync.cli.demo",
        "demo",
        "Train a small model with GRPO on Ray: FSDP2 workers refit vLLM over NIXL.",
    ),
    "verify": Command(
        "weightsync.cli.verify",
        "verify",
        "Refit a vLLM worker and compare it with one started from a checkpoint.",
    ),
    "bench": Command(
        "weightsync.cli.bench",
        "bench",
        "Measure every transport against one plain copy through shared memory.",
    ),
    "elastic-demo": Command(
        "weightsync.cli.elastic",
        "elastic_demo",
        "Add, remove, kill and replace rollout workers of a running job on Ray.",
    ),
    "faults": Command(
        "weightsync.cli.faults",
        "faults",
        "Break refits in every way; each must end in time, say why, and be followed by a good one.",
    ),
    "soak": Command(
        "weightsync.cli.soak",
        "soak",
        "Refit a small model thousands of times; nothing that a process holds may grow.",
    ),
    "plan": Command(
        "weightsync.cli.plan",
        "plan",
        "Say what a refit between two parallel layouts moves: bytes, links, seconds.",
    ),
    "doctor": Command(
        "weightsync.cli.doctor",
        "doctor",
        "Say what of this machine is ready for a refit, and what to install.",
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; exits with 0, 1 (a check or a refit failed) or 2 (wrong usage).

    A `WeightSyncError` becomes one clear line on standard error; with ``--debug``, anywhere on the line,
    its traceback.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in given
    arguments = [each for each in given if each != "--debug"]
    try:
        _build(next((each for each in arguments if not each.startswith("-")), None))(
            arguments, prog_name="weightsync"
        )
    except WeightSyncError as error:
        if debug:
            raise
        typer.echo(f"weightsync: {type(error).__name__}: {error}", err=True)
        sys.exit(1)


def _build(selected: str | None) -> typer.Typer:
    """Make the application; only the selected subcommand brings its real options."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    app.callback()(_options)
    for name, command in COMMANDS.items():
        function = _load(command) if name == selected else _unselected
        app.command(name, short_help=command.summary)(function)
    return app


def _load(command: Command) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(importlib.import_module(command.module), command.function)
    return function


def _unselected() -> None:
    """Stand for a subcommand in the list of commands."""


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"weightsync {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit."),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Print tracebacks of errors; may stand anywhere on the line.")
    ] = False,
) -> None:
    """Move policy weights from training workers into inference engines while an RL job runs."""
