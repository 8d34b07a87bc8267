"""Making the engines of both sides and connecting them: capacities, bucket size, shares, metadata."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from weightsync.cluster.base import PendingCall, WorkerGroup, driver_failure
from weightsync.cluster.view import ranks_of
from weightsync.config import RefitConfig, resolve_bucket_size
from weightsync.crew import Crew, Deadline, StepError, require_complete
from weightsync.errors import ConfigurationError, WeightSyncError
from weightsync.names import portable_backend
from weightsync.shares import PHASE as LAYOUT
from weightsync.shares import Shares
from weightsync.topology import RankId


def agree_on_bucket_size(crew: Crew, config: RefitConfig, deadline: Deadline) -> int:
    """Return the bucket size in bytes that suits the smallest worker of both sides.

    Raises:
        StepError: a worker did not answer.
        ConfigurationError: no bucket of the configured ratio fits.
    """
    answers = crew.require(
        "capacity",
        *crew.on_both("checkpoint_engine_total_memory_bytes", {"device": config.device}),
        deadline=deadline,
    )
    groups: tuple[WorkerGroup, ...] = (crew.policy, crew.rollout)
    capacities = [value for group in groups for value in require_complete(answers, group, "capacity")]
    return resolve_bucket_size(capacities, config.bucket_memory_ratio)


def make_engines(crew: Crew, config: RefitConfig, bucket_size: int, deadline: Deadline) -> None:
    """Make an engine on every worker.

    Raises:
        StepError: a worker could not.
    """
    arguments = _engine_arguments(config, bucket_size)
    crew.require("init", *crew.on_both("init_checkpoint_engine", arguments), deadline=deadline)


def _engine_arguments(config: RefitConfig, bucket_size: int) -> dict[str, Any]:
    return {
        # A name that only this process registered would be unknown to the workers.
        "backend": portable_backend(config.transport),
        "bucket_size_bytes": bucket_size,
        "engine_kwargs": config.engine_kwargs(),
    }


class Connection:
    """The engines of both sides: made, connected, and connected again where something has changed.

    Args:
        crew: the workers.
        config: of the engines.

    Attributes:
        bucket_size: bytes of one transfer bucket; fixed once it is known.
        is_due: whether the engines must prepare and connect again before the next refit.
        lacks_engines: whether a worker may have been started anew behind its handle, and so have no engine.
        shares: what the ranks have said of theirs, in a refit by regions.
    """

    def __init__(self, crew: Crew, config: RefitConfig) -> None:
        self.bucket_size: int | None = None
        self.shares = Shares(config)
        self.is_due = False
        self.lacks_engines = False
        self._crew = crew
        self._config = config
        self._metadata: dict[str, list[Any]] = {"policy": [], "rollout": []}

    def make(self, deadline: Deadline, step_s: float) -> None:
        """Make an engine on every worker and connect them all; ``step_s`` bounds each step but the first.

        Raises:
            StepError: a worker could not.
            ConfigurationError: no bucket fits into the smallest worker, or a tensor cannot be moved as it
                must be.
            ManifestError: the policy ranks would send different tensors, or one that nobody reads.
        """
        if self.bucket_size is None:
            # The first call also waits for workers that are still starting.
            self.bucket_size = agree_on_bucket_size(self._crew, self._config, deadline)
        make_engines(self._crew, self._config, self.bucket_size, Deadline(min(step_s, deadline.left_s())))
        self.shares.learn(self._crew, deadline, step_s=step_s)
        self._connect(Deadline(min(step_s, deadline.left_s())))

    def again(self, deadline: Deadline, crew: Crew | None = None) -> None:
        """Let every engine prepare and connect anew.

        Args:
            deadline: of all of it.
            crew: those that can be reached, if that is not all.

        Raises:
            StepError: a worker could not.
        """
        # A stopped worker is to be noticed before the time of a whole refit has passed.
        finalize_engines(crew or self._crew, Deadline(min(self._config.lifecycle.stall_s, deadline.left_s())))
        if self.lacks_engines and self.bucket_size is not None:
            # A worker that was started anew gets an engine; policy workers that have theirs keep it.
            make_engines(crew or self._crew, self._config, self.bucket_size, deadline)
            try:
                self.shares.learn(crew or self._crew, deadline)
            except WeightSyncError as error:  # in a refit, whatever fails is a rank's failure
                who = RankId(error.context.side or "policy", error.context.rank or 0)
                raise StepError(LAYOUT, [driver_failure(who, LAYOUT, type(error), error.message)]) from error
        self._connect(deadline, crew)

    def change(self, deadline: Deadline, *, policy: Collection[int], rollout: Collection[int]) -> None:
        """Connect workers that are new; the others keep their buffers, and their links to each other.

        Args:
            deadline: of all of it.
            policy: the ranks of the policy workers that are new.
            rollout: the first ranks of the engine hosts that are new.

        Raises:
            StepError: a worker could not; all of them must connect anew then.
            ConfigurationError: a new worker has too little memory for the buckets of the others, or a tensor
                cannot be moved there as it must be.
            ManifestError: a new policy worker would send other tensors than the others.
        """
        self.is_due = self.lacks_engines = True  # until it has worked
        if self.bucket_size is None:
            raise ConfigurationError("the engines were never connected")
        new = _Part(self._crew, policy, rollout)
        arguments = {"device": self._config.device}
        answers = new.require("capacity", "checkpoint_engine_total_memory_bytes", arguments, deadline)
        _require_room(answers, self._config.bucket_memory_ratio, self.bucket_size)
        engine = _engine_arguments(self._config, self.bucket_size)
        new.require("init", "init_checkpoint_engine", engine, deadline)
        self.shares.learn(self._crew, deadline, policy=policy, rollout=rollout)
        prepared = new.require("prepare", "prepare_checkpoint_engine", None, deadline)
        for who, metadata in prepared.items():
            self._metadata[who.side][who.rank] = metadata
        self._join(deadline, new)
        self.is_due = self.lacks_engines = False

    def late_arguments(self) -> dict[str, Any]:
        """Return what an engine needs to join the policy ranks late, beside the version and its rank."""
        return {
            **_engine_arguments(self._config, self.bucket_size or 0),
            "train_world_size": self._crew.policy.world_size,
            "rollout_world_size": self._crew.rollout.world_size,
            "metadata": list(self._metadata["policy"]),
        }

    def insert(self, side: str, rank: int, count: int) -> None:
        """Make room for the metadata of new ranks, which take this one and those after it."""
        self._metadata[side][rank:rank] = [None] * count
        if side == "rollout":
            self.shares.insert(rank, count)

    def remove(self, side: str, rank: int, count: int) -> None:
        """Forget the metadata of ranks that have left."""
        del self._metadata[side][rank : rank + count]
        if side == "rollout":
            self.shares.remove(rank, count)

    def _connect(self, deadline: Deadline, crew: Crew | None = None) -> None:
        """Let every engine prepare, hand all metadata to all of them, and connect both sides at once."""
        crew = crew or self._crew
        answers = crew.require("prepare", *crew.on_both("prepare_checkpoint_engine"), deadline=deadline)
        groups: tuple[WorkerGroup, ...] = (crew.policy, crew.rollout)
        prepared = {group.side: require_complete(answers, group, "prepare") for group in groups}
        if crew is self._crew:
            self._metadata = prepared
        else:  # of those that cannot be reached the old metadata stay in their places
            for group in groups:
                for rank, metadata in zip(ranks_of(group), prepared[group.side], strict=True):
                    self._metadata[group.side][rank] = metadata
        self._join(deadline, None, crew)
        self.is_due = self.lacks_engines = False

    def _join(self, deadline: Deadline, new: _Part | None, crew: Crew | None = None) -> None:
        """Hand all metadata, policy ranks first, to all workers; those that are not new have joined."""
        world = self._crew
        arguments = {
            "train_world_size": world.policy.world_size,
            "rollout_world_size": world.rollout.world_size,
            "metadata": [*self._metadata["policy"], *self._metadata["rollout"]],
        }
        prefixes = [{"rank_prefix": prefix} for prefix in world.rollout.rank_prefixes]
        method = "init_checkpoint_engine_process_group"
        if new is None:
            crew = crew or world
            rollout = crew.rollout.submit(method, arguments, each=prefixes)
            crew.require("connect", rollout, crew.policy.submit(method, arguments), deadline=deadline)
            return
        calls = new.submit(method, arguments, prefixes)
        calls += new.others().submit("update_checkpoint_engine_process_group", arguments, prefixes)
        world.require("connect", *calls, deadline=deadline)


class _Part:
    """Some workers of each side, by their first ranks."""

    def __init__(self, crew: Crew, policy: Collection[int], rollout: Collection[int]) -> None:
        self._crew = crew
        self._policy = frozenset(policy)
        self._rollout = frozenset(rollout)

    def others(self) -> _Part:
        """Return all workers that are not in this part, but for engine hosts that are lost or busy."""
        policy = frozenset(range(self._crew.policy.world_size)) - self._policy
        missing = {who.rank for who in self._crew.busy() | set(self._crew.lost) if who.side == "rollout"}
        gone = {self._crew.host_of(rank) for rank in missing}
        return _Part(self._crew, policy, frozenset(self._crew.rollout.rank_prefixes) - self._rollout - gone)

    def submit(
        self, method: str, kwargs: Mapping[str, Any] | None, each: Sequence[Mapping[str, Any]] | None = None
    ) -> list[PendingCall]:
        """Start a call on them; ``each`` has further arguments for every engine host of the group."""
        calls = []
        if self._rollout:
            calls.append(self._crew.rollout.submit(method, kwargs, each=each, only=self._rollout))
        if self._policy:
            calls.append(self._crew.policy.submit(method, kwargs, only=self._policy))
        return calls

    def require(
        self, phase: str, method: str, kwargs: Mapping[str, Any] | None, deadline: Deadline
    ) -> dict[RankId, Any]:
        """Call them all; returns their values by rank."""
        return self._crew.require(phase, *self.submit(method, kwargs), deadline=deadline).values


def _require_room(capacities: Mapping[RankId, Any], ratio: float, bucket_size: int) -> None:
    for who, capacity in capacities.items():
        if (size := resolve_bucket_size([capacity], ratio)) < bucket_size:
            raise ConfigurationError(
                f"{who} has {capacity} bytes of memory, room for buckets of {size} bytes; the others have "
                f"buckets of {bucket_size}: connect anew, after shutdown(), or use workers of one size"
            )


def finalize_engines(crew: Crew, deadline: Deadline) -> None:
    """Let every engine end what a refit left, before the engines are connected again.

    Raises:
        StepError: a worker could not.
    """
    crew.require("finalize", *crew.on_both("finalize_checkpoint_engine"), deadline=deadline)


def highest_version(crew: Crew, deadline: Deadline) -> int | None:
    """Return the highest version that a rollout rank serves or has ever served, if any.

    Also ranks that are fenced know it, so that a driver that was started anew does not begin again.

    Raises:
        StepError: a rank did not answer.
    """
    answers = crew.require("status", crew.rollout.submit("refit_status"), deadline=deadline)
    states = require_complete(answers, crew.rollout, "status")
    versions = [status.get(key) for status in states for key in ("version", "highest")]
    return max((version for version in versions if version is not None), default=None)


def disconnect_engines(crew: Crew, timeout_s: float) -> list[str]:
    """Finalize and close on every worker that can still be reached; return what did not work.

    Calls are also queued on busy workers, which run them once they can, but are not waited for there.
    """
    complaints = []
    deadline = Deadline(timeout_s)
    for phase, method in (("finalize", "finalize_checkpoint_engine"), ("close", "close_checkpoint_engine")):
        already_lost = set(crew.lost)
        answers = crew.hear(phase, *crew.on_both(method), timeout_s=deadline.left_s(0.25))
        complaints += [
            f"{failure.who}: {failure.record}"
            for failure in answers.failures
            if failure.who not in already_lost
        ]
    return complaints
