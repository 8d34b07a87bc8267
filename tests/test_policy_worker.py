"""The policy worker's mixins, over an engine that records what it is told."""

import asyncio
import inspect
import threading

import pytest
import torch
from torch import nn

from tests.recording_engine import BACKEND, RecordingEngine
from weightsync.errors import ErrorRecord, LifecycleError
from weightsync.policy import (
    AsyncPolicyCheckpointEngineMixin,
    PolicyCheckpointEngineMixin,
    preinit_checkpoint_engine,
    weight_stream_from,
)
from weightsync.policy.session import POLICY_METHODS

SEND = "send_weights_via_checkpoint_engine"
GROUP = {"train_world_size": 1, "rollout_world_size": 1, "metadata": [{}, {}]}


class Hooks:
    """The user's side of a worker, keeping a record of what happened in which order."""

    rank = 3

    def __init__(self) -> None:
        self.model = nn.Linear(2, 3)
        self.events: list[str] = []
        self.fail: dict[str, str] = {}

    def prepare_weight_send(self) -> None:
        self._event("prepare")

    def finish_weight_send(self) -> None:
        self._event("finish")

    def weight_stream(self):
        self._event("stream")
        return self.tensors()

    def tensors(self):
        try:
            yield from list(self.model.state_dict().items())
        finally:
            self.events.append("closed")
            engine_calls = [name for name, _ in RecordingEngine.made[-1].calls]
            self.events.append("told before" if "abort_refit" in engine_calls else "not told")

    def _event(self, name: str) -> None:
        self.events.append(name)
        if name in self.fail:
            raise ValueError(self.fail[name])


class Worker(Hooks, PolicyCheckpointEngineMixin):
    def rpc(self, method: str, **kwargs):
        return self.checkpoint_engine_rpc(method, kwargs)


class AsyncWorker(Hooks, AsyncPolicyCheckpointEngineMixin):
    pass


def ready(worker=None, **engine_kwargs):
    worker = worker or Worker()
    made = worker.rpc(
        "init_checkpoint_engine", backend=BACKEND, bucket_size_bytes=1 << 20, engine_kwargs=engine_kwargs
    )
    assert made == {"rank": worker.rank, "value": None}
    assert worker.rpc("prepare_checkpoint_engine")["value"] == {"bucket_size": 1 << 20}
    assert worker.rpc("init_checkpoint_engine_process_group", **GROUP)["value"] is None
    return worker, RecordingEngine.made[-1]


def error_of(outcome: dict) -> ErrorRecord:
    assert "value" not in outcome
    return ErrorRecord.from_dict(outcome["error"])


def test_no_coroutine_in_the_synchronous_mixin():
    found = [name for name, member in inspect.getmembers(Worker) if inspect.iscoroutinefunction(member)]
    assert found == []


def test_a_whole_life():
    worker, engine = ready()
    for version in (1, 2, 3):
        with torch.no_grad():
            worker.model.weight.add_(1)
        assert worker.rpc("open_refit", epoch=version, version=version)["value"] is None
        figures = worker.rpc(SEND)["value"]
        assert figures["bytes"] == 9 * 4
        assert figures["tensors"] == 2
        assert figures["batches"] == 0
        assert 0 <= figures["seconds"]["gather"] <= figures["seconds"]["total"] < 60
        assert torch.equal(engine.sent["weight"], worker.model.weight)
        assert worker.rpc("finalize_checkpoint_engine")["value"] is None
    assert worker.events == ["prepare", "stream", "closed", "not told", "finish"] * 3
    assert engine.calls[1] == ("init_policy_process_group", {"worker_rank": 3, **GROUP})
    assert [call[0] for call in engine.calls[2:5]] == ["open_refit", "send_weights", "finalize"]
    assert worker.rpc("close_checkpoint_engine")["value"] is None
    assert engine.calls[-1][0] == "close"


def test_the_manifest_reaches_the_engine():
    worker, engine = ready()
    worker.weight_stream = lambda: weight_stream_from(worker.model)
    assert worker.rpc(SEND)["value"]["tensors"] == 2
    assert engine.manifest.names == ["weight", "bias"]


def test_the_engines_own_figures_go_first():
    worker, _ = ready(stats={"bytes": 7, "batches": 5, "seconds_pack": 0.5, "seconds_gather": 0.25})
    figures = worker.rpc(SEND)["value"]
    assert (figures["bytes"], figures["tensors"], figures["batches"]) == (7, 2, 5)
    assert figures["seconds"].keys() == {"gather", "pack", "total"}
    assert figures["seconds"]["gather"] == 0.25


