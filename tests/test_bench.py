"""`weightsync bench`: what it measures on, what it counts and refuses, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path

import psutil
import pytest
import torch

from weightsync.benchmarking import shapes
from weightsync.benchmarking.baselines import plan_buckets
from weightsync.benchmarking.crew import Crew
from weightsync.benchmarking.memory import MemoryUse, mark_memory, memory_since, together
from weightsync.benchmarking.nixl_read import ReadTrial, ReadWorker
from weightsync.benchmarking.regions import PartMemory, RegionWorker
from weightsync.benchmarking.run import BenchResult, machine
from weightsync.benchmarking.shapes import Part, SharedModel, model_bytes, parameter_shapes
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

    def __init__(self, model, side: str, part: Part = Part(), holder: type[Holder] = Holder) -> None:
        self.holder = holder(model, (side,), 1, part)

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


class HalvesTrial(FakeTrial):
    """Two tensor-parallel rollout ranks."""

    exact = True

    @contextmanager
    def crew(self, model):
        parts = [Part(0, 2), Part(1, 2)]
        rollout = [LocalMember(model, "rollout", part) for part in parts]
        yield Crew([LocalMember(model, "policy")], rollout, parts=parts)

    def refit(self, crew, number):
        return self.act([member.holder for member in crew.rollout], number)


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


def test_a_tensor_parallel_rank_serves_its_part_of_each_parameter(small_model) -> None:
    whole, served = small_model.attach(), Holder(small_model, ("rollout",), 1, Part(1, 2))
    served.load(iter(whole.items()))
    for name, rows, columns in (
        ("mlp.gate_proj.weight", slice(1536, None), slice(None)),
        ("mlp.down_proj.weight", slice(None), slice(1536, None)),
        ("self_attn.o_proj.weight", slice(None), slice(1024, None)),
        ("self_attn.k_proj.weight", slice(512, None), slice(None)),
    ):
        full = f"model.layers.0.{name}"
        assert torch.equal(served.served[full], whole[full][rows, columns])
    assert torch.equal(served.served["model.norm.weight"], whole["model.norm.weight"])
    norms = sum(t.nbytes for name, t in whole.items() if name.endswith("norm.weight"))
    assert (
        served.stored_bytes()
        == (model_bytes(1) + norms) // 2
        == settings(layers=1, rollout_tp=2).stored_bytes
    )
    with pytest.raises(ConfigurationError, match="3 tensor-parallel ranks do not divide"):
        parameter_shapes(1, Part(0, 3))


def test_what_ranks_hold_and_store_tells_of_each_element_once(small_model) -> None:
    whole = small_model.attach()
    held = [PartMemory.rows(whole, rank, 3) for rank in range(3)]
    parts = [Part(rank, 2) for rank in range(2)]
    stored = [PartMemory.served(whole, shapes.new_parameters(1, part), part) for part in parts]
    norms = sum(t.nbytes for name, t in whole.items() if name.endswith("norm.weight"))
    for memories, replicated in ((held, 0), (stored, norms)):
        assert sum(s.nbytes for m in memories for s in m.table.storages) == model_bytes(1) + replicated
    index = [storage.name for storage in held[2].table.storages].index("model.embed_tokens.weight")
    assert torch.equal(held[2].storage(index), whole["model.embed_tokens.weight"][342:].reshape(-1))


def test_bytes_copies_and_what_is_made_once_are_counted_by_rank(small_model) -> None:
    def act(holders, number):
        stretches = [Stretch("policy", 0.0, 1.0, {"register": 0.25 / number}, {"bytes_moved": 1.0})]
        for holder in holders:
            holder.copy()
            counts = {"bytes_moved": holder.stored_bytes(), "bytes_in_place": 10, "bytes_staged": 2}
            stretches.append(Stretch("rollout", 0.0, 1.0, {"plan": 0.5 if number == 1 else 0.0}, counts))
        return stretches

    trial = HalvesTrial(act)
    trial.connect_seconds = lambda crew: {"plan": 2.0}
    measured = measure(trial, small_model, settings(layers=1), lambda text: None)
    assert measured.error == ""
    assert (
        measured.received_bytes
        == measured.least_bytes
        == [Holder.stored_bytes(h) for h in halves(small_model)]
    )
    assert measured.receives_least
    assert measured.copies_by_bytes == {"in_place": 20, "staged": 4}
    assert measured.made_once == {
        "plan": {"connecting": 2.0, "first": 0.5, "later": 0.0},
        "register": {"connecting": 0.0, "first": 0.25, "later": 0.125},
        "prepare": {"connecting": 0.0, "first": 0.0, "later": 0.0},
    }


def halves(model) -> list[Holder]:
    return [Holder(model, ("rollout",), 1, Part(rank, 2)) for rank in range(2)]


def test_a_byte_more_than_is_stored_is_a_failure_where_only_parts_are_read(small_model) -> None:
    def act(holders, number):
        for holder in holders:
            holder.copy()
        return [Stretch("rollout", 0.0, 1.0, {}, {"bytes_moved": h.stored_bytes() + number}) for h in holders]

    measured = measure(HalvesTrial(act), small_model, settings(), lambda text: None)
    assert "received" in measured.error
    assert not measured.ran


def test_memory_of_connecting_and_of_refits_is_told_apart(small_model) -> None:
    holder = Holder(small_model, ("rollout",), 1)
    holder.mark()
    connected = torch.ones(48 * MIB, dtype=torch.uint8)
    holder.mark_connected()
    taken = torch.ones(96 * MIB, dtype=torch.uint8)
    del taken
    assert 90 * MIB <= holder.refit_memory().extra <= 110 * MIB
    assert 138 * MIB <= holder.memory().extra <= 160 * MIB
    assert int(connected[0]) == 1


# Failures.


def test_a_wrong_byte_of_one_rank_s_part_is_a_failure(small_model) -> None:
    def act(holders, number):
        for holder in holders:
            holder.copy()
        holders[1].served["model.layers.0.mlp.down_proj.weight"].view(torch.uint8)[5, 9] ^= 1
        return [Stretch("rollout", 0.0, 1.0, {}, {"bytes_moved": h.stored_bytes()}) for h in holders]

    measured = measure(HalvesTrial(act), small_model, settings(), lambda text: None)
    assert "after refit 1, rollout rank 1 serves other bytes" in measured.error


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
        ("nixl:regions", Wish("nixl", "regions")),
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

    assert names(1, 1) == ["pairs", "regions"]
    assert names(1, 3) == ["star", "ring", "tree", "regions"]
    assert names(2, 2) == ["pairs", "star", "ring", "stripes", "regions"]


def test_a_transport_that_cannot_read_regions_says_so() -> None:
    trials, without = transport_trials([Wish("ipc", "regions")], settings())
    assert trials == []
    assert "ipc cannot refit by regions" in without[0].error


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
        "--transports", "nixl:ring,ipc,nixl:regions,tests.bench_engines:FlippingCheckpointEngine",
        "--rollout-ranks", "2", "--rollout-tp", "2",
        "--topology", "star", "--no-baselines", "--json", "--json-file", str(file), "--png", str(picture),
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    result = json.loads(done.stdout)
    assert json.loads(file.read_text()) == result
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert result["bytes"] == model_bytes(1)
    nixl, ipc, regions, flipping = result["measurements"]
    assert (nixl["name"], nixl["topology"]) == ("nixl", "ring")
    assert (ipc["name"], ipc["topology"]) == ("ipc", "star")
    for each in (nixl, ipc):
        assert each["error"] == ""
        assert each["ratio"] == each["copies"][0] / each["refits"][0] > 0
        assert {"pack", "wait"} <= set(each["phases"]["policy"])
        assert {"receive", "fetch", "load"} <= set(each["phases"]["rollout"])
        assert 2 * MIB <= each["extra_bytes"] < 3 * model_bytes(1)
        assert each["received_bytes"] == [model_bytes(1)] * 2
        assert not each["receives_least"]
    assert regions["error"] == ""
    assert regions["received_bytes"] == regions["least_bytes"] == [regions["bytes"]] * 2
    assert regions["receives_least"]
    assert regions["bytes"] < 0.51 * model_bytes(1)
    assert regions["made_once"]["register"]["later"] == regions["made_once"]["plan"]["later"] == 0.0
    assert (
        regions["refit_bytes"] < regions["extra_bytes"] <= regions["connect_bytes"] + regions["refit_bytes"]
    )
    assert "serves other bytes than the policy has" in flipping["error"]


@pytest.mark.slow
@pytest.mark.nixl
def test_a_refit_by_regions_receives_what_is_stored_and_makes_its_plan_once(small_model) -> None:
    """In this process: 2 policy ranks with half of the rows each, 2 tensor-parallel rollout ranks."""
    chosen = settings(layers=1, policy_ranks=2, rollout_ranks=2, rollout_tp=2)
    (trial,), _ = transport_trials([Wish("nixl", "regions")], chosen)
    trial.crew = lambda model: threads_of(model, chosen)
    measured = measure(trial, small_model, chosen, lambda text: None)
    assert measured.error == ""
    assert measured.received_bytes == measured.least_bytes == [chosen.stored_bytes] * 2
    assert sum(measured.copies_by_bytes.values()) == 2 * chosen.stored_bytes
    assert measured.copies_by_bytes["whole"] == 0
    # Columns are cut into runs that are packed; the rest is read from parameter to parameter.
    packed = 2 * (1024 * 3072 + 1024 * 2048)
    assert measured.copies_by_bytes["staged"] == packed
    assert measured.made_once["plan"]["connecting"] > 0
    assert measured.made_once["register"]["first"] > 0
    assert measured.made_once["plan"]["later"] == measured.made_once["register"]["later"] == 0.0
    assert {"pack", "wait"} <= set(measured.phases["policy"])
    assert {"fetch", "verify"} <= set(measured.phases["rollout"])


class ThreadMember:
    """A holder that does each thing in a thread, so that ranks in one process wait for each other."""

    def __init__(self, model, side: str, part: Part) -> None:
        self.holder = RegionWorker(model, (side,), 1, part)

    def start(self, method: str, *args) -> None:
        self.pending = ThreadPoolExecutor(1).submit(getattr(self.holder, method), *args)

    def result(self):
        return self.pending.result(timeout=60)


@contextmanager
def threads_of(model, chosen: BenchSettings):
    parts = [Part(rank, chosen.rollout_tp) for rank in range(chosen.rollout_ranks)]
    policy = [ThreadMember(model, "policy", Part()) for _ in range(chosen.policy_ranks)]
    yield Crew(policy, [ThreadMember(model, "rollout", part) for part in parts], parts=parts)


@pytest.mark.nixl
def test_a_bare_read_brings_everything(small_model) -> None:
    trial = ReadTrial(settings(layers=1))
    policy, rollout = (LocalMember(small_model, side, holder=ReadWorker) for side in ("policy", "rollout"))
    trial.crew = lambda model: nullcontext(Crew([policy], [rollout]))
    measured = measure(trial, small_model, settings(layers=1), lambda text: None)
    assert measured.error == ""
    assert measured.received_bytes == measured.least_bytes == [model_bytes(1)]
    assert measured.phases["rollout"]["fetch"] == measured.seconds > 0


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.nixl
@pytest.mark.ray
def test_the_baselines_run_and_are_shown_as_a_table() -> None:
    done = bench("--transports", "naive,nixl:regions")
    assert done.returncode == 0, done.stdout + done.stderr
    others = ("gloo by hand", "safetensors file", "Ray direct", "bare NIXL read")
    for title in ("one plain copy", *others, "naive", "nixl regions"):
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
