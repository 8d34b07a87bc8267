"""Every wait in the package has a bound: found in its code, with the reasoned exceptions named one by one."""

from __future__ import annotations

import ast

import pytest

from tests.package_code import Call, calls_in, dotted, parse_package

TREES = parse_package()

BOUNDS = ("timeout", "timeout_s", "patience_s")
ARGUMENTS = {
    # Methods that wait for ever unless they are given so many arguments, or one of `BOUNDS`.
    "wait": 1, "join": 1, "result": 1, "exception": 1, "get": 1, "acquire": 1, "poll": 1, "select": 1,
    "communicate": 1, "recv": 2, "recv_bytes": 3, "recv_multipart": 1, "recv_string": 1, "recv_json": 1,
    "accept": 2, "wait_for": 2, "until": 2, "wait_for_all": 1, "monitored_barrier": 2,
}  # fmt: skip
KEYWORD = {
    # These say how long only by name, or are used here in that way.
    "ray.get": "timeout", "ray.wait": "timeout", "self._ray.get": "timeout", "self._ray.wait": "timeout",
    "asyncio.wait": "timeout", "subprocess.run": "timeout", "subprocess.check_output": "timeout",
    "subprocess.check_call": "timeout", "subprocess.call": "timeout", "socket.create_connection": "timeout",
    "urllib.request.urlopen": "timeout", "urlopen": "timeout", "connection.wait": "timeout",
}  # fmt: skip
ENDLESS = {"run_until_complete", "run_forever", "synchronize", "barrier", "sigwait", "pause"}
ENDLESS_NAMES = {"asyncio.run", "signal.pause", "dist.barrier"}

NOT_A_WAIT = {
    "distribution.entry_points.select": "of a list",
    "self._state.pause": "sets a flag",
    "task.result": "of a task that is done",
    "errand.result": "of an errand that is over: `await_ended` has waited for it, within its bound",
    "crew.join": "connects engines; a crew bounds each of its calls",
    "self.join": "the same",
    "member.result": "bounds itself, by ANSWER_S",
    "hub.accept": "makes a link and returns",
    "self._hub.accept": "makes a link and returns",
    "session.accept": "makes a link and returns",
    "work.exception": "of work that has ended",
    "work.wait": "of work that has ended: raises its error",
}
_BOUNDED_RUN = "asyncio.run(asyncio.wait_for("
ALLOWED = {
    "weightsync.engines.buffers:synchronize": "a device's queue knows no bound; it is short",
    "weightsync.engines.buffers:await_readers": "the same",
    "weightsync.engines.buffers:overwrite": "the same",
    "weightsync.engines.handing:_finish_work": "the same",
    "weightsync.engines.sender:BucketSender._publish.publish": "the same",
    "weightsync.engines.regions.sender:RegionSender._expose": "the same",
    "weightsync.engines.regions.sender:RegionSender._send_bucket": "the same",
    "weightsync.rollout.cleanup:synchronize_device": "the same",
    "weightsync.rollout.receiver:RefitReceiver.receive": "runs an engine's refit, which keeps its deadlines",
    "weightsync.policy.worker:PolicyCheckpointEngineMixin.send_weights_via_checkpoint_engine": "the same",
    "weightsync.policy.colocated:ColocatedWorkerMixin._refit_colocated": (
        "the other half of the same refit, which keeps the engine's deadlines; the driver bounds the call"
    ),
    "weightsync.cluster.local:_run_jobs": "a worker's own thread, idle: a daemon",
    "weightsync.drills.actors:Remote._read": "a daemon that hands answers to callers, who are bounded",
    "weightsync.drills.actors:_Server._accept": "a child's own thread, idle: a daemon",
    "weightsync.drills.actors:_Server._read": "the same",
    # Benchmarks and conformance tests: their parents bound what they ask, and end the children.
    "weightsync.benchmarking.crew:Process.result": "after `poll`, which is bounded",
    "weightsync.benchmarking.crew:_serve": "a child that waits for its parent's word, and ends with it",
    "weightsync.benchmarking.crew:_end_with_parent.watch": "waits for just that: the parent's end",
    "weightsync.benchmarking.workers:EngineWorker.refit": "the same refit's other half",
    "weightsync.benchmarking.workers:EngineWorker._send": "runs an engine's refit, which keeps its deadlines",
    "weightsync.benchmarking.workers:EngineWorker._receive": "the same",
    "weightsync.benchmarking.regions:RegionWorker._send": "the same",
    "weightsync.testing.work:RankWorker.refit": "the same",
    "weightsync.testing.cases_faults:_require_refused": "a call that the engine must refuse at once",
    "weightsync.testing.ranks:ThreadRank._serve": "a rank's own thread, idle: a daemon",
    "weightsync.testing.ranks:ProcessRank._next": "after `poll`, which is bounded",
    "weightsync.testing.ranks:_serve": "a child that waits for its parent's word, and ends with it",
    "weightsync.testing.ranks:_serve.hold": "the same",
}
ALLOWED_POOLS = {
    "weightsync.engines.telling": "each job begins and aborts within two seconds",
    "weightsync.drills.stage": "each job ends a process: it is killed",
    "weightsync.testing.cases_processes": "each job is a crew's, which bounds each of its calls",
}
# Loops that sleep and look again, but do not look at the clock: what ends them.
SLEEPING = {
    "weightsync.engines.collective_group:Group.form": "`go_on` raises once its caller has left",
    "weightsync.engines.collective_group:_end": "gloo's own time-out; a daemon, waited for by nobody",
    "weightsync.engines.collective_meeting:Meeting._lead": "`go_on`, as above",
    "weightsync.engines.collective_meeting:Meeting._follow": "`go_on`, as above",
    "weightsync.engines.mooncake_session:_Read._read": "`leave`, in a daemon thread whose caller is bounded",
}


