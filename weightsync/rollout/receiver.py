"""One refit at one rollout rank: engine on one side, loader on the other, and what is served in between.

`RefitReceiver` pulls batches from a checkpoint engine into a `WeightLoader`, checks that everything that
was promised has come, and keeps the state that decides whether this rank may serve: the committed version,
whether weights were touched since, and why serving is refused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from weightsync.digests import WeightDigest
from weightsync.engines.base import CheckpointEngine
from weightsync.errors import (
    ErrorContext,
    IncompleteStreamError,
    LifecycleError,
    WeightSyncError,
    WorkerFencedError,
)
from weightsync.rollout.ledger import StreamLedger
from weightsync.rollout.loader import Batch, WeightLoader
from weightsync.rollout.staging import StagedWeights
from weightsync.tensors import WeightManifest, list_names


def synchronize_device() -> None:
    """Wait until the accelerator, if there is one, has done what was asked of it.

    Called before a batch is given back: the engine may overwrite its memory from then on.
    """
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


@dataclass
class ReceiveFigures:
    """What one refit moved at one rank, and where its time went (seconds)."""

    bytes: int = 0
    tensors: int = 0
    batches: int = 0
    receive_s: float = 0.0
    digest_s: float = 0.0
    stage_s: float = 0.0
    load_s: float = 0.0
    total_s: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        optional = {"digest": self.digest_s, "stage": self.stage_s}
        some = {phase: taken for phase, taken in optional.items() if taken}
        seconds = {"receive": self.receive_s, **some, "load": self.load_s, "total": self.total_s}
        counts = {"bytes": self.bytes, "tensors": self.tensors, "batches": self.batches}
        return {**counts, "seconds": seconds, **self.extra}

    def line(self, kind: str) -> str:
        """Return the line that is printed for each update."""
        return (
            f"[{kind} refit] Loaded {self.tensors} tensors in {self.batches} batches via checkpoint engine; "
            f"bytes={self.bytes} total={self.total_s:.3f}s receive={self.receive_s:.3f}s "
            f"load={self.load_s:.3f}s"
        )


@dataclass(frozen=True)
class Position:
    """How far a refit has come: the phase, and the tensors that are being loaded."""

    phase: str
    loading: tuple[str, ...] = ()

    @property
    def tensor(self) -> str | None:
        """The tensor at hand, where it is only one."""
        return self.loading[0] if len(self.loading) == 1 else None

    @property
    def failed(self) -> str:
        """Say which tensors are not loaded if the refit fails here; empty where that is said otherwise."""
        count = len(self.loading)
        return f"{count} tensors failed to load: {list_names(self.loading)}" if count > 1 else ""


class RefitReceiver:
    """Receives refits at one rank.

    Args:
        engine: initialised for the rollout side.
        loader: of the model that this rank serves.
        rank: global rollout rank, for messages.

    Attributes:
        version: the version served, `None` before the first commit and while fenced.
        dirty: whether weights were written since the last commit.
        fenced: why this rank must not serve, or `None`.
        highest: the highest version that was ever committed here.
        digests: whether the tensors of a refit are digested as they come.
        stream_digest: of the weights committed last, as they came; `None` if they were not digested.
    """

    def __init__(self, engine: CheckpointEngine, loader: WeightLoader, *, rank: int = 0) -> None:
        self.engine = engine
        self.loader = loader
        self.rank = rank
        self.version: int | None = None
        self.dirty = False
        self.fenced: str | None = None
        self.highest: int | None = None
        self.digests = True
        self.stream_digest: WeightDigest | None = None
        self._came = WeightDigest()
        self._staged: tuple[int, StagedWeights, ReceiveFigures] | None = None
        self._position = Position("receive")
        self._failed: tuple[BaseException, Position] | None = None
        self._loaded: int | None = None
        self._busy = False
        self._begun = False

    def status(self) -> dict[str, Any]:
        """Return ``{"version", "highest", "dirty", "fenced"}``."""
        return {
            "version": self.version,
            "highest": self.highest,
            "dirty": self.dirty,
            "fenced": self.fenced,
        }

    def require_serving(self) -> None:
        """Check that the weights are whole.

        Raises:
            WorkerFencedError: a refit wrote some of them and was not committed.
        """
        if self.fenced is not None or self.dirty:
            reason = self.fenced or "a refit has begun and is not committed"
            raise WorkerFencedError(
                f"this worker does not serve: {reason}; a complete refit is needed",
                side="rollout",
                rank=self.rank,
            )

    def require_next(self, version: int) -> None:
        """Check that ``version`` may follow what was served here, and that no refit is running.

        While nothing is served, the version that was committed last may come once more.

        Raises:
            LifecycleError: it is stale or repeated, or a refit is running.
        """
        if self._busy:
            raise self._lifecycle(f"refit to version {version} while another one runs", "open")
        if self.version is not None and version <= self.version:
            raise self._lifecycle(
                f"version {version} does not follow version {self.version}: versions must increase",
                "open",
            )
        if self.highest is not None and version < self.highest:
            raise self._lifecycle(
                f"version {version} is older than version {self.highest}, which was served here: "
                "versions must increase",
                "open",
            )

    def receive(self, version: int, *, staged: bool = False) -> dict[str, Any]:
        """Receive and load one refit; blocks. Returns the figures; see `receive_async`.

        Raises:
            LifecycleError: called from within a running event loop; await `receive_async` there.
        """
        self.require_next(version)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self.receive_async(version, staged=staged))
        raise self._lifecycle("this thread runs an event loop: await receive_async instead", "receive")

    async def receive_async(self, version: int, *, staged: bool = False) -> dict[str, Any]:
        """Receive and load one refit. The weights are complete afterwards, but not yet committed.

        Args:
            version: greater than the last committed one.
            staged: keep all of it in host memory for `load_staged`; what is served stays as it is.

        Returns:
            bytes, tensors, batches, and seconds by phase (``receive``, ``load``, ``total``).

        Raises:
            LifecycleError: a refit is running, or the version is stale.
            ManifestError: the stream does not fit the model.
            IncompleteStreamError: less came than was promised, or nothing at all.
            Exception: whatever the engine or the loader raised. This rank is dirty if it wrote anything.
        """
        self.require_next(version)
        self._busy, self._begun, self._loaded, self._failed = True, False, None, None
        self._came = WeightDigest()
        self.drop_staged()
        waiting = StagedWeights() if staged else None
        started = time.perf_counter()
        try:
            figures = await self._run(waiting)
        except BaseException as error:
            self._give_up(error)
            raise
        finally:
            self._busy = False
            self.engine.manifest_check = None
        figures.total_s = time.perf_counter() - started
        if waiting is not None:
            figures.extra["staged_bytes"] = waiting.nbytes
            self._staged = version, waiting, figures
            return figures.to_dict()
        return self._complete(version, figures)

    def load_staged(self) -> dict[str, Any]:
        """Load what was staged; returns the figures of all of the refit. Not yet committed afterwards.

        Raises:
            LifecycleError: nothing is staged, or a refit is running.
            Exception: whatever the loader raised. This rank is dirty then.
        """
        if self._staged is None or self._busy:
            raise self._lifecycle("there is no staged update to load", "load")
        (version, waiting, figures), self._staged = self._staged, None
        self.require_next(version)
        self._busy, self._begun, self._failed, self._position = True, False, None, Position("load")
        started = time.perf_counter()
        try:
            with _timed(figures, "load_s"):
                for batch in waiting.take():
                    self._load_batch(batch)
                self._finish(figures)
        except BaseException as error:
            self._give_up(error)
            raise
        finally:
            self._busy = False
        figures.total_s += time.perf_counter() - started
        return self._complete(version, figures)

    def drop_staged(self) -> None:
        """Let go of an update that waits in host memory."""
        self._staged = None

    def _complete(self, version: int, figures: ReceiveFigures) -> dict[str, Any]:
        self._loaded = version
        print(figures.line(self.loader.kind), flush=True)
        return figures.to_dict()

    def position_of(self, error: BaseException) -> Position | None:
        """Return where in the last refit ``error`` was met; `None` if it is not what ended it."""
        return self._failed[1] if self._failed is not None and self._failed[0] is error else None

    def commit(self, version: int) -> int:
        """Serve the weights that were received; returns the version now served. Lifts a fence.

        Raises:
            LifecycleError: this version was not completely received, or is stale.
        """
        self.require_next(version)
        if self._loaded != version:
            held = "nothing" if self._loaded is None else f"version {self._loaded}"
            raise self._lifecycle(f"commit of version {version}, but {held} was received", "commit")
        self.version, self.highest = version, version
        self.stream_digest = self._came if self._came.tensors else None
        self.dirty, self.fenced, self._loaded = False, None, None
        return version

    def fence(self, reason: str) -> None:
        """Refuse to serve until a complete refit, if weights were touched; else only drop what is staged."""
        self.drop_staged()
        if self.dirty:
            self.fenced, self.version, self._loaded, self.stream_digest = reason, None, None, None

    def discard(self, reason: str) -> None:
        """The weights are gone: refuse to serve until a complete refit."""
        self.dirty = True
        self.fence(reason)

    async def _run(self, waiting: StagedWeights | None) -> ReceiveFigures:
        def check(manifest: WeightManifest) -> None:
            self.loader.check_manifest(manifest)
            if waiting is not None:
                waiting.require_room(manifest)

        figures, ledger = ReceiveFigures(), StreamLedger(check)
        self.engine.manifest_check = ledger.announce
        self._position = Position("receive")
        batches = self.engine.receive_weight_batches()
        try:
            await self._take_all(batches, ledger, figures, waiting)
        except BaseException as error:
            if self._position.failed:
                error.add_note(self._position.failed)
            # Before the generator is closed: the engine should tell its peers why, not merely that, it stops.
            self._tell_engine(error)
            await _close_quietly(error, batches)
            raise
        await batches.aclose()
        return figures

    async def _take_all(
        self,
        batches: AsyncGenerator[Batch, None],
        ledger: StreamLedger,
        figures: ReceiveFigures,
        waiting: StagedWeights | None,
    ) -> None:
        while True:
            with _timed(figures, "receive_s"):
                batch = await anext(batches, None)
            if batch is None:
                break
            self._take(batch, ledger, figures, waiting)
            batch = None
            self._position = Position("receive")
        self._position = Position("manifest")
        if ledger.is_silent:
            raise IncompleteStreamError("the update brought no tensors and promised none")
        ledger.require_complete()
        if waiting is None:
            with _timed(figures, "load_s"):
                self._finish(figures)

    def _take(
        self, batch: Batch, ledger: StreamLedger, figures: ReceiveFigures, waiting: StagedWeights | None
    ) -> None:
        self._position = Position("manifest")
        ledger.record(batch)
        if self.digests:
            with _timed(figures, "digest_s"):
                for name, tensor in batch:
                    self._came.add(name, tensor, self.engine.arrived_digest(name))
        if waiting is None:
            with _timed(figures, "load_s"):
                self._load_batch(batch)
        else:
            self._position = Position("stage")
            with _timed(figures, "stage_s"):
                waiting.keep(batch)
        figures.batches += 1
        figures.tensors += len(batch)
        figures.bytes += sum(tensor.numel() * tensor.element_size() for _, tensor in batch)

    def _load_batch(self, batch: Batch) -> None:
        self._position = Position("load", tuple(name for name, _ in batch))
        self._begin_once()
        self.loader.load(batch)
        synchronize_device()

    def _finish(self, figures: ReceiveFigures) -> None:
        self._position = Position("load")
        self._begin_once()
        self.loader.finish()
        synchronize_device()
        self._begun = False
        figures.extra |= dict(getattr(self.loader, "notes", {}))

    def _begin_once(self) -> None:
        if not self._begun:
            self._begun = self.dirty = True
            self.version = self.stream_digest = None
            self.loader.begin()

    def _give_up(self, error: BaseException) -> None:
        position = self._position
        place = ErrorContext(side="rollout", rank=self.rank, phase=position.phase, tensor=position.tensor)
        self._failed = error, position
        if isinstance(error, WeightSyncError):
            error.with_context(**asdict(place))
        else:
            error.add_note(f"[{place}]")
        if self._begun:
            self._begun = False
            self.fenced = f"a refit failed after it had begun to write: {error}"
            _quietly(error, "clean up the model", self.loader.abort)

    def _tell_engine(self, error: BaseException) -> None:
        _quietly(error, "tell the engine", lambda: self.engine.abort_refit(error))

    def _lifecycle(self, message: str, phase: str) -> LifecycleError:
        return LifecycleError(message, side="rollout", rank=self.rank, phase=phase)


@contextmanager
def _timed(figures: ReceiveFigures, name: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        setattr(figures, name, getattr(figures, name) + time.perf_counter() - started)


def _quietly(error: BaseException, what: str, call: Callable[[], object]) -> None:
    """Run a clean-up step; its own failure is noted on ``error``, which is the one to report."""
    try:
        call()
    except Exception as second:  # noqa: BLE001 - the first error must not be replaced by a later one
        error.add_note(f"then could not {what}: {type(second).__name__}: {second}")


async def _close_quietly(error: BaseException, batches: AsyncGenerator[Batch, None]) -> None:
    """Close an engine's generator, as `_quietly` does."""
    try:
        await batches.aclose()
    except Exception as second:  # noqa: BLE001 - as in `_quietly`
        error.add_note(f"then could not close the stream: {type(second).__name__}: {second}")