@pytest.mark.parametrize("fail_at", [0, 1, -1])
def test_errors_of_the_engine(fail_at):
    worker, engine = ready(fail_at=fail_at)
    record = error_of(worker.rpc(SEND))
    assert (record.kind, record.message) == ("RuntimeError", "the wire broke")
    assert (record.context.side, record.context.rank, record.context.phase) == ("policy", 3, SEND)
    assert "in send_weights" in record.traceback
    aborted = [argument for name, argument in engine.calls if name == "abort_refit"]
    assert [str(error) for error in aborted] == ["the wire broke"]
    # A generator that was never started has nothing to clean up.
    closed = ["closed", "told before"] if fail_at == 1 else ["closed", "not told"] if fail_at else []
    assert worker.events == ["prepare", "stream", *closed, "finish"]
    engine.fail_at = None
    assert worker.rpc(SEND)["value"]["tensors"] == 2


@pytest.mark.parametrize("item", [0, 1, 2])
def test_errors_of_the_stream(item):
    worker, engine = ready()

    def broken():
        for number, pair in enumerate([*worker.model.state_dict().items(), ("extra", torch.ones(1))]):
            if number == item:
                raise LifecycleError("no such shard", tensor=pair[0])
            yield pair

    worker.weight_stream = broken
    record = error_of(worker.rpc(SEND))
    assert (record.kind, record.message) == ("LifecycleError", "no such shard")
    assert record.context.tensor == ["weight", "bias", "extra"][item]
    assert len(engine.sent) == item
    assert engine.calls[-1][0] == "abort_refit"
    assert worker.events == ["prepare", "finish"]


@pytest.mark.parametrize("hook", ["prepare", "stream"])
def test_errors_before_the_first_item_are_told_to_the_peers(hook):
    worker, engine = ready()
    worker.fail[hook] = "out of memory"
    record = error_of(worker.rpc(SEND))
    assert (record.kind, record.message) == ("ValueError", "out of memory")
    assert engine.calls[-1][0] == "abort_refit"
    assert worker.events[-1] == "finish"


def test_a_failing_clean_up_does_not_hide_the_cause():
    worker, _ = ready(fail_at=1)
    worker.fail["finish"] = "cannot offload"
    record = error_of(worker.rpc(SEND))
    assert record.message == "the wire broke"
    assert "cannot offload" in record.traceback


def test_a_failing_clean_up_alone_is_the_error():
    worker, _ = ready()
    worker.fail["finish"] = "cannot offload"
    assert error_of(worker.rpc(SEND)).message == "cannot offload"


def test_an_engine_that_stops_early_leaves_a_closed_generator():
    worker, engine = ready(stop_at=1)
    assert worker.rpc(SEND)["value"]["tensors"] == 1
    assert len(engine.sent) == 1
    assert worker.events == ["prepare", "stream", "closed", "not told", "finish"]


def test_an_engine_may_close_what_it_was_given():
    worker, engine = ready()
    original = engine.send_weights

    async def closing(weights):
        await original(weights)
        weights.close()
        assert next(weights, None) is None
        # What closing costs is paid after the peers were told, not here.
        assert "closed" not in worker.events

    engine.send_weights = closing
    engine.stop_at = 1
    assert worker.rpc(SEND)["value"]["tensors"] == 1
    assert worker.events[2:] == ["closed", "not told", "finish"]


def test_unknown_method_names_the_known_ones():
    record = error_of(Worker().rpc("send_weigths"))
    assert record.kind == "ConfigurationError"
    assert "'send_weigths'" in record.message
    assert all(method in record.message for method in POLICY_METHODS)
    # What is reachable is the protocol, not every method of the object.
    assert error_of(Worker().rpc("__class__")).kind == "ConfigurationError"
    assert error_of(Worker().rpc("sending")).kind == "ConfigurationError"


def test_wrong_arguments():
    record = error_of(Worker().rpc("open_refit", epoch=1, versoin=2))
    assert record.kind == "ConfigurationError"
    assert "versoin" in record.message or "version" in record.message


@pytest.mark.parametrize(
    ("method", "kwargs"),
    [
        ("prepare_checkpoint_engine", {}),
        ("init_checkpoint_engine_process_group", GROUP),
        ("open_refit", {"epoch": 1, "version": 1}),
        (SEND, {}),
    ],
)
def test_calls_before_init(method, kwargs):
    worker = Worker()
    record = error_of(worker.rpc(method, **kwargs))
    assert record.kind == "LifecycleError"
    assert "call init_checkpoint_engine first" in record.message
    assert worker.events == []


