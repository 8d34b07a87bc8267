"""The parameter server in one process: shares kept in host memory, refits in a row, latecomers."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.engine_crew import MIB, Crew, assert_same, collect, make_engine, plain, run, some_weights
from weightsync.engines.kimi import KimiCheckpointEngine
from weightsync.engines.nixl import NIXLCheckpointEngine
from weightsync.errors import (
    ConfigurationError,
    DeadlineError,
    LifecycleError,
    PeerAbortedError,
    ProtocolError,
    WeightSyncError,
)

TRANSPORTS = ["ipc", pytest.param("nixl", marks=pytest.mark.nixl)]
both = pytest.mark.parametrize("transport", TRANSPORTS)


def slow(world):
    return pytest.param(world, marks=pytest.mark.slow)


class Server(Crew):
    """Joined Kimi engines, and the latecomers that they serve."""

    def __init__(self, policy: int = 1, rollout: int = 1, transport: str = "ipc", **settings) -> None:
        self.settings = {"engine": KimiCheckpointEngine, "transport": transport, **settings}
        self.policy = [make_engine(**self.settings) for _ in range(policy)]
        self.rollout = [make_engine(**self.settings) for _ in range(rollout)]
        self.guests: list[KimiCheckpointEngine] = []
        self.epoch = 0
        self.join()

    def join(self) -> None:
        self.metadata = [engine.prepare() for engine in self.engines]
        for rank, engine in enumerate(self.policy):
            engine.init_policy_process_group(worker_rank=rank, **self.worlds(self.metadata))
        for rank, engine in enumerate(self.rollout):
            engine.init_rollout_process_group(rollout_rank=rank, **self.worlds(self.metadata))

    def worlds(self, metadata) -> dict:
        sizes = {"train_world_size": len(self.policy), "rollout_world_size": len(self.rollout)}
        return {**sizes, "metadata": metadata}

    def guest(self, **settings) -> KimiCheckpointEngine:
        """A worker that comes now; no other one is called."""
        engine = make_engine(**{**self.settings, **settings})
        self.guests.append(engine)
        engine.prepare()
        rank = len(self.rollout) + len(self.guests) - 1
        engine.join_late(rollout_rank=rank, **self.worlds(self.metadata[: len(self.policy)]))
        return engine

    def version(self, pairs) -> None:
        """A refit of all, under the next version."""
        self.epoch += 1
        self.open(self.epoch, self.epoch)
        for received in self.refit(pairs):
            same(received, pairs)

    @property
    def buffers(self) -> list[list[int]]:
        """Where the buffers of each policy rank are."""
        return [[b.data_ptr() for b in engine._memory.buffers] for engine in self.policy]

    def __exit__(self, *_: object) -> None:
        for engine in self.guests:
            engine.close()
        super().__exit__()


def same(received, sent) -> None:
    """The order in which shares come in is not the stream's."""
    by_name = {name: (name, tensor) for name, tensor in received}
    assert len(by_name) == len(received)
    assert_same([by_name[name] for name, _ in sent], sent)


async def failure_of(work) -> BaseException:
    try:
        await work
    except BaseException as error:  # noqa: BLE001 - the outcome
        return error
    raise AssertionError("it did not fail")


async def paused(engine, at: int, go_on: asyncio.Event, reached: asyncio.Event):
    """Receive, and wait at a batch until told to go on."""
    received, seen = [], 0
    async for batch in engine.receive_weight_batches():
        if seen == at:
            reached.set()
            await go_on.wait()
        seen += 1
        received += [(name, tensor.clone()) for name, tensor in batch]
    return received


# Refits.


