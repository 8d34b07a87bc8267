"""Tied weights: one tensor under several names, sent under the names that the checkpoint has."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weightsync.policy.entries import StateEntry, named_modules_unwrapped

_DRAFT = re.compile(r"(^|\.)mtp(\.|$)")
_HEAD = re.compile(r"(^|\.)lm_head\.")


def drop_tied(model: nn.Module, entries: list[StateEntry], keep_tied: bool | None) -> list[StateEntry]:
    """Leave out the names under which a tensor need not be sent again.

    Args:
        model: asked for its tie declarations.
        entries: all names, in stream order.
        keep_tied: `None` does what a Hugging Face checkpoint does: a transformers model drops exactly the
            names that it declares as tied and that really are; any other model sends a shared tensor once,
            under its first name, ``lm_head`` last. Weights of a draft head (``mtp.``) are kept in any case,
            for a receiver may hold them apart. True keeps every name. False sends each shared tensor once.
    """
    if keep_tied:
        return entries
    declared = declared_ties(model)
    if declared is None or keep_tied is False:
        return _once_each(entries, {} if declared is None else declared)
    return _without_declared(entries, declared)


def declared_ties(model: nn.Module) -> dict[str, str | None] | None:
    """Return ``{dropped name: kept name or None}`` as transformers models declare it.

    `None` when no module is a transformers model, which is not the same as a model that ties nothing.
    """
    found: dict[str, str | None] | None = None
    for prefix, module in named_modules_unwrapped(model):
        ties = _declared_by(module)
        if ties is not None:
            named = {prefix + name: prefix + kept if kept else None for name, kept in ties.items()}
            found = {**(found or {}), **named}
    return found


def _declared_by(module: nn.Module) -> Mapping[str, str | None] | None:
    resolved = getattr(module, "all_tied_weights_keys", None)
    if isinstance(resolved, Mapping):
        return resolved
    # Before transformers 5 a class lists the names that it may tie, and its configuration says whether.
    config = getattr(module, "config", None)
    if config is None or not hasattr(module, "_tied_weights_keys"):
        return None
    keys: Any = module._tied_weights_keys if getattr(config, "tie_word_embeddings", False) else None
    return dict(keys) if isinstance(keys, Mapping) else dict.fromkeys(keys or ())


def _without_declared(entries: list[StateEntry], declared: Mapping[str, str | None]) -> list[StateEntry]:
    """A declaration alone proves nothing: a head that was untied since then has values of its own."""
    undeclared = {_identity(entry.tensor()) for entry in entries if entry.name not in declared}
    return [
        entry
        for entry in entries
        if entry.name not in declared or _identity(entry.tensor()) not in undeclared
    ]


def _once_each(entries: list[StateEntry], declared: Mapping[str, str | None]) -> list[StateEntry]:
    chosen: dict[Hashable, StateEntry] = {}
    for entry in sorted(entries, key=lambda entry: entry.name in declared or bool(_HEAD.search(entry.name))):
        chosen.setdefault(_identity(entry.tensor()), entry)
    kept = {entry.name for entry in chosen.values()}
    return [entry for entry in entries if entry.name in kept or _DRAFT.search(entry.name)]


def _identity(tensor: torch.Tensor) -> Hashable:
    """Say which tensors are one: the same object, or the same view of the same plain memory.

    Local memory says nothing about a DTensor: on a rank with empty shards all of them look alike, and ranks
    that disagree about the names would meet in different collectives.
    """
    if isinstance(tensor, DTensor) or not tensor.numel() or not tensor.data_ptr():
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
