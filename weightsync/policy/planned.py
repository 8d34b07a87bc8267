"""What comes of each tensor of a model: the items of the stream, planned before anything is gathered."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weightsync.policy.entries import StateEntry
from weightsync.policy.experts import Cut, Window
from weightsync.tensors import TensorSpec


@dataclass(frozen=True)
class Piece:
    """One item of the stream: a slice of an entry's full tensor."""

    spec: TensorSpec
    source_name: str
    cut: Cut
    window: Window


@dataclass(frozen=True)
class PlannedEntry:
    """One tensor to gather, and the items that come of it."""

    entry: StateEntry
    shape: torch.Size
    pieces: tuple[Piece, ...]
