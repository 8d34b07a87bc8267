"""Failures inside the processes: each is a typed error on both sides, soon, and the next refit works."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import textwrap
import threading
import time
import warnings

import pytest
import torch

from tests.engine_crew import (
    MIB,
    Crew,
    assert_same,
    collect,
    join,
    make_engine,
    noise,
    plain,
    run,
    some_weights,
    stream_of,
)
from weightsync.engines.nixl import NIXLCheckpointEngine, NixlTransport
from weightsync.engines.nixl_agent import NixlAgent
from weightsync.errors import (
    ConfigurationError,
    DeadlineError,
    DigestError,
    IncompleteStreamError,
    LifecycleError,
    ManifestError,
    PeerAbortedError,
    PeerLostError,
    TransportError,
    WeightSyncError,
)
from weightsync.tensors import TensorSpec, WeightManifest, WeightStream

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(60)]


@pytest.fixture(scope="module")
def shared():
    with Crew() as crew:
        yield crew


@pytest.fixture
def crew(shared):
    """The same engines for every test: each leaves them fit for the next refit."""
    yield shared
    recovers(shared)


def recovers(crew: Crew) -> None:
    for manifest in (False, True):
        sent = some_weights(seed=7)
        for received in crew.refit(sent, manifest=manifest):
            assert_same(received, sent)


def timed(crew, streams, receive=None, within=2.0):
    started = time.monotonic()
    outcomes = crew.attempt(streams, receive)
    assert time.monotonic() - started < within
    return outcomes


def breaking(pairs, at, error):
    """A stream that raises before item ``at``; at the end if there is no such item."""
    for i, pair in enumerate(pairs):
        if i == at:
            raise error
        yield pair
    if at >= len(pairs):
        raise error


def failing_consumer(at: int, error: BaseException, *, tell: bool):
    """Raises at batch ``at``, as a loader would, with or without telling the engine first."""

    async def receive(engine):
        batches = engine.receive_weight_batches()
        try:
            i = 0
            async for _ in batches:
                if i == at:
                    raise error
                i += 1
        except ValueError as failure:
            if tell:
                engine.abort_refit(failure)
            raise
        finally:
            await batches.aclose()

    return receive


# The stream.


@pytest.mark.parametrize("manifest", [False, True], ids=["generator", "manifest"])
@pytest.mark.parametrize("at", [0, 1, 6, 11, 12])
def test_the_stream_raises(crew, at, manifest):
    sent = some_weights()
    stream = breaking(sent, at, ValueError("no more weights"))
    if manifest:
        stream = WeightStream(WeightManifest.build(TensorSpec.of(n, t) for n, t in sent), stream)
    sender, receiver = timed(crew, [stream])
    assert isinstance(sender, ValueError)
    notes = "\n".join(sender.__notes__)
    assert f"at item {at}" in notes
    assert at == 0 or f"after 'layer.{at - 1}.weight'" in notes
    assert isinstance(receiver, PeerAbortedError)
    assert "no more weights" in str(receiver)
    assert (receiver.remote.kind, receiver.context.side, receiver.context.rank) == (
        "ValueError",
        "rollout",
        0,
    )
    assert "in breaking" in receiver.remote.traceback
    assert receiver.context.peer == "policy rank 0"


def test_an_exhausted_stream_is_an_empty_one(crew):
    stream = plain(some_weights())
    list(stream)
    assert crew.attempt([stream]) == [None, []]


def test_the_stream_is_closed_whatever_happens(crew):
    closed = []

    def weights():
        try:
            yield from some_weights()
        finally:
            closed.append(True)

    crew.attempt([weights()])
    crew.attempt([weights()], failing_consumer(1, ValueError("x"), tell=True))
    assert len(closed) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_what_is_no_exception_ends_a_refit_too(crew, error):
    """The lock is free and the stream closed afterwards: the next refit shows it."""

    async def both():
        receiver = asyncio.create_task(collect(crew.rollout[0]))
        try:
            await crew.policy[0].send_weights(breaking(some_weights(), 6, error("stop")))
        finally:
            (outcome,) = await asyncio.gather(receiver, return_exceptions=True)
            assert isinstance(outcome, PeerAbortedError)

    with pytest.raises(error):
        asyncio.run(both())


# The consumer.


@pytest.mark.parametrize("at", [0, 2, 3])
def test_the_consumer_raises_and_tells(crew, at):
    sender, receiver = timed(
        crew, [plain(some_weights())], failing_consumer(at, ValueError("bad shape"), tell=True)
    )
    assert isinstance(receiver, ValueError)
    assert isinstance(sender, PeerAbortedError)
    assert "bad shape" in str(sender)
    assert sender.remote.kind == "ValueError"
    assert "in receive" in sender.remote.traceback
    assert "bad shape" in "".join(sender.__notes__)
    assert (sender.context.side, sender.context.rank) == ("policy", 0)
    assert sender.context.peer == "rollout rank 0"
    assert sender.context.bytes_done > 0


@pytest.mark.parametrize("at", [0, 2])
def test_the_consumer_raises_and_does_not_tell(crew, at):
    sender, _ = timed(crew, [plain(some_weights())], failing_consumer(at, ValueError("x"), tell=False))
    assert isinstance(sender, PeerAbortedError)
    assert sender.remote.kind == "IncompleteStreamError"
    assert "consumer stopped" in str(sender)


def test_an_abort_arrives_within_a_second(crew):
    seen = {}

    async def receive(engine):
        async for _ in engine.receive_weight_batches():
            await asyncio.sleep(0.3)  # the sender waits for a buffer by now
            seen["aborted"] = time.monotonic()
            engine.abort_refit(ValueError("x"))
            break

    async def send(engine):
        try:
            await engine.send_weights(plain(some_weights()))
        except PeerAbortedError as error:
            seen["heard"] = time.monotonic()
            return error

    async def both():
        return await asyncio.gather(send(crew.policy[0]), receive(crew.rollout[0]))

    error, _ = run(both())
    assert seen["heard"] - seen["aborted"] < 1
    assert "'x'" in str(error) or "ValueError: x" in str(error)
    assert "ValueError: x" in error.remote.traceback


def test_the_consumer_breaks_off_without_closing(crew):
    async def receive(engine):
        async for batch in engine.receive_weight_batches():
            return batch[0][0]
        return None

    sender, name = timed(crew, [plain(some_weights())], receive)
    assert name == "layer.0.weight"
    assert isinstance(sender, PeerAbortedError)
    assert "consumer stopped" in str(sender)


def test_the_consumer_breaks_off_after_the_last_batch(crew):
    """Without asking for the end it has not agreed that all came: that is no success for the sender."""
    sent = some_weights(count=2)

    async def receive(engine):
        async for batch in engine.receive_weight_batches():
            return len(batch)
        return None

    sender, count = timed(crew, [plain(sent)], receive)
    assert count == 2
    assert isinstance(sender, PeerAbortedError)


def test_a_generator_dropped_with_its_event_loop_frees_the_engine(crew):
    """No `aclose` ever runs: the loop is gone before the generator is."""
    policy, rollout = crew.pair
    sender: list[BaseException] = []

    def send():
        try:
            asyncio.run(policy.send_weights(plain(some_weights())))
        except BaseException as error:  # noqa: BLE001 - the outcome
            sender.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    loop = asyncio.new_event_loop()
    batches = rollout.receive_weight_batches()
    loop.run_until_complete(anext(batches))
    loop.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        del batches
        gc.collect()
    thread.join(10)
    assert isinstance(sender[0], PeerAbortedError)


@pytest.mark.parametrize("when", [0.1, 0.3, 0.5])
@pytest.mark.parametrize("side", ["policy", "rollout"])
def test_one_side_is_cancelled(crew, side, when):
    async def slow_consumer(engine):
        async for _ in engine.receive_weight_batches():
            await asyncio.sleep(0.2)

    async def both():
        tasks = {
            "policy": asyncio.create_task(crew.policy[0].send_weights(plain(some_weights()))),
            "rollout": asyncio.create_task(slow_consumer(crew.rollout[0])),
        }
        await asyncio.sleep(when)
        tasks[side].cancel()
        return dict(zip(tasks, await asyncio.gather(*tasks.values(), return_exceptions=True), strict=True))

    outcomes = run(both())
    other = "rollout" if side == "policy" else "policy"
    assert isinstance(outcomes[side], asyncio.CancelledError)
    assert isinstance(outcomes[other], PeerAbortedError)


@pytest.mark.parametrize("side", ["policy", "rollout"])
def test_one_side_is_cancelled_while_it_waits_for_its_peer(side):
    """The peer has not come yet. A refit soon after must not meet the forgotten wait."""
    with Crew(connect_s=2.0) as crew:
        work = (
            crew.policy[0].send_weights(plain(some_weights()))
            if side == "policy"
            else collect(crew.rollout[0])
        )

        async def cancelled():
            task = asyncio.create_task(work)
            await asyncio.sleep(0.2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        run(cancelled())
        recovers(crew)


def test_the_manifest_check_refuses(crew):
    receiver, batches = crew.rollout[0], []

    def refuse(manifest):
        raise ManifestError(f"{len(manifest)} tensors, the model has 3", tensor=manifest.names[0])

    async def receive(engine):
        async for batch in engine.receive_weight_batches():
            batches.append(batch)

    receiver.manifest_check = refuse
    try:
        sender, outcome = timed(crew, [stream_of(some_weights(), manifest=True)], receive)
    finally:
        receiver.manifest_check = None
    assert batches == []
    assert isinstance(outcome, ManifestError)
    assert isinstance(sender, PeerAbortedError)
    assert "12 tensors, the model has 3" in str(sender)
    assert sender.remote.context.side == "rollout"


# What arrives is not what was sent.


@pytest.mark.parametrize(
    ("bucket", "byte", "tensor"), [(0, 5, "layer.0.weight"), (2, 300_500, "layer.7.weight")]
)
def test_a_changed_byte_is_a_digest_error(crew, monkeypatch, bucket, byte, tensor):
    original = NixlTransport.fetch

    def corrupting(self, source, message, slot, **kwargs):
        data = original(self, source, message, slot, **kwargs)
        if message.seq == bucket:
            data[byte] ^= 1
        return data

    monkeypatch.setattr(NixlTransport, "fetch", corrupting)
    sender, receiver = timed(crew, [plain(some_weights())])
    assert isinstance(receiver, DigestError)
    assert (receiver.context.tensor, receiver.context.bucket) == (tensor, bucket)
    assert (receiver.context.side, receiver.context.rank) == ("rollout", 0)
    assert isinstance(sender, PeerAbortedError)
    assert sender.remote.kind == "DigestError"
    assert sender.remote.context.tensor == tensor
    monkeypatch.undo()


def test_without_digests_nobody_looks(monkeypatch):
    original = NixlTransport.fetch

    def corrupting(self, source, message, slot, **kwargs):
        data = original(self, source, message, slot, **kwargs)
        data[0] ^= 1
        return data

    monkeypatch.setattr(NixlTransport, "fetch", corrupting)
    with Crew(verify="off") as crew:
        sent = some_weights(count=1)
        ((_, got),) = crew.refit(sent)[0]
        assert got[0] == sent[0][1][0] ^ 1


@pytest.mark.parametrize("lost", ["nothing moved", "a lost bucket", "a repeated bucket"])
def test_a_transport_that_moves_nothing_or_a_message_that_is_lost(crew, monkeypatch, lost):
    from weightsync.control import Bucket, Link

    send, fetch, saved = Link.send, NixlTransport.fetch, []

    def faulty_fetch(self, source, bucket, slot, **kwargs):
        if lost == "nothing moved":
            return self._buffers[slot][: bucket.nbytes]
        return fetch(self, source, bucket, slot, **kwargs)

    def faulty_send(self, message):
        if isinstance(message, Bucket) and message.seq == 1 and lost != "nothing moved":
            if lost == "a repeated bucket":
                send(self, saved[0])
            return
        if isinstance(message, Bucket):
            saved.append(message)
        send(self, message)

    monkeypatch.setattr(NixlTransport, "fetch", faulty_fetch)
    monkeypatch.setattr(Link, "send", faulty_send)
    crew.rollout[0]._memory.buffers[0].zero_()
    crew.rollout[0]._memory.buffers[1].zero_()
    sender, receiver = timed(crew, [plain(some_weights())], within=8)
    assert isinstance(sender, WeightSyncError)
    assert isinstance(receiver, WeightSyncError)
    monkeypatch.undo()


# Calls out of order.


def test_before_prepare_before_init_and_after_close():
    engine = make_engine()

    def both(reason):
        with pytest.raises(LifecycleError, match=reason):
            run(engine.send_weights(plain([])))
        with pytest.raises(LifecycleError, match=reason):
            run(collect(engine))

    worlds = {"train_world_size": 1, "rollout_world_size": 1, "metadata": [{}, {}]}
    with pytest.raises(LifecycleError, match="not prepared"):
        engine.init_policy_process_group(worker_rank=0, **worlds)
    with pytest.raises(LifecycleError, match="not prepared"):
        engine.init_rollout_process_group(rollout_rank=0, **worlds)
    both("not prepared")
    engine.prepare()
    both("not joined")
    for _ in range(3):
        engine.finalize()
        engine.abort_refit(ValueError("nobody listens"))
    for _ in range(3):
        engine.close()
    both("not prepared")
    with pytest.raises(LifecycleError, match="closed"):
        engine.prepare()
    engine.finalize()


def test_the_wrong_side():
    with Crew() as crew:
        policy, rollout = crew.pair
        with pytest.raises(LifecycleError, match="not joined as a policy"):
            run(rollout.send_weights(plain([])))
        with pytest.raises(LifecycleError, match="not joined as a rollout"):
            run(collect(policy))
        recovers(crew)


def test_a_second_call_while_a_refit_runs_is_refused_and_the_refit_goes_on(crew):
    policy, rollout = crew.pair
    refused = []

    async def receive(engine):
        received = []
        async for batch in engine.receive_weight_batches():
            received += [(n, t.clone()) for n, t in batch]
            for attempt in (
                lambda: run_in_thread(lambda: asyncio.run(policy.send_weights(plain([])))),
                lambda: run_in_thread(lambda: asyncio.run(collect(rollout))),
                policy.prepare,
                rollout.prepare,
                policy.finalize,
                rollout.finalize,
            ):
                with pytest.raises(LifecycleError, match="still running"):
                    attempt()
                refused.append(attempt)
        return received

    sent = some_weights()
    assert_same(crew.attempt([plain(sent)], receive)[1], sent)
    assert len(refused) >= 6


def run_in_thread(call):
    outcome = []

    def target():
        try:
            outcome.append(call())
        except BaseException as error:  # noqa: BLE001 - the outcome
            outcome.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join(10)
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


@pytest.mark.parametrize("side", ["policy", "rollout"])
def test_close_from_another_thread_ends_a_refit(side):
    crew = Crew()
    engine = crew.pair[side == "rollout"]
    closed = []

    def close_soon():
        time.sleep(0.3)
        started = time.monotonic()
        engine.close()
        closed.append(time.monotonic() - started)

    async def slow_consumer(engine):
        async for _ in engine.receive_weight_batches():
            await asyncio.sleep(0.2)

    thread = threading.Thread(target=close_soon)
    thread.start()
    sender, receiver = crew.attempt([plain(some_weights())], slow_consumer)
    thread.join(10)
    assert closed[0] < 3
    mine, other = (sender, receiver) if side == "policy" else (receiver, sender)
    assert isinstance(mine, LifecycleError)
    assert isinstance(other, PeerAbortedError)
    assert "closed during a refit" in str(other)
    crew.__exit__()


@pytest.mark.parametrize("side", ["policy", "rollout"])
def test_close_from_another_thread_ends_a_wait_for_the_peer(side):
    crew = Crew(connect_s=30.0)
    engine = crew.pair[side == "rollout"]
    timer = threading.Timer(0.3, engine.close)
    timer.start()
    started = time.monotonic()
    with pytest.raises(LifecycleError):
        run(engine.send_weights(plain(some_weights())) if side == "policy" else collect(engine))
    assert time.monotonic() - started < 3
    timer.join(10)
    crew.__exit__()


def test_close_in_the_refit_s_own_thread_aborts_it_and_says_why_it_cannot_close():
    crew = Crew()

    async def receive(engine):
        async for _ in engine.receive_weight_batches():
            with pytest.raises(LifecycleError, match="still running"):
                engine.close()

    sender, receiver = crew.attempt([plain(some_weights())], receive)
    assert isinstance(sender, PeerAbortedError)
    assert isinstance(receiver, LifecycleError)
    crew.__exit__()


# Preparing.


class Ledger:
    """Counts registrations of all agents."""

    def __init__(self, monkeypatch) -> None:
        self.registered = self.deregistered = 0
        register, deregister = NixlAgent.register, NixlAgent.deregister

        def counted_register(agent, buffer):
            handle = register(agent, buffer)
            self.registered += 1
            return handle

        def counted_deregister(agent, handle):
            deregister(agent, handle)
            self.deregistered += 1

        monkeypatch.setattr(NixlAgent, "register", counted_register)
        monkeypatch.setattr(NixlAgent, "deregister", counted_deregister)


def test_every_registration_is_undone(monkeypatch):
    ledger = Ledger(monkeypatch)
    with Crew(2, 1) as crew:
        crew.refit(some_weights())
        crew.attempt([breaking(some_weights(), 3, ValueError("x")) for _ in range(2)])
        join(crew.policy, crew.rollout)
        crew.refit(some_weights())
    assert (ledger.registered, ledger.deregistered) == (6, 6)
    with Crew(1, 1, release_after_refit=True) as crew:
        for _ in range(3):
            crew.refit(some_weights())
            for engine in crew.engines:
                engine.finalize()
                engine.finalize()
            join(crew.policy, crew.rollout)
    assert (ledger.registered, ledger.deregistered) == (22, 22)


def test_a_registration_that_fails_leaves_nothing_behind(monkeypatch):
    ledger = Ledger(monkeypatch)
    counted, calls = NixlAgent.register, []

    def second_fails(agent, buffer):
        calls.append(buffer)
        if len(calls) == 2:
            raise TransportError("no more memory")
        return counted(agent, buffer)

    monkeypatch.setattr(NixlAgent, "register", second_fails)
    engine = make_engine()
    with pytest.raises(TransportError, match="no more memory"):
        engine.prepare()
    engine.prepare()
    engine.close()
    assert ledger.registered == ledger.deregistered


def test_release_after_refit_frees_the_buffers_and_prepare_makes_new_ones():
    with Crew(release_after_refit=True) as crew:
        for seed in range(3):
            sent = some_weights(seed)
            assert_same(crew.refit(sent)[0], sent)
            for engine in crew.engines:
                engine.finalize()
                assert engine._memory.buffers == []
                with pytest.raises(LifecycleError, match="not prepared"):
                    run(engine.send_weights(plain([])))
            join(crew.policy, crew.rollout)


def test_finalize_keeps_the_peers_by_default(crew):
    for engine in crew.engines:
        engine.finalize()
        engine.finalize()


def test_prepare_twice_opens_a_new_session(crew):
    old = [engine.prepare() for engine in crew.engines]
    join(crew.policy, crew.rollout)
    recovers(crew)
    new = [engine._session.own.to_dict() for engine in crew.engines]
    assert all(a["control"]["session"] != b["control"]["session"] for a, b in zip(old, new, strict=True))
    assert [a["transport"]["slots"] for a in old] == [b["transport"]["slots"] for b in new]


def test_joining_twice_takes_a_new_prepare(crew):
    metadata = [engine._session.own.to_dict() for engine in crew.engines]
    worlds = {"train_world_size": 1, "rollout_world_size": 1, "metadata": metadata}
    with pytest.raises(LifecycleError, match="joined as policy rank 0 already"):
        crew.policy[0].init_policy_process_group(worker_rank=0, **worlds)
    with pytest.raises(LifecycleError, match="joined as rollout rank 0 already"):
        crew.rollout[0].init_rollout_process_group(rollout_rank=0, **worlds)


def damaged(entry, **changes):
    return {**entry, **changes}


def damaged_metadata(policy, rollout):
    slots = policy["transport"]["slots"]
    whole = policy["transport"]["metadata"]

    def transport(**changes):
        return damaged(policy, transport={**policy["transport"], **changes})

    return {
        "expected 2, got 1": [policy],
        "expected 2, got 3": [policy, rollout, rollout],
        "expected 2, got None": None,
        "entry 0 was not made by a nixl engine": [{"engine": "other"}, rollout],
        "entry 0 was not made by": ["policy", rollout],
        "entry 0 has bucket_size 2097152": [damaged(policy, bucket_size=2 * MIB), rollout],
        "entry 0 has digest 'off'.*set verify and device alike": [damaged(policy, digest="off"), rollout],
        "entry 0 has no proper 'control'": [damaged(policy, control=None), rollout],
        "entry 0 has no proper 'transport'": [{k: v for k, v in policy.items() if k != "transport"}, rollout],
        "entry 0 has topology 'star'.*set topology alike": [damaged(policy, topology="star"), rollout],
        "entry 0 has fan_out 3.*set fan_out alike": [damaged(policy, fan_out=3), rollout],
        "entry 1 is not what this worker's last prepare": [rollout, policy],
        "policy rank 0 has backend_name 'POSIX', this worker 'UCX'": [transport(backend="POSIX"), rollout],
        "(?s)metadata of policy rank 0 are damaged.*": [transport(metadata=b"garbage"), rollout],
        "metadata of policy rank 0 are damaged": [transport(metadata=whole[: len(whole) // 2]), rollout],
        "metadata of policy rank 0 are damaged:": [transport(metadata=b""), rollout],
        "metadata of policy rank 0 are damaged: ": [transport(metadata="text"), rollout],
        "does not describe a buffer": [transport(slots=[["x", *slots[0][1:]], slots[1]]), rollout],
        "metadata of policy rank 0 are damaged: they lack agent, slots": [
            damaged(policy, transport={"backend": "UCX", "metadata": whole}), rollout,
        ],
        "metadata of policy rank 0 are damaged: they are another agent's": [
            transport(agent="preinit-1-0"), rollout,
        ],
        "card must hold": [damaged(policy, control={"name": "x"}), rollout],
    }  # fmt: skip


@pytest.mark.parametrize(
    "reason", damaged_metadata(*[{"transport": {"slots": [[0]] * 2, "metadata": b""}}] * 2)
)
def test_wrong_metadata_are_refused(shared, reason):
    policy, rollout = shared.pair
    metadata = damaged_metadata(policy.prepare(), rollout.prepare())[reason]
    with pytest.raises(ConfigurationError, match=reason):
        rollout.init_rollout_process_group(
            rollout_rank=0, train_world_size=1, rollout_world_size=1, metadata=metadata
        )
    join(shared.policy, shared.rollout)
    assert_same(shared.refit(some_weights())[0], some_weights())


def test_verify_must_be_alike_on_both_sides():
    engines = make_engine(verify="full"), make_engine(verify="off")
    metadata = [engine.prepare() for engine in engines]
    worlds = {"train_world_size": 1, "rollout_world_size": 1, "metadata": metadata}
    try:
        with pytest.raises(ConfigurationError, match="verify"):
            engines[0].init_policy_process_group(worker_rank=0, **worlds)
        with pytest.raises(ConfigurationError, match="verify"):
            engines[1].init_rollout_process_group(rollout_rank=0, **worlds)
    finally:
        for engine in engines:
            engine.close()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"bucket_size": MIB - 1}, "at least 1 MiB.*update_weights_bucket_memory_ratio"),
        ({"bucket_size": 0}, "at least 1 MiB"),
        ({"device": "tpu"}, "'cpu' or 'cuda'"),
        ({"verify": "maybe"}, "'sample' or 'off'"),
        ({"stall_s": 0}, "stall_s"),
        ({"shard_expert_weights": True, "shard_weights": "all"}, "leave shard_expert_weights out"),
        ({"backend_name": "NO_SUCH"}, "NO_SUCH"),
        ({"bind_host": "tcp://here:5"}, "bind_host"),
        ({"bind_host": "0.0.0.0"}, "advertise_host"),
        ({"bind_host": "203.0.113.7"}, "bind_host"),
    ],
)
def test_wrong_settings_are_refused(settings, reason):
    bucket_size = settings.pop("bucket_size", MIB)
    with pytest.raises(ConfigurationError, match=reason):
        engine = make_engine(bucket_size, **settings)
        try:
            engine.prepare()
        finally:
            engine.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_says_what_to_write():
    with pytest.raises(ConfigurationError, match="device: cpu"):
        NIXLCheckpointEngine(MIB)


@pytest.mark.slow
def test_a_missing_nixl_names_the_extra():
    code = """
        import sys

        class Block:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in {"nixl", "nixl_cu12", "nixl_cu13"}:
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        sys.meta_path.insert(0, Block())
        from weightsync.engines.nixl import NIXLCheckpointEngine, preinit_nixl_agent
        from weightsync.errors import MissingDependencyError

        engine = NIXLCheckpointEngine(1 << 20, device="cpu")
        for call in (engine.prepare, preinit_nixl_agent):
            try:
                call()
            except MissingDependencyError as error:
                if "pip install 'weightsync[nixl]'" not in str(error):
                    raise
            else:
                raise SystemExit("no error")
        engine.close()
        print("fine")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


