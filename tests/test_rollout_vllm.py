"""Real vLLM on the CPU, refitted; each group of scenarios runs once, in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("vllm") is None:  # its import takes seconds
    pytest.skip("needs vLLM", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(300)]

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


def run_group(name, directory, in_process=True, module="tests.vllm_scenarios"):
    env = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(not in_process)),
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", module, name, str(directory)]
    out, err, code = run_in_group(command, env)
    results = [line for line in out.splitlines() if line.startswith("RESULT ")]
    assert results, f"rc {code}\n{out[-3000:]}\n{err[-6000:]}"
    return json.loads(results[0].removeprefix("RESULT ")), out


def run_in_group(command, env):
    """Run a command in a process group of its own, and end what is left of the group afterwards."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True, **pipes) as process:
        try:
            out, err = process.communicate(timeout=280)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return out, err, process.returncode


@pytest.fixture(scope="module")
def equal(checkpoints):
    return run_group("equal", checkpoints)


@pytest.fixture(scope="module")
def faults(checkpoints):
    return run_group("faults", checkpoints)[0]


@pytest.mark.parametrize(("kind", "tensors"), [("qwen3", 25), ("qwen3tied", 24), ("qwen3moe", 45)])
def test_three_refits_equal_fresh_engines(equal, kind, tensors):
    seen = equal[0][kind]
    assert [refit["equal"] for refit in seen["refits"]] == [True] * 3
    assert [refit["equals_another"] for refit in seen["refits"]] == [[], [], []]
    assert {refit["tensors"] for refit in seen["refits"]} == {tensors}
    # Small buckets split fused layers, so that deferred tensors had to be copied out of the buffer.
    assert seen["refits"][0]["batches"] > 10
    assert seen["refits"][0]["detached_bytes"] > 0
    assert seen["refits"][2]["batches"] == 1
    version = 3 if kind == "qwen3tied" else 4
    assert seen["published"] == str(version)
    assert {"version": version, "dirty": False, "fenced": None}.items() <= seen["status"].items()


def test_a_staged_update_is_served_only_once_it_is_loaded(equal):
    seen = equal[0]["qwen3"]["staged"]
    assert seen["meanwhile"]
    assert seen["untouched"]
    assert seen["equal"]
    assert seen["changed"]
    assert seen["stream"].startswith("xxh3-64:")
    assert seen["staged"]["staged_bytes"] == seen["figures"]["bytes"] == seen["staged"]["bytes"]
    assert {"stage", "load", "total"} <= seen["figures"]["seconds"].keys()


def test_experts_may_come_fused(equal):
    seen = equal[0]["qwen3moe"]["fused"]
    assert seen["equal"]
    assert seen["tensors"] == 45 - 24 + 4
    assert [error["tensor"] for error in seen["refused"]] == ["model.norm.weight"]


def test_a_line_for_each_update(equal):
    lines = [line for line in equal[1].splitlines() if line.startswith("[vLLM refit] Loaded ")]
    assert len(lines) == 11  # one of them of a staged update
    assert "Loaded 25 tensors in 1 batches via checkpoint engine; bytes=853504 total=" in lines[2]


REFUSED = {
    "dropped": ("not be filled", "model.layers.1.mlp.down_proj.weight"),
    "dropped_norm": ("0 of 128 elements", "model.norm.weight"),
    "dropped_head": ("not be filled", "lm_head.weight"),
    "q_only": ("16384 of 32768 elements", "model.layers.1.self_attn.qkv_proj.weight"),
    "unknown": ("refuses", "model.norm.scale"),
    "unknown_top": ("refuses", "mtp.head.weight"),
    "misshapen": ("refuses", "model.layers.1.mlp.gate_proj.weight"),
    "misshapen_long": ("refuses", "model.layers.1.self_attn.k_proj.weight"),
    "mistyped": ("int32 to bfloat16", None),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_before_the_first_write(faults, name):
    text, tensor = REFUSED[name]
    [error] = faults[name]["errors"]
    assert error["kind"] == "ManifestError"
    assert text in error["message"]
    assert tensor in (None, error["tensor"])
    assert (error["side"], error["rank"], error["phase"]) == ("rollout", 0, "manifest")
    assert faults[name]["serves_old"]


@pytest.mark.parametrize(
    ("name", "kind", "phase"),
    [
        ("engine_fails", "DigestError", "receive"),
        ("late_refusal", "ManifestError", "manifest"),
        ("loader_fails", "ValueError", "load"),
    ],
)
def test_a_failure_in_the_middle_fences_until_a_good_refit(faults, name, kind, phase):
    seen = faults[name]
    [error] = seen["errors"]
    assert (error["kind"], error["phase"]) == (kind, phase)
    assert {"version": None, "dirty": True, "fenced": "the refit failed"}.items() <= seen["status"].items()
    assert seen["refused"]
    assert seen["pending"] == 0
    assert seen["equal_after"]
    assert faults["deferred"] == 0


def test_casts_are_reported(faults):
    assert faults["cast"] == {"equal": True, "casts": {"float32 to bfloat16": 25}}


def test_tensor_parallel(checkpoints):
    seen, _ = run_group("tp2", checkpoints)
    assert seen["world_size"] == 2
    assert seen["changed"]
    assert seen["tokens_equal"]
    assert seen["largest_difference"] < 1e-4
    assert seen["serves_old"]
    for errors in (seen["errors"], seen["misshapen"]):
        assert [(error["rank"], error["kind"]) for error in errors] == [
            (0, "ManifestError"),
            (1, "ManifestError"),
        ]
    assert [figures["tensors"] for figures in seen["figures"]] == [24, 24]


def test_async_engine(checkpoints):
    seen, _ = run_group("async", checkpoints, in_process=False)
    [error] = seen["dropped"]
    assert (error["kind"], error["tensor"], error["rank"]) == ("ManifestError", "model.norm.weight", 3)
    assert seen["serves_old"]
    kept = seen["kept"]
    assert kept["unfinished_at_pause"]
    assert kept["waited"]
    assert kept["tokens"] == 400
    assert kept["figures"]["tensors"] == 25
    assert kept["queued"] == seen["after"] == seen["after_fence"]
    assert seen["after"] != seen["before"]
    assert seen["version"] == "1"
    assert {"version": 1, "dirty": False, "fenced": None}.items() <= seen["status"][0].items()
    assert [error["kind"] for error in seen["fenced"]["errors"]] == ["DigestError"]
    assert seen["fenced"]["refused"] == [True, True]
    for errors in (seen["lost"]["first"], seen["lost"]["again"]):
        assert [(error["kind"], error["rank"]) for error in errors] == [("PeerLostError", 3)]
        assert "its process died during refit_status" in errors[0]["message"]


def test_a_stalled_engine_is_given_up_in_time(checkpoints):
    seen, _ = run_group("stalled", checkpoints, in_process=False)
    assert seen["figures"]["tensors"] == 21
    assert seen["changed"]
    assert 3 <= seen["waited"] < 6
    [lost] = seen["lost"]
    assert (lost["kind"], lost["rank"]) == ("PeerLostError", 0)
    assert "did not answer to refit_status in 3 s" in lost["message"]
    assert [error["kind"] for error in seen["again"]] == ["PeerLostError"]
