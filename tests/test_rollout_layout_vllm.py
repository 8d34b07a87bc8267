"""Tables of real vLLM ranks, emulated one by one: boxes give the parameters that ``load_weights`` gives."""

from __future__ import annotations

import json
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import product

import pytest
import torch

if find_spec("vllm") is None:
    pytest.skip("needs vLLM", allow_module_level=True)

from tests.rollout_engines import fused_experts
from tests.table_oracle import differences
from tests.test_layout_trace import CONFIGS, SIZES
from tests.test_rollout_layout import random_weights
from weightsync.cli.plan_inputs import read_model
from weightsync.cli.plan_trace import _engine_config
from weightsync.errors import ConfigurationError
from weightsync.layout.pieces import ABSENT
from weightsync.layout.regions import Box, uncovered
from weightsync.rollout.vllm.emulation import EnginePlace, config_at, standing_at
from weightsync.rollout.vllm.layout import rank_layout
from weightsync.rollout.vllm.trial import TrialModel
from weightsync.tensors import TensorSpec, WeightManifest

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

THREE = {
    "num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96, "intermediate_size": 96,
    "vocab_size": 570,
}  # fmt: skip
LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "shared_expert_intermediate_size": 32, "num_hidden_layers": 4,
    "mlp_only_layers": [],
}  # fmt: skip
OTHERS = {key: value for key, value in SIZES.items() if key != "hidden_act"}
MODELS = {
    **CONFIGS,
    "tied llama": {**CONFIGS["llama"], "tie_word_embeddings": True},
    "llama of three": {**CONFIGS["llama"], **THREE},
    "deepseek without query rank": {**CONFIGS["deepseek"], "q_lora_rank": None},
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 8,
        "vocab_size": 500, "n_positions": 512, "torch_dtype": "bfloat16",
    },
    "mamba2": {
        "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "hidden_size": 64, "num_heads": 8,
        "head_dim": 16, "state_size": 16, "num_hidden_layers": 2, "vocab_size": 512, "n_groups": 2,
        "expand": 2, "torch_dtype": "bfloat16",
    },
    "qwen3 next": {
        **CONFIGS["moe"], **LINEAR, "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next",
    },
    "olmo2": {**OTHERS, "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "pad_token_id": 0},
    "starcoder2": {**OTHERS, "architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2"},
    "llama4": {
        **SIZES, "architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text", "num_local_experts": 4,
        "num_experts_per_tok": 1, "intermediate_size_mlp": 128, "head_dim": 16,
    },
    "gpt oss": {
        **OTHERS, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 4,
        "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 128, "pad_token_id": 0,
    },
}  # fmt: skip
LAYOUTS = [
    ("llama", {}), ("llama", {"tp": 2}), ("llama of three", {"tp": 3}), ("llama", {"tp": 4}),
    ("llama", {"tp": 2, "pp": 2}), ("tied llama", {"pp": 2}), ("qwen2", {"pp": 3}), ("qwen3", {"tp": 4}),
    ("qwen3", {"tp": 2, "pp": 2}), ("moe", {}), ("moe", {"tp": 2}),
    ("moe", {"tp": 2, "expert_parallel": True}), ("moe", {"tp": 4, "expert_parallel": True}),
    ("moe", {"tp": 2, "pp": 2, "expert_parallel": True}),
    ("moe", {"dp": 2}), ("moe", {"dp": 2, "expert_parallel": True}), ("deepseek", {"tp": 2}),
    ("deepseek", {"tp": 4, "expert_parallel": True}),
    ("deepseek", {"tp": 2, "pp": 2, "expert_parallel": True}),
    ("deepseek without query rank", {"tp": 2}), ("mixtral", {"tp": 2}),
    ("mixtral", {"tp": 2, "expert_parallel": True}), ("phi3", {"tp": 2}), ("olmo2", {"tp": 2, "pp": 2}),
    ("starcoder2", {"tp": 2, "pp": 2}),
]  # fmt: skip


@contextmanager
def rank_of(engine, place):
    from vllm.config import set_current_vllm_config

    config = config_at(engine, place)
    with standing_at(place), set_current_vllm_config(config), torch.no_grad():
        yield config


