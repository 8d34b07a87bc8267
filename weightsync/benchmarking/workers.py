"""What a benchmark process does: hold the parameters, copy, check, and take part in one kind of refit."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash

from weightsync.benchmarking.memory import MemoryMark, MemoryUse, mark_memory, memory_since
from weightsync.benchmarking.shapes import WHOLE, ModelHandle, Parameters, Part, new_parameters
from weightsync.engines.base import CheckpointEngine, ParameterBatch
from weightsync.engines.regions.engine import RegionEngine
from weightsync.engines.registry import create_checkpoint_engine
from weightsync.tensors import TensorSpec, WeightManifest, WeightStream, flat_bytes

_STEP = "seconds_"


@dataclass(frozen=True)
class Stretch:
    """When a rank's part of something began and ended, on this machine's monotonic clock, and its phases."""

    side: str
    start: float
    end: float
    phases: dict[str, float]
    counts: dict[str, float] = field(default_factory=dict)
    """What an engine has counted."""


class Holder:
    """The parameters of one process: the policy's, which all share, and those that it serves, its own.

    Args:
        model: where the policy's parameters are.
        sides: ``"policy"``, ``"rollout"`` or both.
        threads: of torch.
        part: of each parameter, that it serves.
    """

    def __init__(self, model: ModelHandle, sides: tuple[str, ...], threads: int, part: Part = WHOLE) -> None:
        torch.set_num_threads(threads)
        # The machine's own name may not resolve, and all processes are on it.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._shared = model.attach()
        # As a trainer has them: memory of its own.
        self.policy = _own_copy(self._shared, model.layers) if "policy" in sides else self._shared
        self.part = part
        self.served: Parameters = new_parameters(model.layers, part) if "rollout" in sides else {}
        self._mark: MemoryMark | None = None
        self._connected: MemoryMark | None = None
        self._connecting = MemoryUse(0, {})

    def copy(self) -> Stretch:
        """Copy the policy's parameters, in shared memory, into those served here: the limit."""
        start = time.perf_counter()
        for name, tensor in self.served.items():
            tensor.copy_(self.part.of(name, self._shared[name]))
        return Stretch("rollout", start, time.perf_counter(), {})

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Copy what is served here of whole parameters that came."""
        for name, tensor in weights:
            self.served[name].copy_(self.part.of(name, tensor))

    def stored_bytes(self) -> int:
        """Return the bytes of the served parameters: the least that can be received."""
        return sum(tensor.nbytes for tensor in self.served.values())

    def wipe(self) -> None:
        """Overwrite what is served, so that nothing can be taken for having arrived."""
        for tensor in self.served.values():
            tensor.zero_()

    def policy_digest(self, part: Part) -> str:
        """Return a digest of every name and byte of a part of the policy's parameters."""
        return _digest({name: part.of(name, tensor) for name, tensor in self.policy.items()})

    def served_digest(self) -> str:
        """Return the same of the served ones."""
        return _digest(self.served)

    def mark(self) -> None:
        """Count extra memory from here."""
        self._mark = mark_memory()

    def mark_connected(self) -> None:
        """Count what refits take from here."""
        self._connecting = self.memory()
        self._connected = mark_memory()

    def memory(self) -> MemoryUse:
        """Return the extra memory since `mark`."""
        use = memory_since(self._mark) if self._mark is not None else MemoryUse(0, {})
        # The peak was set back by `mark_connected`.
        return MemoryUse(max(use.extra, self._connecting.extra), use.shared)

    def refit_memory(self) -> MemoryUse:
        """Return the extra memory since `mark_connected`."""
        return memory_since(self._connected) if self._connected is not None else MemoryUse(0, {})


