"""Two worker groups over the same workers, each of which holds a policy rank and an inference engine.

`weightsync.cluster.local` and `weightsync.cluster.ray` make them. A worker answers for its policy rank
through ``checkpoint_engine_rpc`` and for its engine through ``colocated_rpc`` and ``refit_control``. It would
have to come and go on both sides at once, so these groups have fixed workers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from weightsync.cluster.base import PendingCall
from weightsync.cluster.units import AnswerSource, Caller, HostGroup, RawAnswer, Request, UnitCall, UnitGroup

COLOCATED_METHODS = ("checkpoint_engine_rpc", "colocated_rpc", "refit_control")
"""What a colocated worker answers."""


class ColocatedPolicyGroup(UnitGroup):
    """The policy ranks of colocated workers.

    Args:
        workers: in rank order; at least one.
        caller: how to call them; the same that the rollout group has.
    """

    replace = None  # type: ignore[assignment]

    def __init__(self, workers: Sequence[Any], caller: Caller) -> None:
        super().__init__("policy", workers, caller)


class ColocatedRolloutGroup(HostGroup):
    """The inference engines of colocated workers; see `HostGroup`."""

    rpc_entry = "colocated_rpc"
    add = replace = remove = None  # type: ignore[assignment]

    def transfer(self) -> tuple[PendingCall, PendingCall]:
        """Start ``refit_colocated`` on every worker; see `ColocatedGroup.transfer`."""
        requests = [Request(unit, self.rpc_entry, "refit_colocated", {}) for unit in self._units]
        source = self._caller.start(requests)
        policy = [replace(unit, ranks=range(rank, rank + 1)) for rank, unit in enumerate(self._units)]
        return (
            UnitCall("rollout", self._units, _Half(source, "rollout"), per_unit=False),
            UnitCall("policy", policy, _Half(source, "policy"), per_unit=False),
        )


class _Half:
    """What the answers of one call say about one of the two sides that they are about."""

    def __init__(self, source: AnswerSource, side: str) -> None:
        self._source = source
        self._side = side

    def take(self, timeout_s: float, awaited: Collection[int]) -> list[RawAnswer]:
        return [_half_of(answer, self._side) for answer in self._source.take(timeout_s, awaited)]


def _half_of(answer: RawAnswer, side: str) -> RawAnswer:
    """Return what an answer says about one side; news of the whole worker, and malformed ones, go to both."""
    if isinstance(answer.value, Mapping) and side in answer.value:
        return replace(answer, value=answer.value[side])
    return answer
