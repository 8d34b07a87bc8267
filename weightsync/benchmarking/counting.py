"""What the ranks' stretches of several refits come to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import median

from weightsync.benchmarking.workers import Stretch

_RECEIVED = "bytes_moved"
_COPIES = ("in_place", "staged", "whole")
_ONCE = ("plan", "register", "prepare")


def received(refits: Iterable[list[Stretch]]) -> list[list[int]]:
    """Return the bytes that each rollout rank received, refit by refit."""
    return [
        [
            int(each.counts[_RECEIVED])
            for each in stretches
            if each.side == "rollout" and _RECEIVED in each.counts
        ]
        for stretches in refits
    ]


def copies(stretches: Iterable[Stretch]) -> dict[str, int]:
    """Return the bytes of all rollout ranks in one refit, by the way that they took."""
    found: dict[str, int] = {}
    for each in stretches:
        for kind in _COPIES:
            if each.side == "rollout" and f"bytes_{kind}" in each.counts:
                found[kind] = found.get(kind, 0) + int(each.counts[f"bytes_{kind}"])
    return found


def made_once(connecting: dict[str, float], refits: list[list[Stretch]]) -> dict[str, dict[str, float]]:
    """Return the seconds of the slowest rank by phase, of transports that tell of them."""
    if not connecting:
        return {}

    def most(phase: str, some: Iterable[list[Stretch]]) -> float:
        return max((each.phases.get(phase, 0.0) for stretches in some for each in stretches), default=0.0)

    return {
        phase: {
            "connecting": connecting.get(phase, 0.0),
            "first": most(phase, refits[:1]),
            "later": most(phase, refits[1:]),
        }
        for phase in _ONCE
    }


def phases(refits: Iterable[list[Stretch]]) -> dict[str, dict[str, float]]:
    """Return the seconds by side and phase: medians of the slowest rank's."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for stretches in refits:
        slowest: dict[tuple[str, str], float] = defaultdict(float)
        for each in stretches:
            for phase, seconds in each.phases.items():
                slowest[each.side, phase] = max(slowest[each.side, phase], seconds)
        for key, seconds in slowest.items():
            found[key].append(seconds)
    medians: dict[str, dict[str, float]] = defaultdict(dict)
    for (side, phase), values in found.items():
        medians[side][phase] = median(values)
    return dict(medians)