def test_sending_before_there_are_peers():
    worker = Worker()
    worker.rpc("init_checkpoint_engine", backend=BACKEND, bucket_size_bytes=1, engine_kwargs={})
    record = error_of(worker.rpc(SEND))
    assert record.kind == "LifecycleError"
    assert "init_checkpoint_engine_process_group" in record.message


def test_closing_twice_or_without_an_engine_is_nothing():
    worker = Worker()
    for _ in range(2):
        assert worker.rpc("finalize_checkpoint_engine")["value"] is None
        assert worker.rpc("close_checkpoint_engine")["value"] is None


def test_init_is_idempotent_and_others_are_refused():
    worker, engine = ready(fail_at=5)
    same = {"backend": BACKEND, "bucket_size_bytes": 1 << 20, "engine_kwargs": {"fail_at": 5}}
    assert worker.rpc("init_checkpoint_engine", **same)["value"] is None
    assert RecordingEngine.made[-1] is engine
    record = error_of(worker.rpc("init_checkpoint_engine", **{**same, "bucket_size_bytes": 2}))
    assert record.kind == "LifecycleError"
    assert "close_checkpoint_engine" in record.message
    worker.rpc("close_checkpoint_engine")
    assert worker.rpc("init_checkpoint_engine", **{**same, "bucket_size_bytes": 2})["value"] is None
    assert RecordingEngine.made[-1].bucket_size == 2
    # The new engine has no peers yet.
    assert error_of(worker.rpc(SEND)).kind == "LifecycleError"


def test_an_engine_that_will_not_close_is_kept_and_closed_later():
    worker, engine = ready(fail_close=True)
    assert error_of(worker.rpc("close_checkpoint_engine")).message == "would not close"
    assert error_of(worker.rpc(SEND)).kind == "LifecycleError"
    engine.fail_close = False
    assert worker.rpc("close_checkpoint_engine")["value"] is None
    assert [name for name, _ in engine.calls].count("close") == 2


def test_no_engine_is_made_beside_one_that_will_not_close():
    worker, engine = ready(fail_close=True)
    worker.rpc("close_checkpoint_engine")
    arguments = {"backend": BACKEND, "bucket_size_bytes": 1 << 20, "engine_kwargs": {"fail_close": True}}
    made = len(RecordingEngine.made)
    assert error_of(worker.rpc("init_checkpoint_engine", **arguments)).message == "would not close"
    assert len(RecordingEngine.made) == made
    engine.fail_close = False
    assert worker.rpc("init_checkpoint_engine", **arguments)["value"] is None
    assert RecordingEngine.made[-1] is not engine


def test_a_close_ends_a_send_that_runs_in_another_thread():
    worker, engine = ready()
    inside, closed = threading.Event(), threading.Event()

    async def hanging(weights):
        inside.set()
        while not closed.is_set():
            await asyncio.sleep(0.01)
        raise LifecycleError("the engine was closed during a refit")

    engine.send_weights, engine.close = hanging, closed.set
    first: list[dict] = []
    thread = threading.Thread(target=lambda: first.append(worker.rpc(SEND)))
    thread.start()
    assert inside.wait(20)
    assert worker.rpc("close_checkpoint_engine")["value"] is None
    thread.join(20)
    assert error_of(first[0]).message == "the engine was closed during a refit"
    assert worker.events[-1] == "finish"
    assert "no checkpoint engine" in error_of(worker.rpc(SEND)).message


def test_default_stream_says_what_to_implement():
    class Bare(PolicyCheckpointEngineMixin):
        rank = 0
        rpc = Worker.rpc

    worker, _ = ready(Bare())
    record = error_of(worker.rpc(SEND))
    assert record.kind == "LifecycleError"
    assert "weight_stream()" in record.message


def test_a_second_send_while_one_runs():
    worker, engine = ready()
    inside, go_on = threading.Event(), threading.Event()

    def slow():
        inside.set()
        assert go_on.wait(20)
        yield "w", torch.ones(1)

    worker.weight_stream = slow
    first: list[dict] = []
    thread = threading.Thread(target=lambda: first.append(worker.rpc(SEND)))
    thread.start()
    try:
        assert inside.wait(20)
        for method in (SEND, "finalize_checkpoint_engine", "prepare_checkpoint_engine"):
            record = error_of(worker.rpc(method))
            assert record.kind == "LifecycleError"
            assert f"{method} while {SEND} is running" in record.message
    finally:
        go_on.set()
        thread.join(20)
    assert first[0]["value"]["tensors"] == 1
    assert "abort_refit" not in [name for name, _ in engine.calls]
    assert worker.events == ["prepare", "finish"]


