"""From a model to a weight stream: the manifest first, from shapes alone, then the tensors one at a time.

Shared by all sources; a source adds only how one tensor becomes a full tensor (its `Gather`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import TypedDict

import torch
from torch import nn

from weightsync.errors import ManifestError, WeightSyncError
from weightsync.policy.dtypes import DtypePolicy
from weightsync.policy.entries import StateEntry, state_entries
from weightsync.policy.experts import Slice, split_fused_experts, whole
from weightsync.policy.planned import Piece, PlannedEntry
from weightsync.policy.shards import LocalShards
from weightsync.policy.ties import drop_tied
from weightsync.tensors import TensorSpec, WeightManifest, WeightStream, dtype_name

Gather = Callable[[torch.Tensor], torch.Tensor]


class SourceOptions(TypedDict, total=False):
    """What every weight source takes as keywords."""

    dtype_policy: DtypePolicy | None
    """Which dtype each weight is sent in; default: as stored, buffers included."""
    rename: Callable[[str], str] | None
    """Gives the name to send, from the Hugging Face name; applied last. Must be the same on all ranks."""
    include_buffers: bool
    """Whether persistent buffers are sent (default True); others never are."""
    keep_tied: bool | None
    """Whether a tensor is sent under each of its names; default `None`: as `ties.drop_tied` says."""
    split_experts: bool
    """Whether fused experts are sent one by one (default False)."""


def plan_stream(model: nn.Module, gather: Gather, options: SourceOptions) -> WeightStream:
    """Make the stream of a model's weights. Its manifest is complete; nothing was gathered yet.

    Raises:
        ManifestError: two weights get one name, or a dtype cannot be sent.
        ConfigurationError: the model or its experts cannot be read.
    """
    entries = state_entries(model, include_buffers=options.get("include_buffers", True))
    entries = drop_tied(model, entries, options.get("keep_tied"))
    policy = options.get("dtype_policy") or DtypePolicy()
    planned = _plan(entries, policy, options)
    manifest = WeightManifest.build(piece.spec for item in planned for piece in item.pieces)
    return WeightStream(manifest, FullTensors(planned, gather, policy), LocalShards(model, manifest, planned))


def _plan(entries: list[StateEntry], policy: DtypePolicy, options: SourceOptions) -> list[PlannedEntry]:
    rename = options.get("rename") or (lambda name: name)
    shapes = {entry.name: entry.tensor().shape for entry in entries}
    split = options.get("split_experts", False)
    claimed: dict[str, str] = {}
    planned = []
    for entry in entries:
        slices = split_fused_experts(entry.name, shapes) if split else whole(entry.name, shapes[entry.name])
        dtype = entry.tensor().dtype
        pieces = tuple(_piece(part, dtype, policy, rename) for part in slices)
        for piece in pieces:
            _claim(claimed, piece)
        planned.append(PlannedEntry(entry, shapes[entry.name], pieces))
    return planned


def _piece(part: Slice, dtype: torch.dtype, policy: DtypePolicy, rename: Callable[[str], str]) -> Piece:
    sent_as = dtype_name(policy.dtype_of(part.name, dtype))
    return Piece(TensorSpec(rename(part.name), tuple(part.shape), sent_as), part.name, part.cut, part.window)


def _claim(claimed: dict[str, str], piece: Piece) -> None:
    name = piece.spec.name
    other = claimed.setdefault(name, piece.source_name)
    if other != piece.source_name:
        raise ManifestError(f"{other!r} and {piece.source_name!r} are both renamed to {name!r}", tensor=name)


class FullTensors(Iterator[tuple[str, torch.Tensor]]):
    """Gathers planned entries one at a time, and yields their pieces.

    Gathering is a collective: every rank must come to every entry. So a rank that stops early, by its own
    error or because the engine failed, owes the others its part in the rest: `close` takes part in the
    remaining gathers and drops what they give. Each of them waits as long as the process group's timeout. An
    error is raised before that, so that the engine can tell its peers while they are still listening; what
    consumes this stream must therefore close it.

    No reference is kept to anything that was yielded: between two items only a fused tensor whose pieces are
    not all out is held.
    """

    def __init__(self, planned: list[PlannedEntry], gather: Gather, policy: DtypePolicy) -> None:
        self._entries = deque(planned)
        self._gather = gather
        self._policy = policy
        self._pieces: deque[Piece] = deque()
        self._full: torch.Tensor | None = None
        self._failed = False

    def __next__(self) -> tuple[str, torch.Tensor]:
        if self._failed:
            raise StopIteration
        try:
            while not self._pieces and self._entries:
                self._next_entry()
            return self._next_piece()
        except BaseException:
            self._failed = True
            self._drop()
            raise

    def select(self, names: Collection[str]) -> FullTensors:
        """Leave out all other tensors, and the gathers that none of these needs; on every rank alike."""
        wanted = frozenset(names)
        for _ in range(len(self._entries)):
            item = self._entries.popleft()
            pieces = tuple(piece for piece in item.pieces if piece.spec.name in wanted)
            if pieces:
                self._entries.append(replace(item, pieces=pieces))
        return self

    def close(self) -> None:
        """Take part in the remaining gathers, without keeping anything; nothing to do after the last item."""
        self._drop()
        self._failed = True
        while self._entries:
            self._gather_next()

    def _next_entry(self) -> None:
        item, self._full = self._gather_next()
        # Local steps begin here, behind the collective.
        if self._full.shape != item.shape:
            raise ManifestError(
                f"has shape {list(self._full.shape)}, but had {list(item.shape)} when the stream was made",
                tensor=item.entry.name,
            )
        self._pieces.extend(item.pieces)

    def _gather_next(self) -> tuple[PlannedEntry, torch.Tensor]:
        item = self._entries.popleft()
        try:
            return item, self._gather(item.entry.tensor())
        except BaseException as error:
            # The group is out of step or broken: taking part in more of it would only wait in vain.
            self._entries.clear()
            if isinstance(error, WeightSyncError):
                error.with_context(tensor=item.entry.name, phase="gather")
            error.add_note(f"while gathering {item.entry.name!r}")
            raise

    def _next_piece(self) -> tuple[str, torch.Tensor]:
        full = self._full
        if full is None or not self._pieces:
            raise StopIteration
        piece = self._pieces.popleft()
        if not self._pieces:
            self._full = None
        try:
            tensor = self._policy.apply(piece.source_name, piece.cut(full))
        except Exception as error:
            error.add_note(f"while casting {piece.source_name!r}")
            raise
        made = TensorSpec(piece.spec.name, tuple(tensor.shape), dtype_name(tensor.dtype))
        if made != piece.spec:
            raise ManifestError(f"is {made}, but the stream promised {piece.spec}", tensor=piece.spec.name)
        return piece.spec.name, tensor

    def _drop(self) -> None:
        self._pieces.clear()
        self._full = None
