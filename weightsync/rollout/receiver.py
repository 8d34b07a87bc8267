"""One refit at one rollout rank: engine on one side, loader on the other, and what is served in between.

`RefitReceiver` pulls batches from a checkpoint engine into a `WeightLoader`, checks that everything that
was promised has come, and keeps the state that decides whether this rank may serve.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict
from typing import Any

from weightsync.digests import WeightDigest
from weightsync.engines.base import CheckpointEngine, ParameterBatch, RankMemory
from weightsync.errors import ErrorContext, IncompleteStreamError, WeightSyncError
from weightsync.rollout.cleanup import close_quietly, quietly, synchronize_device
from weightsync.rollout.figures import Position, ReceiveFigures, timed
from weightsync.rollout.ledger import StreamLedger
from weightsync.rollout.loader import Batch, WeightLoader, region_loader
from weightsync.rollout.serving import ServingState
from weightsync.rollout.staging import StagedWeights
from weightsync.tensors import WeightManifest


class RefitReceiver(ServingState):
    """Receives refits at one rank.

    Args:
        engine: initialised for the rollout side.
        loader: of the model that this rank serves.
        rank: global rollout rank, for messages.

    Attributes:
        digests: whether the tensors of a refit are digested as they come.
        memory: what this rank stores of the tensors, where refits come by regions; else `None`.
    """

    def __init__(self, engine: CheckpointEngine, loader: WeightLoader, *, rank: int = 0) -> None:
        super().__init__(rank)
        self.engine = engine
        self.loader = loader
        self.digests = True
        self.memory: RankMemory | None = None
        self._came: WeightDigest | None = WeightDigest()
        self._staged: tuple[int, StagedWeights, ReceiveFigures] | None = None
        self._position = Position("receive")
        self._failed: tuple[BaseException, Position] | None = None
        self._begun = False

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
            self._unhook()
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
            with timed(figures, "load_s"):
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

    def position_of(self, error: BaseException) -> Position | None:
        """Return where in the last refit ``error`` was met; `None` if it is not what ended it."""
        return self._failed[1] if self._failed is not None and self._failed[0] is error else None

    def commit(self, version: int) -> int:
        """Serve the weights that were received; returns the version now served. Lifts a fence.

        Raises:
            LifecycleError: this version was not completely received, or is stale.
        """
        return self._serve(version, self._came if self._came is not None and self._came.tensors else None)

    def fence(self, reason: str) -> None:
        """Refuse to serve until a complete refit, if weights were touched; else only drop what is staged."""
        self.drop_staged()
        if self.dirty:
            self._close(reason)

    def discard(self, reason: str) -> None:
        """The weights are gone: refuse to serve until a complete refit."""
        self.dirty = True
        self.fence(reason)

    async def _run(self, waiting: StagedWeights | None) -> ReceiveFigures:
        figures, ledger = ReceiveFigures(), self._hook(waiting)
        self._position = Position("receive")
        batches = self.engine.receive_weight_batches()
        try:
            await self._take_all(batches, ledger, figures, waiting)
        except BaseException as error:
            if self._position.failed:
                error.add_note(self._position.failed)
            # Before the generator is closed: the engine should tell its peers why, not merely that, it stops.
            self._tell_engine(error)
            await close_quietly(error, batches)
            raise
        await batches.aclose()
        figures.note_copies(self.engine.refit_stats())
        return figures

    def _hook(self, waiting: StagedWeights | None) -> StreamLedger:
        """Have the engine ask before it does what cannot be undone; returns the ledger of the refit."""

        def check(manifest: WeightManifest) -> None:
            self.loader.check_manifest(manifest)
            if waiting is not None:
                waiting.require_room(manifest, self.memory.table if self.memory is not None else None)

        def refuse() -> None:
            raise self._lifecycle("an update that is staged is not written in place", "stage")

        ledger = StreamLedger(check)
        self.engine.manifest_check = ledger.announce
        self.engine.writes_in_place = waiting is None
        self.engine.before_writing = self._begin_once if waiting is None else refuse
        return ledger

    def _unhook(self) -> None:
        self.engine.manifest_check = self.engine.before_writing = None
        self.engine.writes_in_place = True

    async def _take_all(
        self,
        batches: AsyncGenerator[Batch, None],
        ledger: StreamLedger,
        figures: ReceiveFigures,
        waiting: StagedWeights | None,
    ) -> None:
        while True:
            with timed(figures, "receive_s"):
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
            with timed(figures, "load_s"):
                self._finish(figures)

    def _take(
        self, batch: Batch, ledger: StreamLedger, figures: ReceiveFigures, waiting: StagedWeights | None
    ) -> None:
        self._position = Position("manifest")
        if isinstance(batch, ParameterBatch):
            ledger.record_specs(batch.arrived)
            self._came = None  # nobody has seen these tensors whole
            figures.count(len(batch.arrived), batch.nbytes)
        else:
            ledger.record(batch)
            self._digest(batch, figures)
            figures.count(len(batch), sum(tensor.numel() * tensor.element_size() for _, tensor in batch))
        if waiting is not None:
            self._position = Position("stage")
            with timed(figures, "stage_s"):
                waiting.keep(batch)
        elif batch or not isinstance(batch, ParameterBatch):
            with timed(figures, "load_s"):
                self._load_batch(batch)

    def _digest(self, batch: Batch, figures: ReceiveFigures) -> None:
        if not self.digests or self._came is None:
            return
        with timed(figures, "digest_s"):
            for name, tensor in batch:
                self._came.add(name, tensor, self.engine.arrived_digest(name))

    def _load_batch(self, batch: Batch) -> None:
        self._position = Position("load", tuple(name for name, _ in batch))
        self._begin_once()
        if isinstance(batch, ParameterBatch):
            region_loader(self.loader).load_parameters(batch)
        else:
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
            self._begun = True
            self._touch()
            self.loader.begin()

    def _complete(self, version: int, figures: ReceiveFigures) -> dict[str, Any]:
        self._loaded = version
        print(figures.line(self.loader.kind), flush=True)
        return figures.to_dict()

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
            quietly(error, "clean up the model", self.loader.abort)

    def _tell_engine(self, error: BaseException) -> None:
        quietly(error, "tell the engine", lambda: self.engine.abort_refit(error))
