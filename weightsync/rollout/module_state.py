"""A module's tensors by name, and the part of a DTensor that this rank has. No communication."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.tensor import DTensor

from weightsync.layout.holdings import box_pieces, local_ranges, placements_from_torch
from weightsync.layout.pieces import Piece
from weightsync.layout.regions import Box, contiguous_strides


def named_state(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter and persistent buffer under each of its names."""
    yield from model.named_parameters(remove_duplicate=False)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def find_tensor(model: torch.nn.Module, name: str) -> torch.Tensor:
    """Return the parameter or buffer that has this name now."""
    path, _, last = name.rpartition(".")
    tensor: torch.Tensor = getattr(model.get_submodule(path), last)
    return tensor


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a tensor, without autograd history."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def local_pieces(tensor: torch.Tensor) -> list[Piece]:
    """Return where the boxes that this rank has of a tensor are in its contiguous local tensor.

    Raises:
        ConfigurationError: it is placed so that no rank has its values.
    """
    if not isinstance(tensor, DTensor):
        return box_pieces(0, [((0, size),) for size in tensor.shape])
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    placements = placements_from_torch(tensor.placements)
    if coordinate is None:
        return []
    return box_pieces(0, local_ranges(tensor.shape, mesh.shape, coordinate, placements))


@torch.no_grad()
def copy_whole(whole: torch.Tensor, into: torch.Tensor) -> None:
    """Copy a whole tensor, or this rank's part of it, into a tensor that may be a DTensor."""
    if not isinstance(into, DTensor):
        into.copy_(whole)
        return
    place = local_tensor(into)
    packed = (
        place if place.is_contiguous() else torch.empty_like(place, memory_format=torch.contiguous_format)
    )
    for piece in local_pieces(into):
        at = packed.storage_offset() + piece.offset
        strides = contiguous_strides(piece.box.shape) if piece.strides is None else piece.strides
        packed.as_strided(piece.box.shape, strides, at).copy_(whole[_slices(piece.box)])
    if packed is not place:
        place.copy_(packed)


def identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """Tell tensors apart by the memory they view: tied ones may be different objects."""
    local = local_tensor(tensor)
    if local.numel() == 0 or local.is_meta:
        return (id(tensor),)
    return local.data_ptr(), tensor.shape, local.shape, local.stride(), local.dtype, local.device


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(lo, hi) for lo, hi in zip(box.lo, box.hi, strict=True))
