"""`weightsync elastic-demo`: rollout workers come, go and die while a job runs; every digest is checked."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from weightsync.cluster.private_ray import private_ray
from weightsync.config import load_refit_config
from weightsync.drills.elastic import ElasticDrill, Phase
from weightsync.errors import ConfigurationError

_MOST = 16


def elastic_demo(
    *,
    sequence: Annotated[
        str, typer.Option(help="Numbers of rollout workers, one phase each, such as 1,3,2,4,1.")
    ] = "1,3,2,4,1",
    policy_workers: Annotated[int, typer.Option(min=1, max=_MOST, help="Number of policy workers.")] = 2,
    transport: Annotated[str, typer.Option(help="What moves the weights.")] = "nixl",
    topology: Annotated[str, typer.Option(help="Who sends to whom.")] = "auto",
    kill_in: Annotated[
        int, typer.Option(min=0, help="Phase in which a rollout worker is killed and replaced; 0: in none.")
    ] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print the phases as JSON.")] = False,
) -> None:
    """Change the number of rollout workers of a running job on Ray, phase by phase.

    In each phase workers come or go, the policy takes a step and is refitted, and every worker's weights are
    compared with the policy's, byte for byte. Exits with 1 if one differed.
    """
    sizes = _sizes(sequence)
    console = Console(stderr=as_json)
    config = load_refit_config(
        {
            "policy": {
                "generation": {
                    "refit_transport": transport,
                    "refit_cfg": {
                        "shared": {
                            "update_weights_bucket_memory_ratio": 0.0005,
                            "topology": topology,
                            "device": "cpu",
                        }
                    },
                    "refit_lifecycle": {"connect_s": 20, "stall_s": 20, "total_s": 60, "silence_s": 4},
                }
            }
        }
    )
    # Ray says on standard output that a worker has died.
    with (
        redirect_stdout(sys.stderr),
        private_ray(policy_workers + max(sizes) + 2, log_to_driver=False) as ray,
    ):
        drill = ElasticDrill(ray, config, policy_workers=policy_workers, say=console.print)
        phases = drill.run(sizes, kill_in=kill_in or None)
    if as_json:
        typer.echo(json.dumps([phase.to_dict() for phase in phases], indent=2))
    else:
        console.print(_table(phases))
    if not all(phase.passed for phase in phases):
        raise typer.Exit(1)


def _sizes(sequence: str) -> list[int]:
    try:
        sizes = [int(part) for part in sequence.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1 or max(sizes) > _MOST:
        raise ConfigurationError(
            f"--sequence must be numbers from 1 to {_MOST}, such as 1,3,2,4,1; got {sequence!r}"
        )
    return sizes


def _table(phases: list[Phase]) -> Table:
    table = Table("phase", "change", "workers", "version", "right", "kept", "seconds")
    for phase in phases:
        right = f"{phase.digests_right} of {phase.workers}"
        table.add_row(
            str(phase.number),
            phase.change,
            str(phase.workers),
            str(phase.version),
            right if phase.passed else f"[bold red]{right}",
            str(phase.kept),
            f"{phase.seconds:.1f}",
        )
    return table
