"""What every rollout rank says of itself, at any time: its version, whether it may serve, and digests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from weightsync.cluster.view import ranks_of
from weightsync.crew import Crew


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """What one rollout rank serves."""

    version: int | None = None
    """`None`: the starting weights, or none at all."""
    highest: int | None = None
    """The highest version that was ever committed there."""
    dirty: bool = False
    """Whether weights were written since the last commit."""
    fenced: str | None = None
    """Why it refuses to serve, or `None`."""
    served_digest: str | None = None
    """Of its tensors as they are stored: equal on equal shards, and at a policy with the same names."""
    stream_digest: str | None = None
    """What the last refit's tensors digested to as they came, to compare with the policy's."""
    reached: bool = True
    """False if it did not answer."""
    error: str | None = None
    """Why its digests are not known, or why it did not answer."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    @classmethod
    def from_value(cls, value: Any) -> RankStatus:
        """Read the value of ``refit_status`` or ``weight_digest``; anything else counts as no answer."""
        if not isinstance(value, Mapping):
            return cls(reached=False, error=f"malformed status: {value!r:.200}")
        return cls(
            version=value.get("version"),
            highest=value.get("highest"),
            dirty=bool(value.get("dirty")),
            fenced=value.get("fenced"),
            served_digest=_total(value.get("served")),
            stream_digest=_total(value.get("stream")),
        )


def ask_status(crew: Crew, timeout_s: float, *, digests: bool) -> dict[int, RankStatus]:
    """Ask every rollout rank; busy and dead ones count as not reached."""
    call = crew.rollout.submit("weight_digest") if digests else crew.rollout.submit("refit_status")
    answers = crew.hear("status", call, timeout_s=timeout_s, hurries=False)
    found = {rank: RankStatus.from_value(value) for rank, value in answers.of("rollout").items()}
    errors = {failure.who.rank: str(failure.record) for failure in answers.failures}
    return {
        rank: found.get(rank, RankStatus(reached=False, error=errors.get(rank, "busy with an earlier call")))
        for rank in ranks_of(crew.rollout)
    }


def _total(digest: Any) -> str | None:
    return str(digest["total"]) if isinstance(digest, Mapping) and "total" in digest else None