def is_unbounded(call: Call) -> bool:
    if call.name in KEYWORD:
        return call.keyword(KEYWORD[call.name]) is None
    if call.name in ENDLESS_NAMES or call.method in ENDLESS:
        return not (call.name == "asyncio.run" and ast.unparse(call.node).startswith(_BOUNDED_RUN))
    if call.method == "shutdown" and ("pool" in call.name or "executor" in call.name):
        return not is_false(call.keyword("wait"))
    if call.method not in ARGUMENTS or "." not in call.name:
        return False
    if any(call.keyword(name) is not None for name in BOUNDS) or is_false(call.keyword("blocking")):
        return False
    return len(call.node.args) < ARGUMENTS[call.method]


def is_false(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def waiting_pools(module: str, tree: ast.AST) -> list[str]:
    """Executors whose ``with`` block waits at its end for all that is still under way."""
    return [
        f"{module} line {node.lineno}"
        for node in ast.walk(tree)
        if isinstance(node, (ast.With, ast.AsyncWith))
        for item in node.items
        if isinstance(item.context_expr, ast.Call)
        and dotted(item.context_expr.func).rpartition(".")[2] in {"ThreadPoolExecutor", "ProcessPoolExecutor"}
    ]


def sleeping_loops(module: str, tree: ast.AST) -> set[str]:
    """Functions that sleep in a ``while`` loop that holds nothing against the clock."""
    timeless = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.While) and not looks_at_the_clock(node)
        for inner in ast.walk(node)
    }
    return {
        call.where
        for call in calls_in(module, tree)
        if call.name in {"time.sleep", "asyncio.sleep"} and call.node in timeless
    }


def looks_at_the_clock(loop: ast.While) -> bool:
    compared = [node for node in ast.walk(loop) if isinstance(node, ast.Compare)]
    return any("time.monotonic()" in ast.unparse(node) for node in compared)


CALLS = [call for module, tree in TREES.items() for call in calls_in(module, tree)]
UNBOUNDED = [call for call in CALLS if is_unbounded(call) and call.name not in NOT_A_WAIT]


def test_every_wait_has_a_bound():
    assert [str(call) for call in UNBOUNDED if call.where not in ALLOWED] == []


def test_every_exception_is_still_needed():
    # The rooms of tools that are not there yet, or not any more, may be named.
    product = {where for where in ALLOWED if not where.startswith("weightsync.drills")}
    assert product - {call.where for call in UNBOUNDED} == set()


def test_pools_that_wait_at_their_end_hold_only_bounded_jobs():
    found = {module for module, tree in TREES.items() if waiting_pools(module, tree)}
    assert found <= set(ALLOWED_POOLS), found


def test_every_loop_that_sleeps_has_an_end():
    found = {where for module, tree in TREES.items() for where in sleeping_loops(module, tree)}
    assert found <= set(SLEEPING), found - set(SLEEPING)


@pytest.mark.parametrize(
    "code",
    [
        "event.wait()", "thread.join()", "future.result()", "jobs.get()", "lock.acquire()", "pipe.recv()",
        "poller.poll()", "process.communicate()", "condition.wait_for(ready)", "asyncio.wait_for(work)",
        "ray.get(ref)", "ray.wait([ref])", "subprocess.run(['x'])", "asyncio.wait({task})",
        "loop.run_until_complete(work)", "dist.barrier()", "self._pool.shutdown()", "asyncio.run(work)",
        "watch.until(probe)",
        "pool.shutdown(wait=True)", "socket.create_connection(address)",
    ],
)  # fmt: skip
def test_what_waits_for_ever_is_found(code):
    (call,) = [call for call in calls_in("m", ast.parse(code)) if is_unbounded(call)]
    assert call.where == "m:"


@pytest.mark.parametrize(
    "code",
    [
        "event.wait(1)", "thread.join(timeout=1)", "', '.join(names)", "future.result(1)",
        "lock.acquire(timeout=1)", "lock.acquire(blocking=False)", "jobs.get(timeout=1)",
        "poller.poll(10)", "settings.get('x')",
        "ray.get(ref, timeout=1)", "watch.until(probe, timeout_s=1)", "self._pool.shutdown(wait=False)",
        "condition.wait_for(ready, 1)", "subprocess.run(['x'], timeout=1)",
    ],
)  # fmt: skip
def test_what_has_a_bound_is_not(code):
    assert [str(call) for call in calls_in("m", ast.parse(code)) if is_unbounded(call)] == []
