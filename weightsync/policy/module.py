"""Weights of a plain `torch.nn.Module`: every rank holds them whole."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weightsync.errors import ConfigurationError
from weightsync.policy.entries import state_entries
from weightsync.policy.plan import SourceOptions, plan_stream
from weightsync.tensors import WeightStream


def module_weights(model: nn.Module, **options: Unpack[SourceOptions]) -> WeightStream:
    """Return the weight stream of a model that is not sharded.

    Items are views of the live parameters (casts are copies): they must be sent before the next optimizer
    step. Names are those of the Hugging Face checkpoint, without wrappers such as DDP or ``torch.compile``.

    Args:
        model: the model, wrapped or not.
        options: see `SourceOptions`.

    Raises:
        ConfigurationError: the model is sharded, or its experts cannot be split.
        ManifestError: two weights get one name.
    """
    if has_sharded_state(model):
        raise ConfigurationError("the model has DTensor parameters; use fsdp_weights or weight_stream_from")
    return plan_stream(model, torch.Tensor.detach, options)


def has_sharded_state(model: nn.Module) -> bool:
    """Whether any parameter or persistent buffer is a DTensor."""
    return any(isinstance(entry.tensor(), DTensor) for entry in state_entries(model))