@both
@pytest.mark.parametrize(
    "world", [(1, 1), *map(slow, [(3, 1), (2, 4), (4, 2)])], ids=lambda world: f"{world[0]} to {world[1]}"
)
def test_refits_in_a_row_with_other_values_and_sizes(world, transport):
    with Server(*world, transport) as server:
        before, grown = server.buffers, []
        for seed, count in enumerate([8, 24, 5, 24]):
            pairs = some_weights(seed, count)
            server.version(pairs)
            for had, has in zip(before, server.buffers, strict=True):
                assert has[: len(had)] == had, "a buffer was made anew"
            before = server.buffers
            grown.append(len(before[0]))
            same(run(collect(server.guest())), pairs)
        # Three tensors fill a bucket. A smaller refit needs fewer buffers and frees none.
        assert grown == {1: [3, 8, 8, 8], 2: [2, 4, 4, 4], 3: [2, 3, 3, 3], 4: [2, 2, 2, 2]}[world[0]]


def test_the_policy_waits_for_nobody_while_it_packs():
    """A receiver that has taken one batch stays where it is until the stream is at its end."""
    pairs = some_weights(0, 40)
    with Server() as server:

        async def refit():
            packed, reached = asyncio.Event(), asyncio.Event()

            def stream():
                yield from pairs
                packed.set()

            receive = paused(server.rollout[0], 0, packed, reached)
            return await asyncio.gather(server.policy[0].send_weights(stream()), receive)

        _, received = run(refit())
        same(received, pairs)


def test_the_shelf_takes_one_share_of_the_bytes():
    pairs = some_weights(0, 60)
    with Server(3, 1) as server:
        server.version(pairs)
        held = sum(len(buffers) for buffers in server.buffers) * MIB
        assert held < 1.3 * sum(tensor.numel() for _, tensor in pairs)


def test_a_release_after_each_refit_frees_the_shelf():
    with Server(release_after_refit=True) as server:
        server.version(some_weights(0, 24))
        assert len(server.buffers[0]) == 8
        for engine in server.engines:
            engine.finalize()
        assert server.buffers == [[]]
        server.join()
        with pytest.raises(PeerAbortedError, match=r"nothing is held .* it was released after"):
            run(collect(server.guest()))
        server.version(some_weights(1))
        same(run(collect(server.guest())), some_weights(1))


# Latecomers.


@pytest.mark.slow
@both
def test_latecomers_at_once_and_after_each_other(transport):
    with Server(2, 1, transport) as server:
        for seed in range(2):
            pairs = some_weights(seed, 20)
            server.version(pairs)
            guests = [server.guest() for _ in range(3)]

            async def all_at_once(guests=guests):
                return await asyncio.gather(*map(collect, guests))

            for guest, received in zip(guests, run(all_at_once()), strict=True):
                same(received, pairs)
                assert guest.refit_stats()["version"] == seed + 1
            same(run(collect(guests[0])), pairs)  # it may ask again
        server.version(some_weights(9))


def test_the_version_that_a_latecomer_names_is_held_against_what_there_is():
    with Server() as server:
        server.version(some_weights(0))
        guest = server.guest()
        guest.open_refit(epoch=77, version=1)
        same(run(collect(guest)), some_weights(0))
        guest.open_refit(epoch=78, version=2)
        with pytest.raises(ProtocolError, match=r"version 1 .* this side version 2"):
            run(collect(guest))
        same(run(collect(guest)), some_weights(0))


def test_without_open_refit_there_is_no_version():
    with Server(2, 2) as server:
        server.refit(some_weights(3))
        guest = server.guest()
        same(run(collect(guest)), some_weights(3))
        assert "version" not in guest.refit_stats()


def test_when_nothing_is_held_a_latecomer_is_told_at_once():
    with Server(2, 1) as server:
        started = time.monotonic()
        with pytest.raises(PeerAbortedError, match=r"nothing is held .* no refit has been completed"):
            run(collect(server.guest()))
        assert time.monotonic() - started < 2
        server.version(some_weights(0))


def broken(pairs, at):
    yield from pairs[:at]
    raise ValueError("the stream broke")


def test_a_refit_that_failed_while_it_packed_leaves_nothing():
    with Server(1, 1) as server:
        server.version(some_weights(0))
        outcomes = server.attempt([broken(some_weights(1), 5)])
        assert all(isinstance(outcome, Exception) for outcome in outcomes)
        guest = server.guest()
        with pytest.raises(PeerAbortedError, match="the last refit failed: ValueError: the stream broke"):
            run(collect(guest))
        server.version(some_weights(2))
        same(run(collect(guest)), some_weights(2))


