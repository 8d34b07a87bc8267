"""One policy worker's checkpoint engine: made, connected, used and closed in the right order."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from weightsync.capacity import total_memory_bytes
from weightsync.engines.base import CheckpointEngine
from weightsync.engines.registry import create_checkpoint_engine
from weightsync.errors import LifecycleError

SEND = "send_weights_via_checkpoint_engine"
OFFLOAD = "offload_policy"
DIGEST = "weight_digest"
DESCRIBE = "describe_weights"

SESSION_METHODS = (
    "checkpoint_engine_total_memory_bytes",
    "init_checkpoint_engine",
    "prepare_checkpoint_engine",
    "init_checkpoint_engine_process_group",
    "update_checkpoint_engine_process_group",
    "open_refit",
    "finalize_checkpoint_engine",
    "close_checkpoint_engine",
)
"""The methods of the worker protocol that a session answers."""

_SEND_ENDS_S = 15.0

POLICY_METHODS = (*SESSION_METHODS[:-2], SEND, OFFLOAD, *SESSION_METHODS[-2:], DIGEST, DESCRIBE)
"""Every method of the worker protocol that a policy worker answers."""


class PolicySession:
    """Holds the engine of one policy worker. Methods may be called from any thread.

    They never overlap: while one runs, the others are refused. Only a close may come during a send: it
    ends the send.
    """

    def __init__(self) -> None:
        self._engine: CheckpointEngine | None = None
        self._made_with: tuple[str, int, dict[str, Any]] | None = None
        self._connected = False
        self._closing = False
        self._busy = threading.Lock()
        self._running = ""
        self._thread: int | None = None

    def checkpoint_engine_total_memory_bytes(self, device: str) -> int:
        """Return the bytes of GPU memory, or of host memory for ``"cpu"``."""
        return total_memory_bytes(device)

    def init_checkpoint_engine(
        self, backend: str, bucket_size_bytes: int, engine_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Make the engine. The same call again does nothing.

        Raises:
            LifecycleError: an engine with other settings is there; close it first.
            Exception: an earlier engine could not be closed, and still cannot.
        """
        wanted = (backend, bucket_size_bytes, copy.deepcopy(engine_kwargs or {}))
        with self._exclusive("init_checkpoint_engine"):
            if self._closing:
                self._close_engine()
            if self._engine is None:
                self._engine = create_checkpoint_engine(
                    backend, bucket_size_bytes=bucket_size_bytes, engine_kwargs=engine_kwargs or {}
                )
                self._made_with = wanted
            elif self._made_with != wanted:
                raise LifecycleError(
                    "this policy worker has a checkpoint engine with other settings; call "
                    f"close_checkpoint_engine first (it has {self._made_with}, wanted {wanted})"
                )

    def prepare_checkpoint_engine(self) -> Any:
        """Return the engine's metadata for its peers."""
        with self._exclusive("prepare_checkpoint_engine"):
            return self._require_engine().prepare()

    def init_checkpoint_engine_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """Connect to the rollout side."""
        with self._exclusive("init_checkpoint_engine_process_group"):
            self._connected = False
            self._require_engine().init_policy_process_group(
                worker_rank=worker_rank,
                train_world_size=train_world_size,
                rollout_world_size=rollout_world_size,
                metadata=metadata,
            )
            self._connected = True

    def update_checkpoint_engine_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """Take another rank among other peers, after this worker has joined."""
        with self._exclusive("update_checkpoint_engine_process_group"):
            engine, self._connected = self._require_connected(), False
            engine.update_process_group(
                rank=worker_rank,
                train_world_size=train_world_size,
                rollout_world_size=rollout_world_size,
                metadata=metadata,
            )
            self._connected = True

    def open_refit(self, epoch: int, version: int, receivers: list[int] | None = None) -> None:
        """Announce the next refit; ``receivers``: the rollout ranks that take part, by default all."""
        with self._exclusive("open_refit"):
            some = {} if receivers is None else {"receivers": receivers}
            self._require_connected().open_refit(epoch=epoch, version=version, **some)

    @contextmanager
    def sending(self) -> Iterator[CheckpointEngine]:
        """Lend the engine for one send; a second one meanwhile is a `LifecycleError`."""
        with self._exclusive(SEND):
            yield self._require_connected()

    @contextmanager
    def describing(self) -> Iterator[CheckpointEngine]:
        """Lend the engine, which need not have peers yet, to be told of this rank's memory."""
        with self._exclusive(DESCRIBE):
            yield self._require_engine()

    @contextmanager
    def digesting(self) -> Iterator[None]:
        """Keep sends away while the weights are read; needs no engine."""
        with self._exclusive(DIGEST):
            yield

    def finalize_checkpoint_engine(self) -> None:
        """Release per-refit state; nothing to do without an engine."""
        with self._exclusive("finalize_checkpoint_engine"):
            if self._engine is not None:
                self._engine.finalize()

    def close_checkpoint_engine(self) -> None:
        """Give the engine back; another can be made afterwards. Nothing to do without an engine.

        A send that runs in another thread is aborted first.

        Raises:
            LifecycleError: another call is running, or the send does not end.
            Exception: the engine could not be closed. It is kept, and can be closed again.
        """
        engine = self._engine
        aborted = engine is not None and self._running == SEND
        if aborted and engine is not None:
            engine.close()
        with self._exclusive("close_checkpoint_engine", wait_s=_SEND_ENDS_S if aborted else 0.0):
            if not aborted or engine is not self._engine:
                self._close_engine()
            else:
                self._forget_engine()

    def _close_engine(self) -> None:
        self._closing, self._connected = True, False
        if self._engine is not None:
            self._engine.close()
        self._forget_engine()

    def _forget_engine(self) -> None:
        self._engine, self._made_with, self._connected, self._closing = None, None, False, False

    @contextmanager
    def _exclusive(self, method: str, wait_s: float = 0.0) -> Iterator[None]:
        # What runs in this very thread, on its event loop, cannot end while this call waits.
        wait_s = 0.0 if self._thread == threading.get_ident() else wait_s
        if not self._busy.acquire(timeout=wait_s):
            raise LifecycleError(
                f"{method} while {self._running or 'another call'} is running on this worker"
            )
        try:
            self._running, self._thread = method, threading.get_ident()
            yield
        finally:
            self._running, self._thread = "", None
            self._busy.release()

    def _require_engine(self) -> CheckpointEngine:
        if self._engine is None:
            raise LifecycleError(
                "this policy worker has no checkpoint engine; call init_checkpoint_engine first"
            )
        return self._engine

    def _require_connected(self) -> CheckpointEngine:
        engine = self._require_engine()
        if not self._connected:
            raise LifecycleError(
                "the checkpoint engine has no peers yet; call init_checkpoint_engine_process_group first"
            )
        return engine
