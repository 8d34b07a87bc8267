"""One thing to measure, and how it is measured: in turns with one plain copy by the same processes."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from weightsync.benchmarking import counting
from weightsync.benchmarking.crew import Crew, spanned
from weightsync.benchmarking.shapes import ModelHandle, Part, model_bytes
from weightsync.benchmarking.workers import Stretch
from weightsync.errors import DigestError, ManifestError, MissingDependencyError, WeightSyncError

MIB = 1 << 20
WARM_UPS = 2


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What a run measures, and on what."""

    layers: int
    policy_ranks: int
    rollout_ranks: int
    repeats: int
    bucket_mib: int
    verify: str
    """Digests of chunks in weightsync's own transports: ``"full"``, ``"sample"`` or ``"off"``."""
    threads: int
    """Of torch, in each process."""
    topology: str = ""
    """The only one of the transports that name none; empty means all that fit."""
    rollout_tp: int = 1
    """Rollout ranks that share each parameter; 1 if each serves all of it."""

    @property
    def stored_bytes(self) -> int:
        """Bytes that a rollout rank serves."""
        return model_bytes(self.layers, Part(0, self.rollout_tp))

    @property
    def bucket_bytes(self) -> int:
        """Bytes of a transfer buffer."""
        return self.bucket_mib * MIB


