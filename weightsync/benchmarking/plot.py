"""A benchmark's figures as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weightsync.benchmarking.run import BenchResult
from weightsync.benchmarking.trial import MIB, Measurement
from weightsync.errors import MissingDependencyError

_COLOURS = {"baseline": "#9aa5b1", "transport": "#2f6fb0"}
_PHASE_COLOURS = "tab20"


def require_matplotlib() -> Any:
    """Return matplotlib, set to draw without a screen.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise MissingDependencyError(
            f"a picture needs matplotlib: pip install 'weightsync[demo]' ({error})"
        ) from error
    mpl.use("Agg")
    return mpl


def save_plot(path: Path, result: BenchResult) -> None:
    """Draw ratios, memory and phases as a PNG.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    mpl = require_matplotlib()
    from matplotlib.figure import Figure

    ran = [each for each in result.measurements if each.ran]
    height = 1.8 + 0.34 * max(1, len(ran))
    figure = Figure(figsize=(17, height), layout="constrained")
    speed, memory, received, phases = figure.subplots(1, 4, sharey=True, width_ratios=(1.2, 0.8, 0.5, 1.6))
    settings = result.settings
    parallel = f" (tensor parallel {settings.rollout_tp})" if settings.rollout_tp > 1 else ""
    figure.suptitle(
        f"{result.nbytes / 1e9:.2f} GB from {settings.policy_ranks} policy to {settings.rollout_ranks} "
        f"rollout ranks{parallel} on {result.machine['cores']} cores"
    )
    _draw_speed(speed, ran)
    _draw_memory(memory, ran)
    _draw_received(received, ran)
    _draw_phases(phases, ran, mpl.colormaps[_PHASE_COLOURS])
    speed.invert_yaxis()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _draw_speed(axes: Any, ran: list[Measurement]) -> None:
    titles = [each.title for each in ran]
    low = [each.ratio - min(each.ratios) for each in ran]
    high = [max(each.ratios) - each.ratio for each in ran]
    axes.barh(
        titles,
        [each.ratio for each in ran],
        xerr=(low, high),
        color=[_COLOURS[each.kind] for each in ran],
        error_kw={"elinewidth": 1, "ecolor": "#444444"},
    )
    axes.axvline(1.0, color="#444444", linestyle="--", linewidth=1)
    axes.set_xlabel("speed, one plain copy = 1 (median, lowest, highest)")


def _draw_memory(axes: Any, ran: list[Measurement]) -> None:
    titles = [each.title for each in ran]
    connected = [each.connect_bytes / MIB for each in ran]
    axes.barh(titles, connected, color="#c7cfd8", label="connecting")
    refits = [each.refit_bytes / MIB for each in ran]
    axes.barh(titles, refits, left=connected, color=[_COLOURS[each.kind] for each in ran], label="refits")
    axes.legend(fontsize="small")
    axes.set_xlabel("peak extra memory, MiB")


def _draw_received(axes: Any, ran: list[Measurement]) -> None:
    shares = [sum(each.received_bytes) / sum(each.least_bytes) for each in ran]
    axes.barh([each.title for each in ran], shares, color=[_COLOURS[each.kind] for each in ran])
    axes.axvline(1.0, color="#444444", linestyle="--", linewidth=1)
    axes.set_xlabel("received / least")


def _draw_phases(axes: Any, ran: list[Measurement], colours: Any) -> None:
    """Stack each side's phases in a bar of its own; those that overlap in time are stacked all the same."""
    names = list(dict.fromkeys(name for each in ran for side in each.phases.values() for name in side))
    names = [name for name in names if any(side.get(name) for each in ran for side in each.phases.values())]
    for offset, side in ((-0.2, "policy"), (0.2, "rollout")):
        for row, each in enumerate(ran):
            left = 0.0
            for name, seconds in each.phases.get(side, {}).items():
                if name not in names:
                    continue
                colour = colours(names.index(name) % colours.N)
                axes.barh(row + offset, seconds, height=0.36, left=left, color=colour)
                left += seconds
    for index, name in enumerate(names):
        axes.barh(0, 0, color=colours(index % colours.N), label=name)
    if names:
        axes.legend(fontsize="small", ncols=2)
    axes.set_xlabel("seconds by phase: policy above, rollout below")