def test_a_refit_that_failed_before_it_packed_leaves_what_was_held():
    with Server(connect_s=1.0) as server:
        server.version(some_weights(0))
        server.policy[0].open_refit(epoch=2, version=2)
        with pytest.raises(DeadlineError):
            run(server.policy[0].send_weights(plain(some_weights(1))))  # nobody receives
        guest = server.guest()
        same(run(collect(guest)), some_weights(0))
        assert guest.refit_stats()["version"] == 1


def test_what_is_held_outlives_a_new_process_group():
    with Server(2, 1) as server:
        server.version(some_weights(0, 30))
        server.join()
        same(run(collect(server.guest())), some_weights(0, 30))
        server.policy.pop().close()
        server.join()
        with pytest.raises(PeerAbortedError, match="the policy ranks are others than in the last refit"):
            run(collect(server.guest()))
        server.version(some_weights(1))


def test_a_latecomer_that_raises_harms_nobody():
    with Server(2, 1) as server:
        server.version(some_weights(0, 20))

        async def break_off(guest):
            async for _ in guest.receive_weight_batches():
                raise ValueError("the load failed")

        for _ in range(3):
            with pytest.raises(ValueError, match="the load failed"):
                run(break_off(server.guest()))
            same(run(collect(server.guest())), some_weights(0, 20))
        server.version(some_weights(1))


# Latecomers and refits.


@pytest.mark.slow
@both
def test_a_latecomer_during_a_refit_is_given_its_weights_after_it(transport):
    old, new = some_weights(0, 20), some_weights(1, 20)
    with Server(2, 1, transport) as server:
        server.version(old)
        guest = server.guest()

        async def both_at_once():
            go_on, reached = asyncio.Event(), asyncio.Event()
            server.open(2, 2)
            sends = [engine.send_weights(plain(new)) for engine in server.policy]
            refit = asyncio.gather(*sends, paused(server.rollout[0], 0, go_on, reached))
            await reached.wait()
            late = asyncio.ensure_future(collect(guest))
            await asyncio.sleep(0.7)
            assert not late.done()
            go_on.set()
            await refit
            return await late

        same(run(both_at_once()), new)
        assert guest.refit_stats()["version"] == 2


def test_a_latecomer_during_a_long_refit_is_told_in_time():
    with Server() as server:
        server.version(some_weights(0))
        guest = server.guest(connect_s=1.0)

        async def both_at_once():
            go_on, reached = asyncio.Event(), asyncio.Event()
            send = server.policy[0].send_weights(plain(some_weights(1)))
            refit = asyncio.gather(send, paused(server.rollout[0], 0, go_on, reached))
            await reached.wait()
            started = time.monotonic()
            error = await failure_of(collect(guest))
            assert time.monotonic() - started < 3
            go_on.set()
            await refit
            return error

        error = run(both_at_once())
        assert isinstance(error, DeadlineError)
        assert "it may be in a refit" in str(error)


@pytest.mark.slow
@both
def test_a_refit_turns_a_slow_latecomer_away_and_never_feeds_it_garbage(transport):
    """The latecomer stops at a batch, the refit overwrites the buffers, and the latecomer goes on."""
    old, new = some_weights(0, 20), some_weights(1, 20)
    for at in (0, 6):  # 20 tensors, three to a bucket: the first and the last batch
        with Server(1, 1, transport, connect_s=2.0) as server:
            server.version(old)
            guest = server.guest()

            async def meet(server=server, guest=guest, at=at):
                go_on, reached = asyncio.Event(), asyncio.Event()
                late = asyncio.ensure_future(failure_of(paused(guest, at, go_on, reached)))
                await reached.wait()
                started = time.monotonic()
                server.open(2, 2)
                _, received = await asyncio.gather(
                    server.policy[0].send_weights(plain(new)), collect(server.rollout[0])
                )
                same(received, new)
                assert time.monotonic() - started < 2.5  # its grace, and the abort
                go_on.set()
                return await late

            error = run(meet())
            assert isinstance(error, PeerAbortedError)
            assert "a refit begins: join again after it" in str(error)
            same(run(collect(guest)), new)