# Waiting.


def test_a_peer_that_never_comes_is_a_deadline_error_on_either_side():
    with Crew(connect_s=0.5) as crew:
        for work in (crew.policy[0].send_weights(plain(some_weights())), collect(crew.rollout[0])):
            started = time.monotonic()
            with pytest.raises(DeadlineError) as failure:
                run(work)
            assert 0.4 < time.monotonic() - started < 2
            assert failure.value.context.peer in {"policy rank 0", "rollout rank 0"}
            assert failure.value.context.phase == "begin"
            assert failure.value.context.side in {"policy", "rollout"}
        recovers(crew)


@pytest.mark.slow
def test_a_consumer_that_stops_asking_is_given_up():
    async def stuck(engine):
        async for _ in engine.receive_weight_batches():
            await asyncio.sleep(2.5)

    with Crew(stall_s=1.0) as crew:
        sender, receiver = timed(crew, [plain(some_weights(count=40))], stuck, within=6)
        assert isinstance(sender, DeadlineError)
        assert sender.context.phase == "waiting for a buffer"
        assert sender.context.peer == "rollout rank 0"
        assert sender.context.bucket is not None
        assert sender.context.bytes_done > MIB
        assert sender.context.tensor is not None
        assert isinstance(receiver, PeerAbortedError)
        recovers(crew)


