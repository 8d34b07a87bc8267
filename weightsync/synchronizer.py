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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from weightsync.cluster.base import Failure, RolloutGroup, WorkerGroup, driver_failure
from weightsync.config import RefitConfig, load_refit_config
from weightsync.connection import (
    agree_on_bucket_size,
    connect_engines,
    disconnect_engines,
    finalize_engines,
    highest_version,
    make_engines,
)
from weightsync.crew import Crew, Deadline, StepError
from weightsync.errors import ConfigurationError, DeadlineError, LifecycleError, RefitError
from weightsync.failures import Serving, may_lack_engine, refit_error
from weightsync.lifecycle import Refit, RefitPlan
from weightsync.progress import NoProgress, ProgressListener, RefitProgress
from weightsync.report import RefitReport

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
        self._reconnect = False
        self._remake = False
        self._bucket_size: int | None = None
        self._topology = ""
        self._epoch = 0
        self._published: int | None = None
        self._floor: int | None = None
        self._serving: dict[int, Serving] = {}
        self._changes = 0
        self._synced: int | None = None

    @property
    def weight_version(self) -> int | None:
        """The version published last; `None` before the first refit."""
        return self._published

    @property
    def bucket_size_bytes(self) -> int | None:
        """Bytes of one transfer bucket; `None` before `init_communicator`, fixed from then on."""
        return self._bucket_size

    @property
    def is_stale(self) -> bool:
        """Whether the rollout workers may serve other weights than the policy has.

        True before the first refit, after a failed one, and after `mark_stale`.
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
            # Before any worker does anything: the topology may not fit the world sizes.
            worlds = self._crew.policy.world_size, self._crew.rollout.world_size
            topology = self.config.topology(*worlds)
            self._topology = str(topology) if topology is not None else ""
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
            What was moved, and where the time went.

        Raises:
            LifecycleError: not connected, another refit is running, or the version is not greater.
            RefitError: the refit failed, within ``total_s`` seconds. Says which rank, phase and tensor, what
                still serves or was published, and what to do.
        """
        with self._exclusive("sync_weights"):
            self._require_ready()
            version = self._next_version(version)
            self._epoch += 1
            self._synced = None
            self._require_workers(f"refit {self._epoch} to version {version}")
            return self._refit(version)

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
        crew, settings = self._crew, self._settings
        # The first call also waits for workers that are still starting.
        start = Deadline(settings.total_s)
        if self._bucket_size is None:
            self._bucket_size = agree_on_bucket_size(crew, self.config, start)
        # Engines have ``connect_s`` themselves: let theirs run out first, it can say more.
        step_s = settings.connect_s + settings.silence_s
        make_engines(crew, self.config, self._bucket_size, Deadline(min(step_s, start.left_s())))
        connect_engines(crew, Deadline(min(step_s, start.left_s())))
        served = highest_version(crew, Deadline(min(step_s, start.left_s())))
        self._raise_floor(served)
        self._reconnect = self._remake = False

    def _refit(self, version: int) -> RefitReport:
        changes = self._changes  # what changes while this refit runs is not in it
        plan = RefitPlan(
            version=version,
            epoch=self._epoch,
            connect=self._connect_again if self._reconnect else None,
            release=self._release,
        )
        refit = Refit(self._crew, self._settings, plan)
        try:
            with self._shown(str(plan)):
                report = replace(refit.run(), transport=self.config.transport, topology=self._topology)
            self._synced = changes
        except RefitError as error:
            if may_lack_engine(error.failures):
                self._reconnect = self._remake = True
            raise
        finally:
            self._learn_from(refit, version)
        _log.info("%s", report)
        return report

    def _connect_again(self, deadline: Deadline) -> None:
        finalize_engines(self._crew, deadline)
        if self._remake and self._bucket_size is not None:
            # A worker that was started anew gets an engine; policy workers that have theirs keep it.
            make_engines(self._crew, self.config, self._bucket_size, deadline)
        connect_engines(self._crew, deadline)
        self._reconnect = self._remake = False

    def _learn_from(self, refit: Refit, version: int) -> None:
        if refit.began:
            # A broken transfer leaves the engines in an unknown state, a release without buffers.
            self._reconnect = self._release or self._synced is None
        self._serving = refit.serving
        if refit.published:
            self._published = version
            self._raise_floor(version)
        for state in refit.serving.values():
            self._raise_floor(state.version)

    def _raise_floor(self, version: int | None) -> None:
        if version is not None:
            self._floor = version if self._floor is None else max(self._floor, version)

    def _next_version(self, version: int | None) -> int:
        if version is None:
            return 1 if self._floor is None else self._floor + 1
        if isinstance(version, bool) or not isinstance(version, int) or version < 0:
            raise ConfigurationError(f"sync_weights: version must be a whole number, got {version!r}")
        if self._floor is not None and version <= self._floor:
            raise LifecycleError(
                f"sync_weights: version {version} does not follow version {self._floor}, which is in use: "
                "versions must increase"
            )
        return version

    def _require_ready(self) -> None:
        if self._state == "new":
            raise LifecycleError("sync_weights: not connected; call init_communicator() first")
        if self._state == "closed":
            raise LifecycleError("sync_weights: shut down; call init_communicator() to connect again")

    def _require_workers(self, attempt: str) -> None:
        """Refuse at once, rather than hang, while a worker is dead or still busy with an earlier call."""
        busy = self._crew.settle()
        lost = self._crew.lost
        failures = [Failure(who, record, "lost") for who, record in lost.items()] + [
            driver_failure(who, "check", DeadlineError, "still busy with a call that was given up earlier")
            for who in sorted(busy)
        ]
        if failures:
            error, cause = refit_error(
                attempt,
                failures,
                lost=lost,
                busy=busy,
                patient=self._crew.patient(),
                serving=self._serving,
            )
            raise error from cause

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
