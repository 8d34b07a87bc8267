"""Real vLLM on the CPU, refitted by regions by sharded policy ranks in processes of their own, over NIXL.

What the full path of the same policy gives into the same vLLM is what must be served: parameters, tokens and
log-probabilities, to the last bit.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

if find_spec("vllm") is None:  # its import takes seconds
    pytest.skip("needs vLLM", allow_module_level=True)
pytest.importorskip("nixl")

from tests.test_rollout_vllm import run_group

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.nixl, pytest.mark.timeout(300)]


def run(name, folder, **options):
    return run_group(name, folder, module="tests.vllm_sharded_scenarios", **options)[0]


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return run("single", tmp_path_factory.mktemp("single"))


def same(seen):
    """Whether a part of a scenario ran, changed what is served, and served what the full path gives."""
    assert "traceback" not in seen, seen["traceback"]
    return seen["same"] and seen.get("changed", True)


def received(seen):
    return [rank["bytes"] for rank in seen["rollout"]]


@pytest.mark.parametrize("way", ["all", "staged", "released"])
def test_float32_masters_are_cast_on_their_way_into_a_padded_and_tied_model(single, way):
    seen, stored = single["cast"][way], single["cast"]["stored"]
    assert same(seen)
    assert received(seen) == [stored]
    assert seen["copies"] == {"in_place": 0, "staged": stored, "whole": 0}
    assert seen["whole"] == {}
    assert seen["commit"] == ("staged" if way == "staged" else "in_place")


def test_experts_alone_move_by_regions_and_all_else_whole(single):
    seen = single["experts"]["experts"]
    assert same(seen)
    assert len(seen["whole"]) == 21
    assert set(seen["whole"].values()) == {"shard_weights: experts (rollout rank 0)"}
    experts = 2 * 4 * 3 * 64 * 128 * 2
    assert seen["copies"] == {
        "in_place": 0,
        "staged": experts,
        "whole": single["experts"]["stored"] - experts,
    }
    assert seen["topology"].startswith("regions (shard_weights: experts) + pairs")


@pytest.mark.parametrize("way", ["auto", "all"])
def test_experts_that_the_policy_keeps_fused_on_a_mesh_of_two_dimensions(single, way):
    assert any("_StridedShard" in each for each in single["experts"]["placements"])
    seen, stored = single["experts"][way], single["experts"]["stored"]
    assert same(seen)
    assert (received(seen), sum(seen["copies"].values())) == ([stored], stored)
    assert seen["copies"]["in_place"] >= 2 * 512 * 128 * 2  # embedding and output layer at least
    assert seen["whole"] == {}


def test_a_rank_that_fails_in_a_gather_after_the_regions_and_a_good_refit(single):
    seen = single["experts"]["gather"]
    assert same(seen)
    assert "policy rank 1" in seen["failed"]["error"]
    assert "no room for it" in seen["failed"]["error"]
    assert seen["failed"]["s"] < 15


def test_float32_is_served_as_it_is_trained(single):
    seen, stored = single["dense"]["all"], single["dense"]["stored"]
    assert same(seen)
    assert (received(seen), sum(seen["copies"].values())) == ([stored], stored)
    assert seen["copies"]["whole"] == 0


def test_engines_join_and_are_replaced(single):
    seen, stored = single["dense"]["elastic"], single["dense"]["stored"]
    assert same(seen)
    assert seen["alike"] == [True] * 3
    assert received(seen["joined"]) == received(seen["replaced"]) == [stored]
    assert received(seen["both"]) == [stored] * 2


def test_a_loader_that_fails_in_the_middle_and_a_good_refit(single):
    seen = single["dense"]["loader"]
    assert same(seen)
    assert "disk on fire" in seen["failed"]["error"]
    assert seen["failed"]["serving"][0] is None


def test_the_others_go_on_without_an_engine_whose_loader_fails(single):
    seen = single["dense"]["goes_on"]
    assert same(seen)
    assert len(seen["left"]) == 1
    assert "disk on fire" in seen["left"][0]
    assert received(seen["one"]) == [single["dense"]["stored"]]
    assert received(seen["good"]) == [single["dense"]["stored"]] * 2
    assert seen["served"]


def test_a_policy_rank_that_dies_while_it_is_read_from(single):
    seen = single["dense"]["lost"]
    assert same(seen)
    assert "policy rank 1" in seen["failed"]["error"]
    assert seen["failed"]["s"] < 15


@pytest.mark.parametrize("way", ["all", "experts"])
def test_tensor_parallel_ranks_get_their_halves(tp2, way):
    seen, (whole, half) = tp2[way], tp2["stored"]
    assert same(seen)
    if way == "all":
        assert received(seen) == [half] * 2
        assert seen["copies"]["whole"] == 0
    else:
        experts = 2 * 4 * 3 * 64 * 128 * 2
        assert received(seen) == [whole - experts // 2] * 2


@pytest.fixture(scope="module")
def tp2(tmp_path_factory):
    return run("tp2", tmp_path_factory.mktemp("tp2"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("group", ["pp2", "ep2", "mesh", "deepseek"])
def test_other_ways_to_divide_a_model(group, tmp_path):
    seen = run(group, tmp_path)
    seen = seen.get(group, seen)
    stored = seen.pop("stored")
    assert all(same(seen[way]) for way in {"all", "auto", "experts"} & set(seen))
    got = received(seen["all"])
    if group == "pp2":  # both stages have the tied embedding
        assert (len(got), sum(got)) == (2, stored[0] + 500 * 128 * 2)
    elif group == "ep2":  # half of the experts, and half of every other matrix
        assert got == [stored[1]] * 2
    else:  # the bias of the router stays float32
        assert got == [stored + (4 * 2 if group == "deepseek" else 0)]
