"""Cutting fused mixture-of-experts weights into the per-expert weights of the checkpoint.

transformers 5 keeps the experts of a layer in two tensors, ``experts.gate_up_proj`` of shape ``(E, 2I, H)``
(gate rows first, then up rows) and ``experts.down_proj`` of shape ``(E, H, I)``; checkpoints have one
``experts.<e>.{gate,up,down}_proj.weight`` for each expert.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from weightsync.errors import ConfigurationError
from weightsync.layout.regions import Box

_FUSED = re.compile(r"(?:^|.*\.)experts\.(gate_up_proj|down_proj)")

Shapes = Mapping[str, torch.Size]
Cut = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Window:
    """The box of a tensor that a slice of it is; the slice lacks the dimensions in ``dropped``."""

    box: Box
    dropped: tuple[int, ...] = ()

    def kept(self, values: Sequence[int]) -> tuple[int, ...]:
        """Return, of values by dimension of the tensor, those of the slice."""
        return tuple(value for dim, value in enumerate(values) if dim not in self.dropped)


@dataclass(frozen=True)
class Slice:
    """One piece of a tensor: its name, its shape, how to cut it out, as a view, and where it lies."""

    name: str
    shape: torch.Size
    cut: Cut
    window: Window


def whole(name: str, shape: torch.Size) -> tuple[Slice, ...]:
    """Return the one slice that is the tensor itself."""
    return (Slice(name, shape, lambda tensor: tensor, Window(Box.whole(shape))),)


def split_fused_experts(name: str, shapes: Shapes) -> tuple[Slice, ...]:
    """Return the per-expert slices of a fused weight, or the tensor itself where it is none.

    Args:
        name: the tensor to cut.
        shapes: full shapes of all tensors of the model, by name.

    Raises:
        ConfigurationError: fused experts in another layout (transposed, interleaved, with biases), for which
            halves cut this way would be wrong.
    """
    match = _FUSED.fullmatch(name)
    if match is None:
        return whole(name, shapes[name])
    prefix = name.removesuffix(match[1])
    experts, width = _require_known_layout(prefix, shapes)
    if match[1] == "down_proj":
        return tuple(_row(f"{prefix}{e}.down_proj.weight", shapes[name], e) for e in range(experts))
    return tuple(
        _half(f"{prefix}{e}.{half}_proj.weight", shapes[name], e, start, width)
        for e in range(experts)
        for half, start in (("gate", 0), ("up", width))
    )


def _require_known_layout(prefix: str, shapes: Shapes) -> tuple[int, int]:
    """Return the number of experts and the rows of one half."""
    siblings = {name.removeprefix(prefix) for name in shapes if name.startswith(prefix)}
    gate_up, down = (shapes.get(prefix + key, torch.Size()) for key in ("gate_up_proj", "down_proj"))
    fits = len(gate_up) == len(down) == 3 and gate_up == (down[0], 2 * down[2], down[1])
    if not fits or siblings != {"gate_up_proj", "down_proj"}:
        raise ConfigurationError(
            "split_experts knows gate_up_proj (E, 2I, H) with down_proj (E, H, I), but "
            f"{prefix.rstrip('.')} has { {name: list(shapes[prefix + name]) for name in sorted(siblings)} }; "
            "send it fused"
        )
    return down[0], down[2]


def _row(name: str, shape: torch.Size, expert: int) -> Slice:
    window = Window(Box((expert, 0, 0), (expert + 1, shape[1], shape[2])), dropped=(0,))
    return Slice(name, shape[1:], lambda tensor: tensor[expert], window)


def _half(name: str, shape: torch.Size, expert: int, start: int, rows: int) -> Slice:
    window = Window(Box((expert, start, 0), (expert + 1, start + rows, shape[2])), dropped=(0,))
    size = torch.Size((rows, shape[2]))
    return Slice(name, size, lambda tensor: tensor[expert, start : start + rows], window)
