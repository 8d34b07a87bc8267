"""Two worker groups over the same workers, each of which holds a policy rank and an inference engine.

`weightsync.cluster.local` and `weightsync.cluster.ray` make them. A worker answers for its policy rank
through ``checkpoint_engine_rpc`` and for its engine through ``colocated_rpc`` and ``refit_control``. It would
have to come and go on both sides at once, so these groups have fixed workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from weightsync.cluster.base import PendingCall
from weightsync.cluster.units import AnswerSource, Caller, HostGroup, RawAnswer, Request, UnitCall, UnitGroup

COLOCATED_METHODS = ("checkpoint_engine_rpc", "colocated_rpc", "refit_control")
"""What a colocated worker answers."""

_SIDES = ("policy", "rollout")


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
        halves = _Halves(self._caller.start(requests))
        policy = [replace(unit, ranks=range(rank, rank + 1)) for rank, unit in enumerate(self._units)]
        return (
            UnitCall("rollout", self._units, halves.of("rollout"), per_unit=False),
            UnitCall("policy", policy, halves.of("policy"), per_unit=False),
        )


class _Halves:
    """Deals the answers of one call out to the two sides that they are about."""

    def __init__(self, source: AnswerSource) -> None:
        self._source = source
        self._waiting: dict[str, deque[RawAnswer]] = {side: deque() for side in _SIDES}

    def of(self, side: str) -> AnswerSource:
        """Return one side's answers."""
        return _Half(self, side)

    def take(self, side: str, timeout_s: float) -> list[RawAnswer]:
        if not self._waiting[side]:
            for answer in self._source.take(timeout_s):
                for each, waiting in self._waiting.items():
                    waiting.append(_half_of(answer, each))
        own = list(self._waiting[side])
        self._waiting[side].clear()
        return own


class _Half:
    def __init__(self, halves: _Halves, side: str) -> None:
        self._halves = halves
        self._side = side

    def take(self, timeout_s: float) -> list[RawAnswer]:
        return self._halves.take(self._side, timeout_s)


def _half_of(answer: RawAnswer, side: str) -> RawAnswer:
    """Return what an answer says about one side; news of the whole worker, and malformed ones, go to both."""
    if isinstance(answer.value, Mapping) and side in answer.value:
        return replace(answer, value=answer.value[side])
    return answer
