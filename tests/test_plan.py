"""`weightsync plan`: the published layout, what it reads, what it prints, and how fast it is."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.buckets import place_chunks, split_weight_chunks
from weightsync.cli import app
from weightsync.cli.plan import parse_bytes
from weightsync.cli.plan_inputs import read_model
from weightsync.errors import ConfigurationError
from weightsync.layout.descriptors import Compiler
from weightsync.layout.destinations import vllm_layout
from weightsync.layout.estimate import count_batches
from weightsync.layout.families import list_tensors
from weightsync.layout.megatron import megatron_layout
from weightsync.layout.parallel import PolicyGrid, RolloutGrid, ShardedGrid
from weightsync.layout.plan import make_plan
from weightsync.layout.sharded import fsdp_layout

MODELS = Path(__file__).parent / "plan_models"
DEEPSEEK = (
    "--policy", "tp=1,pp=16,ep=16", "--policy-ranks", "256", "--rollout", "tp=32", "--rollout-ranks", "32",
    "--bucket", "4096MiB",
)  # fmt: skip
GIB = 1 << 30


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        app.main(("plan", *arguments))
    return 0 if stopped.value.code is None else int(stopped.value.code)


@pytest.fixture
def planned(capsys):
    def plan(*arguments):
        assert run(*arguments, "--json") == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    return plan


@pytest.mark.slow
def test_the_published_layout(planned):
    """45,395 tensors in 18 batches, 69.95 GiB for each rollout rank: experts cut by TP, the rest whole."""
    found = planned(str(MODELS / "deepseek-v3.json"), *DEEPSEEK, "--shard", "experts")
    assert found["tensors_per_rank"] == [45_395] * 32
    assert found["batches_per_rank"] == [18] * 32
    assert [round(size / GIB, 2) for size in found["bytes_per_rank"]] == [69.95] * 32
    assert sum(link["bytes"] for link in found["links"]) == sum(found["bytes_per_rank"])
    assert {link["target"] for link in found["links"]} == set(range(32))


@pytest.mark.slow
def test_all_tensors_cut_is_the_least_possible(planned):
    found = planned(str(MODELS / "deepseek-v3.json"), *DEEPSEEK, "--shard", "all")
    assert found["bytes_per_rank"] == found["least_bytes_per_rank"]
    assert [round(size / GIB, 2) for size in found["bytes_per_rank"]] == [40.92] * 32
    assert found["batches_per_rank"] == [11] * 32
    assert found["copies"] == 45_395 * 32
    assert max(found["descriptors_per_rank"]) == 45_395
    seconds = found["seconds"]
    assert seconds["planned"] < seconds["pairs"] / 20 < seconds["broadcast"] / 20 * 1.01


@pytest.mark.slow
def test_nothing_cut_is_the_whole_model(planned):
    found = planned(str(MODELS / "deepseek-v3.json"), *DEEPSEEK, "--shard", "none")
    assert found["bytes_per_rank"] == [found["model"]["bytes"]] * 32
    assert found["seconds"]["broadcast"] == pytest.approx(found["model"]["bytes"] * 8 / 400e9)


@pytest.mark.slow
def test_the_published_case_is_planned_within_ten_seconds_of_one_core():
    start = time.process_time()
    model = list_tensors(json.loads((MODELS / "deepseek-v3.json").read_text()))
    policy = megatron_layout(model, PolicyGrid(256, pp=16, ep=16))
    plan = make_plan(policy, vllm_layout(model, RolloutGrid(32, tp=32), "all"))
    assert time.process_time() - start < 10
    assert plan.regions == 1_452_640


@pytest.mark.slow
def test_descriptors_cost_less_than_five_microseconds_a_region():
    """Two ranks of a sharded policy read 395,000 regions of 45,395 tensors."""
    model = list_tensors(json.loads((MODELS / "deepseek-v3.json").read_text()))
    policy = fsdp_layout(model, ShardedGrid(256, 1, 256, 1))
    compiler = Compiler(make_plan(policy, vllm_layout(model, RolloutGrid(32, tp=32), "all")))
    start = time.process_time()
    made = [compiler.compile(rank) for rank in (0, 1)]
    seconds = time.process_time() - start
    regions = sum(len(each) for each in made)
    assert 350_000 < regions < 400_000
    assert seconds < 5e-6 * regions
    assert len({each.total_bytes for each in made}) == 1


def test_senders_with_replicas_share_the_work(planned):
    found = planned(
        str(MODELS / "llama-3-8b.json"), "--policy", "tp=1", "--policy-ranks", "8",
        "--rollout", "tp=4", "--rollout-ranks", "16",
    )  # fmt: skip
    assert found["imbalance"]["sent"] < 1.01
    sent = np.array(found["sent_per_rank"])
    assert sent.sum() == sum(found["bytes_per_rank"])
    sizes = [link["bytes"] for link in found["links"]]
    assert len(sizes) == 8 * 16
    assert max(sizes) < 2 * sum(sizes) / len(sizes)


def test_fewer_policy_than_rollout_ranks_have_no_pairs(planned):
    found = planned(str(MODELS / "qwen3-0.6b.json"), "--rollout", "tp=2", "--rollout-ranks", "4")
    assert found["seconds"]["pairs"] is None
    assert found["sent_per_rank"] == [sum(found["bytes_per_rank"])]
    # Each engine of two ranks stores the model once, but for norms, which both ranks have.
    assert 1.0 < sum(found["bytes_per_rank"]) / (2 * found["model"]["bytes"]) < 1.001


def test_expert_parallel_rollout_gets_its_experts_only(planned):
    found = planned(
        str(MODELS / "qwen3-30b-a3b.json"), "--policy", "fsdp=8", "--policy-ranks", "16",
        "--rollout", "tp=4,ep=4", "--rollout-ranks", "4", "--shard", "experts",
    )  # fmt: skip
    assert found["tensors_per_rank"] == [18_867 - 48 * 96 * 3] * 4
    assert found["imbalance"]["received"] == 1.0


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3000), max_size=30), st.integers(1, 2000))
def test_batches_are_those_of_the_transports(sizes, bucket):
    weights = ((f"t{i}", torch.zeros(size, dtype=torch.uint8)) for i, size in enumerate(sizes))
    placed = list(place_chunks(split_weight_chunks(weights, bucket), bucket))
    assert count_batches(sizes, bucket) == (placed[-1].bucket + 1 if placed else 0)


@pytest.mark.slow
def test_the_table_names_what_matters(capsys):
    assert run(str(MODELS / "deepseek-v3.json"), *DEEPSEEK, "--shard", "experts") == 0
    printed = capsys.readouterr().out
    assert all(
        text in printed for text in ("45395", "69.95 GiB", "18", "pairs", "broadcast", "prediction layer")
    )


@pytest.mark.slow
def test_the_picture(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "traffic.png"
    assert (
        run(str(MODELS / "qwen3-0.6b.json"), "--rollout", "tp=2", "--rollout-ranks", "2", "--png", str(path))
        == 0
    )
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert run(str(MODELS / "qwen3-0.6b.json"), "--png", str(tmp_path / "none" / "x.png")) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shard", "most"), "--shard does not know 'most'; write none, experts, all"),
        (("--bucket", "big"), "--bucket 'big' is no size; write 4096MiB or 4GiB"),
        (("--policy", "tp=16", "--policy-ranks", "16"), "num_key_value_heads 8 cannot be cut in 16"),
        (("--rollout", "tp=3", "--rollout-ranks", "3"), "num_attention_heads 16 cannot be cut in 3"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, message, capsys):
    assert run(str(MODELS / "qwen3-0.6b.json"), *arguments) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_sizes():
    assert parse_bytes("4096MiB") == parse_bytes("4 GiB") == parse_bytes(str(4 * GIB)) == 4 * GIB
    assert parse_bytes("1.5gb") == 1_500_000_000
    for odd in ("", "GiB", "-1MiB", "0", "1TiX", "nan", "inf"):
        with pytest.raises(ConfigurationError):
            parse_bytes(odd)


TINY = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 8, "hidden_size": 4, "intermediate_size": 6,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "torch_dtype": "float32",
}  # fmt: skip


def write_checkpoint(directory, *, files=True, drop=(), extra=(), shapes=None):
    """Write a config, an index, and safetensors files that have a header and nothing else."""
    (directory / "config.json").write_text(json.dumps(TINY))
    tensors = {t.info.name: t.info.shape for t in list_tensors(TINY).tensors if t.info.name not in drop}
    tensors |= dict.fromkeys(extra, (3,)) | (shapes or {})
    index = dict.fromkeys(tensors, "one.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    if files:
        header, at = {"__metadata__": {"format": "pt"}}, 0
        for name, shape in tensors.items():
            size = 4 * int(np.prod(shape))
            header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + size]}
            at += size
        raw = json.dumps(header).encode()
        (directory / "one.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)
    return directory


def test_an_index_is_held_against_its_config(tmp_path, planned):
    write_checkpoint(tmp_path, extra=["model.layers.1.mtp.weight"])
    found = planned(str(tmp_path / "model.safetensors.index.json"))
    assert found["tensors_per_rank"] == [12]
    assert any(
        "1 tensors of the index are not sent: 'model.layers.1.mtp.weight'" in note for note in found["notes"]
    )
    assert planned(str(tmp_path))["bytes_per_rank"] == found["bytes_per_rank"]


def test_an_index_without_its_files_will_do(tmp_path, planned):
    assert planned(str(write_checkpoint(tmp_path, files=False)))["tensors_per_rank"] == [12]


def test_an_index_that_does_not_fit_is_refused(tmp_path):
    write_checkpoint(tmp_path, drop=["lm_head.weight"])
    with pytest.raises(ConfigurationError, match=r"lacks 1 tensors of this config.json: 'lm_head.weight'"):
        read_model(tmp_path)
    write_checkpoint(tmp_path, shapes={"model.norm.weight": (5,)})
    with pytest.raises(
        ConfigurationError, match=r"shape \[5\] where config.json gives \[4\].*model.norm.weight"
    ):
        read_model(tmp_path)


def test_a_model_without_rules_is_listed_from_headers(tmp_path):
    write_checkpoint(tmp_path, extra=["model.layers.0.mlp.experts.1.w2.weight"])
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "architectures": ["OtherForCausalLM"]}))
    model = read_model(tmp_path)
    assert not model.has_rules
    placed = {tensor.info.name: tensor.layer for tensor in model.tensors.tensors}
    assert placed["model.embed_tokens.weight"] == -1
    assert placed["lm_head.weight"] == placed["model.norm.weight"] == 1
    assert {layer for name, layer in placed.items() if ".layers.0." in name} == {0}


def test_files_that_are_none_of_these_are_refused(tmp_path):
    odd = tmp_path / "config.json"
    with pytest.raises(ConfigurationError, match="cannot read"):
        read_model(odd)
    odd.write_text("{")
    with pytest.raises(ConfigurationError, match="is no JSON"):
        read_model(odd)
    odd.write_text("[]")
    with pytest.raises(ConfigurationError, match="holds no object"):
        read_model(odd)
    write_checkpoint(tmp_path)
    (tmp_path / "one.safetensors").write_bytes(struct.pack("<Q", 1 << 40))
    with pytest.raises(ConfigurationError, match="is no safetensors file: its header has"):
        read_model(tmp_path)
    (tmp_path / "one.safetensors").write_bytes(struct.pack("<Q", 2) + b"no")
    with pytest.raises(ConfigurationError, match="is no safetensors file"):
        read_model(tmp_path)


def test_the_example_of_the_page_runs():
    page = (Path(__file__).parents[1] / "docs" / "plan.md").read_text(encoding="utf-8")
    found = {}
    exec(page.split("```python\n")[1].split("```")[0], found)
    assert found["rows"].source.tolist() == [0, 1, 2]
    assert found["rows"].total_bytes == found["plan"].links[:, 0].sum() == 6 * 2 * 2
