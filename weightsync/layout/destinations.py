"""What the ranks of vLLM store of the tensors of a Hugging Face checkpoint, by the rules of its layers.

Fused parameters (``qkv_proj``, ``gate_up_proj``, ``w13_weight``, MLA's ``fused_qkv_a_proj``), replicated key
and value heads, the padded vocabulary, tied embeddings, experts cut or distributed, pipeline stages. Where
vLLM is installed, the rules are held against a trace of its own loader.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Literal, NamedTuple

from weightsync.errors import ConfigurationError
from weightsync.layout.checks import share
from weightsync.layout.families import EXPERT_ROLES, ModelTensor, ModelTensors, Role
from weightsync.layout.parallel import RolloutGrid
from weightsync.layout.pieces import Layout, LayoutBuilder, Pattern, Piece
from weightsync.layout.regions import Box, Ints

Sharding = Literal["none", "experts", "all"]
"""Which tensors a rollout rank receives in part: none, its experts (the rest whole), or all."""

_VOCABULARY_MULTIPLE = 64
_FUSED = {
    Role.QUERY: ("q_proj", "qkv_proj"),
    Role.KEY: ("k_proj", "qkv_proj"),
    Role.VALUE: ("v_proj", "qkv_proj"),
    Role.GATE: ("gate_proj", "gate_up_proj"),
    Role.UP: ("up_proj", "gate_up_proj"),
    Role.SHARED_GATE: ("gate_proj", "gate_up_proj"),
    Role.SHARED_UP: ("up_proj", "gate_up_proj"),
    Role.LOW_RANK_Q: ("q_a_proj", "fused_qkv_a_proj"),
    Role.LOW_RANK_KV: ("kv_a_proj_with_mqa", "fused_qkv_a_proj"),
}
_SHARED = frozenset({Role.SHARED_GATE, Role.SHARED_UP, Role.SHARED_DOWN})
_UPS = frozenset({Role.UP, Role.SHARED_UP})


class Part(NamedTuple):
    """What one rank stores of a tensor: the box, and where in the parameter; units are elements."""

    box: Box
    offset: int = 0
    extent: int | None = None
    strides: tuple[int, ...] | None = None


def vllm_layout(model: ModelTensors, grid: RolloutGrid, sharding: Sharding) -> Layout:
    """Return what each rollout rank receives and where it goes.

    With ``"none"`` that is every tensor, whole, on every rank: vLLM's own loader then takes its part. With
    ``"experts"``, tensors of other pipeline stages and experts of other ranks are left out, experts are cut
    and the rest is whole. With ``"all"`` it is what the rank stores, and no byte more.

    Raises:
        ConfigurationError: sizes of the model that the grid does not divide.
    """
    return _Vllm(model, grid, sharding).layout()


class _Vllm:
    def __init__(self, model: ModelTensors, grid: RolloutGrid, sharding: Sharding) -> None:
        self._model, self._grid, self._sharding = model, grid, sharding
        self._stages = grid.stages(model.layers)
        self._builder = LayoutBuilder("rollout", grid.ranks)
        self._require_sizes()

    def layout(self) -> Layout:
        for tensor in self._model.tensors:
            key = self._key(tensor)
            index = self._builder.known(key)
            if index is None:
                pattern = Pattern.of(tensor.info.shape, self._pieces(tensor))
                index = self._builder.add_pattern(key, pattern)
            stored = self._is_cut(tensor)
            name = self._parameter(tensor) if stored else tensor.info.name
            shift = self._expert_shift(tensor) if stored else 0
            self._builder.add(tensor.info, index, name, shift=shift)
        return self._builder.build()

    def _require_sizes(self) -> None:
        model, grid = self._model, self._grid
        share(model.heads, grid.tp, "num_attention_heads", "--rollout tp")
        if not model.latent_attention and max(model.kv_heads, grid.tp) % min(model.kv_heads, grid.tp):
            raise ConfigurationError(
                f"vLLM replicates {model.kv_heads} key-value heads over tp={grid.tp} only where one divides "
                f"the other; write a tp that divides {model.kv_heads}, or is a multiple of it"
            )
        if grid.expert_parallel and not model.experts:
            raise ConfigurationError(f"{model.family} has no experts; write --rollout without ep")
        if model.experts and grid.tp > model.experts:
            raise ConfigurationError(
                f"vLLM wants at least as many experts ({model.experts}) as tensor-parallel ranks "
                f"({grid.tp}); write tp={model.experts} or less"
            )

    def _is_cut(self, tensor: ModelTensor) -> bool:
        return self._sharding == "all" or (self._sharding == "experts" and tensor.role in EXPERT_ROLES)

    def _stage(self, tensor: ModelTensor) -> tuple[int, ...]:
        last = self._grid.pp - 1
        at_an_end = not 0 <= tensor.layer < self._model.layers
        if self._sharding == "none" or (at_an_end and self._model.ends_everywhere):
            return tuple(range(self._grid.pp))
        if tensor.layer < 0:
            return (0, last) if self._model.tied and last else (0,)
        return (last,) if tensor.layer >= self._model.layers else (self._stages[tensor.layer],)

    def _owner(self, tensor: ModelTensor) -> tuple[int, int] | None:
        """Return which of the ranks that share a layer's experts has this one, and its place there."""
        if tensor.expert is None or not self._grid.expert_parallel or not self._is_cut(tensor):
            return None
        base, extra = divmod(self._model.experts, self._grid.expert_ranks)
        large = extra * (base + 1)
        if tensor.expert < large:
            return divmod(tensor.expert, base + 1)
        rank, place = divmod(tensor.expert - large, base)
        return extra + rank, place

    def _key(self, tensor: ModelTensor) -> Hashable:
        owner = self._owner(tensor)
        return tensor.role, tensor.info.shape, self._stage(tensor), owner and owner[0]

    def _pieces(self, tensor: ModelTensor) -> Iterator[Piece]:
        owner = self._owner(tensor)
        for stage in self._stage(tensor):
            ranks = self._grid.grid()[:, :, stage, :]
            for part in range(self._grid.expert_ranks):
                if owner is not None and owner[0] != part:
                    continue
                stored = self._part(tensor, part)
                for rank in self._engines(ranks, part):
                    yield Piece(rank, stored.box, stored.offset, stored.strides, stored.extent)

    def _engines(self, ranks: Ints, part: int) -> list[int]:
        data, tensor = divmod(part, self._grid.tp)
        found: list[int] = ranks[:, data, tensor].tolist()
        return found

    def _part(self, tensor: ModelTensor, part: int) -> Part:
        """Return what the ``part``-th of an engine's ``dp * tp`` ranks of a stage stores."""
        if not self._is_cut(tensor):
            return Part(Box.whole(tensor.info.shape))
        if tensor.role in EXPERT_ROLES:
            return self._expert_part(tensor, part)
        tp, part = self._grid.tp, part % self._grid.tp
        if tensor.role in _SHARED and self._sequence_parallel:
            tp, part = 1, 0
        return self._rule(tensor.role)(tensor, tp, part)

    @property
    def _sequence_parallel(self) -> bool:
        """Whether each tensor-parallel rank computes shared experts on its own tokens, with whole weights."""
        return self._grid.expert_parallel and self._grid.tp > 1 and self._grid.dp > 1

    def _rule(self, role: Role) -> Callable[[ModelTensor, int, int], Part]:
        rules: dict[Role, Callable[[ModelTensor, int, int], Part]] = {
            Role.QUERY: self._head_part,
            Role.KEY: self._head_part,
            Role.VALUE: self._head_part,
            Role.EMBED: self._vocabulary_part,
            Role.HEAD: self._vocabulary_part,
            Role.COLUMN: self._row_part,
            Role.ROW: self._column_part,
            Role.DOWN: self._column_part,
            Role.SHARED_DOWN: self._column_part,
            Role.LOW_RANK_Q: self._low_rank_part,
            Role.LOW_RANK_KV: self._low_rank_part,
        }
        if role in _FUSED:
            return rules.get(role, self._half_part)
        return rules.get(role, lambda tensor, tp, part: Part(Box.whole(tensor.info.shape)))

    def _row_part(self, tensor: ModelTensor, tp: int, part: int) -> Part:
        rows = share(
            tensor.info.shape[0], tp, "the output features of an attention projection", "--rollout tp"
        )
        return Part(_rows(tensor, part * rows, (part + 1) * rows))

    def _column_part(self, tensor: ModelTensor, tp: int, part: int) -> Part:
        shape = tensor.info.shape
        if len(shape) == 1:  # a bias, which every rank has
            return Part(Box.whole(shape))
        what = "the input features of o_proj" if tensor.role is Role.ROW else "intermediate_size"
        columns = share(shape[1], tp, what, "--rollout tp")
        return Part(Box((0, part * columns), (shape[0], (part + 1) * columns)))

    def _half_part(self, tensor: ModelTensor, tp: int, part: int) -> Part:
        rows = share(tensor.info.shape[0], tp, "intermediate_size", "--rollout tp")
        size = rows * _width(tensor)
        box = _rows(tensor, part * rows, (part + 1) * rows)
        return Part(box, size if tensor.role in _UPS else 0, 2 * size)

    def _head_part(self, tensor: ModelTensor, tp: int, part: int) -> Part:
        heads, kv_heads = self._model.heads, self._model.kv_heads
        mine, kv_mine = heads // tp, max(kv_heads // tp, 1)
        is_query = tensor.role is Role.QUERY
        size = tensor.info.shape[0] // (heads if is_query else kv_heads)
        unit = size * _width(tensor)
        before = {Role.QUERY: 0, Role.KEY: mine, Role.VALUE: mine + kv_mine}[tensor.role]
        count = mine if is_query else kv_mine
        # With more ranks than key-value heads, neighbours have copies of the same one.
        first = part * mine if is_query else part * kv_heads // tp
        box = _rows(tensor, first * size, (first + count) * size)
        return Part(box, before * unit, (mine + 2 * kv_mine) * unit)

    def _vocabulary_part(self, tensor: ModelTensor, tp: int, part: int) -> Part:
        vocabulary = tensor.info.shape[0]
        padded = -(-vocabulary // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
        rows = share(padded, tp, "the padded vocabulary of", "--rollout tp")
        box = _rows(tensor, min(part * rows, vocabulary), min((part + 1) * rows, vocabulary))
        return Part(box, 0, rows * _width(tensor))

    def _low_rank_part(self, tensor: ModelTensor, tp: int, part: int) -> Part:
        """MLA's down projections are fused and whole on every rank; without a query rank there is but one."""
        box = Box.whole(tensor.info.shape)
        sizes = self._low_rank_sizes
        before = sizes.get(Role.LOW_RANK_Q, 0) if tensor.role is Role.LOW_RANK_KV else 0
        return Part(box, before, sum(sizes.values()))

    @property
    def _low_rank_sizes(self) -> dict[Role, int]:
        first = [tensor for tensor in self._model.tensors if tensor.layer == 0]
        fused = (Role.LOW_RANK_Q, Role.LOW_RANK_KV)
        return {tensor.role: Box.whole(tensor.info.shape).numel for tensor in first if tensor.role in fused}

    def _expert_part(self, tensor: ModelTensor, part: int) -> Part:
        shape, distributed = tensor.info.shape, self._grid.expert_parallel
        parts, index = (1, 0) if distributed else (self._grid.expert_ranks, part)
        is_down = tensor.role is Role.EXPERT_DOWN
        option = "--rollout tp" if self._grid.dp == 1 else "--rollout tp * dp"
        width = share(shape[1] if is_down else shape[0], parts, "moe_intermediate_size", option)
        box = Box((0, index * width), (shape[0], (index + 1) * width)) if is_down else _rows(
            tensor, index * width, (index + 1) * width
        )  # fmt: skip
        half = box.numel if tensor.role is Role.EXPERT_UP else 0
        extent = self._local_experts(part) * box.numel * (1 if is_down else 2)
        return Part(box, half, extent)

    def _local_experts(self, part: int) -> int:
        if not self._grid.expert_parallel:
            return self._model.experts
        base, extra = divmod(self._model.experts, self._grid.expert_ranks)
        return base + (part < extra)

    def _expert_shift(self, tensor: ModelTensor) -> int:
        """Return where an expert begins in the fused parameter of its rank, in elements."""
        if tensor.expert is None:
            return 0
        owner = self._owner(tensor)
        parts = 1 if owner else self._grid.expert_ranks
        size = Box.whole(tensor.info.shape).numel // parts
        place = owner[1] if owner else tensor.expert
        return place * size * (1 if tensor.role is Role.EXPERT_DOWN else 2)

    def _parameter(self, tensor: ModelTensor) -> str:
        """Return the name of vLLM's parameter."""
        name = tensor.info.name
        if tensor.role in EXPERT_ROLES:
            fused = "w2_weight" if tensor.role is Role.EXPERT_DOWN else "w13_weight"
            return f"{name.split('.experts.')[0]}.experts.routed_experts.{fused}"
        if tensor.role is Role.LOW_RANK_KV and Role.LOW_RANK_Q not in self._low_rank_sizes:
            return name
        old, new = _FUSED.get(tensor.role, ("", ""))
        return name.replace(old, new) if old else name


def _rows(tensor: ModelTensor, lo: int, hi: int) -> Box:
    shape = tensor.info.shape
    return Box((lo, *(0 for _ in shape[1:])), (hi, *shape[1:]))


def _width(tensor: ModelTensor) -> int:
    return Box.whole(tensor.info.shape[1:]).numel
