"""The state machines of the two vLLM hosts, around small fakes; `test_rollout_vllm` has the real engines."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from weightsync.config import RefitLifecycle, load_refit_config
from weightsync.errors import ConfigurationError, DeadlineError, LifecycleError, WorkerFencedError
from weightsync.outcomes import Outcome
from weightsync.rollout.vllm import async_host, host, memory
from weightsync.rollout.vllm.arguments import DEFAULT_TOTAL_S
from weightsync.rollout.vllm.async_host import AsyncVllmEngineHost
from weightsync.rollout.vllm.host import VllmEngineHost
from weightsync.rollout.vllm.turns import Turns

ROOT = Path(__file__).parent.parent
UPDATE = "update_weights_from_checkpoint_engine"
STAGE = "stage_weights_from_checkpoint_engine"
CLEAN = {"version": 1, "dirty": False, "fenced": None}
FENCED = {"version": None, "dirty": True, "fenced": "the refit failed"}


def fake_config():
    return SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_size=1, world_size=1),
        model_config=SimpleNamespace(enable_sleep_mode=True),
    )


class FakeEngineState:
    """What both fakes keep of vLLM's rules about pausing and the KV cache."""

    def __init__(self):
        self.vllm_config = fake_config()
        self.status = CLEAN
        self.calls = []
        self.paused = False
        self.kv_present = True
        self.weights_present = True
        self.fails = {}
        self.polls = []

    def note(self, call):
        self.calls.append(call)
        if call in self.fails:
            raise self.fails.pop(call)

    def discard(self):
        self.note("release_kv_cache_memory")
        if not self.paused:
            raise RuntimeError("release_kv_cache_memory() requires a completed pause first")
        if not self.kv_present:
            raise RuntimeError("release_kv_cache_memory() requires all executor memory to be resident")
        self.kv_present = False

    def wake(self, tags):
        self.note(f"wake_up {','.join(tags)}")
        self.kv_present = self.kv_present or "kv_cache" in tags
        self.weights_present = self.weights_present or "weights" in tags
        awake = self.kv_present and self.weights_present
        self.paused = self.paused and not awake
        return awake

    def answer(self, method):
        self.note(method)
        if method == "poll_staging":
            return [Outcome(0, value=self.polls.pop(0)).to_dict()]
        return [Outcome(0, value=self.status if method == "refit_status" else None).to_dict()]


class FakeLLM(FakeEngineState):
    """Stands in for ``vllm.LLM`` with its engine in the process."""

    def __init__(self):
        super().__init__()
        self.llm_engine = SimpleNamespace(
            vllm_config=self.vllm_config, model_executor=object(), is_sleeping=self.is_sleeping
        )
        self.during = {}
        self.inside = threading.Lock()

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        with self.alone():
            self.during.get(args[0], bool)()
            return self.answer(args[0])

    def generate(self, prompts, sampling_params=None):
        with self.alone():
            self.during.get("generate", bool)()
            self.note("generate")
            if self.is_sleeping():
                raise AssertionError("a real engine would hang here")
            return ["text"]

    def sleep(self, level=1, mode="abort"):
        if mode == "wait":
            raise ValueError("'wait' mode can't be used in inproc-engine mode")
        self.note(f"sleep {level} {mode}")
        self.paused = True
        if level:
            self.kv_present = self.weights_present = False

    def is_sleeping(self):
        return self.paused or not (self.kv_present and self.weights_present)

    def release_kv_cache_memory(self):
        self.discard()

    def wake_up(self, tags=None):
        return self.wake(tags)

    def update_weight_version(self, new_version):
        with self.alone():
            self.note("update_weight_version")

    def alone(self):
        if not self.inside.acquire(blocking=False):
            raise AssertionError("two threads use vLLM's client at once")
        return _released(self.inside)


class _released:
    def __init__(self, lock):
        self.lock = lock

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.lock.release()


class FakeAsyncLLM(FakeEngineState):
    """Stands in for ``AsyncLLM``; ``gates`` hold calls up until they are set."""

    errored = False

    def __init__(self):
        super().__init__()
        self.gates = {}
        self.aborted = []

    async def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        await self.gate(args[0])
        return self.answer(args[0])

    async def pause_generation(self, *, mode="abort", clear_cache=True):
        self.note(f"pause {mode}")
        self.paused = True
        await self.gate("pause")

    async def resume_generation(self):
        self.note("resume")
        if not self.kv_present:
            raise AssertionError("a real engine would write to memory that it gave back")
        self.paused = False

    async def release_kv_cache_memory(self):
        self.discard()
        await self.gate("release_kv_cache_memory")

    async def wake_up(self, tags=None):
        return self.wake(tags)

    async def abort(self, request_id, internal=False):
        self.aborted.append(request_id)

    async def generate(self, prompt, sampling_params, request_id):
        while self.paused:
            await asyncio.sleep(0.01)
            if request_id in self.aborted:
                break
        yield "text"

    async def gate(self, name):
        if name in self.gates:
            await asyncio.wait_for(self.gates[name].wait(), 10)


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    for module in (host, async_host, memory):
        monkeypatch.setattr(module, "is_cpu_platform", lambda: False)


