"""The contract of a checkpoint engine: the six calls of the transfer, and the optional hooks around them.

A transfer backend subclasses `CheckpointEngine` and implements the abstract methods. The hooks below
them have defaults that do nothing, so a plugin that knows only the abstract ones works unchanged.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from weightsync.errors import ConfigurationError
from weightsync.layout.tables import RankTable
from weightsync.tensors import TensorSpec, WeightManifest

CAPABILITIES: Mapping[str, str] = {
    "processes": "its workers may be in processes of their own",
    "hosts": "its workers may be on several hosts",
    "losses": "a worker that dies, stops or raises is an error on its peers within the deadlines",
    "checks": "what comes damaged, twice or not at all is an error",
    "latecomers": "a worker that comes after a refit is given its weights without another one",
}
"""What an engine is expected to do, unless it says in `CheckpointEngine.lacks` why it cannot."""


class RankMemory(Protocol):
    """A rank's part in a refit by regions: what it holds or stores, and the memory itself."""

    @property
    def manifest(self) -> WeightManifest:
        """Every tensor of the stream, whether it is moved by regions or not."""

    @property
    def table(self) -> RankTable:
        """Which boxes of which tensors this rank has, in which of its storages."""

    def storage(self, index: int) -> torch.Tensor | None:
        """Return the live memory of a storage of the table, flat and contiguous, in the storage's dtype.

        The same memory from one refit to the next, as far as it can be. On the rollout side `None` means that
        the storage is handed over in a `ParameterBatch`, because what is served is made from it.
        """


class ParameterBatch(list[tuple[str, torch.Tensor]]):
    """Parameters as a rollout rank stores them: whole, in its own shape, under its own names.

    An engine that moves regions yields these beside batches of named tensors. It may be empty: then what has
    arrived is already in place.

    Args:
        parameters: name and content of storages of the rank's `RankTable`.
        arrived: the tensors of the manifest of which this rank has all its share now, if it has any.
        nbytes: that came for them.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.Tensor]] = (),
        *,
        arrived: Sequence[TensorSpec] = (),
        nbytes: int = 0,
    ) -> None:
        super().__init__(parameters)
        self.arrived = tuple(arrived)
        self.nbytes = nbytes


class CheckpointEngine(ABC):
    """One transfer backend, one instance a worker.

    The constructor must take ``bucket_size`` (bytes) and the backend's own settings as keywords.
    """

    shard_expert_weights: bool = False

    lacks: Mapping[str, str] = {}
    """What this engine cannot do by nature, as it is configured, each of `CAPABILITIES` with the reason."""

    manifest_check: Callable[[WeightManifest], None] | None = None
    """Set by the receiver: called with the manifest before the first batch; raises to refuse the refit."""

    before_writing: Callable[[], None] | None = None
    """Set by the receiver: called before the first byte is written into memory that is served."""

    writes_in_place: bool = True
    """Set by the receiver: whether memory that is served may be written into; else all is handed over."""

    @abstractmethod
    def prepare(self) -> Any:
        """Allocate or register buffers; return plain serialisable metadata for the peers."""

    def get_target_weight_layout(self) -> dict[str, Any] | None:
        """Return this policy rank's destination layout, if it shards weights; else `None`."""
        return None

    @abstractmethod
    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """Connect a policy worker to its transfer peers.

        Args:
            worker_rank: this worker's rank among the policy workers.
            train_world_size: number of policy workers.
            rollout_world_size: number of rollout workers, over all engines.
            metadata: what every worker's `prepare` returned: policy ranks first, then rollout ranks.
        """

    @abstractmethod
    def init_rollout_process_group(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """Connect a rollout worker to its transfer peers; arguments as for the policy side."""

    def join_late(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """Connect a rollout worker that comes after a refit, in place of `init_rollout_process_group`.

        No policy worker is called for it. `receive_weight_batches` then brings the weights that the policy
        side holds, and `refit_stats` says which ``version`` that is.

        Args:
            rollout_rank: of this worker; a new one may follow those that are there.
            train_world_size: number of policy workers.
            rollout_world_size: number of rollout workers, over all engines.
            metadata: what the policy workers' last `prepare` returned, in the order of their ranks.

        Raises:
            ConfigurationError: the engine lacks ``latecomers``, or the metadata are not this engine's.
        """
        reason = self.lacks.get("latecomers", "the engine does not say why")
        raise ConfigurationError(
            f"{type(self).__name__} serves no worker that comes later ({reason}): "
            "join all workers anew and run a refit"
        )

    @abstractmethod
    def finalize(self) -> None:
        """Release per-refit state, if the backend owns any. May be called more than once."""

    @abstractmethod
    async def send_weights(self, weights: Generator[tuple[str, torch.Tensor], None, None]) -> None:
        """Send ``(name, tensor)`` weights from the policy side. The generator is consumed once."""

    @abstractmethod
    def receive_weight_batches(self) -> AsyncGenerator[list[tuple[str, torch.Tensor]], None]:
        """Yield ``(name, tensor)`` batches on the rollout side.

        A yielded tensor is valid until the next batch is asked for; what keeps it longer must copy.
        """

    # Optional hooks.

    def use_memory(self, memory: RankMemory | None) -> None:
        """Learn, before `prepare`, what this rank holds or stores, so as to move regions; `None` undoes it.

        Raises:
            ConfigurationError: this engine moves whole tensors only.
        """
        if memory is not None:
            raise ConfigurationError(
                f"{type(self).__name__} moves whole tensors only: write shard_weights: none"
            )

    def refuses(self, *, train_world_size: int, rollout_world_size: int) -> str | None:
        """Return why this engine, as it is configured, cannot connect so many workers; `None` if it can."""
        return None

    def arrived_digest(self, name: str) -> int | None:
        """Return what the bytes of a tensor of the current batch have digested to, if that is known already.

        As `weightsync.byte_digests.digest_bytes` does; a caller that gets `None` has to digest them itself.
        """
        return None

    def open_refit(self, *, epoch: int, version: int, receivers: Sequence[int] | None = None) -> None:
        """Learn which refit comes next.

        Args:
            epoch: counts attempts.
            version: names the weights.
            receivers: the rollout ranks that take part; `None` means all.

        Raises:
            ConfigurationError: only some are to take part, and this engine has no such refits.
        """
        if receivers is not None:
            raise ConfigurationError(f"{type(self).__name__} refits all rollout ranks, or none")

    def update_process_group(
        self, *, rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """Learn of other peers, after this worker has joined; what concerns the same ones is kept.

        Args:
            rank: of this worker from now on, on its side.
            train_world_size: as for `init_policy_process_group`, and so the others.
            rollout_world_size: see there.
            metadata: see there; entries of workers that were there before are as they were.

        Raises:
            ConfigurationError: this engine cannot; prepare all of them anew instead.
        """
        raise ConfigurationError(
            f"{type(self).__name__} cannot change its process group: "
            "finalize, prepare and join on all workers"
        )

    def abort_refit(self, error: BaseException) -> None:  # noqa: B027 - an optional hook
        """Tell the peers that this side failed. Called by the worker when loading or sending raised."""

    def refit_stats(self) -> dict[str, float]:
        """Return figures of the last refit: bytes, tensors, batches and seconds by phase."""
        return {}

    def close(self) -> None:
        """Give back everything: sockets, threads, buffers. The instance is not used again."""
        self.finalize()
