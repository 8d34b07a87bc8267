"""Selecting tensors of a weight stream, and telling an engine which memory a policy rank has."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import torch
from torch import nn

from tests.recording_engine import RecordingEngine
from weightsync.errors import ConfigurationError, ErrorRecord, LifecycleError, ManifestError
from weightsync.policy import (
    AsyncPolicyCheckpointEngineMixin,
    PolicyCheckpointEngineMixin,
    weight_stream_from,
)
from weightsync.policy.figures import MeteredWeights
from weightsync.policy.plan import plan_stream
from weightsync.tensors import TensorSpec, WeightManifest, WeightStream

SEND = "send_weights_via_checkpoint_engine"
DESCRIBE = "describe_weights"


class RegionEngine(RecordingEngine):
    """Learns of memory, and then takes only some tensors from the stream."""

    def __init__(self, *args, rest: list[str] | None = None, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.rest = rest
        self.memory = None
        self.shards = None

    def use_memory(self, memory) -> None:
        self.calls.append(("use_memory", memory))
        self.memory = memory

    async def send_weights(self, weights) -> None:
        self.shards = weights.shards
        await super().send_weights(weights if self.rest is None else weights.select(self.rest))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 3), nn.Linear(3, 1)
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.randn(2, 6, 4))
        self.experts.down_proj = nn.Parameter(torch.randn(2, 4, 3))


def planned(model: nn.Module) -> tuple[WeightStream, list[int]]:
    """Return a stream, and a list that gets the size of each tensor that is gathered."""
    gathered: list[int] = []

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        gathered.append(tensor.numel())
        return tensor.detach()

    return plan_stream(model, gather, {"split_experts": True}), gathered


CHOSEN = ["experts.1.up_proj.weight", "first.bias", "experts.0.gate_proj.weight"]


def test_only_what_is_selected_is_gathered():
    model = Model()
    every = dict(planned(model)[0])
    stream, gathered = planned(model)
    chosen = stream.select(CHOSEN)
    assert chosen.manifest.names == [name for name in stream.manifest.names if name in CHOSEN]
    assert chosen.manifest.tensors == tuple(s for s in stream.manifest.tensors if s.name in CHOSEN)
    assert chosen.shards is None
    got = dict(chosen)
    assert list(got) == chosen.manifest.names
    assert all(torch.equal(got[name], every[name]) for name in got)
    assert gathered == [3, 48]
    stream.close()
    chosen.close()
    assert gathered == [3, 48]


def test_closing_owes_the_gathers_of_what_is_selected():
    for begun, which in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        stream, gathered = planned(Model())
        chosen = stream.select(CHOSEN)
        for _ in range(begun):
            next(chosen)
        (stream, chosen)[which].close()
        assert gathered == [3, 48]
        assert next(chosen, None) is None


def test_a_stream_of_which_nothing_is_selected_owes_nothing():
    stream, gathered = planned(Model())
    chosen = stream.select(())
    assert len(chosen.manifest) == 0
    assert next(chosen, None) is None
    stream.close()
    chosen.close()
    assert gathered == []


def test_of_a_plain_generator_the_others_are_dropped():
    events = []

    def weights():
        try:
            for name in "abc":
                events.append(name)
                yield name, torch.ones(1)
        finally:
            events.append("closed")

    manifest = WeightManifest.build(TensorSpec(name, (1,), "float32") for name in "abc")
    stream = WeightStream(manifest, weights())
    assert [name for name, _ in stream.select(["b"])] == ["b"]
    assert events == ["a", "b", "c", "closed"]
    events.clear()
    stream = WeightStream(manifest, weights())
    chosen = stream.select(["a", "c"])
    next(chosen)
    chosen.close()
    assert events == ["a", "closed"]
    outer = WeightStream(manifest, WeightStream(manifest, weights()))
    assert [name for name, _ in outer.select(["c"])] == ["c"]


def test_selections_that_cannot_be():
    stream = weight_stream_from(nn.Linear(2, 3))
    with pytest.raises(ManifestError, match="not in the weight stream: 'wight'"):
        stream.select(["bias", "wight"])
    stream.select(["bias"])
    with pytest.raises(LifecycleError, match="once"):
        stream.select(["bias"])
    with pytest.raises(LifecycleError, match="consume those"):
        next(stream)
    begun = weight_stream_from(nn.Linear(2, 3))
    next(begun)
    with pytest.raises(LifecycleError):
        begun.select(["bias"])
    with pytest.raises(LifecycleError, match="without a manifest"):
        MeteredWeights(item for item in ()).select(())


def test_what_is_selected_is_counted():
    model = nn.Linear(2, 3)
    metered = MeteredWeights(weight_stream_from(model))
    engine_side = metered.for_engine()
    assert engine_side.shards.table.storages[1].name == "bias"
    chosen = engine_side.select(["bias"])
    assert [name for name, _ in chosen] == ["bias"]
    figures = metered.figures({})
    assert (figures["bytes"], figures["tensors"]) == (12, 1)
    assert metered.figures({"bytes": 36, "tensors": 2})["bytes"] == 36


class Hooks:
    rank = 1

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model = model or nn.Linear(2, 3)
        self.gathered: list[int] = []
        self.events: list[str] = []

    def prepare_weight_send(self) -> None:
        self.events.append("prepare")

    def finish_weight_send(self) -> None:
        self.events.append("finish")

    def weight_stream(self):
        stream, self.gathered = planned(self.model)
        return stream


class Worker(Hooks, PolicyCheckpointEngineMixin):
    def rpc(self, method: str, **kwargs):
        return self.checkpoint_engine_rpc(method, kwargs)


class AsyncWorker(Hooks, AsyncPolicyCheckpointEngineMixin):
    def rpc(self, method: str, **kwargs):
        return asyncio.run(self.checkpoint_engine_rpc(method, kwargs))


def started(worker, backend: str = f"{__name__}:RegionEngine", **engine_kwargs) -> RegionEngine:
    init = {"backend": backend, "bucket_size_bytes": 64, "engine_kwargs": engine_kwargs}
    assert "error" not in worker.rpc("init_checkpoint_engine", **init)
    return RecordingEngine.made[-1]


def error_of(outcome: dict) -> ErrorRecord:
    return ErrorRecord.from_dict(outcome["error"])


@pytest.mark.parametrize("kind", [Worker, AsyncWorker])
def test_describing_and_then_sending(kind):
    worker = kind(Model())
    engine = started(worker, rest=["second.weight"])
    value = worker.rpc(DESCRIBE, sharding="all")["value"]
    assert (worker.events, worker.gathered) == (["prepare", "finish"], [])
    manifest = worker.weight_stream().manifest
    specs = msgspec.msgpack.decode(value["manifest"], type=tuple[TensorSpec, ...])
    assert specs == manifest.tensors
    assert value["digest"] == manifest.digest() == engine.memory.table.manifest
    assert value["whole"] == {}
    assert engine.memory.manifest == manifest
    worker.rpc("init_checkpoint_engine_process_group", train_world_size=1, rollout_world_size=1, metadata=[])
    for _ in range(2):
        figures = worker.rpc(SEND)["value"]
        assert (figures["tensors"], figures["bytes"], worker.gathered) == (1, 12, [3])
        assert list(engine.sent) == engine.manifest.names == ["second.weight"]
        assert engine.shards is not engine.memory
        assert engine.shards.table is engine.memory.table
    assert worker.rpc(DESCRIBE, sharding="none")["value"] == {"manifest": b"", "digest": "", "whole": {}}
    assert engine.memory is None


def test_reasons_are_told():
    worker = Worker()
    engine = started(worker)
    worker.model.weight = nn.Parameter(torch.ones(3, 4)[:, ::2])
    whole = worker.rpc(DESCRIBE, sharding="auto")["value"]["whole"]
    assert whole.keys() == {"weight"}
    assert "gaps" in whole["weight"]
    specs = [TensorSpec("w", (3,), "float32"), TensorSpec("b", (1,), "float32")]
    worker.weight_stream = lambda: WeightStream(WeightManifest.build(specs), iter(()))
    reason = "the weight stream is a plain generator"
    assert worker.rpc(DESCRIBE, sharding="all")["value"]["whole"] == {"w": reason, "b": reason}
    assert engine.memory.table.whole == {"w": reason, "b": reason}
    worker.rpc("init_checkpoint_engine_process_group", train_world_size=1, rollout_world_size=1, metadata=[])
    assert "error" not in worker.rpc(SEND)
    assert engine.shards.table == engine.memory.table


def test_what_cannot_be_described():
    worker = Worker()
    assert "init_checkpoint_engine first" in error_of(worker.rpc(DESCRIBE, sharding="all")).message
    engine = started(worker)
    closed = []

    def weights():
        yield "w", torch.ones(1)

    worker.weight_stream = weights
    record = error_of(worker.rpc(DESCRIBE, sharding="all"))
    assert (record.kind, record.context.phase) == (ConfigurationError.__name__, DESCRIBE)
    assert "shard_weights: none" in record.message
    assert engine.memory is None

    class Closing(WeightStream):
        def close(self) -> None:
            closed.append(True)

    worker.weight_stream = lambda: Closing(WeightManifest(()), ())
    engine.use_memory = lambda memory: 1 / 0
    assert error_of(worker.rpc(DESCRIBE, sharding="all")).kind == "ZeroDivisionError"
    assert closed == [True]
    assert worker.events == ["prepare", "finish"] * 2


def test_an_engine_that_moves_whole_tensors_only():
    worker = Worker()
    started(worker, "tests.recording_engine:RecordingEngine")
    assert "shard_weights: none" in error_of(worker.rpc(DESCRIBE, sharding="all")).message
    assert worker.rpc(DESCRIBE, sharding="none")["value"]["whole"] == {}
