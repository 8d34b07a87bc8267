"""One rank of a refit under test: an engine, driven as a policy or rollout worker drives it, with faults.

`RankWorker` runs in a thread or a process of its own, see `weightsync.testing.ranks`.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from weightsync.engines.base import CheckpointEngine
from weightsync.engines.registry import create_checkpoint_engine
from weightsync.errors import WeightSyncError
from weightsync.tensors import TensorSpec, WeightManifest, WeightStream
from weightsync.testing.oracle import Expected, check
from weightsync.testing.streams import make_stream

EngineClass = str | type[CheckpointEngine]

FIRST, MIDDLE, LAST = "first", "middle", "last"
PLACES = (FIRST, MIDDLE, LAST)
"""Places of a stream: before its first item, half way, after its last one. For a receiver: at its first
batch, once half of the tensors have come, once all have."""

RAISE, STOP, HOLD, REPEAT = "raise", "stop", "hold", "repeat"


class InjectedError(ValueError):
    """What a stream or a loader raises in a test."""


@dataclass(frozen=True)
class Plan:
    """What one rank does in one refit. Plain data.

    Attributes:
        stream: one of `weightsync.testing.streams.STREAMS`.
        seed: of the stream.
        place: one of `PLACES`, where ``fault`` happens.
        fault: ``"raise"``, ``"stop"`` (a receiver asks for no more), ``"hold"`` (wait for the test's word),
            ``"repeat"`` (a sender's name comes twice); empty for none.
        pace_s: seconds to wait at each item or batch; a receiver compares the batch again after them.
        delay_s: seconds to come late.
        manifest: whether the stream announces what it will bring.
        in_step: whether each item takes a step that all policy ranks must take, as a collective does.
        spent: whether the stream was consumed already.
        watched: whether every item is made when it is asked for, and is not to be kept.
    """

    stream: str = "plain"
    seed: int = 0
    place: str = FIRST
    fault: str = ""
    pace_s: float = 0.0
    delay_s: float = 0.0
    manifest: bool = False
    in_step: bool = False
    spent: bool = False
    watched: bool = False


@dataclass(frozen=True)
class Outcome:
    """How one rank's refit ended.

    Attributes:
        who: the rank.
        seconds: how long it took.
        kind: class name of what was raised; empty where nothing was.
        typed: whether that is a `WeightSyncError`.
        text: what it said.
    """

    who: str
    seconds: float
    kind: str = ""
    typed: bool = False
    text: str = ""

    @property
    def done(self) -> bool:
        """Whether the rank did all of its work."""
        return not self.kind

    def __str__(self) -> str:
        ended = f"raised {self.kind}: {self.text}" if self.kind else "ended well"
        return f"{self.who} {ended} after {self.seconds:.1f} s"


def make_engine(engine: EngineClass, bucket_size: int, settings: Mapping[str, Any]) -> CheckpointEngine:
    """Construct the engine under test, as a worker does.

    Args:
        engine: short name, ``module:ClassName`` or the class itself.
        bucket_size: bytes.
        settings: keywords of its constructor.
    """
    if isinstance(engine, str):
        return create_checkpoint_engine(engine, bucket_size_bytes=bucket_size, engine_kwargs=settings)
    return engine(bucket_size=bucket_size, **settings)  # type: ignore[call-arg]


class RankWorker:
    """One rank and its engine. Its methods are the test's commands; each blocks.

    Args:
        side: ``"policy"`` or ``"rollout"``.
        rank: within its side.
        engine: what it is to drive.
        bucket_size: bytes, the engine's.
        hold: called at a ``"hold"``; returns when the test says so.
        step: called at each item of a stream ``in_step``; returns when all policy ranks have called it.
    """

    def __init__(
        self,
        side: str,
        rank: int,
        engine: CheckpointEngine,
        bucket_size: int,
        *,
        hold: Callable[[], None],
        step: Callable[[], object],
    ) -> None:
        self.side, self.rank, self.engine = side, rank, engine
        self._bucket_size = bucket_size
        self._hold, self._step = hold, step
        self._at_end = False

    @property
    def who(self) -> str:
        """This rank, as messages name it."""
        return f"{self.side} rank {self.rank}"

    def prepare(self) -> bytes:
        """Prepare the engine; returns its metadata, encoded."""
        return msgspec.msgpack.encode(self.engine.prepare())

    def join(self, train: int, rollout: int, metadata: list[bytes]) -> None:
        """Join the process group; ``metadata`` is what every rank's `prepare` returned."""
        worlds = _worlds(train, rollout, metadata)
        if self.side == "policy":
            self.engine.init_policy_process_group(worker_rank=self.rank, **worlds)
        else:
            self.engine.init_rollout_process_group(rollout_rank=self.rank, **worlds)

    def join_late(self, train: int, rollout: int, metadata: list[bytes]) -> None:
        """Join after a refit; ``metadata`` is what the policy ranks' `prepare` returned."""
        self.engine.join_late(rollout_rank=self.rank, **_worlds(train, rollout, metadata))

    def open(self, epoch: int) -> None:
        """Learn which refit comes next."""
        self.engine.open_refit(epoch=epoch, version=epoch)

    def refit(self, plan: Plan) -> Outcome:
        """Send or receive one refit; returns how that ended, and never raises an `Exception`."""
        started = time.monotonic()
        time.sleep(plan.delay_s)
        try:
            asyncio.run(self._send(plan) if self.side == "policy" else self._receive(plan))
        except Exception as error:  # noqa: BLE001 - the outcome
            seconds = time.monotonic() - started
            typed = isinstance(error, WeightSyncError)
            return Outcome(self.who, seconds, type(error).__name__, typed, str(error))
        return Outcome(self.who, time.monotonic() - started)

    def stats(self) -> dict[str, float]:
        """Return the engine's figures of the last refit."""
        return self.engine.refit_stats()

    def finalize(self) -> None:
        """Let the engine end what a refit left."""
        self.engine.finalize()

    def close(self) -> None:
        """Let the engine give back everything."""
        self.engine.close()

    # Sending.

    async def _send(self, plan: Plan) -> None:
        self._at_end = False
        weights = self._stream(plan)
        try:
            await self.engine.send_weights(weights)
        except BaseException as error:
            self.engine.abort_refit(error)
            raise
        finally:
            weights.close()
        check(self._at_end, f"{self.who} returned before its stream was at its end")

    def _stream(self, plan: Plan) -> Generator[tuple[str, torch.Tensor], None, None]:
        pairs = make_stream(plan.stream, self._bucket_size, plan.seed)
        items = self._items(plan, pairs)
        if plan.spent:
            items.close()
            self._at_end = True
        if not plan.manifest:
            return items
        return WeightStream(WeightManifest.build(TensorSpec.of(*pair) for pair in pairs), items)

    def _items(
        self, plan: Plan, pairs: tuple[tuple[str, torch.Tensor], ...]
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        at = {FIRST: 0, MIDDLE: len(pairs) // 2, LAST: len(pairs)}[plan.place] if plan.fault else -1
        kept = Kept(3 * self._bucket_size)
        for i, (name, tensor) in enumerate(pairs):
            if i == at:
                yield from self._sender_fault(plan.fault, pairs)
            if plan.in_step:
                self._step()
            if plan.watched:
                yield name, kept.watch(tensor)
                kept.require_few(self.who)
            else:
                yield name, tensor
            if plan.pace_s:
                time.sleep(plan.pace_s)
        if at == len(pairs):
            yield from self._sender_fault(plan.fault, pairs)
        self._at_end = True

    def _sender_fault(
        self, fault: str, pairs: tuple[tuple[str, torch.Tensor], ...]
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        if fault == RAISE:
            raise InjectedError(f"the stream of {self.who} broke")
        if fault == HOLD:
            self._hold()
        if fault == REPEAT:
            yield pairs[0]

    # Receiving.

    async def _receive(self, plan: Plan) -> None:
        expected = Expected("nothing" if plan.spent else plan.stream, self._bucket_size, plan.seed)
        batches = self.engine.receive_weight_batches()
        struck = not plan.fault
        try:
            async for batch in batches:
                expected.record(batch)
                if plan.pace_s:
                    time.sleep(plan.pace_s)
                    expected.compare(batch, f" {plan.pace_s:g} s later, while it was still in use")
                del batch
                if not struck and self._reached(plan.place, expected.fraction):
                    struck = True
                    if plan.fault == STOP:
                        return
                    self._receiver_fault(plan.fault)
            expected.require_complete()
        except BaseException as error:
            self.engine.abort_refit(error)
            raise
        finally:
            await batches.aclose()
            expected.require_right()
        self._compare_stats(expected)

    def _reached(self, place: str, fraction: float) -> bool:
        return fraction >= {FIRST: 0.0, MIDDLE: 0.5, LAST: 1.0}[place]

    def _receiver_fault(self, fault: str) -> None:
        if fault == RAISE:
            raise InjectedError(f"the loader of {self.who} broke")
        if fault == HOLD:
            self._hold()

    def _compare_stats(self, expected: Expected) -> None:
        stats = self.engine.refit_stats()
        got = stats.get("bytes", expected.nbytes)
        check(got == expected.nbytes, f"refit_stats() of {self.who} says {got} bytes, not {expected.nbytes}")


def _worlds(train: int, rollout: int, metadata: list[bytes]) -> dict[str, Any]:
    return {
        "train_world_size": train,
        "rollout_world_size": rollout,
        "metadata": [msgspec.msgpack.decode(entry) for entry in metadata],
    }


class Kept:
    """Counts the bytes of a stream's items that somebody still holds.

    Args:
        limit: bytes that may be held beside the item that is being sent.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._made: list[tuple[weakref.ref[torch.Tensor], int]] = []

    def watch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fresh tensor of the same values, which is watched."""
        fresh = tensor.detach().clone()
        self._made.append((weakref.ref(fresh), fresh.numel() * fresh.element_size()))
        return fresh

    def require_few(self, who: str) -> None:
        """Check that not many are held.

        Raises:
            ConformanceError: the stream is being collected.
        """
        self._made = [(ref, nbytes) for ref, nbytes in self._made if ref() is not None]
        held = sum(nbytes for _, nbytes in self._made[:-1])
        check(held <= self._limit, f"{who} holds {held} bytes of the stream that it was given item by item")
