"""Refits by regions into real vLLM on the CPU; the full-weight path into the same engine is the oracle."""

from __future__ import annotations

import pytest

from tests.test_rollout_vllm import run_group
from tests.vllm_region_scenario import KINDS, OTHERS

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(300)]

MODULE = "tests.vllm_region_scenario"
REFITS = ("all", "all_again", "whole_after", "staged", "partly_whole", "cast", "healed")


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return run_group("all", tmp_path_factory.mktemp("checkpoints"), module=MODULE)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", REFITS)
def test_parameters_and_answers_are_those_of_the_full_path(seen, kind, name):
    assert seen[kind]["changed"]
    assert seen[kind]["oracle"]
    assert seen[kind][name]["same"] == [True, True]


@pytest.mark.parametrize("kind", KINDS)
def test_each_byte_comes_in_the_way_that_its_layer_allows(seen, kind):
    refit = seen[kind]["all"]
    assert sum(refit["copies"].values()) == refit["bytes"]
    assert refit["copies"].keys() == {"in_place", "staged"}
    norms = [name for name in refit["in_place"] if "norm" in name]
    assert len(norms) == 9
    unpadded = [] if "padded" in kind else ["model.embed_tokens.weight", "lm_head.weight"]
    assert [name for name in refit["in_place"] if "norm" not in name] == unpadded
    assert set(seen[kind]["reasons"]) == set(refit["handed"])
    assert all("proj" in n or "mlp" in n or "embed" in n for n in refit["handed"])
    assert refit["told"] == {"whole": {}, "unread": []}
    assert seen[kind]["staged"]["in_place"] == seen[kind]["cast"]["in_place"] == []
    padding = 12 * 128 * 2 if "padded" in kind else 0
    assert seen[kind]["staged"]["staged_bytes"] == seen[kind]["staged"]["bytes"] + padding
    assert set(seen[kind]["cast"]["casts"]) == {"float32 to bfloat16"}


@pytest.mark.parametrize("kind", KINDS)
def test_vllm_warns_of_nothing_that_it_does_not_warn_of_in_full_refits(seen, kind):
    usual = set(seen[kind]["whole_after"]["warnings"])
    assert {warning for name in REFITS for warning in seen[kind][name]["warnings"]} <= usual


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_in_the_middle_fences_and_one_before_the_first_byte_does_not(seen, kind):
    failed, early = seen[kind]["failed"], seen[kind]["failed_early"]
    assert [error["kind"] for error in failed["errors"]] == ["PeerLostError"]
    assert {"version": None, "dirty": True, "fenced": "the refit failed"}.items() <= failed["status"].items()
    assert early["status"]["dirty"] is False
    assert early["status"]["version"] is not None
    assert failed["pending"] == early["pending"] == seen[kind]["pending"] == 0


def test_experts_alone(seen):
    refit = seen["qwen3moe"]["experts"]
    assert refit["same"] == [True, True]
    assert len(refit["handed"]) == 4
    assert all("routed_experts" in name for name in refit["handed"])
    assert not any(".experts." in name for name in refit["told"]["whole"])
    assert refit["copies"]["whole"] + refit["copies"]["staged"] == refit["bytes"]


def test_layers_that_compute_with_what_is_loaded_are_all_written_in_place(seen):
    refit = seen["qwen3-unpacked"]
    assert refit["same"] == [True, True]
    assert refit["copies"] == {"in_place": refit["bytes"]}
    assert refit["handed"] == refit["warnings"] == []
    assert (refit["reloads"], refit["kept"]) == (0, True)
    whole = refit["policy_whole"]
    assert whole["in_place"] + whole["whole"] == refit["bytes"]
    assert refit["again"] == {"staged": refit["bytes"]}
    assert refit["all_reloads"] == 1  # of the one with whole tensors
    assert refit["same_again"]


def test_experts_are_written_in_place_with_triton_kernels_only(seen):
    assert seen["qwen3-unpacked"]["experts"] == {"TRITON": [True, False]}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", OTHERS)
def test_models_with_biases_and_with_latent_attention(tmp_path, kind):
    seen = run_group(kind, tmp_path, module=MODULE)[0][kind]
    assert seen["changed"]
    assert seen["oracle"]
    refits = [*REFITS, *(["experts"] if kind == "dsv3" else [])]
    assert {name: seen[name]["same"] for name in refits} == {name: [True, True] for name in refits}
    assert seen["pending"] == 0
    assert seen["all"]["told"] == {"whole": {}, "unread": []}
