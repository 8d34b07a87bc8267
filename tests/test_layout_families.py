"""Models and layouts by rule: published sizes, complete storages on both sides, refused sizes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.errors import ConfigurationError
from weightsync.layout.destinations import vllm_layout
from weightsync.layout.estimate import count_received
from weightsync.layout.families import list_tensors
from weightsync.layout.megatron import megatron_layout
from weightsync.layout.parallel import PolicyGrid, RolloutGrid, ShardedGrid, parse_sizes
from weightsync.layout.plan import make_plan
from weightsync.layout.sharded import fsdp_layout

MODELS = Path(__file__).parent / "plan_models"

SMALL = {
    "vocab_size": 500, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
MOE = {"moe_intermediate_size": 24, "num_experts": 6, "mlp_only_layers": [1], "decoder_sparse_step": 1}
LATENT = {
    "num_key_value_heads": 8, "q_lora_rank": 12, "kv_lora_rank": 8, "v_head_dim": 8,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "n_routed_experts": 6, "n_shared_experts": 1,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1,
}  # fmt: skip
CONFIGS = {
    "llama": {**SMALL, "architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True},
    "qwen2": {**SMALL, "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "qwen3": {**SMALL, "model_type": "qwen3"},
    "moe": {**SMALL, **MOE, "architectures": ["Qwen3MoeForCausalLM"]},
    "deepseek": {**SMALL, **LATENT, "architectures": ["DeepseekV3ForCausalLM"]},
}


def load(name):
    return json.loads((MODELS / f"{name}.json").read_text())


@pytest.mark.parametrize(
    ("name", "tensors", "parameters"),
    [
        ("llama-3-8b", 291, 8_030_261_248),
        ("qwen2.5-7b", 339, 7_615_616_512),
        ("qwen3-0.6b", 310, 596_049_920),
        ("qwen3-30b-a3b", 18_867, 30_532_122_624),
        ("deepseek-v3", 45_395, 671_026_419_200),
    ],
)
def test_published_sizes(name, tensors, parameters):
    model = list_tensors(load(name))
    assert len(model.tensors) == tensors
    assert sum(np.prod(tensor.info.shape, dtype=int) for tensor in model.tensors) == parameters
    assert len({tensor.info.name for tensor in model.tensors}) == tensors


def test_what_is_not_sent_is_noted():
    model = list_tensors({**load("deepseek-v3"), "quantization_config": {"quant_method": "fp8"}})
    assert len(model.tensors) == 45_395
    assert any("multi-token prediction layer not counted" in note for note in model.notes)
    assert any("quantization_config not applied" in note for note in model.notes)
    assert list_tensors(CONFIGS["qwen3"]).notes == ()


def test_correction_bias_follows_the_version():
    def biases(**values):
        model = list_tensors({**CONFIGS["deepseek"], **values})
        return sum(tensor.info.name.endswith("e_score_correction_bias") for tensor in model.tensors)

    assert biases() == 2
    assert biases(topk_method="greedy") == 0
    assert biases(architectures=["DeepseekV2ForCausalLM"]) == 0
    assert biases(architectures=["DeepseekV2ForCausalLM"], topk_method="noaux_tc") == 2


def covered(layout, rank):
    """Count how often each element of each storage of a rank belongs to a piece."""
    itemsize = {info.name: info.itemsize for info in layout.tensors}
    sizes = layout.storage_bytes(rank)
    counts = {}
    for tensor, index in enumerate(layout.pattern_of.tolist()):
        if index < 0:
            continue
        pattern, info = layout.patterns[index], layout.tensors[tensor]
        for piece in np.flatnonzero(pattern.rank == rank).tolist():
            name = layout.storages[tensor][int(pattern.slot[piece])]
            count = counts.setdefault(name, np.zeros(sizes[name] // itemsize[info.name], int))
            at = np.array(int(pattern.offset[piece] + layout.shift[tensor]))
            for size, stride in zip(pattern.box(piece).shape, pattern.strides[piece].tolist(), strict=True):
                at = at[..., None] + np.arange(size) * stride
            np.add.at(count, at.reshape(-1), 1)
    return counts


POLICIES = [
    ("tp=1", 1), ("tp=2", 4), ("pp=3", 3), ("tp=2,pp=2", 8), ("pp=2,first=1", 4), ("ep=3", 6),
    ("ep=2,etp=2,tp=2", 8), ("fsdp=3", 3), ("fsdp=2,tp=2", 4), ("fsdp=5,replicate=2", 10),
    ("fsdp=2,tp=4,replicate=1", 8),
]  # fmt: skip
ROLLOUTS = [
    ("tp=1", 2),
    ("tp=2", 4),
    ("tp=4", 4),
    ("pp=2", 2),
    ("tp=2,pp=3", 6),
    ("dp=2", 2),
    ("tp=2,dp=2", 4),
]
EXPERT_ROLLOUTS = [
    ("tp=2,ep=2", 2),
    ("tp=4,ep=4", 4),
    ("ep=3", 6),
    ("tp=2,dp=2,ep=4", 8),
    ("tp=2,pp=2,ep=2", 4),
]


def fitting(layouts):
    """Pair models with layouts; those with expert parallelism only with models that have experts."""
    return [
        (name, text, ranks)
        for name in CONFIGS
        for text, ranks in layouts
        if "ep=" not in text or name in ("moe", "deepseek")
    ]


def policy_of(model, text, ranks):
    sizes = parse_sizes(text, ("tp", "pp", "ep", "etp", "dp", "first", "fsdp", "replicate"), "--policy")
    if "fsdp" in sizes:
        return fsdp_layout(model, ShardedGrid.parse(sizes, ranks))
    return megatron_layout(model, PolicyGrid.parse(sizes, ranks))


def rollout_of(model, text, ranks, sharding="all"):
    return vllm_layout(
        model, RolloutGrid.parse(parse_sizes(text, ("tp", "pp", "dp", "ep"), "--rollout"), ranks), sharding
    )


def is_padded(name):
    return "embed_tokens" in name or "lm_head" in name


@pytest.mark.parametrize(("name", "text", "ranks"), fitting(POLICIES))
def test_policy_storages_are_complete(name, text, ranks):
    """No element of a shard is claimed twice or by no tensor, and all ranks together have every tensor."""
    model = list_tensors(CONFIGS[name])
    layout = policy_of(model, text, ranks)
    for rank in range(ranks):
        for storage, counts in covered(layout, rank).items():
            assert (counts == 1).all(), (rank, storage)
    plan = make_plan(layout, rollout_of(model, "tp=1", 1))
    assert plan.links.sum() == model.nbytes


@pytest.mark.parametrize(("name", "text", "ranks"), fitting([*ROLLOUTS, *EXPERT_ROLLOUTS]))
def test_rollout_parameters_are_complete(name, text, ranks):
    model = list_tensors(CONFIGS[name])
    layout = rollout_of(model, text, ranks)
    for rank in range(ranks):
        for storage, counts in covered(layout, rank).items():
            if is_padded(storage):
                assert set(counts.tolist()) <= {0, 1}, (rank, storage)
            else:
                assert (counts == 1).all(), (rank, storage)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["moe", "deepseek", "qwen3"]), st.sampled_from(POLICIES),
    st.sampled_from([*ROLLOUTS, *EXPERT_ROLLOUTS]), st.sampled_from(["none", "experts", "all"]),
)  # fmt: skip
def test_any_two_layouts_can_be_planned(name, policy, rollout, sharding):
    if name == "qwen3" and ("ep=" in policy[0] or "ep=" in rollout[0]):
        return
    model = list_tensors(CONFIGS[name])
    layout = rollout_of(model, *rollout, sharding)
    plan = make_plan(policy_of(model, *policy), layout)
    received = count_received(layout, 1 << 12)
    assert plan.links.sum(axis=0).tolist() == received.nbytes == layout.held_bytes().tolist()
    if sharding == "none":
        assert set(received.nbytes) == {model.nbytes}
        assert set(received.tensors) == {len(model.tensors)}


def test_replicated_heads_are_those_of_the_loader():
    model = list_tensors(CONFIGS["qwen3"])
    layout = rollout_of(model, "tp=8", 8)
    index = [info.name for info in layout.tensors].index("model.layers.0.self_attn.k_proj.weight")
    pattern = layout.patterns[int(layout.pattern_of[index])]
    assert pattern.lo[:, 0].tolist() == [0, 0, 0, 0, 8, 8, 8, 8]
    assert layout.storages[index] == ("model.layers.0.self_attn.qkv_proj.weight",)


def test_tied_embeddings_are_on_both_ends():
    model = list_tensors(CONFIGS["qwen2"])
    assert not any(tensor.info.name == "lm_head.weight" for tensor in model.tensors)
    layout = rollout_of(model, "pp=3", 3)
    pattern = layout.patterns[int(layout.pattern_of[0])]
    assert pattern.rank.tolist() == [0, 2]


@pytest.mark.parametrize(
    ("name", "policy", "rollout", "message"),
    [
        ("qwen3", ("tp=3", 3), ("tp=1", 1), "heads 8 cannot be cut in 3; write --policy tp=1, 2, 4 or 8"),
        ("qwen3", ("tp=4", 4), ("tp=1", 1), "key_value_heads 2 cannot be cut in 4; write --policy tp=1 or 2"),
        ("qwen3", ("tp=1", 1), ("tp=3", 3), "num_attention_heads 8 cannot be cut in 3"),
        ("qwen3", ("pp=4", 4), ("tp=1", 1), "3 layers do not fill pp=4 policy stages; write a smaller pp"),
        ("qwen3", ("tp=2,pp=2", 6), ("tp=1", 1), "multiple of 4 policy ranks, got 6; write --policy-ranks 8"),
        ("qwen3", ("tp=1", 1), ("tp=2", 3), "multiple of 2 rollout ranks, got 3; write --rollout-ranks 4"),
        ("qwen3", ("tp=1", 1), ("pp=4", 4), "3 layers do not fill pp=4 stages; write pp=3 or less"),
        ("qwen3", ("ep=2", 2), ("tp=1", 1), "Qwen3 has no experts; write --policy without ep=2"),
        ("qwen3", ("tp=1", 1), ("ep=2", 2), "Qwen3 has no experts; write --rollout without ep"),
        ("moe", ("ep=4", 4), ("tp=1", 1), "experts 6 cannot be cut in 4; write --policy ep=1, 2, 3 or 6"),
        ("moe", ("tp=1", 1), ("tp=2,ep=3", 6), "with tp=2,dp=1 write ep=2 or ep=1"),
        ("moe", ("tp=1", 1), ("tp=8", 8), "at least as many experts"),
        ("qwen3", ("fsdp=2,pp=2", 4), ("tp=1", 1), "pp does not go with fsdp"),
        ("qwen3", ("fsdp=4", 6), ("tp=1", 1), "does not divide 6 policy ranks; write --policy-ranks 8"),
        ("qwen3", ("fsdp=2,replicate=3", 4), ("tp=1", 1), "6 policy ranks, not 4; write --policy-ranks 6"),
        ("qwen3", ("tp=2,dp=2", 8), ("tp=1", 1), "dp=2 makes 4 policy ranks, not 8; write --policy-ranks 4"),
        ("qwen3", ("tp=two", 1), ("tp=1", 1), "tp must be a number of at least 1; write tp=1"),
        ("qwen3", ("tp=1,tp=2", 1), ("tp=1", 1), "has tp twice"),
        ("qwen3", ("td=1", 1), ("tp=1", 1), "does not know 'td'; write tp=N"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_say_what_to_write(name, policy, rollout, message):
    model = list_tensors(CONFIGS[name])
    with pytest.raises(ConfigurationError) as caught:
        make_plan(policy_of(model, *policy), rollout_of(model, *rollout))
    assert message in str(caught.value)


def test_odd_configurations_say_what_is_missing():
    with pytest.raises(ConfigurationError, match=r"no rules for GPT2LMHeadModel; known: LlamaForCausalLM"):
        list_tensors({"architectures": ["GPT2LMHeadModel"]})
    with pytest.raises(ConfigurationError, match="names no architecture"):
        list_tensors({"hidden_size": 8})
    with pytest.raises(ConfigurationError, match="needs hidden_size: a whole number, got None"):
        list_tensors({"model_type": "llama", "vocab_size": 8, "num_hidden_layers": 1})
    with pytest.raises(ConfigurationError, match="weights of int8 cannot be planned"):
        list_tensors({**CONFIGS["qwen3"], "dtype": "int8"})