@pytest.mark.slow
def test_a_stream_that_stops_coming_is_given_up():
    def stuck():
        yield from some_weights(count=6)
        time.sleep(2.5)
        yield from [("late", torch.ones(2))]

    with Crew(stall_s=1.0) as crew:
        outcome = []
        thread = threading.Thread(
            target=lambda: outcome.append(asyncio.run(_outcome(crew.policy[0].send_weights(stuck()))))
        )
        thread.start()
        receiver = asyncio.run(_outcome(collect(crew.rollout[0])))
        assert isinstance(receiver, DeadlineError)
        assert receiver.context.peer == "policy rank 0"
        assert receiver.context.bytes_done > 0
        thread.join(10)
        assert isinstance(outcome[0], PeerAbortedError)
        recovers(crew)


async def _outcome(work):
    return (await asyncio.gather(work, return_exceptions=True))[0]


@pytest.mark.slow
def test_the_whole_refit_has_a_deadline():
    async def slow(engine):
        async for _ in engine.receive_weight_batches():
            await asyncio.sleep(0.4)

    with Crew(total_s=1.0) as crew:
        outcomes = timed(crew, [plain(some_weights(count=40))], slow, within=5)
        assert all(isinstance(outcome, (DeadlineError, PeerAbortedError)) for outcome in outcomes)
        assert any(isinstance(outcome, DeadlineError) for outcome in outcomes)
        recovers(crew)


