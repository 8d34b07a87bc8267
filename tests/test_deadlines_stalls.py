"""A refit that stands still, or fails, at any of its phases: all sides end in time and say who and where."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future, wait

import pytest

from tests.control_support import background
from tests.engine_crew import MIB, Crew, assert_same, collect, plain, some_weights, stream_of
from weightsync.control import Complete, Release
from weightsync.engines import inlet, sender
from weightsync.engines.collective import GlooCheckpointEngine
from weightsync.engines.nixl import NIXLCheckpointEngine
from weightsync.engines.waiting import await_ended
from weightsync.errors import DeadlineError, PeerAbortedError, PeerLostError, WeightSyncError

pytestmark = [pytest.mark.slow, pytest.mark.nixl, pytest.mark.timeout(120)]

STALL_S, CONNECT_S, SOON_S = 0.6, 0.9, 2.0
WEIGHTS = some_weights(count=24)
QUICK = {"device": "cpu", "bind_host": "127.0.0.1", "connect_s": CONNECT_S, "stall_s": STALL_S}

KINDS = {
    "nixl pairs": (NIXLCheckpointEngine, 1, "pairs"),
    "nixl ring": (NIXLCheckpointEngine, 2, "ring"),
    "gloo star": (GlooCheckpointEngine, 2, "star"),
}


class OneCrew(Crew):
    """A crew of one kind of engine, each of whose ranks runs in a thread of its own."""

    def __init__(self, kind: str) -> None:
        engine, rollout, topology = KINDS[kind]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "tests.engine_crew.make_engine", lambda size: engine(size, topology=topology, **QUICK)
            )
            super().__init__(1, rollout)

    def begin(self, stream, receive=None, *, without=None) -> dict[str, Future]:
        """Start all ranks, or all but one; returns their outcomes-to-be."""
        started = {}
        if without != "policy 0":
            started["policy 0"] = background(asyncio.run, self.policy[0].send_weights(stream))
        for rank, engine in enumerate(self.rollout):
            if without != f"rollout {rank}":
                how = receive if receive is not None and rank == 0 else collect
                started[f"rollout {rank}"] = background(asyncio.run, how(engine))
        return started

    def works(self) -> None:
        outcomes = self.begin(stream_of(WEIGHTS, manifest=True))
        outcomes.pop("policy 0").result(20)
        for outcome in outcomes.values():
            assert_same(outcome.result(20), WEIGHTS)


@pytest.fixture(scope="module", params=list(KINDS))
def crew(request):
    with OneCrew(request.param) as crew:
        crew.works()
        yield crew


class Halt:
    """Where a rank stands still, or breaks."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.go_on = threading.Event()
        self.reached = threading.Event()
        self.at = 0.0

    def __call__(self) -> None:
        if self.reached.is_set():
            return
        self.at = time.monotonic()
        self.reached.set()
        if self.error is not None:
            break_here(self.error)
        assert self.go_on.wait(20)

    def in_transport(self, *, timeout_s, check, **_) -> None:
        """As a transfer that makes no progress: it keeps to its bounds."""
        if self.error is not None:
            self()
        self.at = time.monotonic()
        self.reached.set()
        await_ended(self.go_on.is_set, timeout_s=timeout_s, check=check, what="a transfer")


def break_here(error: Exception) -> None:
    raise error


def stream_with(halt, at=5):
    for i, pair in enumerate(WEIGHTS):
        if i == at:
            halt()
        yield pair


async def load_with(halt, engine):
    async for batch in engine.receive_weight_batches():
        del batch
        try:
            halt()
        except ValueError as error:
            engine.abort_refit(error)
            raise


def after(calls: int, halt, then):
    """Return a function that halts at its n-th call, before it does what it is for."""
    left = [calls]

    def call(*args, **kwargs):
        left[0] -= 1
        if left[0] < 0:
            halt()
        return then(*args, **kwargs)

    return call


def transport_of(engine):
    return engine._memory._transport


def install(phase: str, crew, halt, patch) -> tuple:
    """Make a phase of the next refit stand still; returns the stream, how rollout rank 0 loads, who halts."""
    policy, rollout = transport_of(crew.policy[0]), transport_of(crew.rollout[0])
    stream, receive = plain(WEIGHTS), None
    source = next(iter(crew.rollout[0]._session.sources.values()))
    if phase == "open":
        patch.setattr(rollout, "open", halt.in_transport)
    elif phase == "gather":
        stream = stream_with(halt)
    elif phase == "pack":
        patch.setattr(sender, "digest_bytes", after(5, halt, sender.digest_bytes))
    elif phase == "publish":
        patch.setattr(policy, "publish", after(1, halt, policy.publish))
    elif phase == "release":
        patch.setattr(source, "send", halting(source.send, Release, halt))
    elif phase == "fetch":
        patch.setattr(rollout, "fetch", lambda *_, **how: halt.in_transport(**how))
    elif phase == "verify":
        # Of several receivers it is the first one that comes here; which one is told by its outcome.
        patch.setattr(inlet, "require_digests", after(1, halt, inlet.require_digests))
    elif phase == "load":
        receive = lambda engine: load_with(halt, engine)  # noqa: E731
    elif phase == "complete":
        patch.setattr(source, "send", halting(source.send, Complete, halt))
    halting_rank = "policy 0" if phase in {"gather", "pack", "publish"} else "rollout 0"
    return stream, receive, halting_rank


