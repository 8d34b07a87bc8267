"""A refit on the receiving side: first what moves by regions, then what travels whole."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

import torch

from weightsync.engines.receiver import BucketReceiver
from weightsync.engines.regions.receiver import RegionReceiver

MADE_ONCE = dict.fromkeys(("seconds_plan", "seconds_register", "seconds_prepare"), 0.0)
"""What a refit by regions makes and keeps for the next ones: 0 where there was nothing to make."""


class RegionIntake:
    """An `Intake` of both.

    Args:
        regions: brings the regions.
        buckets: brings whole tensors, if there are any.
        in_place: whether memory that is served may be written into.
    """

    def __init__(self, regions: RegionReceiver, buckets: BucketReceiver | None, *, in_place: bool) -> None:
        self._regions = regions
        self._buckets = buckets
        self._in_place = in_place

    @property
    def digests(self) -> Mapping[str, int]:
        """Of the current batch's tensors, where it is one of whole tensors."""
        return self._buckets.digests if self._buckets is not None else {}

    async def batches(self) -> AsyncGenerator[list[tuple[str, torch.Tensor]], None]:
        """Yield batches of parameters, then batches of tensors."""
        async with aclosing(self._regions.batches(in_place=self._in_place)) as regions:
            async for batch in regions:
                yield batch
                del batch
        if self._buckets is not None:
            async with aclosing(self._buckets.batches()) as buckets:
                async for tensors in buckets:
                    yield tensors
                    del tensors

    def close(self) -> None:
        """End all transfers and wait for it.

        Raises:
            DeadlineError: one could not be ended.
        """
        try:
            self._regions.close()
        finally:
            if self._buckets is not None:
                self._buckets.close()

    @property
    def is_running(self) -> bool:
        """Whether a transfer may still write into memory."""
        return self._regions.is_running or (self._buckets is not None and self._buckets.is_running)

    def figures(self) -> dict[str, float]:
        """Return what `CheckpointEngine.refit_stats` gives, and the bytes by the copies that they took."""
        regions = self._regions.figures()
        whole = self._buckets.figures() if self._buckets is not None else {}
        summed = {
            key: regions.get(key, 0) + whole.get(key, 0)
            for key in ("bytes", "tensors", "batches", "bytes_moved")
        }
        return {**MADE_ONCE, **regions, **whole, **summed, "bytes_whole": whole.get("bytes", 0)}