# Several ranks.


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("at", [slow(0), 6, slow(12)])
def test_one_rank_s_stream_raises_and_all_ranks_stop(failing, at):
    with Crew(3, 2) as crew:
        streams = [plain(some_weights()) for _ in range(3)]
        streams[failing] = breaking(some_weights(), at, ValueError("rank trouble"))
        outcomes = timed(crew, streams, within=4)
        assert isinstance(outcomes[failing], ValueError)
        last = at == 12
        for rank, outcome in enumerate(outcomes):
            if rank != failing and not last:
                assert isinstance(outcome, PeerAbortedError), rank
                assert "rank trouble" in str(outcome), rank
        assert failing == 2 or isinstance(outcomes[3 + failing], PeerAbortedError)
        recovers(crew)


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("at", [slow(0), 2, slow(6)])
def test_one_receiver_raises_and_all_ranks_stop(failing, at):
    with Crew(3, 2) as crew:
        fails = failing_consumer(at, ValueError("load failed"), tell=True)

        def receive(engine):
            return fails(engine) if engine is crew.rollout[failing] else collect(engine)

        outcomes = timed(crew, [plain(some_weights(count=30)) for _ in range(3)], receive, within=4)
        assert isinstance(outcomes[3 + failing], ValueError)
        for outcome in (*outcomes[:3], outcomes[3 + 1 - failing]):
            assert isinstance(outcome, PeerAbortedError)
            assert "load failed" in str(outcome)
        recovers(crew)