@pytest.fixture
def llm():
    return FakeLLM()


@pytest.fixture
def engine():
    return FakeAsyncLLM()


def value(outcome):
    outcome = Outcome.from_dict(outcome)
    assert outcome.error is None, outcome.error
    return outcome.value


def error(outcome):
    return Outcome.from_dict(outcome).error


def control(engine_host, *actions):
    for action in actions:
        value(engine_host.refit_control(action))


async def control_async(engine_host, *actions):
    for action in actions:
        value(await engine_host.refit_control(action))


# Releasing the KV cache.


def test_the_kv_cache_is_released_and_comes_back(llm):
    engine_host = VllmEngineHost(llm=llm)
    for _ in range(2):
        control(engine_host, "pause", "release_kv_cache")
        assert not llm.kv_present
        control(engine_host, "resume")
        assert engine_host.generate([1]) == ["text"]
    assert llm.calls[:2] == ["sleep 0 abort", "release_kv_cache_memory"]


def test_a_kv_cache_is_not_released_twice(llm):
    engine_host = VllmEngineHost(llm=llm)
    control(engine_host, "pause", "release_kv_cache", "release_kv_cache", "resume")
    assert llm.calls.count("release_kv_cache_memory") == 1


@pytest.mark.parametrize("call", ["sleep 0 abort", "release_kv_cache_memory"])
def test_a_release_that_fails_does_not_leave_the_scheduler_asleep(llm, call):
    engine_host = VllmEngineHost(llm=llm)
    llm.fails[call] = RuntimeError("no")
    control(engine_host, "pause")
    assert error(engine_host.refit_control("release_kv_cache")).message == "no"
    control(engine_host, "resume")
    assert not llm.paused
    assert engine_host.generate([1]) == ["text"]


def test_a_fenced_async_engine_without_its_kv_cache_is_refitted(engine):
    async def run():
        engine_host = AsyncVllmEngineHost(engine=engine)
        await control_async(engine_host, "pause", "release_kv_cache")
        engine.status = FENCED
        await engine_host.checkpoint_engine_rpc_async(UPDATE)
        await control_async(engine_host, "resume")
        assert (engine.paused, engine.kv_present) == (True, False)
        await control_async(engine_host, "pause", "release_kv_cache")
        engine.status = CLEAN
        await engine_host.checkpoint_engine_rpc_async(UPDATE)
        await control_async(engine_host, "resume")
        assert (engine.paused, engine.kv_present) == (False, True)

    asyncio.run(run())
    assert engine.calls.count("release_kv_cache_memory") == 1


def test_a_resume_that_overtakes_a_release_wakes_the_kv_cache(engine):
    async def run():
        engine_host = AsyncVllmEngineHost(engine=engine)
        await control_async(engine_host, "pause")
        engine.gates["release_kv_cache_memory"] = asyncio.Event()
        release = asyncio.create_task(engine_host.refit_control("release_kv_cache"))
        await asyncio.sleep(0)
        await control_async(engine_host, "resume")
        engine.gates["release_kv_cache_memory"].set()
        value(await release)

    asyncio.run(run())
    assert (engine.paused, engine.kv_present) == (False, True)


# An engine that sleeps.


def test_an_engine_that_sleeps_is_woken_in_the_order_of_a_colocated_refit(llm):
    engine_host = VllmEngineHost(llm=llm)
    assert engine_host.sleep()
    with pytest.raises(LifecycleError, match="sleeps: refit it, or call wake_up"):
        engine_host.generate([1])
    control(engine_host, "pause", "resume_weights", "release_kv_cache")
    assert (llm.weights_present, llm.kv_present) == (True, False)
    with pytest.raises(LifecycleError, match="paused"):
        engine_host.sleep()
    control(engine_host, "resume_kv_cache")
    assert (llm.weights_present, llm.kv_present) == (True, True)
    with pytest.raises(LifecycleError, match="paused"):
        engine_host.generate([1])
    control(engine_host, "resume")
    assert engine_host.generate([1]) == ["text"]
    wakes = ["wake_up weights", "wake_up kv_cache", "wake_up scheduling"]
    assert llm.calls == ["sleep 1 abort", *wakes, "generate"]


