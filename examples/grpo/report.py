"""What a run shows and keeps: a line for each step, the table, the picture, ``result.json``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .verdict import RunResult, StepRecord, Verdict

_SMALLEST_PLOTTED = 1e-8


def step_line(record: StepRecord, tolerance: float) -> str:
    """Return one step as a line of text with rich markup; red where the difference is over its tolerance."""
    exceeded = not record.difference <= tolerance
    difference = f"max |policy - vLLM| logprob {record.difference:.2e}"
    parts = [
        f"step {record.step:>3}",
        f"reward {record.reward:.3f}",
        f"loss {record.loss:+.5f}",
        f"KL {record.kl:.4f}",
        _refit_text(record),
        f"[bold red]{difference} > {tolerance:.0e}[/]" if exceeded else difference,
        f"{record.seconds:.1f} s",
    ]
    return "  ".join(parts)


def _refit_text(record: StepRecord) -> str:
    if record.refit_seconds is None or record.refit_bytes is None:
        return f"refit off: policy at version {record.policy_version}, vLLM at {record.rollout_version}"
    return f"refit {record.refit_seconds:.2f} s {_size(record.refit_bytes)}"


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def print_summary(console: Console, result: RunResult, verdict: Verdict) -> None:
    """Print the table of all steps, the held-out accuracy and the verdict."""
    console.print(_table(result))
    before, after = result.held_out_before, result.held_out_after
    if before and after:
        console.print(
            f"Held-out prompts answered right (greedy): {before.accuracy:.0%} before, "
            f"{after.accuracy:.0%} after."
        )
    console.print(
        f"Reward, last third against first third of the steps: {result.reward_rise:+.3f}.  "
        f"Largest difference of the whole run: {result.largest_difference:.2e} "
        f"(tolerance {result.tolerance:.0e}).  {result.wall_seconds:.0f} s in all."
    )
    for reason in verdict.reasons:
        console.print(f"[bold red]FAILED[/] {reason}")
    if verdict.passed:
        console.print(
            "[bold green]PASSED[/] The reward rose, and vLLM served the policy's weights at every step."
        )


def _table(result: RunResult) -> Table:
    mode = "" if result.refit else ", refit switched off"
    # As wide as a plain terminal; the other figures are in the result file.
    table = Table(
        title=f"GRPO of {result.model} on {result.task}{mode}", box=SIMPLE_HEAD, collapse_padding=True
    )
    for column in ("step", "reward", "loss", "KL", "max diff", "refit s", "bytes", "step s"):
        table.add_column(column, justify="right", no_wrap=True)
    for record in result.steps:
        table.add_row(*_row(record, result.tolerance))
    return table


def _row(record: StepRecord, tolerance: float) -> list[str]:
    difference = f"{record.difference:.1e}"
    return [
        str(record.step),
        f"{record.reward:.3f}",
        f"{record.loss:+.5f}",
        f"{record.kl:.4f}",
        difference if record.difference <= tolerance else f"[bold red]{difference}[/]",
        "off" if record.refit_seconds is None else f"{record.refit_seconds:.2f}",
        "off" if record.refit_bytes is None else f"{record.refit_bytes:,}",
        f"{record.seconds:.1f}",
    ]


def write_result(path: Path, result: RunResult, verdict: Verdict | None = None) -> None:
    """Store a run as JSON: everything in `RunResult`, and the verdict once there is one.

    While the run goes on, ``verdict`` is null: so a run that broke can be told from one that failed.
    """
    data: dict[str, Any] = asdict(result)
    data["largest_difference"] = result.largest_difference
    data["reward_rise"] = result.reward_rise
    data["verdict"] = {"passed": verdict.passed, "reasons": list(verdict.reasons)} if verdict else None
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(data, indent=2), encoding="utf-8")
    unfinished.replace(path)


def plot(path: Path, result: RunResult) -> None:
    """Draw the reward and the difference over the steps as a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 7.5), sharex=True, layout="constrained")
    mode = "vLLM refitted after every step" if result.refit else "refit switched off"
    figure.suptitle(f"GRPO of {result.model} on {result.task}: {mode}", fontsize=12)
    _plot_reward(top, result)
    _plot_difference(bottom, result)
    bottom.xaxis.get_major_locator().set_params(integer=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _plot_reward(axes: Any, result: RunResult) -> None:
    steps = [record.step for record in result.steps]
    axes.plot(steps, [record.reward for record in result.steps], marker="o", color="tab:blue")
    axes.set_ylabel("mean reward of the batch")
    axes.set_ylim(0, 1.05)
    axes.grid(alpha=0.3)
    axes.set_title(
        f"Reward: {result.reward_rise:+.2f} from the first to the last third of the steps", fontsize=10
    )


def _plot_difference(axes: Any, result: RunResult) -> None:
    steps = [record.step for record in result.steps]
    for label, marker, values in (
        ("largest", "o", [record.difference for record in result.steps]),
        ("mean", ".", [record.mean_difference for record in result.steps]),
    ):
        # A difference of exactly zero has no place on a logarithmic axis.
        axes.plot(steps, [max(value, _SMALLEST_PLOTTED) for value in values], marker=marker, label=label)
    axes.axhline(result.tolerance, color="tab:red", linestyle="--", label=f"tolerance {result.tolerance:.0e}")
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("|policy - vLLM| log-probability")
    axes.set_title(
        "Difference on the sampled tokens, which equal weights keep under the tolerance", fontsize=10
    )
    axes.grid(alpha=0.3, which="both")
    # Room above the curves for the legend, whichever of them is on top.
    axes.margins(y=0.25)
    axes.legend(loc="upper left", ncols=3)