def loaded(engine, place, weights):
    """Return the parameters of a rank that is made on the host and loads full tensors."""
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with rank_of(engine, place) as config:
        config.device_config.device = torch.device("cpu")
        with set_default_torch_dtype(config.model_config.dtype):
            model = initialize_model(vllm_config=config)
        for parameter in model.parameters():
            parameter.fill_(7)
        model.load_weights(iter(weights.items()))
    return dict(model.named_parameters())


def places(sizes):
    """Return every rank of an engine."""
    mesh = product(range(sizes.get("tp", 1)), range(sizes.get("pp", 1)), range(sizes.get("dp", 1)))
    return [EnginePlace(**sizes, tensor=tensor, stage=stage, data=data) for tensor, stage, data in mesh]


def tensors_of(name, directory, dtype=None):
    (directory / "config.json").write_text(json.dumps(MODELS[name]))
    infos = [tensor.info for tensor in read_model(directory).tensors.tensors]
    return WeightManifest.build(
        TensorSpec(info.name, info.shape, dtype or ("float32" if info.itemsize == 4 else "bfloat16"))
        for info in infos
    )


def problems(report):
    kinds = ("refused", "unused", "partly_read", "mistyped", "missing", "overlapping")
    return {kind: getattr(report, kind) for kind in kinds if getattr(report, kind)}


def tried(engine, place, manifest):
    with rank_of(engine, place) as config:
        trial = TrialModel(config)
        return trial.try_manifest(manifest), trial.parameters


def boxes(layout, manifest):
    """Return what a rank stores of each tensor."""
    table = layout.table
    return {
        spec.name: [Box(held.lo, held.hi) for held in table.patterns[pattern]] if pattern != ABSENT else []
        for spec, pattern in zip(manifest.tensors, table.pattern_of, strict=True)
    }


def matching(name, sizes, manifest, weights, sharding="all"):
    """Yield every rank's layout, once what its boxes give is found to be what the loader gives."""
    with _engine_config(MODELS[name]) as engine:
        for place in places(sizes):
            report, parameters = tried(engine, place, manifest)
            assert problems(report) == {}
            layout = rank_layout(report, parameters, sharding=sharding)
            assert differences(layout, manifest, weights, loaded(engine, place, weights)) == []
            yield layout, parameters


@pytest.mark.parametrize(("name", "sizes"), LAYOUTS, ids=str)
def test_boxes_give_what_the_loader_gives(tmp_path, name, sizes):
    manifest = tensors_of(name, tmp_path)
    stored = {spec.name: [] for spec in manifest.tensors}
    for layout, parameters in matching(name, sizes, manifest, random_weights(manifest)):
        assert (layout.table.whole, layout.casts) == ({}, frozenset())
        assert [each.name for each in layout.table.storages] == list(parameters)
        mine = boxes(layout, manifest)
        assert {each for each in mine if not mine[each]} == set(layout.absent)
        for each, found in mine.items():
            stored[each] += found
    for spec in manifest.tensors:
        assert uncovered(Box.whole(spec.shape), stored[spec.name]) == [], spec.name


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("moe", {"tp": 2, "expert_parallel": True}), ("deepseek", {"tp": 4}), ("llama", {"tp": 2})],
)
def test_experts_only(tmp_path, name, sizes):
    manifest = tensors_of(name, tmp_path)
    for layout, parameters in matching(name, sizes, manifest, random_weights(manifest), "experts"):
        left = {spec.name for spec in manifest.tensors if ".mlp.experts." not in spec.name}
        assert layout.table.whole == dict.fromkeys(left, "shard_weights: experts")
        assert {each.name for each in layout.table.storages} == {
            each for each in parameters if each.endswith(("w13_weight", "w2_weight"))
        }
        assert layout.fills == frozenset()


@pytest.mark.parametrize("sizes", [{}, {"tp": 2}, {"tp": 2, "pp": 2, "expert_parallel": True}], ids=str)
def test_experts_may_come_fused(tmp_path, sizes):
    weights = random_weights(tensors_of("moe", tmp_path))
    weights = dict(fused_experts(weights.items()))
    manifest = WeightManifest.build(TensorSpec.of(*pair) for pair in weights.items())
    assert any(len(spec.shape) == 3 for spec in manifest.tensors)
    for layout, _ in matching("moe", sizes, manifest, weights):
        assert layout.table.whole == {}