class EngineWorker(Holder):
    """Takes part in refits through a checkpoint engine for each side that is in this process."""

    def make(self, backend: str, bucket_bytes: int, settings: dict[str, Any], sides: tuple[str, ...]) -> Any:
        """Make and prepare the engines; returns each one's metadata."""
        self._create(backend, bucket_bytes, settings, sides)
        return {side: engine.prepare() for side, engine in self._engines.items()}

    def _create(
        self, backend: str, bucket_bytes: int, settings: dict[str, Any], sides: tuple[str, ...]
    ) -> None:
        self._engines: dict[str, CheckpointEngine] = {
            side: create_checkpoint_engine(backend, bucket_size_bytes=bucket_bytes, engine_kwargs=settings)
            for side in sides
        }

    def join(self, rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]) -> None:
        """Connect each engine, as rank ``rank`` of its side."""
        worlds: dict[str, Any] = {
            "train_world_size": train_world_size,
            "rollout_world_size": rollout_world_size,
            "metadata": metadata,
        }
        for side, engine in self._engines.items():
            if side == "policy":
                engine.init_policy_process_group(worker_rank=rank, **worlds)
            else:
                engine.init_rollout_process_group(rollout_rank=rank, **worlds)

    def connect_seconds(self) -> dict[str, float]:
        """Return the seconds that connecting took for what refits keep, by phase, of engines that tell."""
        found: dict[str, float] = {}
        for engine in self._engines.values():
            if isinstance(engine, RegionEngine):
                for name, seconds in engine.connect_stats().items():
                    phase = name.removeprefix(_STEP)
                    found[phase] = seconds + found.get(phase, 0.0)
        return found

    def open(self, epoch: int) -> None:
        """Name the next refit."""
        for engine in self._engines.values():
            engine.open_refit(epoch=epoch, version=epoch)

    def refit(self) -> list[Stretch]:
        """Send or receive, or both at once where both sides are here."""
        done: list[Stretch | BaseException] = []

        def run(side: str) -> None:
            try:
                done.append(self._send() if side == "policy" else self._receive())
            except BaseException as error:  # noqa: BLE001 - raised again below
                done.append(error)

        others = [threading.Thread(target=run, args=(side,)) for side in list(self._engines)[1:]]
        for thread in others:
            thread.start()
        run(next(iter(self._engines)))
        for thread in others:
            thread.join()
        for each in done:
            if isinstance(each, BaseException):
                raise each
        return [each for each in done if isinstance(each, Stretch)]

    def finish(self) -> None:
        """Finalize after a refit."""
        for engine in self._engines.values():
            engine.finalize()

    def close(self) -> None:
        """Close the engines."""
        for engine in self._engines.values():
            engine.close()

    def _send(self) -> Stretch:
        engine = self._engines["policy"]
        manifest = WeightManifest.build(TensorSpec.of(name, tensor) for name, tensor in self.policy.items())
        start = time.perf_counter()
        asyncio.run(engine.send_weights(WeightStream(manifest, self.policy.items())))
        return Stretch("policy", start, time.perf_counter(), phases_of(engine), counts_of(engine))

    def _receive(self) -> Stretch:
        engine, loading = self._engines["rollout"], 0.0

        async def receive() -> None:
            nonlocal loading
            async for batch in engine.receive_weight_batches():
                begun = time.perf_counter()
                self._take(batch)
                loading += time.perf_counter() - begun
                del batch

        start = time.perf_counter()
        asyncio.run(receive())
        phases = {**phases_of(engine), "load": loading}
        return Stretch("rollout", start, time.perf_counter(), phases, counts_of(engine))

    def _take(self, batch: list[tuple[str, torch.Tensor]]) -> None:
        if not isinstance(batch, ParameterBatch):
            self.load(iter(batch))
            return
        for name, parameter in batch:
            self.served[name].copy_(parameter)


def phases_of(engine: CheckpointEngine) -> dict[str, float]:
    """Return the seconds of an engine's last refit, by phase."""
    stats = engine.refit_stats()
    return {
        name.removeprefix(_STEP): value
        for name, value in stats.items()
        if name.startswith(_STEP) and name != f"{_STEP}total"
    }


def counts_of(engine: CheckpointEngine) -> dict[str, float]:
    """Return what an engine has counted in its last refit."""
    return {name: value for name, value in engine.refit_stats().items() if not name.startswith(_STEP)}


def _own_copy(shared: Parameters, layers: int) -> Parameters:
    own = new_parameters(layers)
    for name, tensor in own.items():
        tensor.copy_(shared[name])
    return own


def _digest(parameters: Parameters) -> str:
    digest = xxhash.xxh3_128()
    for name, tensor in parameters.items():
        digest.update(name.encode())
        digest.update(flat_bytes(tensor.contiguous()).numpy().data)
    return digest.hexdigest()