def test_memory_of_the_worker():
    assert Worker().rpc("checkpoint_engine_total_memory_bytes", device="cpu")["value"] > 1 << 28
    assert error_of(Worker().rpc("checkpoint_engine_total_memory_bytes", device="tpu")).kind == (
        "ConfigurationError"
    )


def test_rank_without_an_attribute_or_with_a_method_of_that_name():
    class Plain(PolicyCheckpointEngineMixin):
        pass

    class Method(PolicyCheckpointEngineMixin):
        def rank(self) -> int:
            return 9

    assert Plain().checkpoint_engine_rpc("finalize_checkpoint_engine") == {"rank": 0, "value": None}
    assert Method().checkpoint_engine_rpc("finalize_checkpoint_engine") == {"rank": 0, "value": None}


def test_synchronous_worker_on_an_event_loop_says_which_mixin_to_use():
    worker, engine = ready()

    async def call():
        return worker.rpc(SEND)

    record = error_of(asyncio.run(call()))
    assert record.kind == "LifecycleError"
    assert "AsyncPolicyCheckpointEngineMixin" in record.message
    assert "send_weights" not in [name for name, _ in engine.calls]
    assert engine.calls[-1][0] == "abort_refit"


async def async_ready(**engine_kwargs):
    worker = AsyncWorker()
    for method, kwargs in (
        (
            "init_checkpoint_engine",
            {"backend": BACKEND, "bucket_size_bytes": 8, "engine_kwargs": engine_kwargs},
        ),
        ("init_checkpoint_engine_process_group", GROUP),
    ):
        assert await worker.checkpoint_engine_rpc(method, kwargs) == {"rank": 3, "value": None}
    return worker, RecordingEngine.made[-1]


def test_async_worker():
    async def life():
        worker, engine = await async_ready()
        engine.gate = asyncio.Event()
        first = asyncio.ensure_future(worker.checkpoint_engine_rpc(SEND))
        await asyncio.sleep(0.01)
        second = await worker.checkpoint_engine_rpc(SEND)
        unknown = await worker.checkpoint_engine_rpc("nothing")
        engine.gate.set()
        return worker, await first, second, unknown

    worker, first, second, unknown = asyncio.run(life())
    assert first["value"]["tensors"] == 2
    assert error_of(second).kind == "LifecycleError"
    assert error_of(unknown).kind == "ConfigurationError"
    assert worker.events == ["prepare", "stream", "closed", "not told", "finish"]


def test_async_worker_that_fails():
    async def life():
        worker, engine = await async_ready(fail_at=1)
        return worker, engine, await worker.checkpoint_engine_rpc(SEND)

    worker, engine, outcome = asyncio.run(life())
    record = error_of(outcome)
    assert (record.message, record.context.rank, record.context.phase) == ("the wire broke", 3, SEND)
    assert engine.calls[-1][0] == "abort_refit"
    assert worker.events[-1] == "finish"


def test_async_worker_that_is_cancelled_tidies_up():
    async def life():
        worker, engine = await async_ready()
        engine.gate = asyncio.Event()
        sending = asyncio.ensure_future(worker.checkpoint_engine_rpc(SEND))
        await asyncio.sleep(0.01)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        engine.gate = None
        return worker, engine, await worker.checkpoint_engine_rpc(SEND)

    worker, engine, again = asyncio.run(life())
    assert "abort_refit" in [name for name, _ in engine.calls]
    assert worker.events[:3] == ["prepare", "stream", "finish"]
    assert again["value"]["tensors"] == 2


def test_preinit_makes_the_agent_only_for_nixl(monkeypatch):
    nixl = pytest.importorskip("weightsync.engines.nixl")
    calls: list[dict] = []
    monkeypatch.setattr(nixl, "preinit_nixl_agent", lambda **arguments: calls.append(arguments))
    scope = {"device": "cpu", "backend_init_params": {"device_list": "lo"}}
    generation = {"refit_transport": "nixl", "refit_cfg": {"nixl": scope}}
    preinit_checkpoint_engine({"policy": {"generation": generation}})
    params = {"backend_name": "UCX", "backend_init_params": {"device_list": "lo"}}
    assert calls == [{**params, "device": "cpu", "sharding": "none"}]
    preinit_checkpoint_engine({"policy": {"generation": {"refit_transport": BACKEND}}})
    assert len(calls) == 1
