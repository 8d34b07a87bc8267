"""Tensor-parallel vLLM on the CPU, refitted through IPC by two policy processes, of which one dies."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

if find_spec("vllm") is None:  # its import takes seconds
    pytest.skip("needs vLLM", allow_module_level=True)

from tests.test_rollout_vllm import run_group

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(300)]


def test_two_ranks_of_vllm_are_refitted_by_two_policy_processes(tmp_path):
    seen = run_group("tp2", tmp_path, module="tests.vllm_ipc_scenario")[0]
    assert seen["changed"]
    assert seen["tokens_equal"]
    assert seen["largest_difference"] < 1e-4
    assert seen["back"]
    assert (seen["tensors"], seen["bytes"]) == (25, 2 * 1_707_008)
    assert "policy rank 1" in seen["lost"]
    assert seen["serving"] == [None, None]
    assert seen["lost_s"] < 20
    assert seen["recovered"] == 25
    assert seen["as_before"]
    assert seen["left"] == []
