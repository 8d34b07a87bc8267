"""The tensors of a model without rules: what their names tell, for pipeline and expert parallelism."""

from __future__ import annotations

import re
from collections.abc import Iterable

from weightsync.errors import ConfigurationError
from weightsync.layout.families import ModelTensor, ModelTensors, Role
from weightsync.layout.pieces import TensorInfo

GENERIC = "generic"
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.(\w+)")
_EXPERT_ROLES = {
    "gate_proj": Role.EXPERT_GATE,
    "w1": Role.EXPERT_GATE,
    "up_proj": Role.EXPERT_UP,
    "w3": Role.EXPERT_UP,
    "down_proj": Role.EXPERT_DOWN,
    "w2": Role.EXPERT_DOWN,
}


def tensors_by_name(infos: Iterable[TensorInfo], *, tied: bool, notes: tuple[str, ...] = ()) -> ModelTensors:
    """Return a model's tensors with the layers and experts that their names tell; all others are whole.

    Args:
        infos: in the order of the stream.
        tied: whether the output layer shares the embedding.
        notes: what to tell about them.

    Raises:
        ConfigurationError: no tensors.
    """
    tensors, seen = [], -1
    for info in infos:
        layer, expert = _LAYER.search(info.name), _EXPERT.search(info.name)
        if layer:
            seen = max(seen, int(layer[1]))
        role = _EXPERT_ROLES.get(expert[2], Role.WHOLE) if expert and len(info.shape) == 2 else Role.WHOLE
        index = int(expert[1]) if expert and role is not Role.WHOLE else None
        tensors.append(
            ModelTensor(info, role, int(layer[1]) if layer else _AFTER if seen >= 0 else -1, index)
        )
    if not tensors:
        raise ConfigurationError("the model has no tensors")
    layers = seen + 1
    placed = [
        each if each.layer != _AFTER else ModelTensor(each.info, each.role, layers, each.expert)
        for each in tensors
    ]
    experts = 1 + max((each.expert for each in tensors if each.expert is not None), default=-1)
    return ModelTensors(
        family=GENERIC, tensors=tuple(placed), layers=layers, heads=1, kv_heads=1, vocab=0, experts=experts,
        tied=tied, intermediate=0, expert_intermediate=0, shared_intermediate=0, notes=notes,
    )  # fmt: skip


_AFTER = 1 << 30
