"""Making the engines of both sides and connecting them: capacities, bucket size, metadata, topology."""

from __future__ import annotations

from weightsync.cluster.base import WorkerGroup
from weightsync.config import RefitConfig, resolve_bucket_size
from weightsync.crew import Crew, Deadline, require_complete
from weightsync.names import portable_backend


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
    arguments = {
        # A name that only this process registered would be unknown to the workers.
        "backend": portable_backend(config.transport),
        "bucket_size_bytes": bucket_size,
        "engine_kwargs": config.engine_kwargs(),
    }
    crew.require("init", *crew.on_both("init_checkpoint_engine", arguments), deadline=deadline)


def connect_engines(crew: Crew, deadline: Deadline) -> None:
    """Let every engine prepare, hand all metadata to all of them, and connect both sides at once.

    Metadata is ordered: policy ranks first, then global rollout ranks.

    Raises:
        StepError: a worker could not; also for a topology that the engine does not know.
    """
    answers = crew.require("prepare", *crew.on_both("prepare_checkpoint_engine"), deadline=deadline)
    metadata = [
        *require_complete(answers, crew.policy, "prepare"),
        *require_complete(answers, crew.rollout, "prepare"),
    ]
    arguments = {
        "train_world_size": crew.policy.world_size,
        "rollout_world_size": crew.rollout.world_size,
        "metadata": metadata,
    }
    prefixes = [{"rank_prefix": prefix} for prefix in crew.rollout.rank_prefixes]
    method = "init_checkpoint_engine_process_group"
    rollout = crew.rollout.submit(method, arguments, each=prefixes)
    policy = crew.policy.submit(method, arguments)
    crew.require("connect", rollout, policy, deadline=deadline)


def finalize_engines(crew: Crew, deadline: Deadline) -> None:
    """Let every engine end what a refit left, before the engines are connected again.

    Raises:
        StepError: a worker could not.
    """
    crew.require("finalize", *crew.on_both("finalize_checkpoint_engine"), deadline=deadline)


def highest_version(crew: Crew, deadline: Deadline) -> int | None:
    """Return the highest version that a rollout rank serves already, if any.

    Raises:
        StepError: a rank did not answer.
    """
    answers = crew.require("status", crew.rollout.submit("refit_status"), deadline=deadline)
    versions = [status.get("version") for status in require_complete(answers, crew.rollout, "status")]
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