@pytest.mark.parametrize("own", [True, False], ids=["through the host", "behind its back"])
def test_any_refit_wakes_the_weights_and_any_resume_all(llm, own):
    engine_host = VllmEngineHost(llm=llm)
    assert (engine_host if own else llm).sleep(level=1) is (True if own else None)
    control(engine_host, "pause", "release_kv_cache")
    assert (llm.weights_present, llm.kv_present) == (True, False)
    control(engine_host, "resume")
    assert engine_host.generate([1]) == ["text"]
    engine_host.sleep()
    engine_host.wake_up()
    assert engine_host.generate([1]) == ["text"]


def test_weights_that_cannot_be_woken_are_tried_again_at_the_resume(llm):
    engine_host = VllmEngineHost(llm=llm)
    engine_host.sleep()
    for _ in range(2):
        llm.fails["wake_up weights"] = RuntimeError("out of memory")
        control(engine_host, "pause")
        assert error(engine_host.refit_control("resume_weights")).message == "out of memory"
        assert not llm.weights_present
    llm.fails["wake_up weights"] = RuntimeError("still out of memory")
    assert error(engine_host.refit_control("resume")).message == "still out of memory"
    control(engine_host, "resume")
    assert engine_host.generate([1]) == ["text"]


def test_weights_given_up_to_sleep_are_served_only_after_a_refit(llm):
    engine_host = VllmEngineHost(llm=llm)
    llm.status = FENCED
    assert engine_host.sleep(level=2)
    assert llm.calls == ["discard_weights", "refit_status", "sleep 2 abort"]
    engine_host.wake_up()
    with pytest.raises(WorkerFencedError):
        engine_host.generate([1])
    with pytest.raises(ConfigurationError, match="level must be 1 or 2"):
        engine_host.sleep(level=0)


@pytest.mark.parametrize("why", ["on a CPU", "without enable_sleep_mode"])
def test_an_engine_that_cannot_sleep_stays_awake_and_says_so(llm, why, monkeypatch, caplog):
    engine_host = VllmEngineHost(llm=llm)
    if why == "on a CPU":
        monkeypatch.setattr(memory, "is_cpu_platform", lambda: True)
    else:
        llm.vllm_config.model_config.enable_sleep_mode = False
    assert engine_host.sleep(level=2) is False
    assert "the engine stays awake" in caplog.text
    assert why in caplog.text
    assert llm.calls == []
    assert engine_host.generate([1]) == ["text"]


# Updates that come into host memory while requests run.


def test_a_sync_engine_serves_while_an_update_is_staged(llm):
    engine_host = VllmEngineHost(llm=llm)
    llm.polls = [None, None, {"bytes": 3}]
    llm.during["poll_staging"] = engine_host.require_serving
    assert engine_host.checkpoint_engine_rpc(STAGE) == [{"rank": 0, "value": {"bytes": 3}}]
    assert llm.calls == ["start_staging", *["poll_staging"] * 3]
    llm.status = {"version": None, "dirty": True, "fenced": None}
    engine_host.checkpoint_engine_rpc("load_staged_weights")
    with pytest.raises(WorkerFencedError):
        engine_host.generate([1])


def test_an_async_engine_serves_while_an_update_is_staged(engine):
    async def run():
        engine_host = AsyncVllmEngineHost(engine=engine)
        engine.polls = [None] * 5 + [{"bytes": 3}]
        staging = asyncio.create_task(engine_host.checkpoint_engine_rpc_async(STAGE))
        await asyncio.sleep(0)
        assert await ask(engine_host, "a") == ["text"]
        assert await staging == [{"rank": 0, "value": {"bytes": 3}}]
        engine.gates["load_staged_weights"] = asyncio.Event()
        load = asyncio.create_task(engine_host.checkpoint_engine_rpc_async("load_staged_weights"))
        await asyncio.sleep(0)
        with pytest.raises(WorkerFencedError):
            await ask(engine_host, "b")
        engine.gates["load_staged_weights"].set()
        await load
        assert await ask(engine_host, "c") == ["text"]

    asyncio.run(run())