class Trial(ABC):
    """One way to bring the policy's parameters to the served ones."""

    kind: str
    """``"transport"`` or ``"baseline"``."""
    name: str
    topology: str = ""
    required: bool = False
    """Whether it was asked for by name, so that not being able to run is a failure."""
    exact: bool = False
    """Whether a rollout rank is to receive just the bytes that it stores: anything else is a failure."""
    whole_only: bool = False
    """Whether rollout ranks have to serve whole parameters."""

    @abstractmethod
    def crew(self, model: ModelHandle) -> AbstractContextManager[Crew]:
        """Return the processes that it takes."""

    def begin(self, crew: Crew) -> None:  # noqa: B027 - optional
        """Connect; not timed."""

    @abstractmethod
    def refit(self, crew: Crew, number: int) -> list[Stretch]:
        """Bring everything over once; returns every rank's part of it."""

    def connect_seconds(self, crew: Crew) -> dict[str, float]:
        """Return the seconds that connecting took for what refits keep, by phase, where that is known."""
        return {}

    def end(self, crew: Crew) -> None:  # noqa: B027 - optional
        """Disconnect; not timed."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What was measured of one trial; with ``unavailable`` or ``error``, why nothing was."""

    kind: str
    name: str
    topology: str = ""
    unavailable: str = ""
    error: str = ""
    bytes: int = 0
    """Of what a rollout rank serves."""
    copies: list[float] = field(default_factory=list)
    """Seconds of the plain copies, each made right before the refit of the same place in ``refits``."""
    refits: list[float] = field(default_factory=list)
    phases: dict[str, dict[str, float]] = field(default_factory=dict)
    """Seconds by side and phase, medians; of several ranks, the slowest one's."""
    extra_bytes: int = 0
    """Peak memory of all processes above what they had before."""
    connect_bytes: int = 0
    """The same while they connected: agents, libraries, transfer buffers."""
    refit_bytes: int = 0
    """Peak memory while they refitted, above what they had when they were connected."""
    received_bytes: list[int] = field(default_factory=list)
    """By rollout rank, of one refit, padding included; empty where that is not counted."""
    least_bytes: list[int] = field(default_factory=list)
    """By rollout rank: what it serves."""
    copies_by_bytes: dict[str, int] = field(default_factory=dict)
    """Of all rollout ranks: read in place, through a transfer buffer, or as whole tensors in buckets."""
    made_once: dict[str, dict[str, float]] = field(default_factory=dict)
    """Seconds to plan, register and prepare: in connecting, the first refit and, at most, a later one."""

    @property
    def receives_least(self) -> bool | None:
        """Whether each rollout rank received just what it serves; `None` where that is not counted."""
        return self.received_bytes == self.least_bytes if self.received_bytes else None

    @property
    def title(self) -> str:
        """Name and topology."""
        return f"{self.name} {self.topology}".strip()

    @property
    def ratios(self) -> list[float]:
        """Speed relative to the plain copy: 1.0 is as fast."""
        return [copy / refit for copy, refit in zip(self.copies, self.refits, strict=True)]

    @property
    def ratio(self) -> float:
        """Median of `ratios`."""
        return median(self.ratios)

    @property
    def seconds(self) -> float:
        """Median of a refit."""
        return median(self.refits)

    @property
    def gb_per_s(self) -> float:
        """Bytes of the model by second of a refit."""
        return self.bytes / self.seconds / 1e9

    @property
    def ran(self) -> bool:
        """Whether there are figures."""
        return bool(self.refits)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, the derived figures included."""
        found = asdict(self)
        if self.ran:
            found |= {"seconds": self.seconds, "gb_per_s": self.gb_per_s}
            found |= {"ratio": self.ratio, "ratios": self.ratios, "receives_least": self.receives_least}
        return found


def measure(
    trial: Trial, model: ModelHandle, settings: BenchSettings, tell: Callable[[str], None]
) -> Measurement:
    """Measure one trial; a failure is part of the answer, never raised."""
    name: dict[str, Any] = {"kind": trial.kind, "name": trial.name, "topology": trial.topology}
    try:
        return Measurement(**name, bytes=settings.stored_bytes, **_measure(trial, model, settings, tell))
    except MissingDependencyError as error:
        return absent(trial, error.message)
    except Exception as error:  # noqa: BLE001 - one transport's failure must not take the others' figures
        text = str(error) if isinstance(error, WeightSyncError) else repr(error)
        return Measurement(**name, error=f"{type(error).__name__}: {text}")


def absent(trial: Trial, reason: str) -> Measurement:
    """Return the measurement of a trial that cannot run here."""
    return Measurement(
        kind=trial.kind,
        name=trial.name,
        topology=trial.topology,
        unavailable="" if trial.required else reason,
        error=reason if trial.required else "",
    )


def _measure(
    trial: Trial, model: ModelHandle, settings: BenchSettings, tell: Callable[[str], None]
) -> dict[str, Any]:
    copies: list[float] = []
    refits: list[list[Stretch]] = []
    with trial.crew(model) as crew:
        crew.copy()  # so that every page is there
        crew.mark()
        trial.begin(crew)
        connecting = crew.extra_memory()
        crew.mark_connected()
        for number in range(1, WARM_UPS + settings.repeats + 1):
            crew.wipe()
            copies.append(crew.copy())
            crew.wipe()
            started = time.perf_counter()
            refits.append(trial.refit(crew, number))
            tell(f"refit {number} of {WARM_UPS + settings.repeats}, {time.perf_counter() - started:.2f} s")
            _require_arrival(crew, number)
        received = counting.received(refits)
        least = crew.least_bytes()
        if trial.exact and any(each != least for each in received):
            raise ManifestError(f"rollout ranks received {received[-1]} bytes, and serve {least}")
        memory = {
            "extra_bytes": crew.extra_memory(),
            "connect_bytes": connecting,
            "refit_bytes": crew.refit_memory(),
        }
        once = trial.connect_seconds(crew)
        trial.end(crew)
    kept = refits[WARM_UPS:]
    return {
        **memory,
        "received_bytes": received[-1],
        "least_bytes": least,
        "copies_by_bytes": counting.copies(kept[-1]),
        "made_once": counting.made_once(once, refits),
        "copies": copies[WARM_UPS:],
        "refits": [spanned(each) for each in kept],
        "phases": counting.phases(kept),
    }


def _require_arrival(crew: Crew, number: int) -> None:
    wrong = crew.wrong_ranks()
    if wrong:
        raise DigestError(
            f"after refit {number}, rollout rank {wrong[0]} serves other bytes than the policy has"
        )
