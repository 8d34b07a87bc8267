"""What the ranks of an FSDP2 policy hold: DTensors on a mesh of replicas, shards and tensor parallelism."""

from __future__ import annotations

import numpy as np

from weightsync.layout.families import EXPERT_ROLES, ModelTensor, ModelTensors, Role
from weightsync.layout.holdings import (
    Placed,
    Ranges,
    Replicated,
    Sharded,
    box_pieces,
    chunk_bounds,
    dtensor_pieces,
    local_ranges,
)
from weightsync.layout.parallel import ShardedGrid
from weightsync.layout.pieces import Layout, LayoutBuilder, Pattern, Piece
from weightsync.layout.regions import Ints, contiguous_strides

_BY_COLUMNS = frozenset({Role.ROW, Role.DOWN, Role.SHARED_DOWN})
_WHOLE = frozenset({Role.WHOLE, Role.LOW_RANK_Q, Role.LOW_RANK_KV})


def fsdp_layout(model: ModelTensors, grid: ShardedGrid) -> Layout:
    """Return what each rank of an FSDP2 policy holds.

    Every parameter is sharded along its first dimension; tensor parallelism has cut it before, by rows or by
    columns. The experts of a layer are one tensor for each projection, sharded by expert.
    """
    builder, mesh = LayoutBuilder("policy", grid.ranks), grid.mesh()
    for tensor in model.tensors:
        expert = tensor.role in EXPERT_ROLES
        key = (tensor.role, tensor.info.shape, tensor.expert)
        index = builder.known(key)
        if index is None:
            pieces = (
                _expert_pieces(tensor, model.experts, mesh)
                if expert
                else dtensor_pieces(tensor.info.shape, mesh, _placements(tensor, grid))
            )
            index = builder.add_pattern(key, Pattern.of(tensor.info.shape, pieces))
        builder.add(tensor.info, index, _fused_name(tensor) if expert else tensor.info.name)
    return builder.build()


def _placements(tensor: ModelTensor, grid: ShardedGrid) -> tuple[Placed, Placed, Placed]:
    if tensor.role in _WHOLE or (tensor.role in _BY_COLUMNS and len(tensor.info.shape) == 1):
        return Replicated(), Sharded(0), Replicated()
    if tensor.role in _BY_COLUMNS:
        return Replicated(), Sharded(0), Sharded(1)
    return Replicated(), Sharded(0, split_factor=grid.tp), Sharded(0)


def _expert_pieces(tensor: ModelTensor, experts: int, mesh: Ints) -> list[Piece]:
    """Return the holders of one expert of ``experts.gate_up_proj (E, 2I, H)`` or ``down_proj (E, H, I)``."""
    expert = tensor.expert or 0
    halves = 1 if tensor.role is Role.EXPERT_DOWN else 2
    cut: Placed = Sharded(1 if halves == 1 else 0)
    shard = expert // -(-experts // mesh.shape[1])
    first, last = chunk_bounds(experts, mesh.shape[1], shard)
    pieces: list[Piece] = []
    for replica, part in np.ndindex(mesh.shape[0], mesh.shape[2]):
        ranges: list[Ranges] = local_ranges(tensor.info.shape, mesh.shape[2:], (part,), (cut,))
        for piece in box_pieces(int(mesh[replica, shard, part]), ranges):
            local = piece.box.shape
            half = local[0] * local[1]
            offset = (expert - first) * half * halves + (half if tensor.role is Role.EXPERT_UP else 0)
            extent = (last - first) * half * halves
            pieces.append(Piece(piece.rank, piece.box, offset, contiguous_strides(local), extent))
    return pieces


def _fused_name(tensor: ModelTensor) -> str:
    prefix = tensor.info.name.split(".experts.")[0]
    return f"{prefix}.experts.{'down_proj' if tensor.role is Role.EXPERT_DOWN else 'gate_up_proj'}"
