"""Rules held against vLLM's own loader, rank by rank; and plans that move bytes, against what it loads."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from weightsync.cli import app
from weightsync.cli.plan_inputs import read_model
from weightsync.cli.plan_trace import _engine_config, _Place, _rank_config, _standing_at, traced_layout
from weightsync.errors import ConfigurationError
from weightsync.layout.descriptors import Compiler
from weightsync.layout.destinations import vllm_layout
from weightsync.layout.families import list_tensors
from weightsync.layout.parallel import RolloutGrid, ShardedGrid, parse_sizes
from weightsync.layout.plan import make_plan
from weightsync.layout.sharded import fsdp_layout
from weightsync.tensors import flat_bytes

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

SIZES = {
    "vocab_size": 500, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "hidden_act": "silu", "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}  # fmt: skip
CONFIGS = {
    "llama": {**SIZES, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": True},
    "qwen2": {**SIZES, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {
        **SIZES, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16,
        "tie_word_embeddings": True,
    },
    "moe": {
        **SIZES, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 16,
        "moe_intermediate_size": 32, "num_experts": 6, "num_experts_per_tok": 2, "mlp_only_layers": [1],
        "decoder_sparse_step": 1, "norm_topk_prob": True,
    },
    "deepseek": {
        **SIZES, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
        "num_key_value_heads": 8, "v_head_dim": 16, "q_lora_rank": 24, "kv_lora_rank": 32,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "n_routed_experts": 8,
        "n_shared_experts": 1, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
        "topk_method": "noaux_tc",
    },
    "mixtral": {
        **SIZES, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "phi3": {**SIZES, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "pad_token_id": 0},
}  # fmt: skip
RULES = [
    ("llama", "tp=1", 1), ("llama", "tp=2", 4), ("llama", "tp=4,pp=2", 8), ("qwen2", "tp=2", 2),
    ("qwen3", "tp=8", 8), ("qwen3", "tp=2,pp=2", 4), ("moe", "tp=4", 4), ("moe", "tp=2,pp=2", 4),
    ("moe", "tp=2,ep=2", 2), ("moe", "tp=4,ep=4", 4), ("moe", "tp=2,dp=2", 4), ("deepseek", "tp=2", 2),
    ("deepseek", "tp=4", 4), ("deepseek", "tp=2,ep=2", 2), ("deepseek", "tp=2,dp=2,ep=4", 4),
    ("deepseek", "tp=2,pp=2", 8),
]  # fmt: skip


def grid_of(text, ranks):
    return RolloutGrid.parse(parse_sizes(text, ("tp", "pp", "dp", "ep"), "--rollout"), ranks)


def places(layout):
    """Return, for each tensor, who stores which box where."""
    found = {}
    for tensor, index in enumerate(layout.pattern_of.tolist()):
        pattern, info = layout.patterns[index], layout.tensors[tensor]
        found[info.name] = {
            (
                int(pattern.rank[piece]),
                str(pattern.box(piece)),
                int(pattern.offset[piece] + layout.shift[tensor]),
                # The stride of a dimension of size 1 means nothing.
                tuple(
                    s * (n > 1) for s, n in zip(pattern.strides[piece], pattern.box(piece).shape, strict=True)
                ),
                int(pattern.extent[piece]),
                layout.storages[tensor][int(pattern.slot[piece])],
            )
            for piece in range(len(pattern))
        }
    return found


@pytest.mark.parametrize(("name", "text", "ranks"), RULES)
def test_rules_are_what_the_loader_does(name, text, ranks):
    model, grid = list_tensors(CONFIGS[name]), grid_of(text, ranks)
    for sharding in ("all", "experts"):
        traced = traced_layout(CONFIGS[name], model, grid, sharding)
        assert (traced.whole, traced.unfilled, traced.unread) == ({}, {}, [])
        assert places(traced.layout) == places(vllm_layout(model, grid, sharding))


def loaded(config, grid, place, weights):
    """Return the parameters of a real rank on the CPU, after its own loader."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with _engine_config(config) as engine:
        rank = _rank_config(engine, grid)
        with _standing_at(grid, place), set_current_vllm_config(rank), torch.no_grad():
            with set_default_torch_dtype(torch.bfloat16):
                model = initialize_model(vllm_config=rank)
            for parameter in model.parameters():
                parameter.zero_()
            model.load_weights(iter(weights.items()))
    return {name: flat_bytes(parameter).numpy() for name, parameter in model.named_parameters()}


