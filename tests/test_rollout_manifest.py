"""Unknown, missing, repeated and failed tensors: each kind is named, in a bounded list, before and after."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from tests.engine_crew import MIB
from tests.rollout_engines import RecordingEngine
from weightsync.engines.ipc import IPCCheckpointEngine
from weightsync.errors import ErrorRecord, IncompleteStreamError, ManifestError
from weightsync.outcomes import Outcome
from weightsync.rollout.endpoint import RolloutEndpoint
from weightsync.rollout.module import ModuleLoader
from weightsync.rollout.receiver import RefitReceiver
from weightsync.tensors import TensorSpec, WeightManifest, WeightStream

COUNT = 40
FAST = {"device": "cpu", "bind_host": "127.0.0.1", "connect_s": 5.0, "stall_s": 5.0, "silence_s": 4.0}


def model() -> torch.nn.Module:
    layers = torch.nn.Module()
    for i in range(COUNT):
        layers.register_parameter(f"layer{i}", torch.nn.Parameter(torch.zeros(3)))
    return layers


def weights(numbers=range(COUNT)) -> list[tuple[str, torch.Tensor]]:
    return [(f"layer{i}", torch.full((3,), float(i))) for i in numbers]


def promise(pairs) -> WeightManifest:
    return WeightManifest.build(TensorSpec.of(name, tensor) for name, tensor in pairs)


class FailingLoader(ModuleLoader):
    """Fails at the batch that holds ``layer20``."""

    def load(self, batch):
        if any(name == "layer20" for name, _ in batch):
            raise ValueError("disk on fire")
        super().load(batch)


def names(first: int, count: int, more: int) -> str:
    shown = ", ".join(f"'layer{i}'" for i in range(first, first + count))
    return f"{shown} and {more} more"


def receive(stream, *, manifest=None, announce=True, per_batch=0, loader=None) -> tuple[RefitReceiver, str]:
    """Receive a stream that fails; returns what the error says."""
    engine = RecordingEngine(MIB, announce, per_batch)
    engine.stream, engine.manifest = stream, manifest
    receiver = RefitReceiver(engine, loader or ModuleLoader(model()))
    with pytest.raises((ManifestError, IncompleteStreamError)) as caught:
        receiver.receive(1)
    assert engine.errors == [caught.value]
    return receiver, str(caught.value)


# Before anything is written.


def test_unknown_before():
    receiver, text = receive([*weights(), *weights(range(40, 60))], per_batch=9)
    assert f"20 tensors: {names(40, 5, 15)}" in text
    assert not receiver.dirty


@pytest.mark.parametrize("announce", [True, False])
def test_missing_before(announce):
    receiver, text = receive(weights(range(10)), announce=announce, per_batch=9)
    assert f"30 tensors: {names(10, 5, 25)}" in text
    assert receiver.dirty is not announce


def test_repeated_before():
    manifest = WeightManifest(promise(weights()).tensors * 2)
    receiver, text = receive(weights(), manifest=manifest)
    assert f"repeated in the weight stream: {names(0, 5, 35)}" in text
    assert not receiver.dirty


# Afterwards: what comes is not what was promised.


def test_unknown_afterwards():
    stream = [*weights(), *weights(range(40, 60))]
    receiver, text = receive(stream, manifest=promise(weights()), per_batch=COUNT)
    assert f"came and was not promised: {names(40, 5, 15)}" in text
    assert receiver.dirty


def test_missing_afterwards():
    _, text = receive(weights(range(10)), manifest=promise(weights()))
    assert f"30 of 40 promised tensors did not come: {names(10, 5, 25)}" in text


@pytest.mark.parametrize("per_batch", [0, COUNT], ids=["in one batch", "in two"])
def test_repeated_afterwards(per_batch):
    stream = [*weights(), *weights(range(10))]
    _, text = receive(stream, manifest=promise(weights()), per_batch=per_batch)
    assert f"came twice in one refit: {names(0, 5, 5)}" in text


def test_failed():
    endpoint = RolloutEndpoint(0, lambda: FailingLoader(model()))

    def call(method, **kwargs):
        return Outcome.from_dict(endpoint.call(method, kwargs))

    backend = "tests.rollout_engines:RecordingEngine"
    assert call("init_checkpoint_engine", backend=backend, bucket_size_bytes=MIB).error is None
    worlds = {"train_world_size": 1, "rollout_world_size": 1}
    call("init_checkpoint_engine_process_group", rank_prefix=0, metadata=[], **worlds)
    engine = endpoint.receiver.engine
    engine.stream, engine.per_batch = weights(), 15
    call("open_refit", epoch=1, version=1)
    error = call("update_weights_from_checkpoint_engine").error
    failed = f"15 tensors failed to load: {names(15, 5, 10)}"
    assert (error.kind, error.message) == ("ValueError", f"disk on fire ({failed})")
    assert failed in ErrorRecord.from_exception(engine.errors[0]).traceback
    assert endpoint.refit_status()["fenced"]


# The same over a real transport: the sender hears of it, too.


@pytest.fixture
def pair():
    policy, rollout = IPCCheckpointEngine(MIB, **FAST), IPCCheckpointEngine(MIB, **FAST)
    metadata = [policy.prepare(), rollout.prepare()]
    worlds = {"train_world_size": 1, "rollout_world_size": 1, "metadata": metadata}
    policy.init_policy_process_group(worker_rank=0, **worlds)
    rollout.init_rollout_process_group(rollout_rank=0, **worlds)
    yield policy, rollout
    policy.close()
    rollout.close()


def refit(pair, stream, *, manifest=None, loader=None) -> tuple[BaseException | None, BaseException | None]:
    """Run one refit; returns what the sender and what the receiver raised."""
    policy, rollout = pair
    errors: dict[str, BaseException] = {}

    def send():
        items = (pair for pair in stream)
        try:
            asyncio.run(policy.send_weights(WeightStream(manifest, items) if manifest else items))
        except BaseException as error:  # noqa: BLE001 - the outcome
            errors["policy"] = error

    thread = threading.Thread(target=send)
    thread.start()
    try:
        RefitReceiver(rollout, loader or ModuleLoader(model())).receive(1)
    except Exception as error:  # noqa: BLE001 - the outcome
        errors["rollout"] = error
    thread.join(20)
    assert not thread.is_alive()
    return errors.get("policy"), errors.get("rollout")


@pytest.mark.parametrize(
    ("stream", "promised", "words"),
    [
        (weights(range(60)), weights(range(60)), f"20 tensors: {names(40, 5, 15)}"),
        (weights(range(10)), weights(range(10)), f"30 tensors: {names(10, 5, 25)}"),
        (weights(range(60)), None, "does not know this tensor [rollout rank 0, phase load, tensor 'layer40'"),
        (weights(range(10)), None, f"30 tensors: {names(10, 5, 25)}"),
    ],
    ids=["unknown", "missing", "unknown, unannounced", "missing, unannounced"],
)
def test_a_real_transport_names_them_on_both_sides(pair, stream, promised, words):
    sender, receiver = refit(pair, stream, manifest=promise(promised) if promised else None)
    assert isinstance(receiver, ManifestError)
    assert words in str(receiver)
    if promised:
        assert words in str(sender)
    assert refit(pair, weights()) == (None, None)


def test_a_real_transport_names_what_failed_on_both_sides(pair):
    sender, receiver = refit(pair, weights(), loader=FailingLoader(model()))
    failed = f"40 tensors failed to load: {names(0, 5, 35)}"
    assert failed in receiver.__notes__
    assert failed in ErrorRecord.from_exception(sender).traceback
    assert refit(pair, weights()) == (None, None)


def test_a_real_transport_names_what_is_repeated(pair):
    sender, receiver = refit(pair, [*weights(), *weights(range(3))])
    assert "layer0" in str(sender)
    assert "layer0" in str(receiver)
    assert refit(pair, weights()) == (None, None)