def halting(send, kind, halt):
    def call(message):
        if isinstance(message, kind):
            halt()
        return send(message)

    return call


PHASES = ["open", "gather", "pack", "publish", "release", "fetch", "verify", "load", "complete"]
TYPED = (DeadlineError, PeerAbortedError, PeerLostError)


@pytest.mark.parametrize("phase", PHASES)
def test_a_stall_at_any_phase_ends_all_ranks_in_time_and_the_next_refit_works(crew, phase, monkeypatch):
    halt = Halt()
    with monkeypatch.context() as patch:
        stream, receive, stalled = install(phase, crew, halt, patch)
        outcomes = crew.begin(stream, receive)
        assert halt.reached.wait(10)
        others = {rank: outcome for rank, outcome in outcomes.items() if rank != stalled}
        bound_s = max(STALL_S, CONNECT_S) + SOON_S
        if phase == "verify":
            wait(outcomes.values(), timeout=bound_s, return_when="FIRST_COMPLETED")
        else:
            _, late = wait(others.values(), timeout=bound_s)
            assert not late, f"{phase}: {[rank for rank, each in others.items() if not each.done()]} went on"
        waited = time.monotonic() - halt.at
        halt.go_on.set()
        _, late = wait(outcomes.values(), timeout=SOON_S)
        assert not late, f"{phase}: the rank that stood still went on"
    assert waited < bound_s
    errors = {rank: outcome.exception() for rank, outcome in outcomes.items()}
    if phase == "complete" and errors.get("rollout 1", True) is None:
        del errors["rollout 1"]  # it had loaded everything before the other one stood still
    for rank, error in errors.items():
        assert isinstance(error, TYPED), f"{phase}: {rank}: {error!r}"
        assert str(error.context).startswith(rank.replace(" ", " rank ")), error
    require_explained(phase, errors)
    crew.works()


def require_explained(phase: str, errors: dict[str, WeightSyncError]) -> None:
    """Whoever waited in vain says for whom, for what, how far it was, and what was heard last."""
    first = [error for error in errors.values() if isinstance(error, DeadlineError)]
    assert first, errors
    for error in first:
        assert "heard" in error.message, error
        assert error.context.phase, error
        if phase != "open":
            assert error.context.peer or "rank" in error.message, error
            assert error.context.bytes_done is not None, error
            assert error.context.bucket is not None or error.context.bytes_done == 0, error


def test_a_peer_that_does_not_come_is_named_in_time(crew):
    started = time.monotonic()
    outcomes = crew.begin(plain(WEIGHTS), without="rollout 0")
    _, late = wait(outcomes.values(), timeout=CONNECT_S + SOON_S)
    assert not late
    assert time.monotonic() - started < CONNECT_S + SOON_S
    errors = {rank: outcome.exception() for rank, outcome in outcomes.items()}
    error = errors["policy 0"]
    assert isinstance(error, DeadlineError)
    assert (error.context.peer, error.context.phase) == ("rollout rank 0", "begin")
    assert "nothing was heard of it (tcp://127.0.0.1:" in error.message
    assert all(isinstance(each, TYPED) for each in errors.values())
    crew.works()


@pytest.mark.parametrize("phase", PHASES)
def test_an_error_at_any_phase_reaches_all_ranks_at_once_with_its_traceback(crew, phase, monkeypatch):
    halt = Halt(ValueError(f"broken at {phase}"))
    with monkeypatch.context() as patch:
        stream, receive, _ = install(phase, crew, halt, patch)
        outcomes = crew.begin(stream, receive)
        _, late = wait(outcomes.values(), timeout=STALL_S + 10)
        seconds = time.monotonic() - halt.at
    assert not late
    assert seconds < SOON_S
    errors = [outcome.exception() for outcome in outcomes.values()]
    if phase == "complete" and None in errors:
        errors.remove(None)  # one that had loaded everything before the other one failed
    told = [error for error in errors if not isinstance(error, ValueError)]
    assert len(told) == len(errors) - 1, errors
    for error in told:
        assert isinstance(error, PeerAbortedError), error
        assert f"broken at {phase}" in str(error)
        assert "break_here" in "".join([error.remote.traceback, *getattr(error, "__notes__", ())])
        assert error.context.peer, error
    crew.works()


def test_sizes_are_such_that_no_receiver_is_done_before_it_hears_of_a_failure():
    assert sum(tensor.numel() for _, tensor in WEIGHTS) > 6 * MIB
