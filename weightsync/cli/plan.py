"""`weightsync plan`: what a refit between two parallel layouts moves, with no accelerator and no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, get_args

import typer

from weightsync.cli.plan_inputs import PlanModel, read_model
from weightsync.cli.plan_report import PlanReport, print_report, write_png
from weightsync.errors import ConfigurationError
from weightsync.layout.destinations import Sharding, vllm_layout
from weightsync.layout.families import architecture
from weightsync.layout.megatron import megatron_layout
from weightsync.layout.parallel import (
    POLICY_KEYS,
    ROLLOUT_KEYS,
    PolicyGrid,
    RolloutGrid,
    ShardedGrid,
    parse_sizes,
)
from weightsync.layout.pieces import Layout
from weightsync.layout.sharded import fsdp_layout
from weightsync.tensors import list_names

_LEAST_BUCKET = 1 << 20
_UNITS = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
}


def plan(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG",
            help="A model's config.json, a model.safetensors.index.json, or the directory that has them.",
        ),
    ],
    *,
    policy: Annotated[
        str,
        typer.Option(help="Megatron: tp=,pp=,ep=,etp=,cp=,dp=,first=,last=. FSDP2: fsdp=,tp=,replicate=."),
    ] = "tp=1",
    policy_ranks: Annotated[int, typer.Option(min=1, help="Number of policy workers.")] = 1,
    rollout: Annotated[str, typer.Option(help="vLLM: tp=,pp=,dp=,ep=; ep is tp * dp.")] = "tp=1",
    rollout_ranks: Annotated[
        int, typer.Option(min=1, help="Number of rollout workers, over all engines.")
    ] = 1,
    bucket: Annotated[str, typer.Option(help="Size of a bucket, as 4096MiB or 4GiB.")] = "1GiB",
    shard: Annotated[
        str,
        typer.Option(
            help="Which tensors a rollout rank receives in part: none, experts (the rest whole), all."
        ),
    ] = "all",
    link_gbps: Annotated[
        float, typer.Option(min=0.001, help="Gigabits per second of one rank's link, each way.")
    ] = 400.0,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace",
            help="Learn the rollout layout from vLLM's own loader, without memory (any model; needs vLLM).",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    png: Annotated[Path | None, typer.Option(help="Write a picture of the traffic to this file.")] = None,
) -> None:
    """Say what a refit moves: tensors, bytes and batches of each rollout rank, links, and predicted seconds.

    Compared with a full broadcast, and with pairs of ranks. Nothing is loaded or started.
    """
    sharding, bucket_size = _sharding(shard), parse_bytes(bucket)
    model = read_model(config)
    grid = RolloutGrid.parse(parse_sizes(rollout, ROLLOUT_KEYS, "--rollout"), rollout_ranks)
    senders = _policy_layout(model, policy, policy_ranks)
    receivers, least, notes = _rollout_layouts(model, grid, sharding, trace=trace)
    report = PlanReport.make(
        model=model.tensors,
        policy=senders,
        rollout=receivers,
        least=least,
        settings={
            "policy": policy, "policy_ranks": policy_ranks,
            "rollout": rollout, "rollout_ranks": rollout_ranks,
            "bucket_bytes": bucket_size, "shard": sharding, "link_gbps": link_gbps,
        },
        notes=notes,
    )  # fmt: skip
    if png is not None:
        write_png(report, png)
    if as_json:
        typer.echo(json.dumps(report.to_dict()))
    else:
        print_report(report)


def parse_bytes(text: str) -> int:
    """Read a size such as ``4096MiB``, ``4GiB`` or ``4294967296``.

    Raises:
        ConfigurationError: it is none, or less than a byte.
    """
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = _UNITS.get(text.strip()[len(number) :].strip().lower())
    try:
        size = int(float(number) * (unit or 0))
    except (ValueError, OverflowError):
        size = 0
    if size < 1:
        raise ConfigurationError(f"--bucket {text!r} is no size; write 4096MiB or 4GiB, say")
    if size < _LEAST_BUCKET:
        raise ConfigurationError(
            f"--bucket {text!r} is {size} bytes, and buckets have at least 1 MiB; write 1GiB, say"
        )
    return size


def _sharding(text: str) -> Sharding:
    for known in get_args(Sharding):
        if text == known:
            sharding: Sharding = known
            return sharding
    raise ConfigurationError(f"--shard does not know {text!r}; write {', '.join(get_args(Sharding))}")


def _policy_layout(model: PlanModel, text: str, ranks: int) -> Layout:
    sizes = parse_sizes(text, POLICY_KEYS, "--policy")
    if not model.has_rules and sizes.get("tp", 1) > 1:
        raise ConfigurationError(
            f"no rules for how tensor parallelism cuts {architecture(model.config)} on the policy side; "
            "write --policy without tp, or fsdp=N alone"
        )
    if "fsdp" in sizes:
        return fsdp_layout(model.tensors, ShardedGrid.parse(sizes, ranks))
    return megatron_layout(model.tensors, PolicyGrid.parse(sizes, ranks))


def _rollout_layouts(
    model: PlanModel, grid: RolloutGrid, sharding: Sharding, *, trace: bool
) -> tuple[Layout, Layout | None, tuple[str, ...]]:
    """Return what rollout ranks receive, what they store (where that is known), and what to tell."""
    if model.has_rules and not trace:
        least = vllm_layout(model.tensors, grid, "all")
        return (least if sharding == "all" else vllm_layout(model.tensors, grid, sharding)), least, ()
    from weightsync.cli.plan_trace import traced_layout

    traced = traced_layout(model.config, model.tensors, grid, sharding)
    notes = ["the rollout layout is traced from vLLM's own loader"]
    for names, what in (
        (traced.whole, "tensors are not loaded by copies, and come whole"),
        (traced.unread, "tensors are read by no rollout rank"),
        (traced.unfilled, "parameters are not filled"),
    ):
        if names:
            notes.append(f"{len(names)} {what}: {list_names(names)}")
    return traced.layout, traced.layout if sharding == "all" else None, tuple(notes)
