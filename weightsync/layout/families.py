"""The tensors of a model, with their shapes and what each is for, from its ``config.json``.

The names are those of Hugging Face checkpoints. What is listed is what a policy trains and an engine's main
model loads: modules for speculative decoding (DeepSeek's multi-token prediction) and the scales of a
quantised checkpoint are not part of it, and `ModelTensors.notes` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from weightsync.errors import ConfigurationError
from weightsync.layout.pieces import TensorInfo


class Role(StrEnum):
    """What a tensor is for, which decides how it is distributed."""

    WHOLE = "whole"
    """Replicated: norms, routers, down projections of MLA."""
    EMBED = "embed"
    HEAD = "head"
    QUERY = "query"
    KEY = "key"
    VALUE = "value"
    COLUMN = "column"
    """Cut by rows (output features)."""
    ROW = "row"
    """Cut by columns (input features)."""
    GATE = "gate"
    UP = "up"
    DOWN = "down"
    SHARED_GATE = "shared_gate"
    SHARED_UP = "shared_up"
    SHARED_DOWN = "shared_down"
    EXPERT_GATE = "expert_gate"
    EXPERT_UP = "expert_up"
    EXPERT_DOWN = "expert_down"
    LOW_RANK_Q = "low_rank_q"
    LOW_RANK_KV = "low_rank_kv"


EXPERT_ROLES = frozenset({Role.EXPERT_GATE, Role.EXPERT_UP, Role.EXPERT_DOWN})


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A tensor of a model.

    Attributes:
        info: name, shape and item size.
        role: what it is for.
        layer: index of its layer; -1 before the first one, the number of layers after the last.
        expert: index of its expert, or `None`.
    """

    info: TensorInfo
    role: Role
    layer: int
    expert: int | None = None


@dataclass(frozen=True)
class ModelTensors:
    """A model's tensors and the numbers that its distribution depends on."""

    family: str
    tensors: tuple[ModelTensor, ...]
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    experts: int
    tied: bool
    intermediate: int
    expert_intermediate: int
    shared_intermediate: int
    latent_attention: bool = False
    ends_everywhere: bool = False
    """Whether vLLM has the embeddings and the last norm on every pipeline stage."""
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.info.nbytes for tensor in self.tensors)


_ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}


_OTHER_NAMES = {"num_experts": "num_local_experts", "n_routed_experts": "num_local_experts"}
"""Names by which other versions of transformers save an entry."""


