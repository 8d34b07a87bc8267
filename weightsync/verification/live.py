"""Does a running rollout group serve what the policy has? Tensor by tensor, and by log-probabilities.

Every rank reads its parameters back in the form in which they came, where the engine's own processing can be
undone, and digests them; the policy digests what it would send now. No weight moves. For tensors that cannot
be read back, a comparison of log-probabilities has to vouch, which the caller supplies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from weightsync.cluster.base import Answers, PendingCall, RolloutGroup, WorkerGroup, gather
from weightsync.digests import OFF, WeightDigest
from weightsync.errors import WeightSyncError
from weightsync.tensors import list_names
from weightsync.verification.compare import Comparison


@dataclass(frozen=True, kw_only=True)
class RankCheck:
    """What one rollout rank serves, against the policy."""

    rank: int
    version: int | None
    refuses: str | None = None
    """Why it does not serve, or could not be compared."""
    equal: int = 0
    """Tensors that are equal, byte by byte."""
    different: tuple[str, ...] = ()
    """Tensors that are not."""
    unread: tuple[str, ...] = ()
    """Tensors that cannot be read back, or are not stored under their names."""
    arrived: bool | None = None
    """Whether the last refit brought the policy's tensors, before any loading; `None` if unknown."""

    @property
    def passed(self) -> bool:
        """Whether nothing differs, as far as that can be read."""
        return self.refuses is None and not self.different and self.arrived is not False

    def __str__(self) -> str:
        parts = [f"rollout rank {self.rank}, version {self.version}: {self.equal} tensors equal"]
        if self.different:
            parts.append(f"{len(self.different)} DIFFERENT: {list_names(self.different)}")
        if self.unread:
            parts.append(f"{len(self.unread)} cannot be read back")
        if self.arrived is not None:
            parts.append("the last refit brought " + ("these weights" if self.arrived else "OTHER weights"))
        return "; ".join([*parts, *([self.refuses] if self.refuses else [])])


@dataclass(frozen=True, kw_only=True)
class LiveReport:
    """What a comparison of two running groups came to."""

    policy_digest: str
    ranks: tuple[RankCheck, ...]
    comparison: Comparison | None = None
    """Of log-probabilities, where one was asked for."""

    @property
    def is_proven(self) -> bool:
        """Whether nothing was left unread that log-probabilities do not vouch for."""
        return self.comparison is not None or not any(each.unread for each in self.ranks)

    @property
    def passed(self) -> bool:
        """Whether every rank serves one and the same version, the policy's."""
        agrees = self.comparison is None or self.comparison.agrees
        one_version = len({each.version for each in self.ranks}) == 1
        return agrees and one_version and all(each.passed for each in self.ranks)

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can carry."""
        comparison = asdict(self.comparison) | {"agrees": self.comparison.agrees} if self.comparison else None
        return {
            "passed": self.passed,
            "proven": self.is_proven,
            "policy_digest": self.policy_digest,
            "ranks": [asdict(each) | {"passed": each.passed} for each in self.ranks],
            "comparison": comparison,
        }

    def __str__(self) -> str:
        lines = [str(each) for each in self.ranks]
        if self.comparison is not None:
            lines.append(
                f"log-probabilities: {self.comparison.equal_tokens} of {self.comparison.tokens} tokens "
                f"equal, largest difference {self.comparison.largest_difference:.1e}"
            )
        return "\n".join(lines)


def verify_live(
    policy: WorkerGroup,
    rollout: RolloutGroup,
    *,
    timeout_s: float = 300.0,
    compare: Callable[[], Comparison] | None = None,
) -> LiveReport:
    """Compare what runs with the policy. Requests may run meanwhile; the policy's weights must not change.

    Args:
        policy: the policy workers; all are called, for making the weights may be a collective.
        rollout: the inference engines.
        timeout_s: seconds for each side.
        compare: compares log-probabilities, for what cannot be read back.

    Raises:
        WeightSyncError: a policy worker did not answer.
    """
    answers = _hear(rollout.submit("weight_digest", {"tensors": True}), timeout_s)
    values: Mapping[int, Any] = answers.of("rollout")
    kinds = [value["originals"]["kind"] for value in values.values()]
    kind = next((kind for kind in kinds if kind != OFF), None)
    wanted = _policy_digest(policy, kind, timeout_s)
    failed = {failure.who.rank: str(failure.record) for failure in answers.failures}
    checks = [_check(rank, value, wanted) for rank, value in values.items()]
    checks += [RankCheck(rank=rank, version=None, refuses=why) for rank, why in failed.items()]
    ranks = tuple(sorted(checks, key=lambda check: check.rank))
    comparison = compare() if compare is not None else None
    return LiveReport(policy_digest=wanted.total(), ranks=ranks, comparison=comparison)


def _policy_digest(policy: WorkerGroup, kind: str | None, timeout_s: float) -> WeightDigest:
    answers = _hear(policy.submit("weight_digest", {"kind": kind, "tensors": True}), timeout_s)
    for failure in answers.failures:
        raise failure.record.to_exception()
    digests = [WeightDigest.from_dict(value) for value in answers.of("policy").values()]
    if not digests or len({each.total() for each in digests}) > 1:
        raise WeightSyncError("the policy workers would send different weights", side="policy")
    return digests[0]


def _check(rank: int, value: Mapping[str, Any], wanted: WeightDigest) -> RankCheck:
    originals = WeightDigest.from_dict(value["originals"])
    if originals.kind not in (wanted.kind, OFF):
        why = f"its digests are of kind {originals.kind}, the policy's {wanted.kind}"
        return RankCheck(rank=rank, version=value["version"], refuses=why)
    same = [name for name, entry in wanted.tensors.items() if originals.tensors.get(name) == entry]
    unread = [name for name in wanted.tensors if name not in originals.tensors]
    known = {*same, *unread}
    came = WeightDigest.from_dict(value["stream"]) if value["stream"] else None
    reason = value["fenced"] or ("a refit has begun and is not committed" if value["dirty"] else None)
    return RankCheck(
        rank=rank,
        version=value["version"],
        refuses=f"it does not serve: {reason}" if reason else None,
        equal=len(same),
        different=tuple(name for name in wanted.tensors if name not in known),
        unread=tuple(unread),
        arrived=came.tensors == wanted.tensors if came and came.kind == wanted.kind else None,
    )


def _hear(call: PendingCall, timeout_s: float) -> Answers:
    return gather("weight_digest", [call], timeout_s=timeout_s, grace_s=timeout_s)
