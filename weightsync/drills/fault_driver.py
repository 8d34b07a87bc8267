"""The driver of the drills in processes: a synchronizer that can be killed, stopped and interrupted."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from weightsync.cluster.units import Request
from weightsync.config import load_refit_config
from weightsync.drills.actors import Remote
from weightsync.drills.groups import ProcessPolicyGroup, ProcessRolloutGroup
from weightsync.errors import RefitError, WeightSyncError
from weightsync.report import RefitReport
from weightsync.synchronizer import CheckpointEngineWeightSynchronizer

_CALLS = {"connect": "open_refit", "commit": "commit_refit", "finalize": "finalize_checkpoint_engine"}
_ALTERED = {"connect": "epoch", "commit": "version"}
_OTHER = 1_000


class InterruptedDriverError(Exception):
    """Raised in the driver by a signal."""


class DrillDriver:
    """Makes synchronizers and uses them; each call's result is plain data."""

    def __init__(self) -> None:
        self._synchronizer: CheckpointEngineWeightSynchronizer | None = None
        self._order: tuple[str, str, int] | None = None
        self._began = False
        self._struck = False
        self._running = False
        signal.signal(signal.SIGUSR1, self._interrupt)

    def make(
        self, policy: Sequence[str], rollout: Sequence[str], config: Mapping[str, Any], startup_s: float
    ) -> dict[str, Any]:
        """Connect to workers at these addresses, and let their engines connect."""
        self.shutdown()
        try:
            groups = (
                ProcessPolicyGroup([Remote(each) for each in policy]),
                ProcessRolloutGroup(
                    [Remote(each) for each in rollout], passing=self._passing, startup_s=startup_s
                ),
            )
        except WeightSyncError as error:
            return _told(error)
        made = CheckpointEngineWeightSynchronizer(*groups, load_refit_config(dict(config)), progress=False)
        self._synchronizer = made
        return self._try(made.init_communicator)

    def sync(self) -> dict[str, Any]:
        """Run one refit."""
        return self._try(lambda: self._required().sync_weights())

    def replace(self, side: str, rank: int, address: str) -> dict[str, Any]:
        """Put another worker in the place of one."""
        made = self._required()
        call = made.replace_policy if side == "policy" else made.replace_rollout
        return self._try(lambda: call(rank, Remote(address)))

    def shutdown(self) -> None:
        """Let the workers go."""
        made, self._synchronizer = self._synchronizer, None
        if made is not None:
            made.shutdown()

    def version(self) -> int | None:
        """Return the version published last."""
        return self._required().weight_version

    def pid(self) -> int:
        """Return the process."""
        return os.getpid()

    def arm(self, fault: str, phase: str, rank: int) -> None:
        """Let the next call to a rollout rank get lost or altered."""
        self._order, self._struck, self._began = (fault, phase, rank), False, False

    def struck(self) -> bool:
        """Return whether that, or an interruption, has come."""
        return self._struck

    def _required(self) -> CheckpointEngineWeightSynchronizer:
        if self._synchronizer is None:
            raise WeightSyncError("no synchronizer has been made")
        return self._synchronizer

    def _try(self, call: Any) -> dict[str, Any]:
        self._running = True
        try:
            done = call()
        except Exception as error:  # noqa: BLE001 - judged by the drill
            return _told(error)
        finally:
            self._running = False
        left_out = [each.rank for each in done.failed] if isinstance(done, RefitReport) else []
        return {"ok": True, "version": self.version(), "left_out": left_out}

    def _interrupt(self, *_: object) -> None:
        self._struck = True
        if self._running:
            raise InterruptedDriverError("the drill interrupts the driver")

    def _passing(self, request: Request) -> Request | None:
        if self._order is None:
            return request
        fault, phase, rank = self._order
        self._began = self._began or request.method == _CALLS["connect"]
        if not self._began or request.method != _CALLS[phase] or request.unit.ranks[0] != rank:
            return request
        self._order, self._struck = None, True
        if fault == "drop":
            return None
        key = _ALTERED[phase]
        return replace(request, kwargs={**request.kwargs, key: request.kwargs[key] + _OTHER})


def _told(error: Exception) -> dict[str, Any]:
    """Return an error as plain data."""
    kinds = [failure.kind for failure in error.failures] if isinstance(error, RefitError) else []
    return {
        "ok": False,
        "kind": type(error).__name__,
        "typed": isinstance(error, WeightSyncError),
        "kinds": kinds,
        "text": str(error),
        "notes": "\n".join(getattr(error, "__notes__", [])),
    }
