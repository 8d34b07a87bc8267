"""A rank's table carried out by hand: full tensors into storages, box by box."""

from __future__ import annotations

import torch

from weightsync.layout.pieces import ABSENT
from weightsync.tensors import dtype_from_name, flat_bytes


def filled_storages(layout, manifest, weights):
    """Return the storages of a rank by name, in their own dtypes; what is not written is garbage."""
    table = layout.table
    storages = []
    for each in table.storages:
        size = each.nbytes if each.name not in layout.fills else 0
        raw = torch.full((size,), 0xA5, dtype=torch.uint8) if size else torch.zeros(each.nbytes).byte()
        storages.append(raw.view(dtype_from_name(each.dtype)))
    for spec, pattern, slots in zip(manifest.tensors, table.pattern_of, table.slots, strict=True):
        for held in table.patterns[pattern] if pattern != ABSENT else ():
            source = weights[spec.name][tuple(slice(a, b) for a, b in zip(held.lo, held.hi, strict=True))]
            storage = storages[slots[held.slot]]
            assert storage.dtype == source.dtype
            storage.as_strided(source.shape, held.strides, held.offset).copy_(source)
    return {
        each.name: storage.view(each.shape) for each, storage in zip(table.storages, storages, strict=True)
    }


def differences(layout, manifest, weights, parameters):
    """Return the storages whose bytes are not those of the parameters that a loader filled."""
    found = []
    for name, storage in filled_storages(layout, manifest, weights).items():
        parameter = parameters[name].detach()
        if (storage.dtype != parameter.dtype) != (name in layout.casts):
            found.append(f"{name}: {storage.dtype} for {parameter.dtype}")
        elif not torch.equal(flat_bytes(storage.to(parameter.dtype)), flat_bytes(parameter)):
            found.append(name)
    return found