def test_casts(tmp_path):
    manifest = tensors_of("moe", tmp_path, dtype="float32")
    for layout, parameters in matching("moe", {"tp": 2}, manifest, random_weights(manifest)):
        assert layout.table.whole == {}
        assert layout.casts == set(parameters)
        assert {each.dtype for each in layout.table.storages} == {"float32"}


@pytest.mark.parametrize(
    ("name", "whole", "reason"),
    [
        ("gpt2", (".c_attn.weight", ".c_proj.weight", ".c_fc.weight"), "it is stored transposed"),
        ("mamba2", (".A_log",), "its values are computed anew once it is loaded"),
        ("qwen3 next", (), None),
        ("gpt oss", (".gate_up_proj", ".down_proj"), "its values are computed, not copied"),
    ],
)
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}], ids=str)
def test_what_cannot_move_by_regions(tmp_path, name, whole, reason, sizes):
    manifest, found = tensors_of(name, tmp_path), {}
    for layout, _ in matching(name, sizes, manifest, random_weights(manifest)):
        found.update(layout.table.whole)
    assert set(found) == {spec.name for spec in manifest.tensors if spec.name.endswith(whole)}
    assert {each.split(": ", 1)[1] for each in found.values()} == ({reason} if reason else set())


def test_loaders_that_choose_experts_themselves(tmp_path):
    """This one reads the numbers of its experts where the tensors are, which have no values there."""
    manifest, sizes = tensors_of("llama4", tmp_path), {"tp": 2, "expert_parallel": True}
    for layout, _ in matching("llama4", sizes, manifest, random_weights(manifest)):
        assert {name for name in layout.table.whole if ".experts." in name} == {
            spec.name for spec in manifest.tensors if ".experts." in spec.name
        }
        assert len(layout.table.storages) > 10


def test_experts_that_are_transposed_are_refused(tmp_path):
    manifest = tensors_of("gpt oss", tmp_path)
    with _engine_config(MODELS["gpt oss"]) as engine:
        report, parameters = tried(engine, EnginePlace(), manifest)
    with pytest.raises(
        ConfigurationError, match=r"cannot move .*experts.gate_up_proj.*write shard_weights: auto"
    ):
        rank_layout(report, parameters, sharding="experts")


SPOILT = {
    "model.layers.0.self_attn.z_proj.weight": (8, 64), "model.layers.2.mlp.experts.0.z_proj.weight": (8, 64),
    "model.layers.7.self_attn.q_proj.weight": (128, 64),
    "model.layers.2.mlp.experts.9.up_proj.weight": (32, 64), "mtp.head.weight": (8, 64),
}  # fmt: skip


@pytest.mark.parametrize(
    "sizes", [{"pp": 2}, {"tp": 2, "expert_parallel": True}, {"dp": 2, "pp": 2}], ids=str
)
def test_every_rank_finds_what_none_of_them_knows(tmp_path, sizes):
    """Also below layers and experts that are other ranks', and tensors of those that are of another shape."""
    specs = list(tensors_of("moe", tmp_path).tensors)
    long = {"model.layers.0.mlp.experts.5.up_proj.weight", "model.layers.2.self_attn.k_proj.weight"}
    specs = [
        TensorSpec(spec.name, (spec.shape[0] + 2, spec.shape[1]), spec.dtype) if spec.name in long else spec
        for spec in specs
    ]
    specs += [TensorSpec(name, shape, "bfloat16") for name, shape in SPOILT.items()]
    manifest, found = WeightManifest.build(specs), set()
    with _engine_config(MODELS["moe"]) as engine:
        for place in places(sizes):
            report, _ = tried(engine, place, manifest)
            mine = {*report.refused, *report.unused, *report.partly_read}
            assert set(SPOILT) <= mine
            assert not mine & set(report.absent)
            found |= mine
    assert found == set(SPOILT) | long


def test_what_is_not_sent_is_missing_only_where_it_belongs(tmp_path):
    manifest = tensors_of("qwen3", tmp_path)
    manifest = WeightManifest.build(spec for spec in manifest.tensors if ".2.mlp.up_proj" not in spec.name)
    with _engine_config(MODELS["qwen3"]) as engine:
        first, last = (tried(engine, place, manifest)[0] for place in places({"pp": 2}))
    assert problems(first) == {}
    assert list(problems(last)["missing"]) == ["model.layers.2.mlp.gate_up_proj.weight"]
    assert len(first.absent) == 11
    assert "model.layers.0.mlp.up_proj.weight" in last.absent
