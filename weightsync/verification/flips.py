"""Flipping single bits, and counting how many are seen.

In three places: in the sender's buffer after the digests were made, in the receiver's before they are
compared, and in the served parameter after the load, where only a comparison with the policy can see it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from weightsync.digests import WeightDigest
from weightsync.engines.bucketed import BucketedCheckpointEngine
from weightsync.engines.registry import resolve_checkpoint_engine
from weightsync.engines.transport import BucketTransport
from weightsync.errors import ConfigurationError, DigestError
from weightsync.tensors import TensorSpec, WeightManifest, WeightStream, flat_bytes

PLACES = ("sent", "received", "served")
_BUCKET = 1 << 20
_TENSORS = {"a": 4096, "b": 1 << 18, "c": 256, "d": 1 << 20}
"""Bytes of each tensor: none leaves padding in a bucket, where a changed byte changes nothing."""
_BOUND_S = 60.0


@dataclass(frozen=True)
class FlipCount:
    """How many flipped bits were seen in one place."""

    place: str
    flipped: int
    seen: int
    seconds: float

    @property
    def missed(self) -> int:
        """Those that were not."""
        return self.flipped - self.seen


def count_flips(
    places: int = 1000, *, transport: str = "nixl", verify: str = "full", seed: int = 0
) -> list[FlipCount]:
    """Flip ``places`` bits, one after another, a third of them in each place, within this process.

    Those on the way take a refit each.

    Args:
        places: how many, at least 3.
        transport: a built-in one that works within one process.
        verify: the mode of the digests on the way; the served parameters are compared in any case.
        seed: of what is flipped.

    Raises:
        ConfigurationError: too few places, or a transport that is no built-in one.
        WeightSyncError: a refit failed for another reason than a flipped bit.
    """
    if places < len(PLACES):
        raise ConfigurationError(f"at least {len(PLACES)} places are needed, got {places}")
    rng = random.Random(seed)
    with _Pair(transport, verify, rng) as pair:
        counts = []
        for number, place in enumerate(PLACES):
            share = places // len(PLACES) + (number < places % len(PLACES))
            started = time.perf_counter()
            seen = sum(pair.is_seen(place) for _ in range(share))
            counts.append(FlipCount(place, share, seen, time.perf_counter() - started))
    return counts


class _Pair:
    """A sender and a receiver of one stream; a bit is flipped where it is armed."""

    def __init__(self, transport: str, verify: str, rng: random.Random) -> None:
        self._rng = rng
        self._armed: str | None = None
        self._passing = 0
        """Buckets that pass before the one in which the bit is flipped; there are two in all."""
        self._served: dict[str, torch.Tensor] = {}
        self._epoch = 0
        settings = {"device": "cpu", "bind_host": "127.0.0.1", "verify": verify, "topology": "star"}
        cls = _flipping(transport, self._flip)
        self._sender, self._receiver = cls(_BUCKET, **settings), cls(_BUCKET, **settings)
        generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
        self._weights = [
            (name, torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator))
            for name, size in _TENSORS.items()
        ]
        self._policy = WeightDigest.of(self._weights).total()

    def __enter__(self) -> _Pair:
        metadata = [self._sender.prepare(), self._receiver.prepare()]
        worlds = {"train_world_size": 1, "rollout_world_size": 1}
        self._sender.init_policy_process_group(worker_rank=0, metadata=metadata, **worlds)
        self._receiver.init_rollout_process_group(rollout_rank=0, metadata=metadata, **worlds)
        return self

    def __exit__(self, *_: object) -> None:
        self._sender.close()
        self._receiver.close()

    def is_seen(self, place: str) -> bool:
        """Flip one bit; returns whether anything noticed."""
        if place == "served":
            return self._is_seen_in_memory()
        self._armed, self._passing = place, self._rng.randrange(2)
        try:
            asyncio.run(asyncio.wait_for(self._refit(), _BOUND_S))
        except DigestError:
            return True
        return False

    def _is_seen_in_memory(self) -> bool:
        if not self._served:
            self._served = asyncio.run(asyncio.wait_for(self._refit(), _BOUND_S))
        data = flat_bytes(self._served[self._rng.choice(list(self._served))])
        place, bit = self._rng.randrange(data.numel()), 1 << self._rng.randrange(8)
        data[place] ^= bit
        seen = WeightDigest.of(self._served.items()).total() != self._policy
        data[place] ^= bit
        return seen and WeightDigest.of(self._served.items()).total() == self._policy

    def _flip(self, place: str, data: torch.Tensor) -> None:
        if self._armed != place:
            return
        self._passing -= 1
        if self._passing < 0:
            self._armed = None
            data[self._rng.randrange(data.numel())] ^= 1 << self._rng.randrange(8)

    async def _refit(self) -> dict[str, torch.Tensor]:
        self._epoch += 1
        for engine in (self._sender, self._receiver):
            engine.open_refit(epoch=self._epoch, version=self._epoch)
        specs = [TensorSpec.of(*item) for item in self._weights]
        stream = WeightStream(WeightManifest.build(specs), iter(self._weights))
        outcomes = await asyncio.gather(
            self._sender.send_weights(stream),
            _collect(self._receiver.receive_weight_batches()),
            return_exceptions=True,
        )
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        # The receiver's own error first: the sender's only passes it on.
        for error in sorted(errors, key=lambda error: not isinstance(error, DigestError)):
            raise error
        received: dict[str, torch.Tensor] = outcomes[1]  # type: ignore[assignment]
        return received


async def _collect(batches: AsyncGenerator[list[tuple[str, torch.Tensor]], None]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() async for batch in batches for name, tensor in batch}


def _flipping(
    transport: str, flip: Callable[[str, torch.Tensor], None]
) -> Callable[..., BucketedCheckpointEngine]:
    """Return a built-in engine whose transport lets ``flip`` at the bytes on their way."""
    engine: Any = resolve_checkpoint_engine(transport)
    if not issubclass(engine, BucketedCheckpointEngine):
        raise ConfigurationError(f"{transport!r} moves no buckets")

    class Flipping(engine):  # type: ignore[misc]
        def make_transport(self) -> BucketTransport:
            inner: Any = super().make_transport()
            buffers: list[torch.Tensor] = []
            allocate, publish, fetch = inner.allocate, inner.publish, inner.fetch

            def allocated(*args: Any) -> list[torch.Tensor]:
                buffers[:] = allocate(*args)
                return buffers

            def published(slot: int, nbytes: int) -> bytes:
                flip("sent", buffers[slot][:nbytes])
                return bytes(publish(slot, nbytes))

            def fetched(*args: Any, **kwargs: Any) -> torch.Tensor:
                data: torch.Tensor = fetch(*args, **kwargs)
                flip("received", data)
                return data

            inner.allocate, inner.publish, inner.fetch = allocated, published, fetched
            made: BucketTransport = inner
            return made

    return partial(Flipping)


def require_all_seen(counts: list[FlipCount]) -> None:
    """Check that nothing was missed.

    Raises:
        DigestError: something was.
    """
    missed = [f"{each.missed} of {each.flipped} {each.place}" for each in counts if each.missed]
    if missed:
        raise DigestError(f"flipped bits were not seen: {', '.join(missed)}")
