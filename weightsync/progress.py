"""Progress of a long refit: a bar on a terminal, a line now and then elsewhere, nothing for a short one."""

from __future__ import annotations

import sys
import time
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from weightsync.failures import list_ranks
from weightsync.topology import RankId

_MAX_RANKS_SHOWN = 8


class ProgressListener(Protocol):
    """Told how an operation goes on. Called from the thread that runs it, a few times a second."""

    def begin(self, title: str) -> None:
        """An operation starts."""

    def update(self, phase: str, heard: int, awaited: frozenset[RankId]) -> None:
        """``heard`` ranks have answered in this phase, ``awaited`` have not."""

    def end(self) -> None:
        """The operation is over, well or not."""


class NoProgress:
    """Shows nothing."""

    def begin(self, title: str) -> None:
        """Do nothing."""

    def update(self, phase: str, heard: int, awaited: frozenset[RankId]) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""


class RefitProgress:
    """Shows what lasts longer than ``quiet_s`` seconds.

    Args:
        stream: where to; standard error by default.
        every_s: seconds between two lines where ``stream`` is no terminal.
        quiet_s: seconds before anything is shown.
    """

    def __init__(self, stream: TextIO | None = None, *, every_s: float = 10.0, quiet_s: float = 2.0) -> None:
        self._stream = stream
        self._every_s = every_s
        self._quiet_s = quiet_s
        self._title = ""
        self._started = 0.0
        self._next_s = 0.0
        self._bar: _Bar | None = None

    def begin(self, title: str) -> None:
        """Start the clock."""
        self._title = title
        self._started = time.monotonic()
        self._next_s = self._quiet_s

    def update(self, phase: str, heard: int, awaited: frozenset[RankId]) -> None:
        """Show the state, if it is time to."""
        elapsed = time.monotonic() - self._started
        if elapsed < self._next_s:
            return
        stream = self._stream or sys.stderr
        if stream.isatty():
            self._bar = self._bar or _Bar(self._title, stream, elapsed)
            self._bar.show(phase, heard, awaited)
            return
        self._next_s = elapsed + self._every_s
        waiting = f", waiting for {_shown(awaited)}" if awaited else ""
        total = heard + len(awaited)
        print(f"{self._title}: {phase}, {heard} of {total} ranks done{waiting}, {elapsed:.0f} s",
              file=stream, flush=True)  # fmt: skip

    def end(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class _Bar:
    def __init__(self, title: str, stream: TextIO, elapsed_s: float) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f} ranks"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[awaited]}"),
            console=Console(file=stream),
            transient=True,
        )
        self._title = title
        self._task = self._progress.add_task(title, total=1, awaited="")
        self._progress.tasks[0].start_time = self._progress.get_time() - elapsed_s
        self._progress.start()

    def show(self, phase: str, heard: int, awaited: frozenset[RankId]) -> None:
        self._progress.update(
            self._task,
            description=f"{self._title}: {phase}",
            completed=heard,
            total=heard + len(awaited),
            awaited=f"waiting for {_shown(awaited)}" if awaited else "",
        )

    def stop(self) -> None:
        self._progress.stop()


def _shown(ranks: frozenset[RankId]) -> str:
    first = sorted(ranks)[:_MAX_RANKS_SHOWN]
    more = len(ranks) - len(first)
    return list_ranks(first) + (f" and {more} more" if more > 0 else "")
