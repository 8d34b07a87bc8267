"""What the two vLLM engine hosts share: ranks, lost engines, and whether requests may run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from weightsync.errors import (
    ConfigurationError,
    DeadlineError,
    ErrorRecord,
    PeerLostError,
    WeightSyncError,
    WorkerFencedError,
)
from weightsync.outcomes import Outcome

UPDATE = "update_weights_from_checkpoint_engine"
STAGE = "stage_weights_from_checkpoint_engine"
WRITING = frozenset({UPDATE, "load_staged_weights"})
"""Methods during which the weights are written."""

POLL_S = 0.02
"""Seconds between two looks at an update that comes into host memory while requests run."""

STATUS_CHANGING = frozenset(
    {*WRITING, "commit_refit", "fence_refit", "discard_weights", "init_checkpoint_engine"}
)
"""Methods after which the host asks its ranks for their status."""


class HostState:
    """State of one engine host.

    Args:
        vllm_config: of the engine.
        rank_prefix: the engine's first global rollout rank.

    Attributes:
        paused: what a pause does with running requests, from its beginning to the resume; else `None`.
        withheld: whether the last resume was refused, because the weights were not whole.
        kv_released: whether the KV cache may have been given back.
        asleep: whether `sleep` has given back the weights, too, and nothing has woken them.
        fenced: why a rank must not serve, or `None`.
        dirty: whether weights may have been written since the last commit: also while an update runs.
        lost: why the engine does not answer any more, or `None`.
    """

    def __init__(self, vllm_config: Any, rank_prefix: int) -> None:
        parallel = vllm_config.parallel_config
        if parallel.data_parallel_size > 1:
            raise ConfigurationError(
                f"data_parallel_size is {parallel.data_parallel_size}: make one engine host for each replica"
            )
        self.world_size = int(parallel.world_size)
        self.rank_prefix = rank_prefix
        self.paused: str | None = None
        self.withheld = False
        self.kv_released = False
        self.asleep = False
        self.fenced: str | None = None
        self.dirty = False
        self.lost: str | None = None
        self._updates = 0

    @property
    def is_whole(self) -> bool:
        """Whether the weights are those of one version, as far as the ranks said."""
        return self.fenced is None and not self.dirty

    def describe(self) -> dict[str, int]:
        """Return ``{"world_size", "pid"}``."""
        return {"world_size": self.world_size, "pid": os.getpid()}

    def assign_ranks(self, rank_prefix: int) -> None:
        """Learn the engine's first global rollout rank."""
        self.rank_prefix = rank_prefix

    def pause(self, in_flight: str) -> None:
        """Note that a pause begins. A later resume ends it, also if that overtakes the pause's own end."""
        self.paused, self.withheld = in_flight, False

    @contextmanager
    def writing(self, method: str) -> Iterator[None]:
        """Count the weights as written to while ``method`` writes them, and until the ranks deny it."""
        if method not in WRITING:
            yield
            return
        self.dirty = True
        self._updates += 1
        try:
            yield
        finally:
            self._updates -= 1

    def learn(self, outcomes: list[dict[str, Any]]) -> None:
        """Take the ranks' answers to ``refit_status``."""
        answers = [Outcome.from_dict(outcome) for outcome in outcomes]
        reasons = [a.value["fenced"] if a.error is None else str(a.error) for a in answers]
        self.fenced = next((reason for reason in reasons if reason is not None), None)
        self.dirty = bool(self._updates) or any(a.error is None and a.value["dirty"] for a in answers)

    def lose(self, reason: str) -> None:
        """Note that the engine does not answer any more. It has to be replaced."""
        self.lost = self.lost or reason

    def gave_up(self, phase: str, waited_s: float | None) -> PeerLostError | DeadlineError:
        """Note, and return as an error, that a call was not answered.

        Args:
            phase: the call.
            waited_s: for how long; `None` if the engine's process is dead.
        """
        if waited_s is None:
            self.lose(f"its process died during {phase}")
            return self._lost_error(self.rank_prefix, phase)
        self.lose(f"it did not answer to {phase} in {waited_s:g} s")
        return DeadlineError(self.lost or "", side="rollout", rank=self.rank_prefix, phase=phase)

    def lost_outcomes(self, phase: str) -> list[dict[str, Any]]:
        """Return one `PeerLostError` outcome for each rank of the engine."""
        ranks = range(self.rank_prefix, self.rank_prefix + self.world_size)
        return [
            Outcome(rank, error=ErrorRecord.from_exception(self._lost_error(rank, phase))).to_dict()
            for rank in ranks
        ]

    def failed_outcomes(self, error: WeightSyncError, phase: str) -> list[dict[str, Any]]:
        """Return an outcome with ``error`` for each rank of the engine."""
        ranks = range(self.rank_prefix, self.rank_prefix + self.world_size)
        record = ErrorRecord.from_exception
        return [
            Outcome(rank, error=record(error, side="rollout", rank=rank, phase=phase)).to_dict()
            for rank in ranks
        ]

    def require_serving(self) -> None:
        """Check that the engine's weights are whole.

        Raises:
            PeerLostError: the engine does not answer any more.
            WorkerFencedError: a rank holds partly written weights.
        """
        if self.lost is not None:
            raise self._lost_error(self.rank_prefix, "generate")
        if self.fenced is not None or (self.dirty and (self.paused is None or self.withheld)):
            reason = self.fenced or "a refit has begun and is not committed"
            raise WorkerFencedError(
                f"this engine does not serve: {reason}; a complete refit is needed",
                side="rollout",
                rank=self.rank_prefix,
            )

    def _lost_error(self, rank: int, phase: str) -> PeerLostError:
        return PeerLostError(
            f"the vLLM engine is lost and must be replaced: {self.lost}",
            side="rollout",
            rank=rank,
            phase=phase,
        )


def has_ended(outcomes: list[dict[str, Any]]) -> bool:
    """Whether every rank has answered ``poll_staging`` with figures or an error."""
    return all("error" in outcome or outcome.get("value") is not None for outcome in outcomes)
