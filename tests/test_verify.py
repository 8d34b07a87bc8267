"""`weightsync verify`: real vLLM, real NIXL, real Ray; and that a missing tensor makes it fail."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from weightsync.verification.compare import Generation, compare_generations

DROPPED = "model.layers.1.mlp.down_proj.weight"


def run_verify(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weightsync", "verify", *arguments, "--json"]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)


def generation(tokens: list[int], logprobs: list[float]) -> list[Generation]:
    return [Generation(tuple(tokens), tuple(logprobs))]


def test_equal_generations_agree() -> None:
    one = generation([1, 2], [-0.5, -0.25])
    assert compare_generations(one, one, 1e-4).agrees


def test_a_differing_token_disagrees_whatever_follows() -> None:
    comparison = compare_generations(
        generation([1, 9, 3], [-0.5, -0.5, -0.5]), generation([1, 2, 3], [-0.5, -0.25, -0.5]), 1.0
    )
    assert (comparison.equal_tokens, comparison.agrees) == (1, False)


def test_a_difference_beyond_the_tolerance_disagrees() -> None:
    comparison = compare_generations(generation([1], [-0.5]), generation([1], [-0.502]), 1e-3)
    assert comparison.largest_difference == pytest.approx(0.002)
    assert not comparison.agrees


@pytest.mark.parametrize("served", [float("nan"), float("-inf")])
def test_what_is_no_number_disagrees(served: float) -> None:
    comparison = compare_generations(generation([1], [served]), generation([1], [-0.5]), 1.0)
    assert not comparison.agrees


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.ray
@pytest.mark.nixl
@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    ("model", "verified"),
    [
        ("moe", ["moe"]),
        # tests/test_rollout_vllm.py has the other two, in one process
        pytest.param("all", ["dense", "tied", "moe"], marks=pytest.mark.exhaustive),
    ],
)
def test_three_refits_in_a_row_arrive_whole(model: str, verified: list[str]) -> None:
    result = run_verify("--model", model)
    assert result.returncode == 0, result.stdout + result.stderr
    checks = json.loads(result.stdout)
    assert {name: len(each) for name, each in checks.items()} == dict.fromkeys(verified, 3)
    for check in (check for each in checks.values() for check in each):
        assert check["changed"]
        assert check["equal_tokens"] == check["tokens"] == 48
        assert check["largest_logprob_difference"] <= check["tolerance"] == 1e-4
        assert check["bytes"] > 1_000_000


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.ray
@pytest.mark.nixl
@pytest.mark.timeout(420)
def test_a_dropped_tensor_is_refused_by_name_before_anything_is_written() -> None:
    result = run_verify("--model", "dense", "--refits", "1", "--drop-tensor", DROPPED)
    assert result.returncode == 1
    assert "ManifestError" in result.stderr
    assert "layers.1.mlp.down_proj.weight" in result.stderr


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.ray
@pytest.mark.nixl
@pytest.mark.timeout(420)
def test_a_dropped_tensor_that_is_let_pass_still_fails_the_comparison() -> None:
    result = run_verify("--model", "dense", "--refits", "1", "--drop-tensor", DROPPED, "--allow-missing", "*")
    assert result.returncode == 1, result.stdout + result.stderr
    (check,) = json.loads(result.stdout)["dense"]
    assert check["changed"]
    assert not check["passed"]
