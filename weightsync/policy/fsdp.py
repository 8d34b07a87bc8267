"""Weights of a model sharded with FSDP 2, tensor parallelism, or any other DTensor layout.

The manifest comes from shapes alone: a DTensor knows its full shape. Tensors are then made whole one at a
time, on every rank, in the same order, whether that rank sends them or not.

What happens on errors. The plan (names, ties, dtypes, shapes) is made before any collective, from facts that
are the same on all ranks, and fails on all of them alike; ``rename`` must keep it so. While streaming, the
collective comes first and the local steps (shape check, cast, cut) after it. If one of them raises on one
rank, the error goes to the consumer at once, and closing the stream takes part in the remaining gathers, so
that no other rank is left inside one. `PolicyCheckpointEngineMixin` always closes it, after it has told
the engine. Only a wait inside a gather cannot be interrupted: the process group's timeout bounds it.
"""

from __future__ import annotations

from typing import Unpack, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from weightsync.policy.local_views import LocalView, local_tensor
from weightsync.policy.plan import SourceOptions, plan_stream
from weightsync.tensors import WeightStream


def fsdp_weights(model: nn.Module, **options: Unpack[SourceOptions]) -> WeightStream:
    """Return the weight stream of a sharded model; every rank of its meshes must make and consume one.

    Items are full tensors on the mesh's device; parameters that are not DTensors are passed through as views.
    Peak extra memory is one full tensor (its cast copy on top where the dtype changes).

    Args:
        model: the model; parameters may be offloaded to the CPU, and shards uneven or empty.
        options: see `SourceOptions`; the same on every rank.

    Raises:
        ConfigurationError: the model is wrapped in FSDP 1, or its experts cannot be split.
        ManifestError: two weights get one name.
    """
    reshard(model)
    return plan_stream(model, gather_full, options)


def reshard(model: nn.Module) -> None:
    """Bring every FSDP module back to its shards. No collective.

    After a forward pass without a backward one the root still shows its unsharded copies, which may be in
    another dtype and do not follow the optimizer.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gather_full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full values of a tensor, without autograd history; a collective for a sharded DTensor.

    An offloaded shard is copied to the mesh's device for the gather, and that copy dropped again.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    shard = with_sizes(cast(DTensor, tensor.detach()))
    device = shard.device_mesh.device_type
    if shard.device.type != device:
        shard = cast(DTensor, shard.to(device))
    return shard.full_tensor()


def with_sizes(shard: DTensor) -> DTensor:
    """Give an empty shard the sizes that it has as it is placed.

    FSDP2 makes all of them 0 where tensor parallelism left no columns, and then torch's gather goes wrong:
    this rank would get zeros, without an error, and the others wait for it.
    """
    view = LocalView.of(shard)
    if 0 not in view.local or view.coordinate is None or any(each.is_partial() for each in view.placements):
        return shard
    sizes = view.placed()
    if sizes == view.local or 0 not in sizes:
        return shard
    return DTensor.from_local(
        local_tensor(shard).new_empty(sizes),
        shard.device_mesh,
        shard.placements,
        run_check=False,
        shape=shard.shape,
        stride=shard.stride(),
    )
