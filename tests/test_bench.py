"""`weightsync bench`: what it measures on, what it counts and refuses, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from weightsync.benchmarking import shapes
from weightsync.benchmarking.baselines import plan_buckets
from weightsync.benchmarking.crew import Crew
from weightsync.benchmarking.memory import MemoryUse, mark_memory, memory_since, together
from weightsync.benchmarking.run import BenchResult, machine
from weightsync.benchmarking.shapes import SharedModel, model_bytes, parameter_shapes
from weightsync.benchmarking.transports import Wish, transport_trials
from weightsync.benchmarking.trial import BenchSettings, Measurement, Trial, measure
from weightsync.benchmarking.workers import Holder, Stretch
from weightsync.errors import ConfigurationError, MissingDependencyError, TransportError

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20


def settings(**changes) -> BenchSettings:
    given = {
        "layers": 2, "policy_ranks": 1, "rollout_ranks": 1, "repeats": 2, "bucket_mib": 1, "verify": "full",
        "threads": 1,
    }  # fmt: skip
    return BenchSettings(**{**given, **changes})


@pytest.fixture
def small_model(monkeypatch):
    monkeypatch.setattr(shapes, "VOCABULARY", 512)
    model = SharedModel(1, seed=3)
    yield model.handle
    model.close()


class LocalMember:
    """A holder in this process, asked as one in another."""

    def __init__(self, model, side: str) -> None:
        self.holder = Holder(model, (side,), 1)

    def start(self, method: str, *args) -> None:
        self.value = getattr(self.holder, method)(*args)

    def result(self):
        return self.value


class FakeTrial(Trial):
    kind, name, topology = "transport", "fake", "pairs"

    def __init__(self, act) -> None:
        self.act = act

    @contextmanager
    def crew(self, model):
        yield Crew([LocalMember(model, "policy")], [LocalMember(model, "rollout")])

    def refit(self, crew, number):
        return self.act(crew.rollout[0].holder, number)


def copied(holder: Holder, number: int) -> list[Stretch]:
    holder.copy()
    return [Stretch("policy", 1.0, 2.0, {"pack": number}), Stretch("rollout", 1.5, 3.0, {"load": 0.5})]


# The model.


def test_the_shapes_are_those_of_qwen3_0_6b() -> None:
    assert len(parameter_shapes(28)) == 310
    assert model_bytes(28) == 2 * 596_049_920
    assert parameter_shapes(1)["model.layers.0.self_attn.k_proj.weight"] == (1024, 1024)
    with pytest.raises(ConfigurationError, match="28 layers"):
        parameter_shapes(29)


def test_parameters_are_shared_finite_and_gone_with_their_last_user(small_model) -> None:
    first, second = small_model.attach(), small_model.attach()
    assert list(first) == list(parameter_shapes(1))
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name])
        assert tensor.dtype == torch.bfloat16
        assert float(tensor.abs().max()) < 2.0
    assert not torch.equal(
        first["model.layers.0.mlp.gate_proj.weight"], first["model.layers.0.mlp.up_proj.weight"]
    )
    first["model.norm.weight"].fill_(1.0)
    assert float(second["model.norm.weight"].sum()) == 1024.0
    assert "weightsync" not in " ".join(os.listdir("/dev/shm"))


# What is counted.


def test_memory_counts_what_a_process_took_and_gave_back_since_the_mark() -> None:
    mark = mark_memory()
    taken = torch.ones(64 * MIB, dtype=torch.uint8)
    del taken
    use = memory_since(mark)
    assert 60 * MIB <= use.extra <= 80 * MIB
    assert memory_since(mark_memory()).extra <= 8 * MIB


def test_what_processes_have_mapped_together_counts_once() -> None:
    uses = [MemoryUse(100, {"a": 60}), MemoryUse(90, {"a": 50, "b": 20})]
    assert together(uses) == 140


def test_a_plan_holds_every_byte_once_in_full_buckets() -> None:
    parameters = {"a": torch.zeros(5, dtype=torch.uint8), "b": torch.zeros(9, dtype=torch.uint8)}
    buckets = plan_buckets(parameters, 4)
    assert buckets == [
        [("a", 0, 4)], [("a", 4, 5), ("b", 0, 3)], [("b", 3, 7)], [("b", 7, 9)],
    ]  # fmt: skip


def test_a_refit_lasts_from_the_first_beginning_to_the_last_end(small_model) -> None:
    measured = measure(FakeTrial(copied), small_model, settings(repeats=3), lambda text: None)
    assert measured.error == ""
    assert measured.refits == [2.0, 2.0, 2.0]
    assert len(measured.copies) == 3
    assert measured.phases == {"policy": {"pack": 4.0}, "rollout": {"load": 0.5}}
    assert measured.ratio == pytest.approx(sorted(measured.copies)[1] / 2.0)


# Failures.


def test_a_missing_byte_is_a_failure(small_model) -> None:
    def act(holder, number):
        done = copied(holder, number)
        if number == 2:
            holder.served["model.norm.weight"].view(torch.uint8)[7] ^= 1
        return done

    measured = measure(FakeTrial(act), small_model, settings(), lambda text: None)
    assert "after refit 2, rollout rank 0 serves other bytes" in measured.error
    assert not measured.ran


def test_a_trial_that_raises_is_a_row_with_its_error(small_model) -> None:
    def act(holder, number):
        raise TransportError("the cable broke")

    measured = measure(FakeTrial(act), small_model, settings(), lambda text: None)
    assert "the cable broke" in measured.error
    result = BenchResult(settings(), machine(), [measured])
    assert result.failed
    assert json.loads(json.dumps(result.to_dict()))["measurements"][0]["error"] == measured.error


@pytest.mark.parametrize(("required", "key"), [(False, "unavailable"), (True, "error")])
def test_a_package_that_is_missing_is_a_failure_only_where_it_was_asked_for(
    small_model, required: bool, key: str
) -> None:
    def act(holder, number):
        raise MissingDependencyError("pip install 'weightsync[x]'")

    trial = FakeTrial(act)
    trial.required = required
    measured = measure(trial, small_model, settings(), lambda text: None)
    assert getattr(measured, key) == "pip install 'weightsync[x]'"
    assert (measured.error != "") == required


# Which transports.


@pytest.mark.parametrize(
    ("text", "wish"),
    [
        ("nixl", Wish("nixl")),
        (" ipc:star ", Wish("ipc", "star")),
        ("my_pkg.refit:MyEngine", Wish("my_pkg.refit:MyEngine")),
        ("my_pkg.refit:MyEngine:ring", Wish("my_pkg.refit:MyEngine", "ring")),
    ],
)
def test_a_transport_may_name_its_topology(text: str, wish: Wish) -> None:
    assert Wish.read(text) == wish


def test_topologies_with_the_same_connections_are_measured_once() -> None:
    def names(policy: int, rollout: int) -> list[str]:
        trials, _ = transport_trials([Wish("nixl")], settings(policy_ranks=policy, rollout_ranks=rollout))
        return [trial.topology for trial in trials]

    assert names(1, 1) == ["pairs"]
    assert names(1, 3) == ["star", "ring", "tree"]
    assert names(2, 2) == ["pairs", "star", "ring", "stripes"]


def test_what_cannot_run_here_says_why() -> None:
    trials, without = transport_trials([], settings(rollout_ranks=2))
    assert {"nixl", "ipc", "gloo"} <= {trial.name for trial in trials}
    reasons = {each.name: each.unavailable for each in without}
    assert "device: cuda" in reasons["nccl"]
    assert "add policy workers" in reasons["naive"]
    assert not any(each.error for each in without)


def test_what_was_asked_for_and_cannot_run_is_a_failure() -> None:
    trials, without = transport_trials([Wish("nixl", "pairs")], settings(rollout_ranks=2))
    assert trials == []
    assert "topology: auto" in without[0].error


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="nixl"):
        transport_trials([Wish("nxil")], settings())


def test_ratios_are_of_neighbours() -> None:
    measured = Measurement(kind="transport", name="x", bytes=8, copies=[1.0, 4.0], refits=[2.0, 4.0])
    assert measured.ratios == [0.5, 1.0]
    assert measured.to_dict()["ratio"] == 0.75


# The command.


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "weightsync", "bench", "--layers", "1", "--repeats", "1", *arguments]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )


@pytest.mark.slow
@pytest.mark.nixl
def test_a_run_prints_json_and_draws(tmp_path) -> None:
    picture, file = tmp_path / "bench.png", tmp_path / "out" / "bench.json"
    done = bench(
        "--transports", "nixl:ring,ipc,tests.bench_engines:FlippingCheckpointEngine", "--rollout-ranks", "2",
        "--topology", "star", "--no-baselines", "--json", "--json-file", str(file), "--png", str(picture),
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    result = json.loads(done.stdout)
    assert json.loads(file.read_text()) == result
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert result["bytes"] == model_bytes(1)
    nixl, ipc, flipping = result["measurements"]
    assert (nixl["name"], nixl["topology"]) == ("nixl", "ring")
    assert (ipc["name"], ipc["topology"]) == ("ipc", "star")
    for each in (nixl, ipc):
        assert each["error"] == ""
        assert each["ratio"] == each["copies"][0] / each["refits"][0] > 0
        assert {"pack", "wait"} <= set(each["phases"]["policy"])
        assert {"receive", "fetch", "load"} <= set(each["phases"]["rollout"])
        assert 2 * MIB <= each["extra_bytes"] < 3 * model_bytes(1)
    assert "serves other bytes than the policy has" in flipping["error"]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.nixl
@pytest.mark.ray
def test_the_baselines_run_and_are_shown_as_a_table() -> None:
    done = bench("--transports", "naive")
    assert done.returncode == 0, done.stdout + done.stderr
    for title in ("one plain copy", "gloo by hand", "safetensors file", "Ray direct", "naive"):
        assert title in done.stdout
    assert "FAILED" not in done.stdout


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_leaves_no_process_behind(number: signal.Signals) -> None:
    with subprocess.Popen(
        command("--transports", "ipc", "--no-baselines", "--repeats", "1000"),
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        parent, end = psutil.Process(process.pid), time.monotonic() + 60
        while len(started := parent.children(recursive=True)) < 4 and time.monotonic() < end:
            time.sleep(0.1)
        assert len(started) >= 4
        process.send_signal(number)
        assert process.wait(30) != 0
    _, alive = psutil.wait_procs(started, timeout=10)
    assert alive == []