class _Config:
    """A ``config.json`` whose missing entries are errors that say what to write."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def number(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key, self.values.get(_OTHER_NAMES.get(key, key)))
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ConfigurationError(f"the model's config.json needs {key}: a whole number, got {value!r}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key)
        return default if value is None else bool(value)

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def itemsize(self) -> int:
        name = str(self.get("dtype") or self.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        if name not in _ITEMSIZES:
            raise ConfigurationError(
                f"weights of {name} cannot be planned; write dtype: {' or '.join(_ITEMSIZES)}"
            )
        return _ITEMSIZES[name]


@dataclass
class _Lister:
    """Collects tensors in checkpoint order."""

    itemsize: int
    tensors: list[ModelTensor] = field(default_factory=list)
    prefix: str = ""
    layer: int = -1

    def add(
        self, name: str, shape: tuple[int, ...], role: Role = Role.WHOLE, *, itemsize: int = 0,
        expert: int | None = None,
    ) -> None:  # fmt: skip
        info = TensorInfo(self.prefix + name, shape, itemsize or self.itemsize)
        self.tensors.append(ModelTensor(info, role, self.layer, expert))

    def linear(self, name: str, rows: int, columns: int, role: Role, bias: bool = False) -> None:
        self.add(f"{name}.weight", (rows, columns), role)
        if bias:
            self.add(f"{name}.bias", (rows,), role)

    def mlp(self, name: str, hidden: int, width: int, kind: str = "", bias: bool = False) -> None:
        self.linear(f"{name}.gate_proj", width, hidden, Role(f"{kind}gate"), bias)
        self.linear(f"{name}.up_proj", width, hidden, Role(f"{kind}up"), bias)
        self.linear(f"{name}.down_proj", hidden, width, Role(f"{kind}down"), bias)

    def experts(self, count: int, hidden: int, width: int) -> None:
        for expert in range(count):
            name = f"mlp.experts.{expert}"
            self.add(f"{name}.gate_proj.weight", (width, hidden), Role.EXPERT_GATE, expert=expert)
            self.add(f"{name}.up_proj.weight", (width, hidden), Role.EXPERT_UP, expert=expert)
            self.add(f"{name}.down_proj.weight", (hidden, width), Role.EXPERT_DOWN, expert=expert)


def _attention(out: _Lister, config: _Config, *, bias: bool, out_bias: bool, norms: bool) -> None:
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    kv_heads = config.number("num_key_value_heads", heads)
    # The families with norms on queries and keys have a head size of their own, whatever the hidden size is.
    size = config.number("head_dim", 128 if norms else hidden // max(heads, 1))
    for name, rows, role in (
        ("q", heads * size, Role.QUERY),
        ("k", kv_heads * size, Role.KEY),
        ("v", kv_heads * size, Role.VALUE),
    ):
        out.linear(f"self_attn.{name}_proj", rows, hidden, role, bias)
    out.linear("self_attn.o_proj", hidden, heads * size, Role.ROW, out_bias)
    if norms:
        out.add("self_attn.q_norm.weight", (size,))
        out.add("self_attn.k_norm.weight", (size,))


def _latent_attention(out: _Lister, config: _Config) -> None:
    """Multi-head latent attention: queries, keys and values through low-rank projections."""
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    rope, nope = config.number("qk_rope_head_dim"), config.number("qk_nope_head_dim")
    rank, value = config.number("kv_lora_rank"), config.number("v_head_dim")
    if config.get("q_lora_rank") is None:
        out.linear("self_attn.q_proj", heads * (rope + nope), hidden, Role.COLUMN)
    else:
        q_rank = config.number("q_lora_rank")
        out.linear("self_attn.q_a_proj", q_rank, hidden, Role.LOW_RANK_Q)
        out.add("self_attn.q_a_layernorm.weight", (q_rank,))
        out.linear("self_attn.q_b_proj", heads * (rope + nope), q_rank, Role.COLUMN)
    out.linear("self_attn.kv_a_proj_with_mqa", rank + rope, hidden, Role.LOW_RANK_KV)
    out.add("self_attn.kv_a_layernorm.weight", (rank,))
    out.linear("self_attn.kv_b_proj", heads * (nope + value), rank, Role.COLUMN)
    out.linear("self_attn.o_proj", hidden, heads * value, Role.ROW)


Layer = Callable[[_Lister, _Config, int], None]


def _llama(out: _Lister, config: _Config, _: int) -> None:
    bias = config.flag("attention_bias")
    _attention(out, config, bias=bias, out_bias=bias, norms=False)
    out.mlp(
        "mlp", config.number("hidden_size"), config.number("intermediate_size"), bias=config.flag("mlp_bias")
    )


def _qwen2(out: _Lister, config: _Config, _: int) -> None:
    _attention(out, config, bias=True, out_bias=False, norms=False)
    out.mlp("mlp", config.number("hidden_size"), config.number("intermediate_size"))


def _qwen3(out: _Lister, config: _Config, _: int) -> None:
    _attention(out, config, bias=config.flag("attention_bias"), out_bias=False, norms=True)
    out.mlp("mlp", config.number("hidden_size"), config.number("intermediate_size"))


def _qwen3_moe(out: _Lister, config: _Config, layer: int) -> None:
    hidden = config.number("hidden_size")
    _attention(out, config, bias=config.flag("attention_bias"), out_bias=False, norms=True)
    if _qwen3_has_experts(config, layer):
        experts = config.number("num_experts")
        out.linear("mlp.gate", experts, hidden, Role.WHOLE)
        out.experts(experts, hidden, config.number("moe_intermediate_size"))
    else:
        out.mlp("mlp", hidden, config.number("intermediate_size"))


def _qwen3_has_experts(config: _Config, layer: int) -> bool:
    dense = layer in (config.get("mlp_only_layers") or [])
    step = config.number("decoder_sparse_step", 1) or 1
    return not dense and config.number("num_experts") > 0 and (layer + 1) % step == 0


def _deepseek(out: _Lister, config: _Config, layer: int) -> None:
    hidden = config.number("hidden_size")
    _latent_attention(out, config)
    experts = config.number("n_routed_experts", 0)
    frequency = config.number("moe_layer_freq", 1) or 1
    if not experts or layer < config.number("first_k_dense_replace", 0) or layer % frequency:
        out.mlp("mlp", hidden, config.number("intermediate_size"))
        return
    width = config.number("moe_intermediate_size")
    out.linear("mlp.gate", experts, hidden, Role.WHOLE)
    # The third version always has it, and not all of its configurations say so.
    always = architecture(config.values) == "DeepseekV3ForCausalLM"
    if config.get("topk_method", "noaux_tc" if always else None) == "noaux_tc":
        out.add("mlp.gate.e_score_correction_bias", (experts,), itemsize=4)
    out.experts(experts, hidden, width)
    shared = config.number("n_shared_experts", 0)
    if shared:
        out.mlp("mlp.shared_experts", hidden, width * shared, kind="shared_")


_LAYERS: dict[str, tuple[str, Layer]] = {
    "LlamaForCausalLM": ("Llama", _llama),
    "MistralForCausalLM": ("Llama", _llama),
    "Qwen2ForCausalLM": ("Qwen2", _qwen2),
    "Qwen3ForCausalLM": ("Qwen3", _qwen3),
    "Qwen3MoeForCausalLM": ("Qwen3-MoE", _qwen3_moe),
    "DeepseekV2ForCausalLM": ("DeepSeek", _deepseek),
    "DeepseekV3ForCausalLM": ("DeepSeek", _deepseek),
}
_ARCHITECTURE_OF = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
ARCHITECTURES = tuple(_LAYERS)
"""Architectures whose tensors and distribution are known by rule."""


def architecture(config: Mapping[str, Any]) -> str:
    """Return the architecture that a ``config.json`` names.

    Raises:
        ConfigurationError: it names none.
    """
    named = config.get("architectures")
    if isinstance(named, list) and named and isinstance(named[0], str):
        return named[0]
    kind = config.get("model_type")
    if kind in _ARCHITECTURE_OF:
        return _ARCHITECTURE_OF[str(kind)]
    raise ConfigurationError(
        f"the model's config.json names no architecture; write architectures: [{ARCHITECTURES[0]}], say"
    )


def list_tensors(config: Mapping[str, Any]) -> ModelTensors:
    """Return the tensors of a model.

    Args:
        config: the contents of its ``config.json``.

    Raises:
        ConfigurationError: an unknown architecture, or an entry that is missing or odd.
    """
    name = architecture(config)
    if name not in _LAYERS:
        raise ConfigurationError(f"no rules for {name}; known: {', '.join(ARCHITECTURES)}")
    family, layer = _LAYERS[name]
    values = _Config(config)
    tied = values.flag("tie_word_embeddings")
    tensors = tuple(_all_tensors(values, layer, tied))
    heads = values.number("num_attention_heads")
    return ModelTensors(
        family=family,
        tensors=tensors,
        layers=values.number("num_hidden_layers"),
        heads=heads,
        kv_heads=values.number("num_key_value_heads", heads),
        vocab=values.number("vocab_size"),
        experts=values.number("n_routed_experts" if family == "DeepSeek" else "num_experts", 0),
        tied=tied,
        intermediate=values.number("intermediate_size"),
        expert_intermediate=values.number("moe_intermediate_size", 0),
        shared_intermediate=values.number("moe_intermediate_size", 0) * values.number("n_shared_experts", 0),
        latent_attention=family == "DeepSeek",
        ends_everywhere=family == "Qwen3-MoE",
        notes=tuple(_notes(values)),
    )


def _all_tensors(config: _Config, layer: Layer, tied: bool) -> Iterator[ModelTensor]:
    hidden, vocab, layers = (config.number(key) for key in ("hidden_size", "vocab_size", "num_hidden_layers"))
    out = _Lister(config.itemsize())
    out.add("model.embed_tokens.weight", (vocab, hidden), Role.EMBED)
    for index in range(layers):
        out.layer, out.prefix = index, f"model.layers.{index}."
        layer(out, config, index)
        out.add("input_layernorm.weight", (hidden,))
        out.add("post_attention_layernorm.weight", (hidden,))
    out.layer, out.prefix = layers, ""
    out.add("model.norm.weight", (hidden,))
    if not tied:
        out.add("lm_head.weight", (vocab, hidden), Role.HEAD)
    yield from out.tensors


def _notes(config: _Config) -> Iterator[str]:
    predicted = config.number("num_nextn_predict_layers", 0)
    if predicted:
        yield (
            f"{predicted} multi-token prediction layer{'s' * (predicted > 1)} not counted: the main model "
            "does not load them"
        )
    if config.get("quantization_config") is not None:
        yield "quantization_config not applied: the plan is for the weights as they are trained"
