"""The refit of rollout workers that came late: they get what the policy ranks hold, which are not called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightsync.config import RefitLifecycle
from weightsync.crew import Crew, require_complete
from weightsync.lifecycle.plan import RefitPlan
from weightsync.lifecycle.refit import Refit

_LEAVE_S = 5.0


class HeldRefit(Refit):
    """A `Refit` of some engine hosts alone, by engines that join late beside their own.

    Args:
        crew: with the hosts that came.
        settings: of the refits.
        plan: names the version that is held.
        join: arguments of ``join_checkpoint_engine_late``, but for the version.
    """

    def __init__(
        self, crew: Crew, settings: RefitLifecycle, plan: RefitPlan, join: Mapping[str, Any]
    ) -> None:
        super().__init__(crew, settings, plan)
        self._join = {**join, "version": plan.version}
        self._joined = False

    def find_out(self) -> str | None:
        """Join; returns why the hosts have to wait for the next refit, and `None` if `run` may follow."""
        call = self._crew.rollout.submit("join_checkpoint_engine_late", self._join)
        limit_s = self._settings.connect_s + self._settings.silence_s
        answers = self._crew.hear("join", call, timeout_s=limit_s)
        reasons = [str(failure.record) for failure in answers.failures]
        reasons += [str(reason) for reason in answers.values.values() if reason is not None]
        if reasons:
            self.leave()
        self._joined = not reasons
        return reasons[0] if reasons else None

    def leave(self) -> None:
        """Let the hosts go back to their own engines; what cannot be reached does so with its next refit."""
        call = self._crew.rollout.submit("leave_checkpoint_engine_late")
        self._crew.hear("leave", call, timeout_s=_LEAVE_S)

    def _open(self) -> None:
        crew = self._casualties.left
        if not self._joined:  # again, without a host that has failed
            limit_s = self._settings.connect_s + self._settings.silence_s
            joining = crew.rollout.submit("join_checkpoint_engine_late", self._join)
            self._do.require("open", joining, limit_s=limit_s)
        self._joined = False
        if self._settings.commit == "in_place":
            crew.stale.update(crew.rollout.rank_prefixes)
        self._progress.began = True

    def _transfer(self) -> None:
        crew = self._casualties.left
        staged = self._settings.commit == "staged"
        method = "stage_weights_from_checkpoint_engine" if staged else "update_weights_from_checkpoint_engine"
        receiving = crew.rollout.submit(method)
        answers = self._do.require("transfer", receiving, patience_s=self._settings.connect_s)
        require_complete(answers, crew.rollout, "transfer")
        self._figures = {"policy": (), "rollout": ()}
        self._take_figures("transfer", answers)
