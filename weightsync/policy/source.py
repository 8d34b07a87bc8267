"""Choosing the weight source of a model."""

from __future__ import annotations

from typing import Unpack

from torch import nn

from weightsync.policy.fsdp import fsdp_weights
from weightsync.policy.module import has_sharded_state, module_weights
from weightsync.policy.plan import SourceOptions
from weightsync.tensors import WeightStream


def state_source(model: nn.Module, **options: Unpack[SourceOptions]) -> WeightStream:
    """Return the weight stream of a model, sharded or not; see `fsdp_weights` and `module_weights`."""
    if has_sharded_state(model) or _is_fsdp(model):
        return fsdp_weights(model, **options)
    return module_weights(model, **options)


def _is_fsdp(model: nn.Module) -> bool:
    """Whether FSDP manages any part: its modules may show plain, unsharded copies at the moment."""
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())
