"""The driver-side object: it connects both sides once, then runs one refit after another.

::

    policy, rollout = RayPolicyGroup(trainers), RayRolloutGroup(engines)
    with CheckpointEngineWeightSynchronizer(policy, rollout, "grpo.yaml") as synchronizer:
        synchronizer.init_communicator()
        for step in range(steps):
            train(step)
            synchronizer.mark_stale()
            print(synchronizer.sync_weights())
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from weightsync.attendance import absent_ranks, require_workers
from weightsync.cluster.base import PendingCall, RolloutGroup, WorkerGroup
from weightsync.config import RefitConfig, load_refit_config
from weightsync.connection import (
    Connection,
    disconnect_engines,
    highest_version,
)
from weightsync.crew import Crew, Deadline, StepError
from weightsync.errors import LifecycleError, RefitError
from weightsync.failures import Serving, may_lack_engine, refit_error
from weightsync.lifecycle import HeldRefit, Refit, RefitPlan
from weightsync.membership import Membership
from weightsync.progress import NoProgress, ProgressListener, RefitProgress
from weightsync.report import RefitReport
from weightsync.status import RankStatus, ask_status
from weightsync.topology import RankId
from weightsync.versions import Versions

# News of a failure reaches a rank that waits for its peer within about a second.
_LEAST_GRACE_S = 1.5
_log = logging.getLogger(__name__)


class CheckpointEngineWeightSynchronizer:
    """Runs the refit's lifecycle over two worker groups. It never holds a weight.

    Methods may be called from any thread; one of them runs at a time.

    Args:
        policy: the workers that hold the weights being trained.
        rollout: the inference engines.
        config: a checked configuration, a YAML file's path, or the loaded mapping.
        progress: where progress of long operations goes: by default a bar or lines on standard error;
            ``False`` for nowhere, or an object of one's own.

    Raises:
        ConfigurationError: the configuration is wrong.
    """

    def __init__(
        self,
        policy: WorkerGroup,
        rollout: RolloutGroup,
        config: RefitConfig | str | Path | Mapping[str, Any],
        *,
        progress: ProgressListener | bool = True,
    ) -> None:
        self.config = config if isinstance(config, RefitConfig) else load_refit_config(config)
        self._settings = self.config.lifecycle
        self._release = bool(self.config.engine_kwargs().get("release_after_refit", False))
        self._progress = _listener(progress)
        grace_s = max(self._settings.silence_s, _LEAST_GRACE_S)
        self._crew = Crew(policy, rollout, grace_s=grace_s, listener=self._progress.update)
        self._lock = threading.Lock()
        self._state: Literal["new", "ready", "closed"] = "new"
        self._connection = Connection(self._crew, self.config)
        self._membership = Membership(
            self._crew, self._connection, self._settings.total_s, check=self._require_topology
        )
        self._topology = ""
        self._epoch = 0
        self._versions = Versions()
        self._serving: dict[int, Serving] = {}
        self._changes = 0
        self._synced: int | None = None
        self._left_out: frozenset[int] = frozenset()

    @property
    def weight_version(self) -> int | None:
        """The version published last; `None` before the first refit."""
        return self._versions.published

    @property
    def bucket_size_bytes(self) -> int | None:
        """Bytes of one transfer bucket; `None` before `init_communicator`, fixed from then on."""
        return self._connection.bucket_size

    @property
    def is_stale(self) -> bool:
        """Whether the rollout workers may serve other weights than the policy has.

        True before the first refit, after a failed one, and after `mark_stale`. Those that a refit went on
        without are not counted: see `RefitReport.failed`.
        """
        return self._synced != self._changes

    def mark_stale(self) -> None:
        """Say that the policy's weights have changed: to be called after an optimizer step."""
        self._changes += 1

    def init_communicator(self) -> None:
        """Make an engine on every worker and connect them. Also works again after `shutdown`.

        The first call also fixes the bucket size, from the smallest memory that any worker reports.

        Raises:
            LifecycleError: it is connected already, or a refit is running.
            ConfigurationError: the topology does not fit the world sizes, or no bucket fits into the smallest
                worker.
            RefitError: a worker failed; the engines made so far are closed again.
        """
        with self._exclusive("init_communicator"), self._shown("init_communicator"):
            if self._state == "ready":
                raise LifecycleError("init_communicator: already connected; call shutdown() first")
            self._require_workers("init_communicator")
            self._require_topology()  # before any worker does anything
            try:
                self._connect()
            except StepError as error:
                self._disconnect()
                refit, cause = refit_error(
                    "init_communicator",
                    error.failures,
                    lost=self._crew.lost,
                    busy=self._crew.busy(),
                    remedy="mend the cause and call init_communicator again",
                )
                raise refit from cause
            except BaseException:
                self._disconnect()
                raise
            self._state = "ready"

    def sync_weights(self, version: int | None = None) -> RefitReport:
        """Bring the policy's weights to every rollout worker.

        Args:
            version: name of the weights, greater than every earlier one; by default the last one plus 1.

        Returns:
            What was moved, and where the time went; with ``on_failure: continue``, who was left out.

        Raises:
            LifecycleError: not connected, another refit is running, or the version is not greater.
            RefitError: the refit failed, within ``total_s`` seconds. Says which rank, phase and tensor, what
                still serves or was published, and what to do.
        """
        with self._exclusive("sync_weights"):
            self._require_ready()
            version = self._versions.following(version)
            self._epoch += 1
            self._synced = None
            return self._refit(version, self._present(f"refit {self._epoch} to version {version}"))

    def add_rollout(self, *hosts: Any) -> RefitReport | None:
        """Take inference engines in; the others keep their connections and go on serving.

        The new ones get the published version from the policy at once. Where the policy has moved on (see
        `is_stale`), they get what its ranks keep for them, with an engine that serves latecomers
        (``kimi_ckpt_engine``); with others they are ready after the next `sync_weights`, and hold no version
        until then.

        Args:
            hosts: what the rollout group is made of, such as actor handles; their ranks follow the others'.

        Returns:
            The report of their refit; `None` where they have to wait for the next one.

        Raises:
            LifecycleError: not connected, or another call is running.
            ConfigurationError: the group's workers are fixed, the topology does not fit so many ranks, or a
                host has too little memory for the buckets.
            RefitError: a worker failed, a new one or another; says which.
        """
        with self._changing("add_rollout"):
            return self._catch_up("add_rollout", self._membership.add(hosts))

    def replace_rollout(self, rank: int, host: Any) -> RefitReport | None:
        """Put an inference engine in the place of one, dead or alive; as for `add_rollout`.

        Args:
            rank: first rollout rank of the one that leaves.
            host: with as many ranks.
        """
        with self._changing("replace_rollout", leaving=self._membership.ranks_at(rank)):
            self._membership.replace_rollout(rank, host)
            self._left_out -= {rank}
            return self._catch_up("replace_rollout", [rank])

    def remove_rollout(self, rank: int) -> None:
        """Let an inference engine go, dead or alive; the ranks behind it move up.

        Args:
            rank: its first rollout rank.

        Raises:
            WeightSyncError: as for `add_rollout`.
        """
        leaving = self._membership.ranks_at(rank)
        with self._changing("remove_rollout", leaving=leaving):
            self._membership.remove(rank)
            left = self._left_out - {rank}
            self._left_out = frozenset(each - len(leaving) if each > rank else each for each in left)

    def replace_policy(self, rank: int, worker: Any) -> None:
        """Put a policy worker in the place of one that died.

        The trainer's own process group is the caller's to rebuild; this connects the new worker's engine.

        Raises:
            WeightSyncError: as for `add_rollout`.
        """
        with self._changing("replace_policy", leaving=[RankId("policy", rank)]):
            self._membership.replace_policy(rank, worker)

    def rollout_status(self, *, digests: bool = True) -> dict[int, RankStatus]:
        """Ask every rollout rank what it serves, within ``stall_s``. Changes nothing; not during a refit.

        Args:
            digests: whether each rank is to digest all that it serves, which reads its weights once.

        Returns:
            By rank. One that did not answer is not ``reached``.

        Raises:
            LifecycleError: not connected, or a refit is running.
        """
        with self._exclusive("rollout_status"):
            self._require_ready("rollout_status")
            return ask_status(self._crew, self._settings.stall_s, digests=digests)

    def shutdown(self) -> None:
        """Finalize and close the engines on both sides. Bounded; harmless when called again.

        Waits for a refit that runs in another thread. What cannot be reached is logged, not raised.

        Raises:
            LifecycleError: that refit did not end within its ``total_s``.
        """
        with self._exclusive("shutdown", wait_s=self._settings.total_s), self._shown("shutdown"):
            if self._state == "ready":
                self._disconnect()
            self._state = "closed"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _connect(self) -> None:
        start = Deadline(self._settings.total_s)
        self._connection.make(start, self._step_s)
        self._versions.raise_floor(highest_version(self._crew, Deadline(min(self._step_s, start.left_s()))))

    def _require_topology(self) -> None:
        """Check that the topology fits the world sizes, and note it for the reports."""
        topology = self.config.topology(self._crew.policy.world_size, self._crew.rollout.world_size)
        self._topology = str(topology) if topology is not None else ""

    @property
    def _step_s(self) -> float:
        # Engines have ``connect_s`` themselves: let theirs run out first, it can say more.
        return self._settings.connect_s + self._settings.silence_s

    def _refit(self, version: int, crew: Crew) -> RefitReport:
        changes = self._changes  # what changes while this refit runs is not in it
        present = frozenset(crew.rollout.rank_prefixes)
        if present & self._left_out:
            self._connection.is_due = self._connection.lacks_engines = True
        plan = RefitPlan(
            version=version,
            epoch=self._epoch,
            connect=self._connection.again if self._connection.is_due else None,
            release=self._release,
            partial=crew is not self._crew,
        )
        refit = Refit(crew, self._settings, plan)
        try:
            with self._shown(str(plan)):
                report = self._named(refit.run())
            self._synced = changes
        except RefitError as error:
            if may_lack_engine(error.failures):
                self._connection.is_due = self._connection.lacks_engines = True
            raise
        finally:
            self._learn_from(refit, version)
            self._left_out = frozenset(self._crew.rollout.rank_prefixes) - present | refit.left_out
        _log.log(logging.WARNING if report.failed else logging.INFO, "%s", report)
        return report

    def _present(self, attempt: str) -> Crew:
        """Return those who take part in a refit: all, or all but the hosts that are known to be lost or busy.

        Raises:
            RefitError: somebody is missing without whom the others must not go on.
        """
        if self._settings.on_failure == "fail":
            self._require_workers(attempt)
            return self._crew
        absent = absent_ranks(self._crew)
        hosts = {self._crew.host_of(who.rank) for who in absent}
        present = set(self._crew.rollout.rank_prefixes) - hosts
        self._require_workers(attempt, absent if present else ())
        return self._crew.among(present) if hosts else self._crew

    @contextmanager
    def _changing(self, what: str, leaving: Sequence[RankId] = ()) -> Iterator[None]:
        """Run the block as the only call; a worker's failure in it is a `RefitError`."""
        with self._exclusive(what), self._shown(what):
            self._require_ready(what)
            goes_on = self._settings.on_failure == "continue"
            self._require_workers(what, [*leaving, *(absent_ranks(self._crew) if goes_on else ())])
            try:
                yield
            except StepError as error:
                refit, cause = refit_error(
                    what,
                    error.failures,
                    lost=self._crew.lost,
                    busy=self._crew.busy(),
                    serving=self._serving,
                )
                raise refit from cause

    def _catch_up(self, what: str, hosts: Sequence[int]) -> RefitReport | None:
        """Bring the published version to new hosts, if the policy still has it, or holds it for them."""
        if self._versions.published is None:
            return None
        try:
            report = self._bring_up(what, hosts, self._versions.published)
        except RefitError:
            self._crew.hear("fence", self._hold_back(hosts), timeout_s=self._settings.stall_s)
            raise
        if report is None:
            self._crew.require("fence", self._hold_back(hosts), deadline=Deadline(self._settings.stall_s))
        return report

    def _hold_back(self, hosts: Sequence[int]) -> PendingCall:
        """Start to tell new hosts that they must not serve before their first refit."""
        reason = "this rank has come after a refit, and has had none yet"
        return self._crew.among(hosts).rollout.submit("discard_weights", {"reason": reason})

    def _bring_up(self, what: str, hosts: Sequence[int], version: int) -> RefitReport | None:
        if self._synced is None:
            return None
        self._epoch += 1
        if self.is_stale:
            return self._give_held(what, hosts, version)
        plan = RefitPlan(version=version, epoch=self._epoch, connect=None, release=False, partial=True)
        refit = Refit(self._crew.among(hosts), self._settings, plan)
        try:
            report = self._named(refit.run())
        except RefitError:
            self._synced, self._connection.is_due = None, True
            raise
        finally:
            self._epoch = refit.epoch
            self._left_out |= refit.left_out
        _log.info("%s: %s", what, report)
        return report

    def _give_held(self, what: str, hosts: Sequence[int], version: int) -> RefitReport | None:
        """Bring new hosts the version that the policy ranks keep beside their weights, if they keep any."""
        crew = self._crew.among(hosts)
        plan = RefitPlan(version=version, epoch=self._epoch, connect=None, release=False, partial=True)
        refit = HeldRefit(crew, self._settings, plan, self._connection.late_arguments())
        if (reason := refit.find_out()) is not None:
            _log.info("%s: the policy has moved on, the new ones wait for the next refit: %s", what, reason)
            return None
        try:
            report = replace(refit.run(), transport=self.config.transport, topology="held by the policy")
        except RefitError as error:
            if not all(state.is_untouched for state in refit.serving.values()):
                raise
            _log.warning("%s: the new ones wait for the next refit: %s", what, error)
            return None
        finally:
            self._epoch = refit.epoch
            self._left_out |= refit.left_out
            refit.leave()
        _log.info("%s: %s", what, report)
        return report

    def _named(self, report: RefitReport) -> RefitReport:
        """Return the report with what only the driver knows: who sent what to whom by which transport."""
        shares = self._connection.shares
        ways = [f"regions (shard_weights: {shares.sharding})"] if shares.sharding != "none" else []
        if self._topology and (not ways or shares.whole):
            ways.append(self._topology)
        return replace(report, transport=self.config.transport, topology=" + ".join(ways), whole=shares.whole)

    def _learn_from(self, refit: Refit, version: int) -> None:
        self._epoch = refit.epoch
        if refit.began:
            # A broken transfer leaves the engines in an unknown state, a release without buffers.
            self._connection.is_due = self._release or self._synced is None
        self._serving = dict(refit.serving)
        if refit.published:
            self._versions.published = version
            self._versions.raise_floor(version)
        for state in refit.serving.values():
            self._versions.raise_floor(state.version)
            self._versions.raise_floor(state.highest)

    def _require_ready(self, what: str = "sync_weights") -> None:
        if self._state == "new":
            raise LifecycleError(f"{what}: not connected; call init_communicator() first")
        if self._state == "closed":
            raise LifecycleError(f"{what}: shut down; call init_communicator() to connect again")

    def _require_workers(self, attempt: str, leaving: Sequence[RankId] = ()) -> None:
        require_workers(self._crew, attempt, leaving, self._serving)

    def _disconnect(self) -> None:
        for complaint in disconnect_engines(self._crew, self._settings.silence_s):
            _log.warning("while disconnecting: %s", complaint)

    @contextmanager
    def _exclusive(self, what: str, wait_s: float = 0.0) -> Iterator[None]:
        if not self._lock.acquire(timeout=wait_s):
            raise LifecycleError(f"{what}: another call of this synchronizer is running")
        try:
            yield
        finally:
            self._lock.release()

    @contextmanager
    def _shown(self, title: str) -> Iterator[None]:
        self._progress.begin(title)
        try:
            yield
        finally:
            self._progress.end()


def _listener(progress: ProgressListener | bool) -> ProgressListener:
    if isinstance(progress, bool):
        return RefitProgress() if progress else NoProgress()
    return progress
