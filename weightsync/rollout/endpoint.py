"""The rollout side of the worker protocol: every method a driver may call at one rank, by name.

Shared by all rollout workers, whatever their inference engine. It holds the checkpoint engine and the
receiver; the worker supplies its rank and a way to make the loader of its model.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from weightsync.capacity import total_memory_bytes
from weightsync.digests import WeightDigest
from weightsync.engines.base import CheckpointEngine
from weightsync.engines.registry import create_checkpoint_engine
from weightsync.errors import ConfigurationError, ErrorRecord, LifecycleError
from weightsync.outcomes import Outcome
from weightsync.rollout.latecomer import Latecomer
from weightsync.rollout.layouts import decode_manifest, describe
from weightsync.rollout.loader import WeightLoader, region_loader
from weightsync.rollout.receiver import RefitReceiver
from weightsync.rollout.threads import in_thread


class RolloutEndpoint:
    """Answers the driver's calls at one rollout rank.

    Args:
        local_rank: rank within this inference engine.
        make_loader: returns the loader of the model that this rank serves; called once, on first use.
    """

    def __init__(self, local_rank: int, make_loader: Callable[[], WeightLoader]) -> None:
        self._local_rank = local_rank
        self._rank_prefix = 0
        self._make_loader = make_loader
        self._receiver: RefitReceiver | None = None
        self._opened: int | None = None
        self._engine_ready = False
        self._connected = False
        self._discarded: str | None = None
        self._staging: Future[dict[str, Any]] | None = None
        self._late = Latecomer()

    @property
    def rank(self) -> int:
        """Global rollout rank, as far as it is known."""
        return self._rank_prefix + self._local_rank

    @property
    def receiver(self) -> RefitReceiver | None:
        """The receiver; `None` until an engine was first initialised."""
        return self._receiver

    def call(self, method: str, kwargs: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run one protocol method and return its outcome; never raises an `Exception`."""
        try:
            return self._value(self._method(method)(**(kwargs or {})))
        except Exception as error:  # noqa: BLE001 - the one boundary at which worker errors become data
            return self._failure(method, error)

    async def call_async(self, method: str, kwargs: dict[str, Any] | None = None) -> dict[str, Any]:
        """Like `call`, for a thread that runs an event loop: receiving is awaited there."""
        if method not in ("update_weights_from_checkpoint_engine", "stage_weights_from_checkpoint_engine"):
            return self.call(method, kwargs)
        try:
            receiver, version = self._require_opened(method)
            staged = method == "stage_weights_from_checkpoint_engine"
            return self._value(await receiver.receive_async(version, staged=staged))
        except Exception as error:  # noqa: BLE001 - as in `call`
            return self._failure(method, error)

    # The methods of the protocol. Each may raise.

    def checkpoint_engine_total_memory_bytes(self, device: str) -> int:
        """Return the bytes of memory behind a device; see `weightsync.capacity`."""
        return total_memory_bytes(device)

    def init_checkpoint_engine(
        self, backend: str, bucket_size_bytes: int, engine_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Make the checkpoint engine; an earlier one is closed. What is served stays as it is."""
        self.close_checkpoint_engine()
        loader = self._receiver.loader if self._receiver else self._make_loader()
        engine = create_checkpoint_engine(
            backend, bucket_size_bytes=bucket_size_bytes, engine_kwargs=engine_kwargs
        )
        if self._receiver is None:
            self._receiver = RefitReceiver(engine, loader, rank=self.rank)
            if self._discarded is not None:
                self._receiver.discard(self._discarded)
        self._receiver.engine, self._receiver.memory = engine, None
        # Where not every chunk is checked, a digest of them all would cost what was to be saved.
        self._receiver.digests = (engine_kwargs or {}).get("verify", "full") == "full"
        self._engine_ready, self._connected, self._opened = True, False, None

    def describe_layout(self, manifest: bytes, sharding: str) -> dict[str, Any]:
        """Learn what this rank stores of the tensors that will come, and tell the engine, until it is closed.

        Args:
            manifest: the tensors' `TensorSpec`s in the order of the stream, as msgpack.
            sharding: ``"experts"``, ``"all"`` or ``"auto"``.

        Returns:
            ``{"whole": {name: reason}, "unread": [name]}``: what cannot be moved by regions here, and of what
            this rank stores nothing though some rank should.
        """
        engine, receiver = self._engine(), self._require_receiver()
        wanted, loader = decode_manifest(manifest), region_loader(receiver.loader)
        memory = loader.layout(wanted, sharding)
        engine.use_memory(memory)
        receiver.memory = memory
        return describe(wanted, memory, loader)

    def prepare_checkpoint_engine(self) -> Any:
        """Return the engine's metadata for its peers."""
        return self._engine().prepare()

    def init_checkpoint_engine_process_group(
        self, rank_prefix: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """Learn this rank's place among all rollout ranks, and connect to the policy side."""
        engine, rank = self._engine(), self._take_rank(rank_prefix, rollout_world_size)
        engine.init_rollout_process_group(
            rollout_rank=rank,
            train_world_size=train_world_size,
            rollout_world_size=rollout_world_size,
            metadata=metadata,
        )
        self._connected = True

    def update_checkpoint_engine_process_group(
        self, rank_prefix: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """Take another place among other peers, after this rank has joined."""
        engine, rank = self._connected_engine(), self._take_rank(rank_prefix, rollout_world_size)
        self._connected = False
        engine.update_process_group(
            rank=rank,
            train_world_size=train_world_size,
            rollout_world_size=rollout_world_size,
            metadata=metadata,
        )
        self._connected = True

    def _take_rank(self, rank_prefix: int, rollout_world_size: int) -> int:
        rank = rank_prefix + self._local_rank
        if not 0 <= rank < rollout_world_size:
            raise ConfigurationError(
                f"rank prefix {rank_prefix} and local rank {self._local_rank} give rollout rank {rank}, "
                f"outside a world of {rollout_world_size}"
            )
        self._rank_prefix = rank_prefix
        self._require_receiver().rank = rank
        return rank

    def join_checkpoint_engine_late(self, version: int, **engine_and_place: Any) -> str | None:
        """Open the refit that brings what the policy side holds, without a call of a policy worker.

        Args:
            version: of what is held.
            engine_and_place: the keywords of `Latecomer.join`, but for the rank.

        Returns:
            Why this engine serves no latecomers; `None` where it does: the next update receives from them.
        """
        self._connected_engine()
        receiver = self._require_receiver()
        receiver.require_next(version)
        reason = self._late.join(receiver, rollout_rank=self.rank, **engine_and_place)
        self._opened = version if reason is None else None
        return reason

    def leave_checkpoint_engine_late(self) -> None:
        """Go back to this rank's own engine; the next call that needs that does so, too."""
        self._late.leave()

    def open_refit(self, epoch: int, version: int, receivers: list[int] | None = None) -> None:
        """Announce the next refit; ``receivers``: the rollout ranks that take part, by default all."""
        engine = self._connected_engine()
        self._require_receiver().require_next(version)
        self._require_receiver().drop_staged()
        self._opened = None
        some = {} if receivers is None else {"receivers": receivers}
        engine.open_refit(epoch=epoch, version=version, **some)
        self._opened = version

    def update_weights_from_checkpoint_engine(self) -> dict[str, Any]:
        """Receive and load the refit that was opened; returns its figures."""
        receiver, version = self._require_opened("update_weights_from_checkpoint_engine")
        return receiver.receive(version)

    def stage_weights_from_checkpoint_engine(self) -> dict[str, Any]:
        """Receive the refit that was opened into host memory; what is served stays. Returns its figures."""
        receiver, version = self._require_opened("stage_weights_from_checkpoint_engine")
        return receiver.receive(version, staged=True)

    def start_staging(self) -> None:
        """As `stage_weights_from_checkpoint_engine`, in a thread: this worker can serve meanwhile."""
        receiver, version = self._require_opened("start_staging")
        self._staging = in_thread(partial(receiver.receive, version, staged=True))

    def poll_staging(self) -> dict[str, Any] | None:
        """Return the figures of `start_staging` once it has ended, `None` before; or raise its error."""
        if self._staging is None:
            raise LifecycleError("poll_staging without start_staging")
        if not self._staging.done():
            return None
        staging, self._staging = self._staging, None
        return staging.result(0)

    def load_staged_weights(self) -> dict[str, Any]:
        """Load what was staged; returns the figures of the whole refit."""
        return self._require_receiver().load_staged()

    def weight_digest(self, tensors: bool = False) -> dict[str, Any]:
        """Digest what this rank serves now, and say what the last refit digested to as it came.

        Args:
            tensors: whether to return the digest of each tensor, too, and ``originals``.

        Returns:
            the status; ``served``, of the tensors as they are stored; ``stream``, as they came, or `None`;
            ``originals``, of those that can be read back in the form in which they came.
        """
        receiver = self._require_receiver()
        served = WeightDigest.of(receiver.loader.served()).to_dict(tensors=tensors)
        stream = receiver.stream_digest
        came = stream.to_dict(tensors=tensors) if stream is not None else None
        answer = {**receiver.status(), "served": served, "stream": came}
        if tensors:
            answer["originals"] = WeightDigest.of(receiver.loader.originals()).to_dict(tensors=True)
        return answer

    def commit_refit(self, version: int) -> int:
        """Serve what was received; returns the version."""
        self._late.require(version)
        return self._require_receiver().commit(version)

    def fence_refit(self, reason: str) -> None:
        """Refuse to serve if weights were touched and not committed."""
        if self._receiver is not None:
            self._receiver.fence(reason)

    def discard_weights(self, reason: str) -> None:
        """The inference engine has given its weights up: refuse to serve until a complete refit."""
        self._discarded = reason
        if self._receiver is not None:
            self._receiver.discard(reason)

    def finalize_checkpoint_engine(self) -> None:
        """Release per-refit state of the engine."""
        if self._engine_ready:
            self._engine().finalize()

    def close_checkpoint_engine(self) -> None:
        """Give back everything the engine holds. What is served stays as it is.

        If the engine fails at it, the next call tries again; until then no refit can be opened.
        """
        if self._engine_ready:
            self._connected, self._opened = False, None
            self._engine().close()
            self._engine_ready = False

    def refit_status(self) -> dict[str, Any]:
        """Return ``{"version", "highest", "dirty", "fenced"}``."""
        if self._receiver is None:
            dirty = self._discarded is not None
            return {"version": None, "highest": None, "dirty": dirty, "fenced": self._discarded}
        return self._receiver.status()

    def _require_opened(self, method: str) -> tuple[RefitReceiver, int]:
        if not self._late.is_here:
            self._connected_engine()
        version, self._opened = self._opened, None
        if version is None:
            raise LifecycleError(f"{method} without open_refit")
        return self._require_receiver(), version

    def _require_receiver(self) -> RefitReceiver:
        if self._receiver is None:
            raise LifecycleError("init_checkpoint_engine comes first")
        return self._receiver

    def _engine(self) -> CheckpointEngine:
        if not self._engine_ready:
            raise LifecycleError("init_checkpoint_engine comes first")
        self._late.leave()
        return self._require_receiver().engine

    def _connected_engine(self) -> CheckpointEngine:
        engine = self._engine()
        if not self._connected:
            raise LifecycleError("init_checkpoint_engine_process_group comes first")
        return engine

    def _method(self, name: str) -> Callable[..., Any]:
        if name not in ROLLOUT_METHODS:
            raise ConfigurationError(
                f"a rollout worker has no method {name!r}; known: {', '.join(ROLLOUT_METHODS)}"
            )
        method: Callable[..., Any] = getattr(self, name)
        return method

    def _value(self, value: Any) -> dict[str, Any]:
        return Outcome(self.rank, value=value).to_dict()

    def _failure(self, method: str, error: Exception) -> dict[str, Any]:
        position = self._receiver.position_of(error) if self._receiver else None
        phase, tensor = (position.phase, position.tensor) if position else (method, None)
        record = ErrorRecord.from_exception(error, side="rollout", rank=self.rank, phase=phase, tensor=tensor)
        if position is not None and position.failed:
            record = replace(record, message=f"{record.message} ({position.failed})")
        return Outcome(self.rank, error=record).to_dict()


ROLLOUT_METHODS = (
    "checkpoint_engine_total_memory_bytes",
    "init_checkpoint_engine",
    "describe_layout",
    "prepare_checkpoint_engine",
    "init_checkpoint_engine_process_group",
    "update_checkpoint_engine_process_group",
    "join_checkpoint_engine_late",
    "leave_checkpoint_engine_late",
    "open_refit",
    "update_weights_from_checkpoint_engine",
    "stage_weights_from_checkpoint_engine",
    "start_staging",
    "poll_staging",
    "load_staged_weights",
    "commit_refit",
    "fence_refit",
    "discard_weights",
    "finalize_checkpoint_engine",
    "close_checkpoint_engine",
    "refit_status",
    "weight_digest",
)
"""Every method of the worker protocol that a rollout rank answers."""