def test_a_refit_waits_a_moment_for_a_latecomer_that_is_nearly_done():
    with Server(2, 1) as server:
        server.version(some_weights(0, 20))
        guest = server.guest()

        async def meet():
            go_on, reached = asyncio.Event(), asyncio.Event()
            late = asyncio.ensure_future(paused(guest, 3, go_on, reached))
            await reached.wait()
            sends = [engine.send_weights(plain(some_weights(1))) for engine in server.policy]
            refit = asyncio.gather(*sends, collect(server.rollout[0]))
            await asyncio.sleep(0.3)
            go_on.set()
            await refit
            return await late

        same(run(meet()), some_weights(0, 20))


def test_closing_turns_a_latecomer_away():
    with Server() as server:
        server.version(some_weights(0, 20))
        guest = server.guest()

        async def meet():
            go_on, reached = asyncio.Event(), asyncio.Event()
            late = asyncio.ensure_future(failure_of(paused(guest, 0, go_on, reached)))
            await reached.wait()
            await asyncio.to_thread(server.policy[0].close)
            go_on.set()
            return await late

        assert "leaves its process group" in str(run(meet()))


# Settings and misuse.


def test_wrong_settings_are_refused():
    with pytest.raises(ConfigurationError, match="host memory: write device: cpu"):
        KimiCheckpointEngine(MIB, device="cuda")
    with pytest.raises(ConfigurationError, match="transport must be one of nixl, ipc"):
        KimiCheckpointEngine(MIB, transport="tcp")
    for topology in ("pairs", "star", "ring", "tree"):
        with pytest.raises(ConfigurationError, match="every policy rank keeps a share for all rollout ranks"):
            KimiCheckpointEngine(MIB, topology=topology)
    assert KimiCheckpointEngine(MIB).refuses(train_world_size=2, rollout_world_size=5) is None
    assert (
        KimiCheckpointEngine(MIB, topology="auto").refuses(train_world_size=1, rollout_world_size=9) is None
    )


def test_joining_late_wants_the_policy_ranks_metadata():
    with Server(2, 1) as server:
        guest = make_engine(**server.settings)
        try:
            with pytest.raises(LifecycleError, match="not prepared"):
                guest.join_late(rollout_rank=1, **server.worlds(server.metadata[:2]))
            guest.prepare()
            with pytest.raises(ConfigurationError, match="expected 2, got 3"):
                guest.join_late(rollout_rank=1, **server.worlds(server.metadata))
            with pytest.raises(ConfigurationError, match="outside its world"):
                guest.join_late(rollout_rank=-1, **server.worlds(server.metadata[:2]))
            torn = [{**entry, "guests": {}} for entry in server.metadata[:2]]
            with pytest.raises(ConfigurationError, match="CURVE key pair"):
                guest.join_late(rollout_rank=1, **server.worlds(torn))
            guest.prepare()
            guest.join_late(rollout_rank=1, **server.worlds(server.metadata[:2]))
            with pytest.raises(LifecycleError, match="joined"):
                guest.join_late(rollout_rank=1, **server.worlds(server.metadata[:2]))
        finally:
            guest.close()


def test_other_engines_say_that_they_serve_no_latecomers():
    assert "latecomers" in NIXLCheckpointEngine.lacks
    engine = make_engine()
    try:
        engine.prepare()
        with pytest.raises(ConfigurationError, match=r"serves no worker that comes later .* run a refit"):
            engine.join_late(rollout_rank=1, train_world_size=1, rollout_world_size=1, metadata=[{}])
    finally:
        engine.close()


def test_rollout_ranks_let_no_guests_in():
    with Server() as server:
        server.version(some_weights(0))
        guest = make_engine(**{**server.settings, "connect_s": 1.0})
        try:
            guest.prepare()
            guest.join_late(rollout_rank=1, **server.worlds([server.metadata[1]]))
            with pytest.raises(WeightSyncError):
                run(collect(guest))
        finally:
            guest.close()
