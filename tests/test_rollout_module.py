"""Receiver, endpoint and module loader, fed by an engine in this process."""

from __future__ import annotations

import asyncio

import pytest
import torch

from tests.rollout_engines import RecordingEngine
from weightsync.errors import (
    DigestError,
    IncompleteStreamError,
    LifecycleError,
    ManifestError,
    WorkerFencedError,
)
from weightsync.outcomes import Outcome
from weightsync.rollout.endpoint import ROLLOUT_METHODS, RolloutEndpoint
from weightsync.rollout.loader import WeightLoader
from weightsync.rollout.module import ModuleLoader, ModuleRolloutWorker
from weightsync.rollout.receiver import RefitReceiver
from weightsync.tensors import TensorSpec, WeightManifest

BACKEND = "tests.rollout_engines:RecordingEngine"


class Net(torch.nn.Module):
    def __init__(self, seed: int = 0, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(11, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.register_buffer("cache", torch.randn(3), persistent=False)
        if tied:
            self.head.weight = self.embed.weight
        self.norm.running_mean.normal_()


def stream_of(model, dedup=True):
    state = dict(model.state_dict())
    if dedup:
        names = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
        state = {name: tensor for name, tensor in state.items() if name in names}
    return [(name, tensor.clone()) for name, tensor in state.items()]


def make(model, stream, bucket_size=128, announce=True, loader=None):
    engine = RecordingEngine(bucket_size, announce)
    engine.stream = stream
    return engine, RefitReceiver(engine, loader or ModuleLoader(model), rank=3)


def same(model, other):
    mine, theirs = model.state_dict(), other.state_dict()
    return all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("announce", [True, False])
@pytest.mark.parametrize("bucket_size", [1, 300, 1 << 20])
def test_three_refits(announce, bucket_size, capsys):
    model = Net(0)
    cache = model.cache.clone()
    for version in (1, 2, 5):
        source = Net(version)
        engine, receiver = make(model, stream_of(source), bucket_size, announce)
        figures = receiver.receive(version)
        assert {"version": None, "dirty": True, "fenced": None}.items() <= receiver.status().items()
        assert receiver.commit(version) == version
        assert same(model, source)
        assert {"version": version, "dirty": False, "fenced": None}.items() <= receiver.status().items()
        assert figures["tensors"] == len(engine.stream) == 7
        assert figures["bytes"] == sum(t.numel() * t.element_size() for _, t in engine.stream)
        assert figures["batches"] == engine.calls.count("batch") == engine.calls.count("released")
        assert set(figures["seconds"]) == {"receive", "digest", "load", "total"}
        assert f"[module refit] Loaded 7 tensors in {figures['batches']} batches" in capsys.readouterr().out
    assert torch.equal(model.cache, cache)


def test_parameters_may_be_replaced_between_refits():
    model = Net(0)
    engine, receiver = make(model, stream_of(Net(1)))
    receiver.receive(1)
    receiver.commit(1)
    model.head.weight = torch.nn.Parameter(torch.zeros(11, 6))
    engine.stream = stream_of(Net(2))
    receiver.receive(2)
    assert same(model, Net(2))


@pytest.mark.parametrize("names", ["both", "embed", "head"])
def test_tied_names_are_accepted_either_way(names):
    source = Net(1, tied=True)
    stream = [
        (name, tensor)
        for name, tensor in stream_of(source, dedup=False)
        if names == "both" or not name.startswith("head" if names == "embed" else "embed")
    ]
    model = Net(0, tied=True)
    make(model, stream)[1].receive(1)
    assert same(model, source)
    assert model.head.weight is model.embed.weight


def spoil(stream, how):
    stream = list(stream)
    name, tensor = stream[1]
    if how == "missing":
        del stream[1]
    elif how == "unknown":
        stream.append(("mtp.weight", tensor))
    elif how == "misshapen":
        stream[1] = (name, tensor[:-1])
    elif how == "mistyped":
        stream[1] = (name, tensor.to(torch.float64))
    elif how == "repeated":
        stream.append((name, tensor))
    return stream


@pytest.mark.parametrize("how", ["missing", "unknown", "misshapen", "mistyped", "repeated"])
def test_a_manifest_that_does_not_fit_writes_nothing(how):
    model, before = Net(0), Net(0)
    engine, receiver = make(model, spoil(stream_of(Net(1)), how))
    with pytest.raises(ManifestError) as caught:
        receiver.receive(1)
    expected = "mtp.weight" if how == "unknown" else "norm.weight"
    assert caught.value.context.tensor == expected
    assert caught.value.context.side == "rollout"
    assert caught.value.context.rank == 3
    assert same(model, before)
    assert {"version": None, "dirty": False, "fenced": None}.items() <= receiver.status().items()
    receiver.require_serving()
    assert engine.errors == [caught.value]
    assert engine.manifest_check is None
    engine.stream = stream_of(Net(2))
    receiver.receive(1)
    assert receiver.commit(1) == 1
    assert same(model, Net(2))


@pytest.mark.parametrize("how", ["missing", "unknown", "misshapen", "mistyped", "repeated"])
def test_without_a_manifest_the_stream_is_checked_before_the_end(how):
    model = Net(0)
    _, receiver = make(model, spoil(stream_of(Net(1)), how), announce=False)
    with pytest.raises(ManifestError):
        receiver.receive(1)
    assert receiver.dirty
    assert receiver.version is None
    with pytest.raises(WorkerFencedError):
        receiver.require_serving()


def test_policies_for_names():
    stream = spoil(spoil(stream_of(Net(1)), "unknown"), "missing")
    loader = ModuleLoader(Net(0), allow_missing=["norm.*"], allow_unused=["mtp.*"])
    make(loader.model, stream, loader=loader)[1].receive(1)
    assert torch.equal(loader.model.head.weight, Net(1).head.weight)


def test_promised_but_not_sent():
    engine, receiver = make(Net(0), stream_of(Net(1)))
    specs = [TensorSpec.of(name, tensor) for name, tensor in engine.stream]
    engine.manifest = WeightManifest.build(specs)
    engine.stream = engine.stream[:-1]
    with pytest.raises(IncompleteStreamError, match="1 of 7 promised tensors"):
        receiver.receive(1)
    assert receiver.dirty


def test_sent_but_not_promised():
    engine, receiver = make(Net(0), stream_of(Net(1)))
    engine.manifest = WeightManifest.build(TensorSpec.of(n, t) for n, t in engine.stream)
    engine.stream[0] = (engine.stream[0][0], engine.stream[0][1].to(torch.int32))
    with pytest.raises(ManifestError, match=r"promised was 'embed\.weight' float32"):
        receiver.receive(1)
    assert not receiver.dirty


def test_nothing_received_is_an_error():
    _, receiver = make(Net(0), [], announce=False)
    with pytest.raises(IncompleteStreamError, match="no tensors"):
        receiver.receive(1)
    assert not receiver.dirty


def test_an_empty_manifest_for_an_empty_model():
    _, receiver = make(torch.nn.Module(), [])
    figures = receiver.receive(1)
    assert (figures["tensors"], figures["batches"], figures["bytes"]) == (0, 0, 0)
    assert receiver.commit(1) == 1


class CountingLoader(ModuleLoader):
    """Counts the calls; keeps tensors until `finish`, as inference engines do, but copies them as it must."""

    def __init__(self, model, fail_at=None):
        super().__init__(model)
        self.calls = []
        self.kept = []
        self.fail_at = fail_at

    def begin(self):
        self.calls.append("begin")
        super().begin()

    def load(self, batch):
        self.calls.append("load")
        if self.calls.count("load") - 1 == self.fail_at:
            raise ValueError("disk on fire")
        self.kept += [(name, tensor.clone()) for name, tensor in batch]

    def finish(self):
        super().load(self.kept)
        self.calls.append("finish")
        super().finish()

    def abort(self):
        self.kept = []
        self.calls.append("abort")


@pytest.mark.parametrize("bucket_size", [1, 1 << 20])
def test_begin_and_finish_once(bucket_size):
    loader = CountingLoader(Net(0))
    assert isinstance(loader, WeightLoader)
    make(loader.model, stream_of(Net(1)), bucket_size, loader=loader)[1].receive(1)
    assert loader.calls[0] == "begin"
    assert loader.calls[-1] == "finish"
    assert set(loader.calls[1:-1]) == {"load"}
    assert same(loader.model, Net(1))


def test_batches_are_released_after_loading_and_in_step():
    engine, receiver = make(Net(0), stream_of(Net(1)), bucket_size=1)
    receiver.receive(1)
    assert engine.calls == ["manifest", *["batch", "released"] * 7, "end"]


@pytest.mark.parametrize("at", [0, 3, 6])
def test_a_loader_that_raises(at):
    loader = CountingLoader(Net(0), fail_at=at)
    engine, receiver = make(loader.model, stream_of(Net(1)), bucket_size=1, loader=loader)
    with pytest.raises(ValueError, match="disk on fire") as caught:
        receiver.receive(1)
    assert engine.errors == [caught.value]
    assert engine.calls[-1] == "abort"
    assert loader.calls[-1] == "abort"
    position = receiver.position_of(caught.value)
    assert (position.phase, position.tensor) == ("load", engine.stream[at][0])
    assert any("rollout rank 3" in note for note in caught.value.__notes__)
    with pytest.raises(WorkerFencedError, match="disk on fire"):
        receiver.require_serving()
    with pytest.raises(LifecycleError, match="nothing was received"):
        receiver.commit(1)
    loader.fail_at = None
    receiver.receive(1)
    receiver.commit(1)
    receiver.require_serving()
    assert same(loader.model, Net(1))


@pytest.mark.parametrize("at", [0, 3])
def test_an_engine_that_raises(at):
    engine, receiver = make(Net(0), stream_of(Net(1)), bucket_size=1)
    engine.fail_after = at
    with pytest.raises(DigestError) as caught:
        receiver.receive(1)
    assert caught.value.context.phase == "receive"
    assert engine.errors == [caught.value]
    assert receiver.dirty is (at > 0)


def test_failing_clean_up_does_not_hide_the_error():
    loader = CountingLoader(Net(0), fail_at=1)
    loader.abort = lambda: 1 / 0
    engine, receiver = make(loader.model, stream_of(Net(1)), bucket_size=1, loader=loader)
    with pytest.raises(ValueError, match="disk on fire") as caught:
        receiver.receive(1)
    assert any("could not clean up the model: ZeroDivisionError" in note for note in caught.value.__notes__)
    assert engine.errors == [caught.value]


def test_two_refits_at_once():
    engine, receiver = make(Net(0), stream_of(Net(1)))

    class Nested(ModuleLoader):
        def load(self, batch):
            with pytest.raises(LifecycleError, match="while another one runs"):
                receiver.receive(2)
            super().load(batch)

    receiver.loader = Nested(receiver.loader.model)
    receiver.receive(1)
    assert receiver.commit(1) == 1
    assert engine.errors == []


def test_receiving_inside_an_event_loop():
    _, receiver = make(Net(0), stream_of(Net(1)))

    async def main():
        with pytest.raises(LifecycleError, match="await receive_async"):
            receiver.receive(1)
        return await receiver.receive_async(1)

    assert asyncio.run(main())["tensors"] == 7


def test_versions_increase():
    engine, receiver = make(Net(0), stream_of(Net(1)))
    with pytest.raises(LifecycleError, match="nothing was received"):
        receiver.commit(1)
    receiver.receive(4)
    with pytest.raises(LifecycleError, match="version 4 was received"):
        receiver.commit(5)
    receiver.commit(4)
    for stale in (3, 4):
        with pytest.raises(LifecycleError, match="versions must increase"):
            receiver.receive(stale)
    assert {"version": 4, "dirty": False, "fenced": None}.items() <= receiver.status().items()
    assert engine.calls.count("end") == 1


def test_fence():
    _, receiver = make(Net(0), stream_of(Net(1)))
    receiver.receive(1)
    receiver.commit(1)
    receiver.fence("another rank failed")
    assert {"version": 1, "dirty": False, "fenced": None}.items() <= receiver.status().items()
    receiver.receive(2)
    receiver.fence("another rank failed")
    assert {
        "version": None,
        "dirty": True,
        "fenced": "another rank failed",
    }.items() <= receiver.status().items()
    with pytest.raises(WorkerFencedError, match="another rank failed"):
        receiver.require_serving()
    with pytest.raises(LifecycleError):
        receiver.commit(2)
    receiver.receive(2)
    assert receiver.commit(2) == 2
    receiver.require_serving()


def test_a_module_on_the_meta_device_is_refused():
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    _, receiver = make(model, stream_of(torch.nn.Linear(2, 2)))
    with pytest.raises(LifecycleError, match="not materialised"):
        receiver.receive(1)


def test_error_lists_are_bounded():
    stream = [(f"unknown.{i}", torch.zeros(1)) for i in range(1000)]
    with pytest.raises(ManifestError) as caught:
        make(Net(0), stream)[1].receive(1)
    assert "and 995 more" in str(caught.value)
    assert len(str(caught.value)) < 500


def values(outcomes):
    outcome = Outcome.from_dict(outcomes[0] if isinstance(outcomes, list) else outcomes)
    assert outcome.error is None, outcome.error
    return outcome.value


def error(outcomes):
    outcome = Outcome.from_dict(outcomes[0] if isinstance(outcomes, list) else outcomes)
    assert outcome.error is not None
    return outcome.error


def connected(model, rank_prefix=0):
    worker = ModuleRolloutWorker(model, rank_prefix=rank_prefix)
    rpc = worker.checkpoint_engine_rpc
    values(rpc("init_checkpoint_engine", {"backend": BACKEND, "bucket_size_bytes": 64, "engine_kwargs": {}}))
    assert values(rpc("prepare_checkpoint_engine")) == {"address": "here", "pair": [1, 2]}
    group = {"train_world_size": 2, "rollout_world_size": 4, "metadata": [["a"], b"b"]}
    values(rpc("init_checkpoint_engine_process_group", {"rank_prefix": rank_prefix, **group}))
    return worker, worker._endpoint.receiver.engine


def test_worker_protocol_end_to_end():
    model = Net(0)
    worker, engine = connected(model, rank_prefix=2)
    rpc, control = worker.checkpoint_engine_rpc, worker.refit_control
    assert "rank 2 of 2+4: [['a'], b'b']" in engine.calls
    assert values(control("describe"))["world_size"] == 1
    assert values(rpc("checkpoint_engine_total_memory_bytes", {"device": "cpu"})) > 1 << 20
    engine.stream = stream_of(Net(1))
    values(control("pause", {"in_flight": "wait"}))
    with pytest.raises(LifecycleError, match="paused"):
        worker.require_serving()
    values(rpc("open_refit", {"epoch": 1, "version": 1}))
    figures = values(rpc("update_weights_from_checkpoint_engine"))
    assert figures["tensors"] == 7
    assert error(control("publish_version", {"version": 1})).kind == "LifecycleError"
    assert rpc("commit_refit", {"version": 1}) == [{"rank": 2, "value": 1}]
    values(control("reset_caches"))
    values(control("publish_version", {"version": 1}))
    values(control("resume"))
    worker.require_serving()
    assert worker.published_version == 1
    assert same(model, Net(1))
    assert engine.calls.count("open 1 1") == 1
    values(rpc("finalize_checkpoint_engine"))
    values(rpc("close_checkpoint_engine"))
    values(rpc("close_checkpoint_engine"))
    assert {"version": 1, "dirty": False, "fenced": None}.items() <= values(rpc("refit_status")).items()


def test_order_of_calls():
    worker = ModuleRolloutWorker(Net(0))
    rpc = worker.checkpoint_engine_rpc
    for method in ("prepare_checkpoint_engine", "update_weights_from_checkpoint_engine"):
        assert error(rpc(method)).kind == "LifecycleError"
    assert error(rpc("open_refit", {"epoch": 1, "version": 1})).kind == "LifecycleError"
    assert error(rpc("commit_refit", {"version": 1})).kind == "LifecycleError"
    assert values(rpc("fence_refit", {"reason": "x"})) is None
    assert {"version": None, "dirty": False, "fenced": None}.items() <= values(rpc("refit_status")).items()
    values(rpc("init_checkpoint_engine", {"backend": BACKEND, "bucket_size_bytes": 64, "engine_kwargs": {}}))
    assert "process_group comes first" in error(rpc("open_refit", {"epoch": 1, "version": 1})).message
    bad = {"rank_prefix": 4, "train_world_size": 1, "rollout_world_size": 4, "metadata": []}
    assert "outside a world of 4" in error(rpc("init_checkpoint_engine_process_group", bad)).message
    good = {**bad, "rank_prefix": 0}
    values(rpc("init_checkpoint_engine_process_group", good))
    assert "without open_refit" in error(rpc("update_weights_from_checkpoint_engine")).message
    assert "no method 'shutdown'" in error(rpc("shutdown")).message
    assert error(worker.refit_control("explode")).kind == "ConfigurationError"
    assert error(worker.refit_control("pause", {"in_flight": "maybe"})).kind == "ConfigurationError"
    values(rpc("close_checkpoint_engine"))
    assert error(rpc("open_refit", {"epoch": 1, "version": 1})).kind == "LifecycleError"


def test_a_failed_update_as_an_outcome():
    worker, engine = connected(Net(0), rank_prefix=1)
    rpc = worker.checkpoint_engine_rpc
    engine.stream = stream_of(Net(1))
    engine.fail_after = 2
    values(rpc("open_refit", {"epoch": 1, "version": 1}))
    record = error(rpc("update_weights_from_checkpoint_engine"))
    assert (record.kind, record.context.rank, record.context.side) == ("DigestError", 1, "rollout")
    assert (record.context.phase, record.context.bucket) == ("receive", 2)
    assert "Traceback" in record.traceback
    values(rpc("fence_refit", {"reason": "the refit failed"}))
    assert {"version": None, "dirty": True, "fenced": "the refit failed"}.items() <= values(
        rpc("refit_status")
    ).items()
    values(worker.refit_control("resume"))
    with pytest.raises(WorkerFencedError, match="the refit failed"):
        worker.require_serving()
    engine.fail_after = None
    values(rpc("open_refit", {"epoch": 2, "version": 1}))
    values(rpc("update_weights_from_checkpoint_engine"))
    values(rpc("commit_refit", {"version": 1}))
    worker.require_serving()


def test_foreign_errors_keep_phase_and_tensor():
    loader = CountingLoader(Net(0), fail_at=1)
    endpoint = RolloutEndpoint(1, lambda: loader)
    endpoint.call("init_checkpoint_engine", {"backend": BACKEND, "bucket_size_bytes": 1})
    group = {"rank_prefix": 4, "train_world_size": 1, "rollout_world_size": 8, "metadata": []}
    endpoint.call("init_checkpoint_engine_process_group", group)
    endpoint.receiver.engine.stream = stream_of(Net(1))
    endpoint.call("open_refit", {"epoch": 1, "version": 1})
    record = error(endpoint.call("update_weights_from_checkpoint_engine"))
    assert (record.kind, record.message) == ("ValueError", "disk on fire")
    assert (record.context.rank, record.context.phase, record.context.tensor) == (5, "load", "norm.weight")


def test_a_new_engine_keeps_what_is_served():
    worker, engine = connected(Net(0))
    engine.stream = stream_of(Net(1))
    rpc = worker.checkpoint_engine_rpc
    values(rpc("open_refit", {"epoch": 1, "version": 7}))
    values(rpc("update_weights_from_checkpoint_engine"))
    values(rpc("commit_refit", {"version": 7}))
    values(rpc("init_checkpoint_engine", {"backend": BACKEND, "bucket_size_bytes": 64}))
    assert engine.calls[-1] == "finalize"
    assert values(rpc("refit_status"))["version"] == 7
    assert error(rpc("open_refit", {"epoch": 1, "version": 8})).kind == "LifecycleError"


def test_an_engine_that_could_not_be_closed_is_closed_again(monkeypatch):
    worker, engine = connected(Net(0))
    rpc, attempts = worker.checkpoint_engine_rpc, []

    def close():
        attempts.append("close")
        if len(attempts) < 3:
            raise OSError("busy")

    monkeypatch.setattr(engine, "close", close)
    assert error(rpc("close_checkpoint_engine")).message == "busy"
    assert error(rpc("open_refit", {"epoch": 1, "version": 1})).kind == "LifecycleError"
    again = {"backend": BACKEND, "bucket_size_bytes": 64}
    assert error(rpc("init_checkpoint_engine", again)).message == "busy"
    assert worker._endpoint.receiver.engine is engine
    values(rpc("init_checkpoint_engine", again))
    values(rpc("close_checkpoint_engine"))
    assert len(attempts) == 3


def test_the_async_entry_point():
    worker, engine = connected(Net(0))
    engine.stream = stream_of(Net(1))

    async def main():
        rpc = worker.checkpoint_engine_rpc_async
        values(await rpc("open_refit", {"epoch": 1, "version": 1}))
        figures = values(await rpc("update_weights_from_checkpoint_engine"))
        values(await rpc("commit_refit", {"version": 1}))
        return figures

    assert asyncio.run(main())["tensors"] == 7


def test_every_protocol_method_exists():
    assert all(callable(getattr(RolloutEndpoint, name)) for name in ROLLOUT_METHODS)
