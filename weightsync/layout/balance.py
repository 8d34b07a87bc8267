"""Which of several ranks that hold the same bytes sends which copy: loads are levelled by bytes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weightsync.layout.regions import Ints

Floats = npt.NDArray[np.float64]


def level_counts(loads: Floats, copies: int, nbytes: float) -> Ints:
    """Split equal copies over senders so that the largest total becomes as small as it can.

    Args:
        loads: bytes that each sender has to send already, shape ``(senders,)``.
        copies: how many copies to hand out.
        nbytes: of one copy, more than 0.

    Returns:
        Copies for each sender, shape ``(senders,)``.
    """
    units = loads / nbytes
    order = np.argsort(units, kind="stable")
    ranked = units[order]
    # With the k lightest senders taking part, the common level is (copies + their loads) / k. Take the
    # largest k whose heaviest sender is still below that level.
    levels = (copies + np.cumsum(ranked)) / np.arange(1, len(ranked) + 1)
    active = int(np.flatnonzero(ranked <= levels).max()) + 1
    shares = np.maximum(levels[active - 1] - ranked[:active], 0.0)
    counts = np.zeros(len(loads), np.int64)
    counts[order[:active]] = np.floor(shares).astype(np.int64)
    missing = copies - int(counts.sum())
    if missing:
        # Rounding down leaves less than one copy a sender, but for errors of the last bit.
        totals = units + counts
        for _ in range(missing):
            lightest = int(np.argmin(totals))
            counts[lightest] += 1
            totals[lightest] += 1.0
    return counts


def deal(counts: Ints, tensors: int, entries: int, turn: int = 0) -> Ints:
    """Give each copy a sender, so that each entry is spread over all of them as evenly as the counts allow.

    Args:
        counts: copies for each sender, shape ``(senders,)``; in all ``tensors * entries``.
        tensors: tensors of the group.
        entries: copies of each tensor.
        turn: how far to turn the order, so that not every group gives an entry to the same sender first.

    Returns:
        Index of the sender of each copy, shape ``(tensors, entries)``.
    """
    senders = len(counts)
    rounds = int(counts.min()) // entries
    first = min(rounds * senders, tensors)
    # A Latin square: every sender once in each column of `senders` rows.
    square = (np.arange(first)[:, None] + np.arange(entries)[None, :]) % senders
    rest = counts - rounds * entries
    dealt = _interleaved(rest).reshape(tensors - first, entries)
    turned = (np.arange(entries)[None, :] + np.arange(tensors - first)[:, None] + turn) % entries
    return np.concatenate((square, np.take_along_axis(dealt, turned, axis=1)))


def _interleaved(counts: Ints) -> Ints:
    """Return sender ``i`` ``counts[i]`` times, evenly spaced."""
    senders = np.repeat(np.arange(len(counts)), counts)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    places = (np.arange(len(senders)) - starts + 0.5) / np.maximum(np.repeat(counts, counts), 1)
    dealt: Ints = senders[np.argsort(places, kind="stable")]
    return dealt
