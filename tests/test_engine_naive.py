"""The colocated engine: handed over without a copy, in one event loop or two threads; failures are told."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
import weakref

import numpy
import pytest
import torch

from tests.engine_crew import Crew as NixlCrew
from tests.engine_crew import assert_same, collect, plain, run, some_weights, stream_of
from weightsync.config import load_refit_config
from weightsync.engines.naive import NaiveCheckpointEngine
from weightsync.engines.registry import create_checkpoint_engine
from weightsync.errors import (
    ConfigurationError,
    DeadlineError,
    IncompleteStreamError,
    LifecycleError,
    ManifestError,
    PeerAbortedError,
    PeerLostError,
)
from weightsync.tensors import TensorSpec, WeightManifest, WeightStream

pytestmark = pytest.mark.timeout(60)

MIB = 1 << 20
FAST = {"bind_host": "127.0.0.1", "connect_s": 5.0, "stall_s": 5.0, "silence_s": 4.0}
FAST_SCOPE = {"bind_host": "127.0.0.1", "device": "cpu"}


class Crew(NixlCrew):
    def __init__(self, policy=1, rollout=1, bucket_size=MIB, **settings):
        settings = {**FAST, **settings}
        self.policy = [NaiveCheckpointEngine(bucket_size, **settings) for _ in range(policy)]
        self.rollout = [NaiveCheckpointEngine(bucket_size, **settings) for _ in range(rollout)]
        join(self.policy, self.rollout)


def join(policy, rollout, change=lambda metadata: metadata):
    metadata = change([engine.prepare() for engine in (*policy, *rollout)])
    worlds = {"train_world_size": len(policy), "rollout_world_size": len(rollout), "metadata": metadata}
    for rank, engine in enumerate(policy):
        engine.init_policy_process_group(worker_rank=rank, **worlds)
    for rank, engine in enumerate(rollout):
        engine.init_rollout_process_group(rollout_rank=rank, **worlds)


@pytest.fixture(scope="module")
def shared():
    with Crew() as crew:
        yield crew


@pytest.fixture
def crew(shared):
    """The same engines for every test: each leaves them fit for the next refit."""
    yield shared
    for manifest in (False, True):
        sent = some_weights(seed=7)
        assert_same(shared.refit(sent, manifest=manifest)[0], sent)


def in_two_threads(crew, stream, receive=collect):
    """Run each side in a thread of its own; returns both outcomes."""
    outcomes = {}

    def go(name, work):
        try:
            outcomes[name] = run(work)
        except Exception as error:  # noqa: BLE001
            outcomes[name] = error

    policy, rollout = crew.pair
    threads = [
        threading.Thread(target=go, args=("rollout", receive(rollout))),
        threading.Thread(target=go, args=("policy", policy.send_weights(stream))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return outcomes["policy"], outcomes["rollout"]


def failing(at, error=None):
    """A consumer that raises at batch ``at``."""

    async def receive(engine):
        batches = engine.receive_weight_batches()
        try:
            number = 0
            async for _ in batches:
                if number == at:
                    raise error or ValueError("the load failed")
                number += 1
        except ValueError as failure:
            engine.abort_refit(failure)
            raise
        finally:
            await batches.aclose()

    return receive


# What is handed over.


@pytest.mark.parametrize("manifest", [False, True])
@pytest.mark.parametrize("threads", [False, True])
def test_the_policys_own_tensors_arrive_and_batches_are_bounded(crew, manifest, threads):
    sent = [*some_weights(count=9), ("large", torch.arange(600_000.0)), ("scalar", torch.tensor(2.5)),
            ("empty", torch.empty(0, 3)), ("last", torch.ones(5, dtype=torch.int8))]  # fmt: skip
    seen = []

    async def receive(engine):
        async for batch in engine.receive_weight_batches():
            seen.append([(name, tensor.data_ptr(), tensor.nbytes) for name, tensor in batch])
        return len(seen)

    stream = stream_of(sent, manifest=manifest)
    if threads:
        assert in_two_threads(crew, stream, receive) == (None, len(seen))
    else:
        assert crew.attempt([stream], receive) == [None, len(seen)]
    assert [(n, p) for batch in seen for n, p, _ in batch] == [(n, t.data_ptr()) for n, t in sent]
    for batch in seen:
        assert len(batch) == 1 or sum(nbytes for _, _, nbytes in batch) <= MIB
    assert [len(batch) for batch in seen] == [3, 3, 3, 1, 3]
    stats = crew.policy[0].refit_stats()
    assert (stats["batches"], stats["tensors"], stats["bytes"]) == (5, 13, sum(t.nbytes for _, t in sent))
    assert {"seconds_gather", "seconds_wait", "seconds_total"} <= set(stats)
    assert crew.rollout[0].refit_stats()["bytes"] == stats["bytes"]


def test_strided_and_trained_tensors_arrive_plain(crew):
    weight = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4))
    received = crew.refit([("t", weight.t()), ("w", weight), ("neg", torch.ones(2) * 1j)])[0]
    assert [name for name, _ in received] == ["t", "w", "neg"]
    assert torch.equal(received[0][1], weight.t())
    assert received[0][1].is_contiguous()
    assert not received[1][1].requires_grad


def test_an_empty_stream(crew):
    assert crew.attempt([stream_of([], manifest=True)]) == [None, []]
    assert crew.attempt([stream_of([])]) == [None, []]


def test_a_batch_is_let_go_before_the_next_one_is_made(crew):
    """Of weights made for the refit, no more than a batch and one item exist at any time."""
    alive, most = [], 0

    def gather():
        nonlocal most
        for number in range(12):
            memory = numpy.zeros(300_000, dtype=numpy.uint8)
            alive.append(weakref.ref(memory))
            most = max(most, sum(reference() is not None for reference in alive))
            tensor = torch.from_numpy(memory)
            del memory
            yield f"w{number}", tensor
            del tensor

    async def receive(engine):
        async for batch in engine.receive_weight_batches():
            batch.clear()

    assert crew.attempt([gather()], receive) == [None, None]
    assert most == 4


def test_a_refit_after_a_refit_and_names_of_refits(crew):
    for epoch in (1, 2, 3):
        crew.open(epoch, epoch)
        sent = some_weights(seed=epoch, count=3)
        assert_same(crew.refit(sent, manifest=True)[0], sent)


def test_several_pairs_and_a_rank_without_a_partner_keep_in_step():
    with Crew(3, 2) as crew:
        for version in (1, 2):
            crew.open(version, version)
            sent = some_weights(seed=version)
            for received in crew.refit(sent):
                assert_same(received, sent)
        drained = []

        def draining():
            for pair in some_weights():
                drained.append(pair[0])
                yield pair

        streams = [plain(some_weights()), plain(some_weights()), draining()]
        crew.attempt(streams)
        assert len(drained) == 12


# What is refused.


def test_the_manifest_is_checked_before_the_first_item_is_made(crew):
    made, checked = [], []
    sent = some_weights(count=2)

    def making():
        for pair in sent:
            made.append(pair[0])
            yield pair

    def check(manifest):
        checked.append((manifest.names, list(made)))
        raise ManifestError("unknown tensor", tensor="layer.0.weight")

    crew.rollout[0].manifest_check = check
    stream = WeightStream(WeightManifest.build(TensorSpec.of(n, t) for n, t in sent), making())
    sender, receiver = crew.attempt([stream])
    crew.rollout[0].manifest_check = None
    assert checked == [(["layer.0.weight", "layer.1.weight"], [])]
    assert made == []
    assert isinstance(receiver, ManifestError)
    assert isinstance(sender, PeerAbortedError)
    assert "unknown tensor" in str(sender)
    assert (sender.remote.kind, sender.context.peer) == ("ManifestError", "rollout rank 0")


def test_streams_that_break_their_promise(crew):
    sent = some_weights(count=3)
    manifest = WeightManifest.build(TensorSpec.of(n, t) for n, t in sent)
    wrong = {
        "ended after 2 of 3": sent[:2],
        "promised 'layer.1.weight'": [sent[0], sent[2], sent[1]],
        "promised no more": [*sent, ("extra", torch.ones(1))],
    }
    for text, pairs in wrong.items():
        sender, receiver = crew.attempt([WeightStream(manifest, plain(pairs))])
        assert isinstance(sender, ManifestError), text
        assert text in str(sender)
        assert isinstance(receiver, PeerAbortedError)
        assert text in str(receiver)
    sender, receiver = crew.attempt([plain([sent[0], sent[1], sent[0]])])
    assert "repeats a name" in str(sender)
    assert sender.context.tensor == "layer.0.weight"
    assert isinstance(receiver, PeerAbortedError)
    twice = WeightManifest((TensorSpec.of(*sent[0]), TensorSpec.of(*sent[0])))
    sender, receiver = crew.attempt([WeightStream(twice, plain([]))])
    assert isinstance(receiver, ManifestError)
    assert "repeated" in str(receiver)


def test_a_tensor_without_values(crew):
    sender, receiver = crew.attempt([plain([("meta", torch.empty(3, device="meta"))])])
    assert isinstance(sender, ManifestError)
    assert sender.context.tensor == "meta"
    assert isinstance(receiver, PeerAbortedError)


def test_more_rollout_than_policy_ranks_are_refused():
    engine = NaiveCheckpointEngine(MIB, **FAST)
    assert engine.refuses(train_world_size=2, rollout_world_size=2) is None
    assert "3 rollout and 2 policy" in engine.refuses(train_world_size=2, rollout_world_size=3)
    metadata = [engine.prepare(), *[{}] * 4]
    with pytest.raises(ConfigurationError, match="3 rollout and 2 policy"):
        engine.init_policy_process_group(
            worker_rank=0, train_world_size=2, rollout_world_size=3, metadata=metadata
        )
    engine.close()


def test_a_partner_in_another_process_is_refused_and_the_text_says_what_to_write():
    policy, rollout = (NaiveCheckpointEngine(MIB, **FAST) for _ in range(2))

    def elsewhere(metadata):
        for entry in metadata:
            assert (entry["engine"], entry["pid"]) == ("naive", os.getpid())
        return [metadata[0], {**metadata[1], "process": "another", "pid": 4711, "host": "gpu-17"}]

    with pytest.raises(ConfigurationError, match=r"pid 4711 on gpu-17.*refit_transport: ipc .*or nixl"):
        join([policy], [rollout], elsewhere)
    metadata = [{**policy.prepare(), "process": "another"}, rollout.prepare()]
    with pytest.raises(ConfigurationError, match="policy rank 0 is in another process"):
        rollout.init_rollout_process_group(
            rollout_rank=0, train_world_size=1, rollout_world_size=1, metadata=metadata
        )
    join([policy], [rollout])
    for engine in (policy, rollout):
        engine.close()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: m[:1], "expected 2, got 1"),
        (lambda m: [m[1], m[0]], "out of order"),
        (lambda m: [m[0], {**m[1], "engine": "nixl"}], "was not made by a naive engine"),
        (lambda m: [m[0], {**m[1], "bucket_size": 5}], "has bucket_size 5"),
        (lambda m: [m[0], {**m[1], "token": 5}], "no proper 'token'"),
        (lambda m: [m[0], {**m[1], "token": "gone"}], "gone or has been prepared again"),
    ],
)
def test_wrong_metadata(change, text):
    engines = [NaiveCheckpointEngine(MIB, **FAST) for _ in range(2)]
    with pytest.raises(ConfigurationError, match=text):
        join(engines[:1], engines[1:], change)
    join(engines[:1], engines[1:])
    with pytest.raises(LifecycleError, match="joined as policy rank 0 already"):
        engines[0].init_policy_process_group(
            worker_rank=0, train_world_size=1, rollout_world_size=1, metadata=[]
        )
    for engine in engines:
        engine.close()


def test_it_takes_the_common_settings_and_no_others():
    generation = {"colocated": {"enabled": True}, "refit_transport": None, "refit_cfg": {"naive": FAST_SCOPE}}
    config = load_refit_config({"policy": {"generation": generation}})
    assert (config.transport, config.colocated) == ("naive", True)
    kwargs = config.engine_kwargs()
    create_checkpoint_engine(config.transport, bucket_size_bytes=5, engine_kwargs=kwargs).close()
    for wrong in ({"chunk": 1}, {"topology": "ring"}):
        with pytest.raises(ConfigurationError, match=str(next(iter(wrong)))):
            create_checkpoint_engine("naive", bucket_size_bytes=5, engine_kwargs=wrong)
    assert set(NaiveCheckpointEngine.lacks) == {"processes", "hosts", "latecomers"}


# Failures.


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("at", [0, 5, 11, 12])
def test_the_stream_raises(crew, at, threads):
    def breaking():
        for number, pair in enumerate(some_weights()):
            if number == at:
                raise ValueError("gather failed")
            yield pair
        raise ValueError("gather failed")

    sender, receiver = in_two_threads(crew, breaking()) if threads else crew.attempt([breaking()])
    assert isinstance(sender, ValueError)
    assert f"at item {at}" in "\n".join(sender.__notes__)
    assert isinstance(receiver, PeerAbortedError)
    assert (receiver.context.side, receiver.context.rank) == ("rollout", 0)
    assert receiver.context.peer == "policy rank 0"
    assert "gather failed" in str(receiver)
    assert "in breaking" in receiver.remote.traceback


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("at", [0, 3])
def test_the_consumer_raises(crew, at, threads):
    closed = []

    def stream():
        try:
            yield from some_weights()
        finally:
            closed.append(True)

    outcomes = (
        in_two_threads(crew, stream(), failing(at)) if threads else crew.attempt([stream()], failing(at))
    )
    assert isinstance(outcomes[0], PeerAbortedError)
    assert "the load failed" in str(outcomes[0])
    assert outcomes[0].remote.kind == "ValueError"
    assert isinstance(outcomes[1], ValueError)
    assert closed == [True]


def test_the_consumer_stops_early(crew):
    async def first_only(engine):
        batches = engine.receive_weight_batches()
        await anext(batches)
        await batches.aclose()

    sender, receiver = crew.attempt([plain(some_weights())], first_only)
    assert receiver is None
    assert isinstance(sender, PeerAbortedError)
    assert sender.remote.kind == IncompleteStreamError.__name__


def test_a_cancelled_side_is_told_to_the_other(crew):
    async def cancel():
        policy, rollout = crew.pair
        sending = asyncio.ensure_future(policy.send_weights(plain(some_weights())))
        await asyncio.sleep(0.05)
        sending.cancel()
        receiving = asyncio.ensure_future(collect(rollout))
        return await asyncio.gather(sending, receiving, return_exceptions=True)

    crew.open(100, 100)
    sender, receiver = run(cancel())
    assert isinstance(sender, asyncio.CancelledError)
    assert isinstance(receiver, PeerAbortedError)


@pytest.mark.parametrize("side", ["policy", "rollout"])
def test_the_other_side_never_comes(side):
    with Crew(connect_s=0.3) as crew:
        crew.open(1, 1)
        started = time.monotonic()
        work = (
            crew.policy[0].send_weights(plain(some_weights()))
            if side == "policy"
            else collect(crew.rollout[0])
        )
        with pytest.raises(DeadlineError, match=r"did not begin this refit within 0\.3 s") as caught:
            run(work)
        assert time.monotonic() - started < 2
        assert caught.value.context.side == side
        crew.open(2, 2)
        assert_same(crew.refit(some_weights())[0], some_weights())


def test_sides_of_different_refits_do_not_meet():
    with Crew(connect_s=0.3) as crew:
        policy, rollout = crew.pair
        policy.open_refit(epoch=4, version=4)
        rollout.open_refit(epoch=5, version=5)
        sender, receiver = crew.attempt([plain(some_weights())])
        assert isinstance(sender, DeadlineError)
        assert isinstance(receiver, DeadlineError)
        assert "it is in refit 5 to version 5" in str(sender)
        crew.open(6, 6)
        assert_same(crew.refit(some_weights())[0], some_weights())


@pytest.mark.parametrize("order", ["waits", "comes later"])
@pytest.mark.parametrize("side", ["policy", "rollout"])
def test_a_side_fails_before_it_begins(crew, side, order):
    epoch = 10 + ["waits", "comes later"].index(order) * 2 + ["policy", "rollout"].index(side)
    crew.open(epoch, epoch)
    policy, rollout = crew.pair
    absent = policy if side == "policy" else rollout

    async def attempt():
        def work():
            return collect(rollout) if side == "policy" else policy.send_weights(plain(some_weights()))

        if order == "comes later":
            absent.abort_refit(ValueError("no weights yet"))
            return await work()
        waiting = asyncio.ensure_future(work())
        await asyncio.sleep(0.05)
        absent.abort_refit(ValueError("no weights yet"))
        return await waiting

    with pytest.raises(PeerAbortedError, match="no weights yet"):
        run(attempt())
    crew.open(epoch + 100, epoch + 100)


@pytest.mark.slow
def test_a_stalled_consumer_and_a_stalled_stream():
    with Crew(stall_s=0.4) as crew:

        async def slow(engine):
            async for _ in engine.receive_weight_batches():
                await asyncio.sleep(1.5)

        sender, receiver = crew.attempt([plain(some_weights())], slow)
        assert isinstance(sender, DeadlineError)
        assert "nothing from rollout rank 0 for 0.4 s" in str(sender)
        assert isinstance(receiver, PeerAbortedError)

        def stuck():
            yield from some_weights(count=8)
            time.sleep(1.5)
            yield "late", torch.ones(1)

        sender, receiver = in_two_threads(crew, stuck())
        assert isinstance(receiver, DeadlineError)
        assert isinstance(sender, PeerAbortedError)
        assert_same(crew.refit(some_weights())[0], some_weights())


def test_a_receiver_that_fails_stops_every_policy_rank():
    with Crew(3, 3) as crew:
        crew.open(1, 1)

        async def receive(engine):
            return await (failing(1)(engine) if engine is crew.rollout[1] else collect(engine))

        started = time.monotonic()
        outcomes = crew.attempt([plain(some_weights(count=30)) for _ in range(3)], receive)
        assert time.monotonic() - started < 4
        assert isinstance(outcomes.pop(4), ValueError)
        for outcome in outcomes:
            assert isinstance(outcome, PeerAbortedError), outcome
            assert "the load failed" in str(outcome)
        crew.open(2, 2)
        for received in crew.refit(some_weights()):
            assert_same(received, some_weights())


def test_a_policy_rank_that_fails_before_it_begins_is_heard_by_all():
    with Crew(2, 2, connect_s=20.0) as crew:
        crew.open(1, 1)

        async def attempt():
            work = asyncio.gather(
                crew.policy[0].send_weights(plain(some_weights())),
                *(collect(engine) for engine in crew.rollout),
                return_exceptions=True,
            )
            await asyncio.sleep(0.2)
            await asyncio.to_thread(crew.policy[1].abort_refit, ValueError("no weights yet"))
            return await work

        started = time.monotonic()
        for outcome in run(attempt()):
            assert isinstance(outcome, PeerAbortedError), outcome
            assert "no weights yet" in str(outcome)
        assert time.monotonic() - started < 4


# Life.


def test_one_call_at_a_time(crew):
    policy, rollout = crew.pair

    async def attempt():
        first = asyncio.ensure_future(policy.send_weights(plain(some_weights())))
        await asyncio.sleep(0.05)
        for call in (policy.prepare, policy.finalize, policy.close):
            with pytest.raises(LifecycleError, match="still running"):
                call()
        with pytest.raises(LifecycleError, match="still running"):
            await policy.send_weights(plain([]))
        return await asyncio.gather(first, collect(rollout), return_exceptions=True)

    outcomes = run(attempt())
    assert all(isinstance(outcome, (LifecycleError, PeerAbortedError)) for outcome in outcomes)


def test_close_during_a_refit_ends_it_on_both_sides():
    crew = Crew()
    entered = threading.Event()

    async def slow(engine):
        async for _ in engine.receive_weight_batches():
            entered.set()
            await asyncio.sleep(0.05)

    closer = threading.Thread(target=lambda: (entered.wait(10), crew.policy[0].close()))
    closer.start()
    sender, receiver = in_two_threads(crew, plain(some_weights(count=200)), slow)
    closer.join(10)
    assert isinstance(sender, LifecycleError)
    assert isinstance(receiver, PeerAbortedError)
    assert "closed during a refit" in str(receiver)
    with pytest.raises(LifecycleError, match="closed"):
        crew.policy[0].prepare()
    with pytest.raises(PeerLostError, match="was closed"):
        run(collect(crew.rollout[0]))
    crew.rollout[0].close()
    crew.rollout[0].close()


def test_before_it_is_prepared_or_joined():
    engine = NaiveCheckpointEngine(MIB, **FAST)
    with pytest.raises(LifecycleError, match="not prepared"):
        engine.init_policy_process_group(worker_rank=0, train_world_size=1, rollout_world_size=1, metadata=[])
    with pytest.raises(LifecycleError, match="not joined as a rollout worker"):
        run(collect(engine))
    engine.abort_refit(ValueError("nobody hears it"))
    engine.finalize()
    engine.close()


def test_connected_anew_and_peers_that_were_not():
    with Crew() as crew:
        join(crew.policy, crew.rollout)
        assert_same(crew.refit(some_weights())[0], some_weights())
        crew.rollout[0].prepare()
        with pytest.raises(PeerLostError, match="prepared again"):
            run(crew.policy[0].send_weights(plain(some_weights())))
        join(crew.policy, crew.rollout)
        assert_same(crew.refit(some_weights())[0], some_weights())


@pytest.mark.slow
def test_nothing_is_left_behind():
    def count():
        gc.collect()
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    with Crew(2, 2) as crew:
        crew.refit(some_weights())
    before = count()
    for _ in range(4):
        with Crew(2, 2) as crew:
            crew.refit(some_weights())
    time.sleep(0.2)
    after = count()
    assert after[0] <= before[0]
    assert after[1] <= before[1]
