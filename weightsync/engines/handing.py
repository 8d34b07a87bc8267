"""The two halves of a refit within one process: handing the stream over, and taking it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from weightsync.control import Deadlines, Link
from weightsync.engines.buffers import synchronize
from weightsync.engines.handover import Handover, Part
from weightsync.engines.lockstep import Lockstep
from weightsync.engines.stats import Stopwatch
from weightsync.engines.stream import PromisedOrder, Weights
from weightsync.engines.waiting import Budget
from weightsync.errors import DeadlineError, ManifestError, WeightSyncError
from weightsync.tensors import WeightManifest, plain_tensor

Batch = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class _Offer:
    """What the sender says first. The receiver answers as to a batch: it asks for the next one."""

    manifest: WeightManifest | None


class _Next:
    """The receiver has done with what it was given."""


class _End:
    """The sender has handed over everything."""


@dataclass(eq=False)
class Handing:
    """What belongs to one refit at one rank."""

    part: Part
    handover: Handover | None
    """`None` at a policy rank without a partner."""
    peer: str
    deadlines: Deadlines
    budget: Budget
    unmet: list[Link]
    """The links to policy ranks on which this refit has not been tried yet: they wait, and know nothing."""
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    tensors: int = 0
    nbytes: int = 0
    batches: int = 0

    async def meet(self) -> None:
        """Begin the refit together with the other side."""
        if self.handover is not None:
            with self.stopwatch.phase("connect"):
                timeout_s = self.budget.clip(self.deadlines.connect_s)
                await self.handover.meet(self.part, self.peer, timeout_s)

    def put(self, item: Any) -> None:
        """Give the other side something."""
        if self.part.peer is not None:
            self.part.peer.inbox.put(item)

    async def get(self, phase: str) -> Any:
        """Take what the other side gives next.

        Raises:
            DeadlineError: nothing in time.
        """
        timeout_s = self.budget.clip(self.deadlines.stall_s)
        try:
            return await self.part.inbox.get(timeout_s)
        except TimeoutError:
            raise DeadlineError(
                f"{phase}: nothing from {self.peer} for {timeout_s:g} s", peer=self.peer
            ) from None

    def count(self, batch: Batch) -> None:
        """Add a batch to the figures."""
        self.batches += 1
        self.tensors += len(batch)
        self.nbytes += sum(tensor.nbytes for _, tensor in batch)

    def figures(self) -> dict[str, float]:
        """Return what `CheckpointEngine.refit_stats` gives: counts, and ``seconds_<phase>``."""
        seconds = {f"seconds_{phase}": value for phase, value in self.stopwatch.seconds().items()}
        return {"bytes": self.nbytes, "tensors": self.tensors, "batches": self.batches, **seconds}

    def sign(self, error: BaseException) -> BaseException:
        """Say in an error whose it is, and how far the stream had come; returns it."""
        if isinstance(error, WeightSyncError):
            phase = "send" if self.part.who.side == "policy" else "receive"
            error.with_context(side=self.part.who.side, rank=self.part.who.rank, phase=phase)
            if self.part.peer is not None:
                error.with_context(peer=self.peer, bytes_done=self.nbytes)
        return error


async def hand_over(handing: Handing, weights: Weights, bucket_size: int, lockstep: Lockstep) -> None:
    """Give the stream to the other side batch by batch; returns once it has taken the last one.

    Between two steps of the lockstep all ranks make the same items, so that none waits for another's receiver
    inside a collective. A rank without a partner makes them, too.
    """
    await handing.meet()
    await lockstep.step()
    promise = PromisedOrder.of(weights, handing.stopwatch)
    handing.put(_Offer(promise.manifest))
    await _taken(handing, "waiting for the manifest to be accepted")
    await lockstep.step()
    for batch in cut_batches(promise.watch(weights), bucket_size):
        _finish_work(batch)
        handing.count(batch)
        handing.put(batch)
        del batch  # or its tensors would still be there while the stream makes the next ones
        await _taken(handing, "waiting for a batch to be loaded")
        await lockstep.step()
    await lockstep.finish()
    handing.put(_End())
    await _taken(handing, "waiting for the receiver to finish")


async def take_over(
    handing: Handing, manifest_check: Callable[[WeightManifest], None] | None
) -> AsyncGenerator[Batch, None]:
    """Yield the batches of the other side, after its manifest was checked."""
    await handing.meet()
    _check(await _given(handing), manifest_check)
    handing.put(_Next())
    while not isinstance(batch := await _given(handing), _End):
        handing.count(batch)
        yield batch
        del batch
        handing.put(_Next())
    handing.put(_Next())


def cut_batches(weights: Iterator[tuple[str, torch.Tensor]], bucket_size: int) -> Iterator[Batch]:
    """Group a stream into batches of at most ``bucket_size`` bytes; a larger tensor is a batch of its own.

    Tensors are passed on as they are, unless they have to be copied to be contiguous.

    Raises:
        ManifestError: a name comes twice, or a tensor has no plain bytes.
    """
    batch: Batch = []
    size = 0
    names: set[str] = set()
    for name, tensor in weights:
        plain = _plain(name, tensor, names)
        del tensor
        if batch and size + plain.nbytes > bucket_size:
            yield batch
            batch, size = [], 0
        batch.append((name, plain))
        size += plain.nbytes
        del plain
    if batch:
        yield batch


def _plain(name: str, tensor: torch.Tensor, names: set[str]) -> torch.Tensor:
    if not isinstance(name, str):
        raise ManifestError(f"a tensor's name must be a string, got {name!r:.80}")
    if name in names:
        raise ManifestError("the weight stream repeats a name", tensor=name)
    names.add(name)
    try:
        return plain_tensor(tensor)
    except ManifestError as error:
        error.with_context(tensor=name)
        raise


def _finish_work(batch: Batch) -> None:
    """Wait for the device: the other side may use another stream of it."""
    for device in {tensor.device for _, tensor in batch}:
        synchronize(device)


def _check(offer: _Offer, manifest_check: Callable[[WeightManifest], None] | None) -> None:
    if offer.manifest is not None:
        manifest = WeightManifest.build(offer.manifest.tensors)
        if manifest_check is not None:
            manifest_check(manifest)


async def _taken(handing: Handing, phase: str) -> None:
    if handing.part.peer is not None:
        with handing.stopwatch.phase("wait"):
            await handing.get(phase)


async def _given(handing: Handing) -> Any:
    with handing.stopwatch.phase("receive"):
        return await handing.get("waiting for the next batch")
