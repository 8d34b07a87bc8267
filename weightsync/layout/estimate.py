"""Figures of a plan: tensors, bytes and batches of each rollout rank, bytes of each link, and seconds.

The seconds are a model, not a measurement: each rank's link carries the given rate in each direction at once,
and the busiest one decides. Latency, packing, loading and contention inside a network are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weightsync.layout.pieces import ABSENT, Layout
from weightsync.layout.plan import ReshardPlan
from weightsync.layout.regions import Ints
from weightsync.tensors import ALIGNMENT


@dataclass(frozen=True)
class Received:
    """What each rollout rank receives; lists by rank."""

    tensors: list[int]
    nbytes: list[int]
    batches: list[int]


def count_received(layout: Layout, bucket_size: int) -> Received:
    """Count what each rollout rank receives, and the buckets that hold it in stream order.

    Args:
        layout: of the rollout side.
        bucket_size: bytes; at least 1.
    """
    table = np.zeros((len(layout.patterns) + 1, layout.ranks), np.int64)  # the last row stands for ABSENT
    has = np.zeros(table.shape, bool)
    for index, pattern in enumerate(layout.patterns):
        np.add.at(table[index], pattern.rank, pattern.numel())
        has[index, pattern.rank] = True
    itemsizes = np.array([info.itemsize for info in layout.tensors], np.int64)
    rows = np.where(layout.pattern_of == ABSENT, len(layout.patterns), layout.pattern_of)
    received = Received([], [], [])
    known: dict[bytes, int] = {}
    for rank in range(layout.ranks):
        sizes = (table[:, rank][rows] * itemsizes)[has[:, rank][rows]]
        received.tensors.append(len(sizes))
        received.nbytes.append(int(sizes.sum()))
        key = sizes.tobytes()
        if key not in known:
            known[key] = count_batches(sizes, bucket_size)
        received.batches.append(known[key])
    return received


def count_batches(sizes: Ints | Sequence[int], bucket_size: int) -> int:
    """Count the buckets that `weightsync.buckets.place_chunks` fills with tensors of these sizes, one sender.

    Args:
        sizes: bytes of the tensors, in stream order.
        bucket_size: bytes; at least 1.
    """
    chunks = _chunk_sizes(np.asarray(sizes, np.int64), bucket_size)
    if not len(chunks):
        return int(len(sizes) > 0)
    aligned = -(-chunks // ALIGNMENT) * ALIGNMENT
    starts = np.cumsum(aligned) - aligned
    ends = starts + chunks
    batches, first = 0, 0
    while first < len(chunks):
        # Chunks fit as long as they end within the bucket that began at the first one.
        first = max(int(np.searchsorted(ends, starts[first] + bucket_size, side="right")), first + 1)
        batches += 1
    return batches


def _chunk_sizes(sizes: Ints, bucket_size: int) -> Ints:
    """Cut what is larger than a bucket; drop what is empty, which needs no room."""
    sizes = sizes[sizes > 0]
    pieces = -(-sizes // bucket_size)
    chunks = np.full(int(pieces.sum()), bucket_size, np.int64)
    last = np.cumsum(pieces) - 1
    chunks[last] = sizes - (pieces - 1) * bucket_size
    return chunks


@dataclass(frozen=True)
class Seconds:
    """Predicted seconds of a refit, by way of doing it."""

    planned: float
    """Every rank sends from what it holds, to the ranks that store it."""
    pairs: float | None
    """Policy rank *i* collects every tensor, and sends rollout rank *i* its part; `None` if too few."""
    broadcast: float
    """Policy rank 0 collects every tensor and broadcasts all of it."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that ranks send and receive under a plan."""

    sent: Ints
    """By policy rank."""
    received: Ints
    """By rollout rank."""
    links: int
    """Pairs of ranks that have bytes to move."""
    largest_link: int
    mean_link: float

    @property
    def imbalance(self) -> float:
        """The busiest sender's bytes over those of an even share; 1.0 is level."""
        return _over_mean(self.sent)

    @property
    def receive_imbalance(self) -> float:
        """The same of the receivers."""
        return _over_mean(self.received)


def traffic(plan: ReshardPlan) -> Traffic:
    """Add up a plan's links."""
    used = plan.links[plan.links > 0]
    return Traffic(
        sent=plan.links.sum(axis=1),
        received=plan.links.sum(axis=0),
        links=len(used),
        largest_link=int(used.max()) if len(used) else 0,
        mean_link=float(used.mean()) if len(used) else 0.0,
    )


def predict_seconds(plan: ReshardPlan, link_gbps: float) -> Seconds:
    """Predict the time of a refit, and of the same refit by pairs and by full broadcast.

    Args:
        plan: of the refit.
        link_gbps: gigabits (1e9 bits) per second of one rank's link, each way.
    """
    rate = link_gbps * 1e9 / 8
    load, held = traffic(plan), plan.policy.held_bytes()
    total = sum(info.nbytes for info in plan.tensors)
    collected = total - held
    pairs = None
    if plan.policy.ranks >= plan.rollout.ranks:
        peers = plan.rollout.ranks
        pairs = float(np.maximum(load.received, collected[:peers]).max()) / rate
    return Seconds(
        planned=float(max(load.sent.max(), load.received.max())) / rate,
        pairs=pairs,
        broadcast=float(max(total, collected[0])) / rate,
    )


def _over_mean(values: Ints) -> float:
    mean = float(values.mean()) if len(values) else 0.0
    return float(values.max()) / mean if mean else 1.0
