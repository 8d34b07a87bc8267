"""Real vLLM on the CPU whose ranks divide the layers or the experts among them, refitted."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

if find_spec("vllm") is None:  # its import takes seconds
    pytest.skip("needs vLLM", allow_module_level=True)

from tests.test_rollout_vllm import run_group

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(300)]

LAYERS = ("model.layers.0.", "model.layers.1.")


@pytest.mark.parametrize(
    ("group", "tensors", "parameters"), [("stages", 24, [9, 10]), ("experts", 45, [21, 21])]
)
def test_ranks_that_divide_a_model_are_refitted(tmp_path, group, tensors, parameters):
    seen, _ = run_group(group, tmp_path, module="tests.vllm_parallel_scenarios")
    assert seen["world_size"] == 2
    assert [len(names) for names in seen["stored"]] == parameters
    for names, layer in zip(seen["stored"], LAYERS, strict=True):
        assert any(name.startswith(layer) for name in names)
    assert seen["changed"]
    assert seen["tokens_equal"]
    assert seen["largest_difference"] < 1e-4
    assert [figures["tensors"] for figures in seen["figures"]] == [tensors, tensors]
    assert seen["serves_old"]
    assert seen["layouts"] == seen["emulated"]
    for name, errors in seen["refused"].items():
        assert [(error["rank"], error["kind"]) for error in errors] == [
            (0, "ManifestError"),
            (1, "ManifestError"),
        ]
        assert {error["tensor"] for error in errors} == {name}
