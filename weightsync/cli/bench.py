"""`weightsync bench`: every transport and topology against one plain copy, in one run on this machine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from weightsync.benchmarking.plot import require_matplotlib, save_plot
from weightsync.benchmarking.report import print_result
from weightsync.benchmarking.run import run_benchmark
from weightsync.benchmarking.shapes import LAYERS, Part, parameter_shapes
from weightsync.benchmarking.transports import Wish
from weightsync.benchmarking.trial import BenchSettings
from weightsync.engines.sampling import MODES
from weightsync.errors import ConfigurationError
from weightsync.topology import TOPOLOGIES


def bench(
    *,
    layers: Annotated[
        int, typer.Option(min=1, max=LAYERS, help="How many of Qwen3-0.6B's layers the model has.")
    ] = LAYERS,
    transports: Annotated[
        str | None,
        typer.Option(
            help="What to measure, with commas: nixl, nixl:regions, ipc:star, my_pkg.refit:MyEngine. "
            "Default: every transport that can run here, in each of its topologies that fits the ranks.",
            show_default=False,
        ),
    ] = None,
    topology: Annotated[
        str | None,
        typer.Option(help="This topology only, for transports that name none.", show_default=False),
    ] = None,
    policy_ranks: Annotated[int, typer.Option(min=1, help="Number of policy processes.")] = 1,
    rollout_ranks: Annotated[int, typer.Option(min=1, help="Number of rollout processes.")] = 1,
    rollout_tp: Annotated[
        int, typer.Option(min=1, help="Rollout processes that share each parameter, as tensor parallel ones.")
    ] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Timed refits of each.")] = 5,
    bucket_mib: Annotated[int, typer.Option(min=1, help="MiB of each transfer buffer.")] = 8,
    verify: Annotated[
        str, typer.Option(help="full, sample or off: which chunks are digested on both sides.")
    ] = "full",
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Of torch, in each process. Default: its share of the cores."),
    ] = None,
    baselines: Annotated[bool, typer.Option(help="Measure the other ways to move weights, too.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    json_file: Annotated[
        Path | None, typer.Option(help="Write the JSON here as well.", show_default=False)
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the figures here.", show_default=False)] = None,
) -> None:
    """Measure refits end to end, policy parameter to served parameter, against one plain copy.

    Exits with 1 if a transport failed or brought a wrong byte; the others' figures are shown all the same.
    """
    if png is not None:
        require_matplotlib()
    if verify not in MODES:
        raise ConfigurationError(f"--verify must be {', '.join(MODES)}, got {verify!r}")
    settings = BenchSettings(
        layers=layers,
        policy_ranks=policy_ranks,
        rollout_ranks=rollout_ranks,
        rollout_tp=_dividing(rollout_tp, rollout_ranks),
        repeats=repeats,
        bucket_mib=bucket_mib,
        verify=verify,
        threads=threads or max(1, len(os.sched_getaffinity(0)) // (policy_ranks + rollout_ranks)),
        topology=_known_topology(topology),
    )
    wishes = [Wish.read(each) for each in (transports or "").split(",") if each.strip()]
    progress = Console(stderr=True)
    with progress.status("starting") as status:
        result = run_benchmark(wishes, settings, baselines=baselines, tell=status.update)
    text = json.dumps(result.to_dict(), indent=2)
    if as_json:
        typer.echo(text)
    else:
        print_result(Console(), result)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(text + "\n", encoding="utf-8")
    if png is not None:
        save_plot(png, result)
    if result.failed:
        raise typer.Exit(1)


def _dividing(rollout_tp: int, rollout_ranks: int) -> int:
    if rollout_ranks % rollout_tp:
        raise ConfigurationError(f"--rollout-tp {rollout_tp} must divide --rollout-ranks {rollout_ranks}")
    parameter_shapes(1, Part(0, rollout_tp))
    return rollout_tp


def _known_topology(name: str | None) -> str:
    if name is not None and name not in TOPOLOGIES:
        raise ConfigurationError(f"--topology must be one of {', '.join(TOPOLOGIES)}, got {name!r}")
    return name or ""