def shards(layout, weights):
    """Return the memory of each policy rank, filled piece by piece."""
    memory = []
    for rank in range(layout.ranks):
        sizes, starts = layout.storage_bytes(rank), layout.virtual_addresses(rank)
        held = {name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes.items()}
        for tensor, index in enumerate(layout.pattern_of.tolist()):
            pattern, info = layout.patterns[index], layout.tensors[tensor]
            for piece in np.flatnonzero(pattern.rank == rank).tolist():
                name, box = layout.storages[tensor][int(pattern.slot[piece])], pattern.box(piece)
                flat = held[name].view(weights[info.name].dtype)
                view = flat.as_strided(box.shape, pattern.strides[piece].tolist(), int(pattern.offset[piece]))
                view.copy_(
                    weights[info.name][tuple(slice(a, b) for a, b in zip(box.lo, box.hi, strict=True))]
                )
        whole = np.zeros(max(starts[name] + sizes[name] for name in sizes), np.uint8)
        for name, start in starts.items():
            whole[start : start + sizes[name]] = held[name].numpy()
        memory.append(whole)
    return memory


@pytest.mark.parametrize(
    ("name", "text", "ranks"),
    [("qwen3", "tp=2", 2), ("moe", "tp=2,ep=2", 2), ("deepseek", "tp=2,pp=2", 4), ("mixtral", "tp=2", 2),
     ("phi3", "tp=2", 2)],
)  # fmt: skip
def test_planned_copies_give_what_the_loader_gives(tmp_path, name, text, ranks):
    """The oracle: bytes moved shard to parameter are those that load_weights makes of the full tensors."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    model, grid = read_model(tmp_path), grid_of(text, ranks)
    generator = torch.Generator().manual_seed(5)
    weights = {
        tensor.info.name: torch.randn(tensor.info.shape, generator=generator).to(
            torch.float32 if tensor.info.itemsize == 4 else torch.bfloat16
        )
        for tensor in model.tensors.tensors
    }
    policy = fsdp_layout(model.tensors, ShardedGrid.parse({"fsdp": 3}, 3))
    rollout = traced_layout(CONFIGS[name], model.tensors, grid, "all").layout
    compiler, memory = Compiler(make_plan(policy, rollout)), shards(policy, weights)
    for rank in range(ranks):
        rows = compiler.compile(rank).runs()
        starts, sizes = rollout.virtual_addresses(rank), rollout.storage_bytes(rank)
        received = np.zeros(max(starts[each] + sizes[each] for each in sizes), np.uint8)
        columns = (rows.source, rows.source_offset, rows.target_offset, rows.nbytes)
        for source, read, write, nbytes in zip(*(each.tolist() for each in columns), strict=True):
            received[write : write + nbytes] = memory[source][read : read + nbytes]
        stage, tensor = divmod(rank, grid.tp)
        expected = loaded(CONFIGS[name], grid, _Place(0, stage, tensor), weights)
        assert set(expected) == set(starts)
        for parameter, data in expected.items():
            at = starts[parameter]
            assert np.array_equal(received[at : at + len(data)], data), (rank, parameter)


def test_the_command_traces_what_it_has_no_rules_for(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["mixtral"]))
    arguments = ("plan", str(tmp_path), "--policy", "fsdp=2", "--policy-ranks", "2", "--json")
    with pytest.raises(SystemExit) as stopped:
        app.main((*arguments, "--rollout", "tp=2,pp=2", "--rollout-ranks", "4"))
    assert not stopped.value.code
    found = json.loads(capsys.readouterr().out)
    assert found["notes"] == ["the rollout layout is traced from vLLM's own loader"]
    assert sum(found["bytes_per_rank"]) > found["model"]["bytes"] > max(found["bytes_per_rank"])
    with pytest.raises(SystemExit):
        app.main((*arguments, "--policy", "tp=2"))
    assert "write --policy without tp, or fsdp=N alone" in capsys.readouterr().err


def test_sizes_that_vllm_refuses_are_one_error():
    grid = RolloutGrid(3, tp=3)
    with pytest.raises(ConfigurationError, match="vLLM does not load this model so"):
        traced_layout(CONFIGS["llama"], list_tensors(CONFIGS["llama"]), grid, "all")
