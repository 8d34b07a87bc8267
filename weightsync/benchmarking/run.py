"""A whole run: one trial after the other, each with processes of its own, all of them ended at the end."""

from __future__ import annotations

import os
import platform
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, NoReturn

import psutil
import torch

from weightsync.benchmarking.baselines import FileTrial, GlooTrial
from weightsync.benchmarking.crew import end_helpers
from weightsync.benchmarking.nixl_read import ReadTrial
from weightsync.benchmarking.ray_baseline import RayTrial
from weightsync.benchmarking.shapes import SharedModel, model_bytes
from weightsync.benchmarking.transports import Wish, transport_trials
from weightsync.benchmarking.trial import BenchSettings, Measurement, Trial, absent, measure

Tell = Callable[[str], None]


@dataclass(frozen=True)
class BenchResult:
    """What a run has found."""

    settings: BenchSettings
    machine: dict[str, Any]
    measurements: list[Measurement]

    @property
    def nbytes(self) -> int:
        """Bytes of the model."""
        return model_bytes(self.settings.layers)

    @property
    def stored_bytes(self) -> int:
        """Bytes that a rollout rank serves: what the plain copy copies."""
        return self.settings.stored_bytes

    @property
    def copy_seconds(self) -> float | None:
        """Median of all plain copies; `None` if nothing has run."""
        copies = [seconds for each in self.measurements for seconds in each.copies]
        return median(copies) if copies else None

    @property
    def failed(self) -> bool:
        """Whether anything that should have run did not."""
        return any(each.error for each in self.measurements)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        seconds = self.copy_seconds
        copy = {"seconds": seconds, "gb_per_s": self.stored_bytes / seconds / 1e9} if seconds else None
        return {
            "machine": self.machine,
            "settings": asdict(self.settings),
            "bytes": self.nbytes,
            "plain_copy": copy,
            "measurements": [each.to_dict() for each in self.measurements],
        }


def run_benchmark(
    wishes: Sequence[Wish], settings: BenchSettings, *, baselines: bool = True, tell: Tell
) -> BenchResult:
    """Measure the baselines and the transports, one at a time.

    Args:
        wishes: transports; none means every one that can run here, in each topology that fits.
        settings: of the run.
        baselines: measure those, too. The plain copy is always there.
        tell: called with a line of text now and then.

    Raises:
        ConfigurationError: the settings are impossible, or a wish names no transport.
    """
    trials, without = transport_trials(wishes, settings)
    if baselines:
        others: list[Trial] = [
            GlooTrial(settings), FileTrial(settings), RayTrial(settings), ReadTrial(settings),
        ]  # fmt: skip
        cannot = [trial for trial in others if trial.whole_only and settings.rollout_tp > 1]
        trials = [*(trial for trial in others if trial not in cannot), *trials]
        without = [*without, *(absent(trial, "it moves whole parameters only") for trial in cannot)]
    with _ending_processes():
        tell(f"making {model_bytes(settings.layers) / 1e9:.3f} GB of random parameters")
        model = SharedModel(settings.layers)
        try:
            measured = [_measured(trial, model, settings, tell) for trial in trials]
        finally:
            model.close()
    return BenchResult(settings, machine(), [*measured, *without])


def machine() -> dict[str, Any]:
    """Describe this machine, as far as it bears on the figures."""
    return {
        "system": platform.system(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": torch.cuda.device_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _measured(trial: Trial, model: SharedModel, settings: BenchSettings, tell: Tell) -> Measurement:
    title = f"{trial.name} {trial.topology}".strip()
    tell(title)
    return measure(trial, model.handle, settings, lambda text: tell(f"{title}: {text}"))


@contextmanager
def _ending_processes() -> Iterator[None]:
    """End by a signal as by Ctrl-C: the processes that were started end first."""

    def stop(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        end_helpers()
