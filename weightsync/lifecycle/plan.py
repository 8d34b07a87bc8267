"""What one refit is to do, and how far it has come. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from weightsync.crew import Crew, Deadline


@dataclass(frozen=True, kw_only=True)
class RefitPlan:
    """What one attempt is to do."""

    version: int
    epoch: int
    connect: Callable[[Deadline, Crew], None] | None
    """Connects the engines of these again first, where that is needed."""
    partial: bool = False
    """Whether only some rollout ranks take part, those that the crew has."""
    release: bool
    """Whether the engines give their buffers back afterwards."""

    def __str__(self) -> str:
        return f"refit {self.epoch} to version {self.version}"


@dataclass
class Progress:
    """How far a refit has come.

    Attributes:
        began: whether a byte may have moved.
        paused: whether a host may have been paused.
        committed: whether every host that is left has committed.
        offloaded: whether the policy was told to make room, where engines live in its workers.
        published: whether every host that is left was told to report the new version, and did.
        asked_to_reset: the hosts, by first rank, whose caches were reset or were to be.
    """

    began: bool = False
    paused: bool = False
    committed: bool = False
    offloaded: bool = False
    published: bool = False
    asked_to_reset: set[int] = field(default_factory=set)