def test_an_absent_follower_fails_all_that_came_with_the_reason():
    with Crew(4, 1, connect_s=1.0) as crew:

        async def without_rank_1():
            work = [crew.policy[rank].send_weights(plain(some_weights())) for rank in (0, 2, 3)]
            return await asyncio.gather(*work, collect(crew.rollout[0]), return_exceptions=True)

        started = time.monotonic()
        leader, *others, receiver = run(without_rank_1())
        assert time.monotonic() - started < 4
        assert isinstance(leader, DeadlineError)
        assert leader.context.peer == "policy rank 1"
        assert all(isinstance(outcome, TransportError) for outcome in (*others, receiver))
        recovers(crew)


def test_an_absent_leader_is_a_deadline_error_for_its_followers():
    with Crew(3, 1, connect_s=1.0) as crew:

        async def without_rank_0():
            work = [crew.policy[rank].send_weights(plain(some_weights())) for rank in (1, 2)]
            return await asyncio.gather(*work, return_exceptions=True)

        for outcome in run(without_rank_0()):
            assert isinstance(outcome, DeadlineError)
            assert outcome.context.peer == "policy rank 0"
        recovers(crew)


def test_ranks_that_do_not_send_hold_one_tensor_at_a_time():
    alive = [set(), set()]
    most = [0, 0]

    def counted(rank):
        import weakref

        for i in range(30):
            tensor = noise(MIB // 2, i)
            alive[rank].add(i)
            weakref.finalize(tensor, alive[rank].discard, i)
            most[rank] = max(most[rank], len(alive[rank]))
            yield f"w{i}", tensor
            del tensor

    with Crew(2, 1) as crew:
        outcomes = crew.attempt([counted(0), counted(1)])
        assert outcomes[:2] == [None, None]
    assert most[0] <= 2
    assert most[1] <= 2


# Clean-up.


def test_no_thread_is_left_and_nothing_is_unawaited():
    before = set(threading.enumerate())
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with Crew(2, 1) as crew:
            recovers(crew)
            crew.attempt([breaking(some_weights(), 5, ValueError("x")) for _ in range(2)])
            crew.attempt([plain(some_weights())] * 2, failing_consumer(1, ValueError("x"), tell=False))
            recovers(crew)
        gc.collect()
    deadline = time.monotonic() + 5
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(threading.enumerate()) - before == set()


@pytest.mark.slow
def test_an_engine_that_nobody_closed_does_not_hold_its_process():
    code = """
        import asyncio, threading
        from tests.engine_crew import Crew, collect, plain, some_weights

        crew = Crew(connect_s=30.0)
        crew.refit(some_weights())

        async def forgotten():
            batches = crew.rollout[0].receive_weight_batches()
            sender = asyncio.create_task(crew.policy[0].send_weights(plain(some_weights())))
            await anext(batches)

        asyncio.run(forgotten())
        print("fine")
    """
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")
    assert time.monotonic() - started < 20


@pytest.mark.slow
def test_optimised_python_checks_as_much():
    code = """
        from tests.engine_crew import Crew, assert_same, collect, plain, some_weights
        from weightsync.errors import ManifestError, PeerAbortedError

        with Crew(2, 1) as crew:
            sent = some_weights()
            received = crew.refit(sent, manifest=True)[0]
            if [(n, bytes(t.numpy())) for n, t in received] != [(n, bytes(t.numpy())) for n, t in sent]:
                raise SystemExit("other bytes")
            outcomes = crew.attempt([plain([sent[0], sent[0]]) for _ in range(2)])
            kinds = [type(outcome) for outcome in outcomes]
            if kinds != [ManifestError, ManifestError, PeerAbortedError]:
                raise SystemExit(f"{kinds}")
            crew.refit(sent)
        print("fine")
    """
    done = subprocess.run(
        [sys.executable, "-O", "-W", "error::RuntimeWarning", "-c", textwrap.dedent(code)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


def test_errors_say_how_far_they_came(crew):
    sender, receiver = crew.attempt([breaking(some_weights(), 9, IncompleteStreamError("cut"))])
    assert isinstance(sender, IncompleteStreamError)
    assert (sender.context.side, sender.context.rank, sender.context.phase) == ("policy", 0, "send")
    assert sender.context.bytes_done > MIB
    assert receiver.remote.context.bytes_done == sender.context.bytes_done


def test_a_lost_peer_is_told_apart_from_one_that_failed(crew):
    """Its engine closes between two refits: the other is told at once, not after a deadline."""
    with Crew() as other:
        other.refit(some_weights())
        other.rollout[0].close()
        started = time.monotonic()
        with pytest.raises(PeerLostError):
            run(other.policy[0].send_weights(plain(some_weights())))
        assert time.monotonic() - started < 2
