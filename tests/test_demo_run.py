"""The demo from its command line to its exit status: real Ray, FSDP2, NIXL and vLLM on the tiny model."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "examples" / "grpo" / "tiny-qwen3.yaml"
TOLERANCE = 1e-3
_MARK = "WEIGHTSYNC_TEST_RUN"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.nixl,
    pytest.mark.timeout(240),
]


class Finished(NamedTuple):
    status: int
    text: str
    result: dict
    output: Path
    leaked: list[str]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def start(cache, output, *options):
    mark = uuid.uuid4().hex
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), _MARK: mark, "COLUMNS": "100"}
    command = [sys.executable, "-m", "weightsync", "demo", "--config", str(CONFIG), "--output", str(output)]
    process = subprocess.Popen(
        [*command, *options],
        cwd=output.parent,  # not the repository: the command finds its example by itself
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    return process, mark


def finish(process, mark, output, timeout_s=200):
    try:
        text, _ = process.communicate(timeout=timeout_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    print(text)
    path = output / "result.json"
    result = json.loads(path.read_text()) if path.exists() else {}
    return Finished(process.returncode, text, result, output, leaked_processes(mark))


def leaked_processes(mark, patience_s=20):
    """Return what is left of a run's processes once they had time to end."""
    deadline = time.monotonic() + patience_s
    while (left := marked_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def marked_processes(mark):
    return [
        f"{process.pid} {process.info['name']}"
        for process in psutil.process_iter(["name", "environ", "status"])
        if (process.info["environ"] or {}).get(_MARK) == mark
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


@pytest.fixture(scope="module")
def good_run(cache, tmp_path_factory):
    output = tmp_path_factory.mktemp("demo") / "out"
    return finish(*start(cache, output), output)


def test_it_passes_and_leaves_nothing_running(good_run):
    assert good_run.status == 0
    assert good_run.result["verdict"] == {"passed": True, "reasons": []}
    assert "PASSED" in good_run.text
    assert good_run.leaked == []


def test_every_step_trained_and_served_the_same_weights(good_run):
    steps = good_run.result["steps"]
    assert [step["step"] for step in steps] == list(range(1, 31))
    # A version behind would pass for small updates; the versions themselves must agree.
    assert [step["rollout_version"] for step in steps] == list(range(30))
    assert [step["policy_version"] for step in steps] == list(range(30))
    assert all(0 < step["difference"] < 1e-4 for step in steps)
    assert good_run.result["largest_difference"] < 1e-4
    assert good_run.result["held_out_after"]["difference"] < 1e-4


def test_reward_rises_to_the_task(good_run):
    rewards = [step["reward"] for step in good_run.result["steps"]]
    assert rewards[0] == pytest.approx(0.25, abs=0.08)
    assert sum(rewards[-3:]) / 3 > 0.7
    assert good_run.result["held_out_before"]["accuracy"] < 0.3
    assert good_run.result["held_out_after"]["accuracy"] > 0.6


def test_each_refit_moved_the_whole_model(good_run, cache):
    weights = load_file(cache / "weightsync" / "models" / "tiny-qwen3" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    expected = sum(tensor.nbytes for tensor in weights.values())
    assert [step["refit_bytes"] for step in good_run.result["steps"]] == [expected] * 30
    assert all(0 < step["refit_seconds"] < 30 for step in good_run.result["steps"])
    assert good_run.text.count("[vLLM refit] Loaded 25 tensors") == 30


def test_the_reference_keeps_its_weights(good_run):
    kl = [step["kl"] for step in good_run.result["steps"]]
    assert kl[0] == pytest.approx(0.0, abs=1e-9)
    assert kl[-1] > 0.1
    assert all(math.isfinite(value) for value in kl)


def test_it_draws_the_picture(good_run):
    assert (good_run.output / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_without_refit_the_difference_grows_and_the_run_says_why(cache, tmp_path):
    output = tmp_path / "out"
    run = finish(*start(cache, output, "--no-refit", "--steps", "4", "--seed", "3"), output)
    assert run.status == 1
    steps = run.result["steps"]
    assert steps[0]["difference"] < 1e-4
    assert all(step["difference"] > 100 * TOLERANCE for step in steps[1:])
    assert [step["rollout_version"] for step in steps] == [0] * 4
    assert [step["refit_bytes"] for step in steps] == [None] * 4
    assert "what a missed refit looks like" in " ".join(run.text.split())
    assert "policy at version 3, vLLM at 0" in run.text
    assert "[vLLM refit]" not in run.text
    assert (run.result["seed"], run.result["refit"]) == (3, False)
    assert run.leaked == []


@pytest.mark.exhaustive
def test_an_interrupted_run_takes_its_processes_along(cache, tmp_path):
    output = tmp_path / "out"
    process, mark = start(cache, output, "--steps", "1000")
    deadline = time.monotonic() + 150
    while not (output / "result.json").exists() and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    run = finish(process, mark, output, timeout_s=60)
    assert run.status != 0
    assert run.result["steps"]
    assert run.result["verdict"] is None
    assert run.leaked == []