@pytest.mark.parametrize("polls", [[], [None]])
def test_staging_that_does_not_start_or_end_is_an_error(llm, polls):
    engine_host = VllmEngineHost(llm=llm, rpc_timeout_s=0.3)
    if polls:
        llm.polls = polls * 1000
        message = "staging did not end"
    else:
        llm.fails["start_staging"] = RuntimeError("gone")
        message = "gone"
    (outcome,) = engine_host.checkpoint_engine_rpc(STAGE)
    assert message in error(outcome).message


# Updates and pauses that the driver gave up.


async def giving_up(engine_host, gate_host, gate):
    """Begin an update that stays silent, as the driver would give it up, and resume."""
    gate_host.gates[UPDATE] = gate
    await control_async(engine_host, "pause")
    update = asyncio.create_task(engine_host.checkpoint_engine_rpc_async(UPDATE))
    await asyncio.sleep(0)
    await control_async(engine_host, "resume")
    return update


async def ask(engine_host, request_id):
    return [text async for text in engine_host.generate([1], None, request_id)]


def test_a_resume_does_not_run_requests_over_an_update(engine):
    async def run():
        engine_host, gate = AsyncVllmEngineHost(engine=engine), asyncio.Event()
        update = await giving_up(engine_host, engine, gate)
        assert engine.paused
        with pytest.raises(WorkerFencedError, match="not committed"):
            await ask(engine_host, "a")
        engine.status = {"version": None, "dirty": True, "fenced": None}
        gate.set()
        await update
        with pytest.raises(WorkerFencedError, match="not committed"):
            await ask(engine_host, "b")
        await control_async(engine_host, "pause")
        waiting = asyncio.create_task(ask(engine_host, "c"))
        engine.status = CLEAN
        await engine_host.checkpoint_engine_rpc_async(UPDATE)
        await engine_host.checkpoint_engine_rpc_async("commit_refit", {"version": 1})
        assert not waiting.done()
        await control_async(engine_host, "resume")
        assert await asyncio.wait_for(waiting, 5) == ["text"]

    asyncio.run(run())


def test_an_answer_from_before_the_update_does_not_clear_it(engine):
    async def run():
        engine_host, gate = AsyncVllmEngineHost(engine=engine), asyncio.Event()
        await giving_up(engine_host, engine, gate)
        await engine_host.checkpoint_engine_rpc_async("fence_refit", {"reason": "why"})
        await control_async(engine_host, "resume")
        assert engine.paused
        gate.set()

    asyncio.run(run())


def test_a_late_update_that_wrote_nothing_lets_requests_run(engine):
    async def run():
        engine_host, gate = AsyncVllmEngineHost(engine=engine), asyncio.Event()
        update = await giving_up(engine_host, engine, gate)
        gate.set()
        await update
        assert not engine.paused
        assert await asyncio.wait_for(ask(engine_host, "a"), 5) == ["text"]

    asyncio.run(run())


def test_the_next_pause_takes_a_late_resume_back(engine):
    async def run():
        engine_host, gate = AsyncVllmEngineHost(engine=engine), asyncio.Event()
        update = await giving_up(engine_host, engine, gate)
        await control_async(engine_host, "pause")
        gate.set()
        await update
        assert engine.paused

    asyncio.run(run())


def test_a_pause_that_ends_after_the_resume_is_over(engine):
    async def run():
        engine_host = AsyncVllmEngineHost(engine=engine)
        engine.gates["pause"] = asyncio.Event()
        pause = asyncio.create_task(engine_host.refit_control("pause", {"in_flight": "wait"}))
        await asyncio.sleep(0)
        await control_async(engine_host, "resume")
        engine.gates["pause"].set()
        value(await pause)
        await control_async(engine_host, "release_kv_cache")
        assert engine.kv_present
        assert await asyncio.wait_for(ask(engine_host, "a"), 5) == ["text"]
        engine.status = FENCED
        await engine_host.checkpoint_engine_rpc_async(UPDATE)
        with pytest.raises(WorkerFencedError, match="the refit failed"):
            await ask(engine_host, "b")

    asyncio.run(run())


def test_a_synchronous_engine_is_dirty_while_it_is_updated(llm):
    engine_host, seen = VllmEngineHost(llm=llm), []

    def look():
        with pytest.raises(WorkerFencedError, match="not committed"):
            engine_host.require_serving()
        seen.append(True)

    llm.during[UPDATE] = look
    engine_host.checkpoint_engine_rpc(UPDATE)
    assert seen == [True]
    assert engine_host.generate([1]) == ["text"]


# Requests and calls from several threads.


