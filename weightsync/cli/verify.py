"""`weightsync verify`: refit a vLLM that has other weights, compare it with a fresh one, again and again."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from weightsync.cli.verify_more import show_flips, show_live
from weightsync.cluster.private_ray import private_ray
from weightsync.errors import ConfigurationError
from weightsync.verification.scenario import RefitCheck, Verification, VerifySettings

_KINDS = {"dense": "qwen3", "tied": "qwen3tied", "moe": "qwen3moe"}
_ACTORS = 3


def verify(
    *,
    model: Annotated[
        str,
        typer.Option(
            help="dense, tied or moe (tiny random Qwen3 models), all of them, or a checkpoint directory."
        ),
    ] = "all",
    refits: Annotated[int, typer.Option(min=1, help="Refits in a row, each with other weights.")] = 3,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="Where the transfer buffers are: cpu or cuda.")] = "cpu",
    drop_tensor: Annotated[
        str | None, typer.Option(help="Leave this tensor out of every refit, to see that it is noticed.")
    ] = None,
    allow_missing: Annotated[
        list[str] | None, typer.Option(help="Pattern of vLLM parameters that a refit may leave unwritten.")
    ] = None,
    live: Annotated[
        bool,
        typer.Option(
            "--live",
            help="Compare the running engine with the policy instead: tensor by tensor, and by what both "
            "make of the same tokens; then once more after the policy alone has changed, to see it noticed.",
        ),
    ] = False,
    flips: Annotated[
        int | None,
        typer.Option(min=3, help="Flip so many bits instead, on the way and in memory; count those seen."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
) -> None:
    """Refit a vLLM engine that has other weights; compare it with one started from a checkpoint.

    Exits with 1 if a refit left the engine with other tokens or log-probabilities than the checkpoint's.
    """
    if flips is not None:
        show_flips(flips, as_json=as_json)
        return
    if live:
        show_live(_selected(model), dtype, device, _checkpoints, as_json=as_json)
        return
    checks: dict[str, list[RefitCheck]] = {}
    console = Console(stderr=as_json)
    for name in _selected(model):
        with (
            tempfile.TemporaryDirectory(prefix="weightsync-verify-") as scratch,
            private_ray(_ACTORS, log_to_driver=False) as ray,
        ):
            checkpoint, other = _checkpoints(name, Path(scratch), dtype)
            settings = VerifySettings(
                checkpoint=checkpoint,
                other_checkpoint=other,
                dtype=dtype,
                refits=refits,
                drop=drop_tensor,
                allow_missing=tuple(allow_missing or ()),
                device=device,
            )
            checks[name] = []
            for check in Verification(ray, settings, Path(scratch)).run():
                checks[name].append(check)
                console.print(f"{name}: refit {check.version} {'passed' if check.passed else 'FAILED'}")
    passed = all(check.passed for each in checks.values() for check in each)
    if as_json:
        typer.echo(
            json.dumps({name: [_row(check) for check in each] for name, each in checks.items()}, indent=2)
        )
    else:
        console.print(_table(checks))
        console.print("Every refit arrived whole." if passed else "[bold red]Not every refit arrived whole.")
    if not passed:
        raise typer.Exit(1)


def _selected(model: str) -> list[str]:
    if model == "all":
        return list(_KINDS)
    if model not in _KINDS and not Path(model).is_dir():
        raise ConfigurationError(
            f"--model must be {', '.join(_KINDS)}, all or a checkpoint directory, got {model!r}"
        )
    return [model]


def _checkpoints(name: str, directory: Path, dtype: str) -> tuple[Path, Path]:
    """Return two checkpoints of one architecture with different weights."""
    if name not in _KINDS:
        return Path(name), _scrambled(Path(name), directory / "other", dtype)
    from weightsync.testing.tiny_models import make_tiny_checkpoint

    first, second = (
        make_tiny_checkpoint(_KINDS[name], directory / f"seed-{seed}", seed, getattr(torch, dtype))  # type: ignore[arg-type]
        for seed in (1, 2)
    )
    return first, second


def _scrambled(checkpoint: Path, target: Path, dtype: str) -> Path:
    """Save a checkpoint's architecture with new random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(target)
    return target


def _row(check: RefitCheck) -> dict[str, object]:
    comparison = check.comparison
    return {
        "version": check.version,
        "passed": check.passed,
        "changed": check.changed,
        "tokens": comparison.tokens,
        "equal_tokens": comparison.equal_tokens,
        "largest_logprob_difference": comparison.largest_difference,
        "tolerance": comparison.tolerance,
        "tensors": check.tensors,
        "bytes": check.bytes,
        "seconds": check.seconds,
    }


def _table(checks: dict[str, list[RefitCheck]]) -> Table:
    table = Table(
        "model", "refit", "tensors", "bytes", "changed", "equal tokens", "largest difference", "result"
    )
    for name, each in checks.items():
        for check in each:
            comparison = check.comparison
            table.add_row(
                name,
                str(check.version),
                str(check.tensors),
                str(check.bytes),
                "yes" if check.changed else "no",
                f"{comparison.equal_tokens}/{comparison.tokens}",
                f"{comparison.largest_difference:.1e} (<= {comparison.tolerance:.0e})",
                "passed" if check.passed else "failed",
            )
    return table
