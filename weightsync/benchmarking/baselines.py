"""What a refit is held against, beside the plain copy: a gloo broadcast by hand, and a file in memory."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weightsync.benchmarking.crew import ANSWER_S, Crew, ProcessCrew, ask
from weightsync.benchmarking.memory import MemoryUse
from weightsync.benchmarking.shapes import WHOLE, ModelHandle, Parameters, Part
from weightsync.benchmarking.trial import BenchSettings, Trial
from weightsync.benchmarking.workers import Holder, Stretch
from weightsync.errors import MissingDependencyError
from weightsync.tensors import flat_bytes

KIND = "baseline"
_SHM = Path("/dev/shm")

Piece = tuple[str, int, int]
"""A tensor's name, and the first byte and the one after the last."""


class Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.phases: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block for a phase."""
        begun = time.perf_counter()
        yield
        self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - begun

    def stretch(self, side: str) -> Stretch:
        """Return everything up to now."""
        return Stretch(side, self.start, time.perf_counter(), self.phases)


def plan_buckets(parameters: Parameters, bucket_bytes: int) -> list[list[Piece]]:
    """Cut the parameters into buckets that are all full but the last one."""
    buckets: list[list[Piece]] = [[]]
    room = bucket_bytes
    for name, tensor in parameters.items():
        start, end = 0, tensor.nbytes
        while start < end:
            taken = min(room, end - start)
            buckets[-1].append((name, start, start + taken))
            start, room = start + taken, room - taken
            if not room:
                buckets.append([])
                room = bucket_bytes
    return [bucket for bucket in buckets if bucket]


class GlooWorker(Holder):
    """Packs, broadcasts and unpacks one bucket after the other, as is commonly written by hand."""

    def join(self, file: str, rank: int, world_size: int) -> None:
        """Join the group; rank 0 is the policy's."""
        timeout = timedelta(seconds=ANSWER_S)
        dist.init_process_group(
            "gloo", init_method=f"file://{file}", rank=rank, world_size=world_size, timeout=timeout
        )

    def broadcast(self, bucket_bytes: int, sending: bool) -> Stretch:
        """Take part in one refit."""
        clock = Clock()
        own = self.policy if sending else self.served
        flat = {name: flat_bytes(tensor) for name, tensor in own.items()}
        buffer = self._buffer(bucket_bytes)
        for bucket in plan_buckets(own, bucket_bytes):
            if sending:
                with clock.phase("pack"):
                    size = _pack(buffer, flat, bucket)
            else:
                size = sum(end - start for _, start, end in bucket)
            with clock.phase("broadcast"):
                dist.broadcast(buffer[:size], src=0)
            if not sending:
                with clock.phase("unpack"):
                    _unpack(buffer, flat, bucket)
        return clock.stretch("policy" if sending else "rollout")

    def leave(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()

    def _buffer(self, nbytes: int) -> torch.Tensor:
        if not hasattr(self, "_kept"):
            self._kept = torch.zeros(nbytes, dtype=torch.uint8)
        return self._kept


def _pack(buffer: torch.Tensor, flat: Parameters, bucket: list[Piece]) -> int:
    offset = 0
    for name, start, end in bucket:
        buffer[offset : offset + end - start].copy_(flat[name][start:end])
        offset += end - start
    return offset


def _unpack(buffer: torch.Tensor, flat: Parameters, bucket: list[Piece]) -> None:
    offset = 0
    for name, start, end in bucket:
        flat[name][start:end].copy_(buffer[offset : offset + end - start])
        offset += end - start


class GlooTrial(Trial):
    """(b) A hand-written loop: policy rank 0 packs and broadcasts buckets to all rollout ranks."""

    kind, name = KIND, "gloo by hand"
    whole_only = True

    def __init__(self, settings: BenchSettings) -> None:
        self._settings = settings

    def crew(self, model: ModelHandle) -> AbstractContextManager[Crew]:
        """Return one policy process and the rollout processes."""
        return ProcessCrew(GlooWorker, model, 1, self._settings.rollout_ranks, threads=self._settings.threads)

    def begin(self, crew: Crew) -> None:
        """Make the group."""
        with tempfile.TemporaryDirectory(prefix="weightsync-bench-") as directory:
            for rank, member in enumerate(crew.members):
                member.start("join", f"{directory}/group", rank, len(crew.members))
            for member in crew.members:
                member.result()

    def refit(self, crew: Crew, number: int) -> list[Stretch]:
        """Broadcast everything."""
        for member in crew.members:
            member.start("broadcast", self._settings.bucket_bytes, member in crew.policy)
        return [member.result() for member in crew.members]

    def end(self, crew: Crew) -> None:
        """Leave the group."""
        ask(crew.members, "leave")


class FileWorker(Holder):
    """Saves the policy's parameters, or loads those that another has saved."""

    def __init__(self, model: ModelHandle, sides: tuple[str, ...], threads: int, part: Part = WHOLE) -> None:
        super().__init__(model, sides, threads, part)
        self._mapped: dict[str, int] = {}

    def save(self, path: str) -> Stretch:
        """Write a safetensors file."""
        clock = Clock()
        with clock.phase("save"):
            _safetensors().save_file(self.policy, path)
        return clock.stretch("policy")

    def restore(self, path: str) -> Stretch:
        """Copy the file's tensors into the served parameters."""
        clock = Clock()
        with clock.phase("load"):
            loaded = _safetensors().load_file(path)
            self.load(iter(loaded.items()))
        self._mapped[path] = Path(path).stat().st_size
        return clock.stretch("rollout")

    def memory(self) -> MemoryUse:
        """Return the extra memory. At its peak a loading process has the whole file mapped."""
        return self._mapping(super().memory())

    def refit_memory(self) -> MemoryUse:
        """Return the same of the refits alone."""
        return self._mapping(super().refit_memory())

    def _mapping(self, use: MemoryUse) -> MemoryUse:
        return MemoryUse(use.extra, {**use.shared, **self._mapped})


class FileTrial(Trial):
    """(c) A safetensors file in /dev/shm: saved by policy rank 0, loaded by all rollout ranks."""

    kind, name = KIND, "safetensors file"

    def __init__(self, settings: BenchSettings) -> None:
        self._settings = settings

    @contextmanager
    def crew(self, model: ModelHandle) -> Iterator[Crew]:
        """Yield the processes; the file is gone afterwards."""
        _safetensors()
        settings = self._settings
        with (
            tempfile.TemporaryDirectory(prefix="weightsync-bench-", dir=_SHM) as directory,
            ProcessCrew(
                FileWorker,
                model,
                1,
                settings.rollout_ranks,
                threads=settings.threads,
                tensor_parallel=settings.rollout_tp,
            ) as crew,
        ):
            self._path = f"{directory}/model.safetensors"
            yield crew

    def refit(self, crew: Crew, number: int) -> list[Stretch]:
        """Save, then load."""
        return [*ask(crew.policy, "save", self._path), *ask(crew.rollout, "restore", self._path)]


def _safetensors() -> Any:
    try:
        from safetensors import torch as module
    except ImportError as error:
        raise MissingDependencyError(
            f"this baseline needs safetensors: pip install 'weightsync[demo]' ({error})"
        ) from error
    return module