def test_calls_wait_for_a_running_generate(llm):
    engine_host, running, end = VllmEngineHost(llm=llm), threading.Event(), threading.Event()

    def generate():
        running.set()
        assert end.wait(10)

    llm.during["generate"] = generate
    with ThreadPoolExecutor(3) as pool:
        answer = pool.submit(engine_host.generate, [1])
        assert running.wait(10)
        call = pool.submit(engine_host.checkpoint_engine_rpc, "init_checkpoint_engine")
        reset = pool.submit(engine_host.refit_control, "publish_version", {"version": 1})
        assert wait([call, reset], 0.1).done == set()
        end.set()
        assert answer.result(10) == ["text"]
        assert value(call.result(10)[0]) is None
        assert value(reset.result(10)) is None
    assert llm.calls[0] == "generate"


def test_a_generate_that_does_not_end_makes_no_engine_lost(llm):
    engine_host, running, end = (
        VllmEngineHost(llm=llm, rpc_timeout_s=0.1),
        threading.Event(),
        threading.Event(),
    )

    def generate():
        running.set()
        assert end.wait(10)

    llm.during["generate"] = generate
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(engine_host.generate, [1])
        assert running.wait(10)
        [outcome] = engine_host.checkpoint_engine_rpc(UPDATE)
        failed = error(outcome)
        assert (failed.kind, failed.context.phase, failed.context.rank) == ("DeadlineError", UPDATE, 0)
        assert error(engine_host.refit_control("pause")).kind == "DeadlineError"
        control(engine_host, "resume")
        end.set()
        answer.result(10)
    assert engine_host.generate([1]) == ["text"]
    assert UPDATE not in llm.calls


def test_turns_are_given_in_order():
    turns, order, ready = Turns(), [], threading.Event()

    def one(name):
        with turns.take(10, name):
            order.append(name)

    with ThreadPoolExecutor(3) as pool, turns.take(None, "first"):
        with pytest.raises(DeadlineError, match=r"0\.01 s"), turns.take(0.01, "late"):
            pytest.fail("two hold the turn")
        for name in "abc":
            pool.submit(one, name)
            ready.wait(0.05)
    assert order == ["a", "b", "c"]


# How long an engine may be silent.


@pytest.mark.parametrize(
    ("lifecycle", "given", "waits"),
    [(None, None, 3660), ({}, None, 3660), ({"total_s": 7200}, None, 7260), ({"total_s": 7200}, 5, 5)],
)
def test_a_long_transfer_makes_no_engine_lost(llm, engine, lifecycle, given, waits):
    generation = {"refit_transport": "nixl", "refit_lifecycle": lifecycle}
    config = None if lifecycle is None else load_refit_config({"policy": {"generation": generation}})
    for engine_host in (
        VllmEngineHost(llm=llm, refit_config=config, rpc_timeout_s=given),
        AsyncVllmEngineHost(engine=engine, refit_config=config, rpc_timeout_s=given),
    ):
        assert engine_host._timeout_s == waits


def test_a_timeout_of_nothing_is_refused(llm):
    with pytest.raises(ConfigurationError, match="rpc_timeout_s must be above 0"):
        VllmEngineHost(llm=llm, rpc_timeout_s=0)


def test_the_default_is_the_configurations():
    assert RefitLifecycle().total_s == DEFAULT_TOTAL_S


# The fakes take what vLLM takes.


def check_signatures():
    """Compare the fakes with vLLM's classes. Importing vLLM changes a process: not run in the tests' own."""
    from vllm import LLM
    from vllm.v1.engine.async_llm import AsyncLLM

    for fake, real in ((FakeLLM, LLM), (FakeAsyncLLM, AsyncLLM)):
        names = {n for n, each in vars(fake).items() if inspect.isfunction(each)} - {
            "__init__",
            "alone",
            "gate",
            "is_sleeping",  # of vLLM's inner engine
        }
        for name in sorted(names):
            mine, theirs = getattr(fake, name), getattr(real, name)
            for kind in (inspect.iscoroutinefunction, inspect.isasyncgenfunction):
                assert kind(mine) == kind(theirs), name
            expected = inspect.signature(theirs).parameters
            for key, parameter in inspect.signature(mine).parameters.items():
                assert parameter.kind == expected[key].kind, (name, key)
                assert (parameter.default is parameter.empty) == (expected[key].default is parameter.empty)
            print(f"checked {fake.__name__}.{name}")


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
def test_the_fakes_take_what_vllm_takes():
    code = "from tests.test_rollout_hosts import check_signatures; check_signatures()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("checked FakeLLM.") == 6
    assert done.stdout.count("checked FakeAsyncLLM.") == 7
