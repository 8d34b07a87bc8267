"""What the ranks of a Megatron policy hold of the tensors of a Hugging Face checkpoint.

Megatron fuses queries, keys and values of each group of heads, and the two halves of a gated MLP; it pads the
vocabulary, and gives each pipeline stage some layers. A tensor by its Hugging Face name is therefore one box
or several boxes of the fused weight, on each replica.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import numpy as np

from weightsync.errors import ConfigurationError
from weightsync.layout.checks import share
from weightsync.layout.families import EXPERT_ROLES, ModelTensor, ModelTensors, Role
from weightsync.layout.parallel import PolicyGrid
from weightsync.layout.pieces import Layout, LayoutBuilder, Pattern, Piece
from weightsync.layout.regions import Box

_VOCABULARY_MULTIPLE = 128
_FUSED_NAMES = {
    Role.QUERY: ("q_proj", "linear_qkv"),
    Role.KEY: ("k_proj", "linear_qkv"),
    Role.VALUE: ("v_proj", "linear_qkv"),
    Role.GATE: ("gate_proj", "linear_fc1"),
    Role.UP: ("up_proj", "linear_fc1"),
    Role.SHARED_GATE: ("gate_proj", "linear_fc1"),
    Role.SHARED_UP: ("up_proj", "linear_fc1"),
    Role.EXPERT_GATE: ("gate_proj", "linear_fc1"),
    Role.EXPERT_UP: ("up_proj", "linear_fc1"),
}
_SECOND_HALF = frozenset({Role.UP, Role.SHARED_UP, Role.EXPERT_UP})
_HALVES = frozenset(_FUSED_NAMES) - {Role.QUERY, Role.KEY, Role.VALUE}
_BY_ROWS = frozenset({Role.COLUMN, Role.EMBED, Role.HEAD})
_BY_COLUMNS = frozenset({Role.ROW, Role.DOWN, Role.SHARED_DOWN, Role.EXPERT_DOWN})


def megatron_layout(model: ModelTensors, grid: PolicyGrid) -> Layout:
    """Return what each policy rank holds.

    Raises:
        ConfigurationError: sizes of the model that the grid does not divide.
    """
    return _Megatron(model, grid).layout()


class _Megatron:
    def __init__(self, model: ModelTensors, grid: PolicyGrid) -> None:
        self._model = model
        self._grid = grid
        self._stages = grid.stages(model.layers)
        self._dense = grid.dense()
        self._expert = grid.expert()
        self._builder = LayoutBuilder("policy", grid.ranks)
        if model.experts:
            share(model.experts, grid.ep, "the number of experts", "--policy ep")
        elif grid.ep > 1:
            raise ConfigurationError(f"{model.family} has no experts; write --policy without ep={grid.ep}")
        share(model.heads, grid.tp, "num_attention_heads", "--policy tp")
        if not model.latent_attention:
            share(model.kv_heads, grid.tp, "num_key_value_heads", "--policy tp")

    def layout(self) -> Layout:
        for tensor in self._model.tensors:
            key = self._key(tensor)
            index = self._builder.known(key)
            if index is None:
                pattern = Pattern.of(tensor.info.shape, self._pieces(tensor))
                index = self._builder.add_pattern(key, pattern)
            old, new = _FUSED_NAMES.get(tensor.role, ("", ""))
            self._builder.add(
                tensor.info, index, tensor.info.name.replace(old, new) if old else tensor.info.name
            )
        return self._builder.build()

    def _stage(self, tensor: ModelTensor) -> tuple[int, ...]:
        """Return the stages that have a tensor: tied embeddings are on the first and the last."""
        last = self._grid.pp - 1
        if tensor.layer < 0:
            return (0, last) if self._model.tied and last else (0,)
        return (last,) if tensor.layer >= self._model.layers else (self._stages[tensor.layer],)

    def _owner(self, tensor: ModelTensor) -> int | None:
        if tensor.expert is None:
            return None
        return tensor.expert // (self._model.experts // self._grid.ep)

    def _key(self, tensor: ModelTensor) -> Hashable:
        return tensor.role, tensor.info.shape, self._stage(tensor), self._owner(tensor)

    def _pieces(self, tensor: ModelTensor) -> Iterator[Piece]:
        for stage in self._stage(tensor):
            if tensor.role in EXPERT_ROLES:
                ranks = self._expert[stage, :, self._owner(tensor), :]
            else:
                ranks = self._dense[stage]
            for part in range(ranks.shape[1]):
                boxes = list(self._boxes(tensor, ranks.shape[1], part))
                for rank in ranks[:, part].tolist():
                    yield from (Piece(rank, *box) for box in boxes)

    def _boxes(
        self, tensor: ModelTensor, parts: int, part: int
    ) -> Iterator[tuple[Box, int, tuple[int, ...] | None, int | None]]:
        """Yield box, offset, strides and extent of what one of ``parts`` ranks holds."""
        shape, role = tensor.info.shape, tensor.role
        if role in (Role.QUERY, Role.KEY, Role.VALUE):
            yield from self._head_boxes(tensor, parts, part)
        elif role in _HALVES:
            rows = share(shape[0], parts, _size_name(role), _option(role))
            box, width = _rows(shape, part * rows, (part + 1) * rows), _row_size(shape)
            yield box, (rows * width if role in _SECOND_HALF else 0), None, 2 * rows * width
        elif role in _BY_ROWS:
            yield self._row_box(tensor, parts, part), 0, None, None
        elif role in _BY_COLUMNS and len(shape) == 2:
            columns = share(shape[1], parts, _size_name(role), _option(role))
            yield Box((0, part * columns), (shape[0], (part + 1) * columns)), 0, None, None
        else:
            yield Box.whole(shape), 0, None, None

    def _row_box(self, tensor: ModelTensor, parts: int, part: int) -> Box:
        shape = tensor.info.shape
        if tensor.role is Role.COLUMN:
            rows = share(shape[0], parts, "the output features of an attention projection", "--policy tp")
        else:
            multiple = _VOCABULARY_MULTIPLE * parts
            rows = -(-shape[0] // multiple) * multiple // parts
        return _rows(shape, min(part * rows, shape[0]), min((part + 1) * rows, shape[0]))

    def _head_boxes(
        self, tensor: ModelTensor, parts: int, part: int
    ) -> Iterator[tuple[Box, int, tuple[int, ...] | None, int | None]]:
        """Yield a box for each group of heads: the fused weight has its queries, its key, its value."""
        shape = tensor.info.shape
        queries = self._model.heads // self._model.kv_heads
        heads = {Role.QUERY: self._model.heads}.get(tensor.role, self._model.kv_heads)
        size = shape[0] // heads
        mine = queries if tensor.role is Role.QUERY else 1
        before = {Role.QUERY: 0, Role.KEY: queries, Role.VALUE: queries + 1}[tensor.role]
        groups, width = self._model.kv_heads // parts, _row_size(shape)
        extent = groups * (queries + 2) * size * width
        for group in range(groups):
            first = (part * groups + group) * mine * size
            offset = (group * (queries + 2) + before) * size * width
            yield _rows(shape, first, first + mine * size), offset, None, extent


def _rows(shape: tuple[int, ...], lo: int, hi: int) -> Box:
    return Box((lo, *(0 for _ in shape[1:])), (hi, *shape[1:]))


def _row_size(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape[1:], dtype=np.int64))


def _size_name(role: Role) -> str:
    if role in EXPERT_ROLES:
        return "moe_intermediate_size"
    return "the input features of o_proj" if role is Role.ROW else "intermediate_size"


def _option(role: Role) -> str:
    return "--policy etp" if role in EXPERT_ROLES else "--policy tp"
