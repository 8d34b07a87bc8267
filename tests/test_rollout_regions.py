"""Receiver, endpoint and module loader in refits by regions, fed by an engine in this process."""

from __future__ import annotations

import msgspec
import pytest
import torch

from tests.region_engine import RegionEngine
from tests.rollout_engines import RecordingEngine
from weightsync.errors import (
    ConfigurationError,
    IncompleteStreamError,
    LifecycleError,
    ManifestError,
    PeerLostError,
    WorkerFencedError,
)
from weightsync.outcomes import Outcome
from weightsync.rollout.endpoint import RolloutEndpoint
from weightsync.rollout.loader import RegionLoader, WeightLoader, region_loader
from weightsync.rollout.module import ModuleLoader, ModuleRolloutWorker, named_state
from weightsync.rollout.receiver import RefitReceiver
from weightsync.tensors import TensorSpec, WeightManifest

BACKEND = "tests.region_engine:RegionEngine"


class Net(torch.nn.Module):
    """Tied, strided, empty and scalar tensors beside plain ones."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(11, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.turned = torch.nn.Parameter(torch.randn(5, 3).t())
        self.experts = torch.nn.ModuleList([torch.nn.Linear(6, 4) for _ in range(2)])
        self.register_buffer("none", torch.empty(0, 4))
        self.norm.running_mean.normal_()
        self.norm.num_batches_tracked += seed


def stream_of(model):
    return [(name, tensor.detach().clone()) for name, tensor in named_state(model)]


def manifest_of(stream):
    return WeightManifest.build(TensorSpec.of(name, tensor) for name, tensor in stream)


def make(model=None, sharding="all", seed=1, loader=None, **options):
    engine = RegionEngine(256, **options)
    engine.stream = stream_of(Net(seed))
    loader = loader or ModuleLoader(model or Net(0))
    receiver = RefitReceiver(engine, loader, rank=3)
    receiver.memory = loader.layout(manifest_of(engine.stream), sharding)
    engine.use_memory(receiver.memory)
    return engine, receiver


def same(model, other):
    return all(
        torch.equal(a, b) for (_, a), (_, b) in zip(named_state(model), named_state(other), strict=True)
    )


def test_parameters_are_written_in_place_and_strided_ones_handed_over(capsys):
    model = Net(0)
    addresses = [tensor.data_ptr() for _, tensor in named_state(model)]
    engine, receiver = make(model)
    for version in (1, 2, 3):
        engine.stream = stream_of(Net(version))
        figures = receiver.receive(version)
        receiver.commit(version)
        assert same(model, Net(version))
        assert engine.handed == ["turned"]
        assert "head.weight" not in engine.in_place
        assert figures["tensors"] == len(engine.stream)
        unique = {t.data_ptr(): t.nbytes for n, t in engine.stream if n != "head.weight"}
        assert figures["bytes"] == sum(unique.values())
        assert figures["copies"] == {"in_place": figures["bytes"] - 60, "staged": 60}
        assert receiver.stream_digest is None
        assert "digest" not in figures["seconds"]
    assert [tensor.data_ptr() for _, tensor in named_state(model)] == addresses
    assert model.head.weight is model.embed.weight
    assert "[module refit] Loaded 13 tensors" in capsys.readouterr().out
    assert receiver.engine.before_writing is None
    assert receiver.engine.manifest_check is None
    assert receiver.engine.writes_in_place is True


def test_what_is_not_moved_by_regions_comes_whole_in_the_same_refit():
    model = Net(0)
    engine, receiver = make(model, "experts", also_whole=["experts.1.weight"])
    figures = receiver.receive(1)
    assert same(model, Net(1))
    assert set(engine.in_place) == {"experts.0.bias", "experts.1.bias", "experts.0.weight"}
    assert figures["tensors"] == 13
    assert receiver.memory.table.whole["embed.weight"].startswith("shard_weights: experts")


def test_the_rank_is_dirty_before_the_first_byte_is_written():
    class Counting(ModuleLoader):
        begun = 0

        def begin(self):
            self.begun += 1
            super().begin()

    loader = Counting(Net(0))
    engine, receiver = make(loader=loader)
    receiver.receive(1)
    receiver.commit(1)
    seen = []
    engine.on_write = lambda: seen.append((receiver.dirty, receiver.version, loader.begun))
    receiver.receive(2)
    assert set(seen) == {(True, None, 2)}
    assert len(seen) == len(engine.in_place) > 5


@pytest.mark.parametrize("fail_at", [0, 4])
def test_a_loss_in_the_middle_fences_and_the_next_refit_heals(fail_at):
    model = Net(0)
    engine, receiver = make(model)
    receiver.receive(1)
    receiver.commit(1)
    engine.fail_at = fail_at
    engine.stream = stream_of(Net(2))
    with pytest.raises(PeerLostError) as caught:
        receiver.receive(2)
    assert caught.value.context.phase == "receive"
    assert receiver.dirty is (fail_at > 0)
    assert engine.errors == [caught.value]
    assert engine.before_writing is None
    if fail_at:
        with pytest.raises(WorkerFencedError, match="policy rank is gone"):
            receiver.require_serving()
    else:
        assert same(model, Net(1))
        assert receiver.version == 1
    engine.fail_at = None
    receiver.receive(3)
    receiver.commit(3)
    assert same(model, Net(2))


def test_a_tensor_of_which_something_is_missing_is_an_error():
    _, receiver = make(lose="norm.bias")
    with pytest.raises(IncompleteStreamError, match=r"1 of 13 promised.*norm\.bias"):
        receiver.receive(1)
    assert receiver.dirty


def test_a_tensor_that_arrives_in_both_ways_is_refused():
    class Twice(RegionEngine):
        async def receive_weight_batches(self):
            async for batch in super().receive_weight_batches():
                yield batch
            yield self._pack([self.stream[0]])

    loader = ModuleLoader(Net(0))
    engine, receiver = make(loader=loader)
    engine.__class__ = Twice
    with pytest.raises(ManifestError, match="came twice"):
        receiver.receive(1)


def test_a_staged_refit_writes_nothing_until_it_is_loaded():
    model = Net(0)
    engine, receiver = make(model, also_whole=["norm.bias"])
    receiver.receive(1)
    receiver.commit(1)
    engine.stream = stream_of(Net(2))
    figures = receiver.receive(2, staged=True)
    assert engine.in_place == []
    assert figures["staged_bytes"] == figures["bytes"]
    assert same(model, Net(1))
    assert receiver.version == 1
    figures = receiver.load_staged()
    receiver.commit(2)
    assert same(model, Net(2))
    assert figures["copies"] == {"staged": figures["bytes"] - 24, "whole": 24}
    assert receiver.stream_digest is None


def test_an_engine_that_writes_in_place_although_the_update_is_staged_is_stopped():
    class Rude(RegionEngine):
        writes_in_place = property(lambda self: True, lambda self, value: None)

    model = Net(0)
    engine, receiver = make(model)
    engine.__class__ = Rude
    with pytest.raises(LifecycleError, match="not written in place"):
        receiver.receive(1, staged=True)
    assert not receiver.dirty
    assert same(model, Net(0))


def test_room_for_a_staged_refit_is_that_of_the_ranks_own_part():
    from weightsync.rollout.staging import StagedWeights

    stream = stream_of(Net(1))
    table = ModuleLoader(Net(0)).layout(manifest_of(stream), "all").table
    need = sum(storage.nbytes for storage in table.storages)
    assert need < manifest_of(stream).nbytes  # one of the tied names
    StagedWeights(need).require_room(manifest_of(stream), table)
    with pytest.raises(ConfigurationError, match=f"needs {need} bytes"):
        StagedWeights(need - 1).require_room(manifest_of(stream), table)


def test_a_parameter_of_another_shape_is_refused():
    class Wrong(RegionEngine):
        def _staging(self, storage):
            return super()._staging(storage)

        def _move(self, index, storage, boxes):
            batch = super()._move(index, storage, boxes)
            batch[:] = [(name, tensor.reshape(-1)) for name, tensor in batch]
            return batch

    engine, receiver = make()
    engine.__class__ = Wrong
    with pytest.raises(ManifestError, match=r"where this rank stores 'turned' float32\[3, 5\]") as caught:
        receiver.receive(1)
    assert caught.value.context.tensor == "turned"
    assert caught.value.context.phase == "load"


def test_parameters_may_be_replaced_between_refits():
    model = Net(0)
    engine, receiver = make(model)
    receiver.receive(1)
    model.norm.weight = torch.nn.Parameter(torch.zeros(6))
    model.experts[0].weight = torch.nn.Parameter(torch.zeros(6, 4).t())
    engine.stream = stream_of(Net(2))
    receiver.receive(2)
    assert same(model, Net(2))
    assert set(engine.handed) == {"turned", "experts.0.weight"}
    with torch.device("meta"):
        model.norm.weight = torch.nn.Parameter(torch.zeros(6))
    assert receiver.memory.storage(names(receiver).index("norm.weight")) is None


def names(receiver):
    return [storage.name for storage in receiver.memory.table.storages]


def test_a_manifest_that_does_not_fit_is_refused_at_set_up():
    loader = ModuleLoader(Net(0))
    stream = stream_of(Net(1))
    with pytest.raises(ManifestError, match="did not get"):
        loader.layout(manifest_of(stream[2:]), "all")
    wrong = [(name, tensor.double()) if name == "norm.bias" else (name, tensor) for name, tensor in stream]
    with pytest.raises(ManifestError, match=r"float64.*float32"):
        loader.layout(manifest_of(wrong), "all")
    with pytest.raises(ConfigurationError, match="'most' is unknown"):
        loader.layout(manifest_of(stream), "most")


class WholeOnly:
    """A loader of a plugin that was written before there were refits by regions."""

    kind = "plain"

    def check_manifest(self, manifest): ...
    def begin(self): ...
    def load(self, batch): ...
    def finish(self): ...
    def abort(self): ...
    def served(self): ...
    def originals(self): ...


def test_a_loader_that_knows_whole_tensors_only_says_so():
    assert isinstance(WholeOnly(), WeightLoader)
    assert not isinstance(WholeOnly(), RegionLoader)
    with pytest.raises(ConfigurationError, match=r"WholeOnly loads whole tensors only.*shard_weights: none"):
        region_loader(WholeOnly())
    assert region_loader(ModuleLoader(Net(0)))


# The endpoint.


def encoded(stream):
    return msgspec.msgpack.encode(manifest_of(stream).tensors)


def value(outcomes):
    outcome = Outcome.from_dict(outcomes[0])
    if outcome.error is not None:
        raise outcome.error.to_exception()
    return outcome.value


def connected(worker, manifest, backend=BACKEND, sharding="all"):
    rpc = worker.checkpoint_engine_rpc
    value(rpc("init_checkpoint_engine", {"backend": backend, "bucket_size_bytes": 256}))
    answer = value(rpc("describe_layout", {"manifest": manifest, "sharding": sharding}))
    value(rpc("prepare_checkpoint_engine"))
    group = {"rank_prefix": 0, "train_world_size": 1, "rollout_world_size": 1, "metadata": []}
    value(rpc("init_checkpoint_engine_process_group", group))
    return answer


def test_a_worker_describes_its_layout_and_is_refitted():
    stream = [*stream_of(Net(1)), ("mtp.weight", torch.ones(3))]
    worker = ModuleRolloutWorker(Net(0), allow_unused=["mtp.*"])
    answer = connected(worker, encoded(stream), sharding="experts")
    assert answer["unread"] == []
    assert set(answer["whole"]) == {n for n, _ in stream if not n.startswith(("experts", "mtp"))}
    engine = worker._endpoint.receiver.engine
    engine.stream = stream
    value(worker.checkpoint_engine_rpc("open_refit", {"epoch": 1, "version": 1}))
    figures = value(worker.checkpoint_engine_rpc("update_weights_from_checkpoint_engine"))
    assert figures["tensors"] == len(stream)
    assert value(worker.checkpoint_engine_rpc("commit_refit", {"version": 1})) == 1
    assert same(worker.model, Net(1))
    assert value(worker.checkpoint_engine_rpc("weight_digest"))["stream"] is None
    value(
        worker.checkpoint_engine_rpc("init_checkpoint_engine", {"backend": BACKEND, "bucket_size_bytes": 9})
    )
    assert worker._endpoint.receiver.memory is None


def test_what_no_rank_may_leave_unread_is_listed():
    endpoint = RolloutEndpoint(0, lambda: _Partial(Net(0)))
    endpoint.init_checkpoint_engine(BACKEND, 256)
    stream = stream_of(Net(1))
    answer = endpoint.describe_layout(encoded(stream), "auto")
    assert answer == {"whole": {}, "unread": ["norm.bias"]}


class _Partial(ModuleLoader):
    """Stores nothing of one tensor, as a rank of another pipeline stage."""

    def layout(self, manifest, sharding):
        from weightsync.layout.tables import TableBuilder

        memory = super().layout(manifest, sharding)
        builder, full = TableBuilder(manifest), memory.table
        for storage in full.storages:
            builder.add_storage(*msgspec.structs.astuple(storage))
        table = builder.build()
        kept = [
            -1 if spec.name == "norm.bias" else pattern
            for spec, pattern in zip(manifest.tensors, full.pattern_of, strict=True)
        ]
        memory._table = msgspec.structs.replace(
            table, patterns=full.patterns, pattern_of=tuple(kept), slots=full.slots
        )
        return memory


def test_errors_of_describe_layout_are_typed():
    endpoint = RolloutEndpoint(0, lambda: ModuleLoader(Net(0)))
    with pytest.raises(LifecycleError, match="init_checkpoint_engine comes first"):
        endpoint.describe_layout(b"", "all")
    endpoint.init_checkpoint_engine("tests.rollout_engines:RecordingEngine", 256)
    with pytest.raises(ManifestError, match="damaged"):
        endpoint.describe_layout(b"\x00\x01", "all")
    with pytest.raises(ConfigurationError, match="RecordingEngine moves whole tensors only"):
        endpoint.describe_layout(encoded(stream_of(Net(1))), "all")
    assert endpoint.receiver.memory is None
    endpoint = RolloutEndpoint(0, WholeOnly)
    endpoint.init_checkpoint_engine(BACKEND, 256)
    with pytest.raises(ConfigurationError, match="WholeOnly loads whole tensors only"):
        endpoint.describe_layout(encoded(stream_of(Net(1))), "all")


def test_figures_without_copies_have_no_entry():
    engine = RecordingEngine(256)
    engine.stream = stream_of(Net(1))
    assert "copies" not in RefitReceiver(engine, ModuleLoader(Net(0))).receive(1)
