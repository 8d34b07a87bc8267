"""The tensors of a model without rules: what their names tell, for pipeline and expert parallelism."""

from __future__ import annotations

import re
from collections.abc import Iterable

from weightsync.errors import ConfigurationError
from weightsync.layout.families import ModelTensor, ModelTensors, Role
from weightsync.layout.pieces import TensorInfo

GENERIC = "generic"
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_EMBEDDING = re.compile(r"embed|wte|wpe")
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
    infos = list(infos)
    found = {info.name: _LAYER.search(info.name) for info in infos}
    layers = 1 + max((int(match[1]) for match in found.values() if match), default=-1)
    tensors = []
    for info in infos:
        match = found[info.name]
        layer = int(match[1]) if match else -1 if _EMBEDDING.search(info.name) else layers
        role, index = _role(info)
        tensors.append(ModelTensor(info, role, layer, index))
    if not tensors:
        raise ConfigurationError("the model has no tensors")
    experts = 1 + max((each.expert for each in tensors if each.expert is not None), default=-1)
    return ModelTensors(
        family=GENERIC, tensors=tuple(tensors), layers=layers, heads=1, kv_heads=1, vocab=0, experts=experts,
        tied=tied, intermediate=0, expert_intermediate=0, shared_intermediate=0, notes=notes,
    )  # fmt: skip


def _role(info: TensorInfo) -> tuple[Role, int | None]:
    match = _EXPERT.search(info.name)
    role = _EXPERT_ROLES.get(match[2]) if match and len(info.shape) == 2 else None
    if match is None or role is None:
        return Role.WHOLE, None
    return role, int(match[1])
