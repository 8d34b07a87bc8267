"""Which policy rank feeds which rollout rank. Pure functions of the two world sizes. No I/O."""

from __future__ import annotations

from weightsync.errors import ConfigurationError


def require_world_sizes(train_world_size: int, rollout_world_size: int) -> None:
    """Check that both sides have workers.

    Raises:
        ConfigurationError: a world size below 1.
    """
    if train_world_size < 1 or rollout_world_size < 1:
        raise ConfigurationError(
            f"a refit needs at least one policy and one rollout worker, "
            f"got train_world_size={train_world_size} and rollout_world_size={rollout_world_size}"
        )


def paired_rollout_rank(policy_rank: int, *, train_world_size: int, rollout_world_size: int) -> int | None:
    """Return the rollout rank that a policy rank sends to in the paired topology, or `None`.

    Policy rank ``i`` sends to rollout rank ``i``; extra policy ranks only keep their stream in step.

    Raises:
        ConfigurationError: more rollout than policy workers, or a rank outside its world.
    """
    _require_pairs(train_world_size, rollout_world_size)
    _require_rank("policy", policy_rank, train_world_size)
    return policy_rank if policy_rank < rollout_world_size else None


def paired_policy_rank(rollout_rank: int, *, train_world_size: int, rollout_world_size: int) -> int:
    """Return the policy rank that a rollout rank hears from in the paired topology.

    Raises:
        ConfigurationError: more rollout than policy workers, or a rank outside its world.
    """
    _require_pairs(train_world_size, rollout_world_size)
    _require_rank("rollout", rollout_rank, rollout_world_size)
    return rollout_rank


def _require_pairs(train_world_size: int, rollout_world_size: int) -> None:
    require_world_sizes(train_world_size, rollout_world_size)
    if rollout_world_size > train_world_size:
        raise ConfigurationError(
            f"the paired topology needs at least as many policy workers as rollout workers, got "
            f"{train_world_size} policy and {rollout_world_size} rollout workers: add policy workers or "
            f"use fewer rollout workers"
        )


def _require_rank(side: str, rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ConfigurationError(f"{side} rank {rank} is outside its world of {world_size}")
