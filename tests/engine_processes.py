"""Engines in processes of their own, driven by a pipe: what the fault tests kill, stop and restart."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from datetime import timedelta
from multiprocessing import forkserver

import torch
import torch.distributed as dist

from tests.engine_crew import MIB, assert_same, collect, make_engine, some_weights, stream_of
from weightsync.errors import ErrorRecord

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["torch", "torch.distributed", "weightsync.engines.nixl", "tests.engine_crew"]
)

QUICK = {"connect_s": 3.0, "stall_s": 4.0, "silence_s": 2.0}


def stop_forkserver() -> None:
    """End the process that the workers are forked from."""
    forkserver._forkserver._stop()


class PipedProcess:
    """A process that is driven by a pipe."""

    def launch(self, context, target, *args) -> None:
        """Start ``target(pipe, *args)``."""
        self._pipe, far = context.Pipe()
        self.process = context.Process(target=target, args=(far, *args), daemon=True)
        self.process.start()
        far.close()

    def go_on(self) -> None:
        """End the wait that the process was told to come to."""
        self._pipe.send("go on")

    def signal(self, what: signal.Signals) -> None:
        os.kill(self.process.pid, what)

    def close(self) -> None:
        """End the process, whatever state it is in."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join(10)
        self._pipe.close()


class Remote(PipedProcess):
    """One engine in one process.

    Args:
        role: ``"policy"`` or ``"rollout"``.
        rank: within its side.
        env: environment variables set before NIXL is loaded.
        gloo: ``(file, world size)`` of a gloo group to join as this rank.
        settings: of the engine.
    """

    def __init__(self, role: str, rank: int = 0, *, env=None, gloo=None, **settings) -> None:
        self.role, self.rank = role, rank
        self.launch(_CONTEXT, _serve, role, rank, env or {}, gloo, {**QUICK, **settings})

    def call(self, command: str, timeout_s: float = 30.0, **kwargs):
        """Run a command in the process; returns what it returns."""
        self.start(command, **kwargs)
        return self.result(timeout_s)

    def start(self, command: str, **kwargs) -> None:
        self._pipe.send((command, kwargs))

    def result(self, timeout_s: float = 30.0):
        """Return the command's value, or the `ErrorRecord` of what it raised."""
        kind, value = self._next(timeout_s)
        assert kind in {"value", "error"}, (kind, value)
        return ErrorRecord.from_dict(value) if kind == "error" else value

    def wait_until_held(self, timeout_s: float = 20.0) -> None:
        """Wait until a refit has come to the place where it was told to wait."""
        assert self._next(timeout_s) == ("held", None)

    def prepare(self):
        return self.call("prepare")

    def _next(self, timeout_s: float):
        assert self._pipe.poll(timeout_s), f"{self.role} rank {self.rank} said nothing for {timeout_s} s"
        return self._pipe.recv()


class Processes:
    """Several `Remote` engines, joined; killed at the end of the ``with`` block."""

    def __init__(self, policy: int, rollout: int, *, env=None, gloo_file=None, **settings) -> None:
        group = (str(gloo_file), policy) if gloo_file else None
        self.policy = [Remote("policy", r, env=env, gloo=group, **settings) for r in range(policy)]
        self.rollout = [Remote("rollout", r, env=env, **settings) for r in range(rollout)]
        self.join()

    @property
    def all(self) -> list[Remote]:
        return [*self.policy, *self.rollout]

    def join(self) -> None:
        """Prepare and connect all, as after a restart."""
        join_remotes(self.policy, self.rollout)

    def refit(self, timeout_s: float = 30.0, **kwargs) -> list:
        """Run one refit on all; returns each one's outcome, policy ranks first."""
        for worker in self.all:
            worker.start("refit", **kwargs)
        return [worker.result(timeout_s) for worker in self.all]

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.all:
            worker.close()


def join_remotes(policy: list[Remote], rollout: list[Remote]) -> None:
    for worker in (*policy, *rollout):
        worker.start("prepare")
    metadata = [worker.result() for worker in (*policy, *rollout)]
    for worker in (*policy, *rollout):
        worker.start("join", train=len(policy), rollout=len(rollout), metadata=metadata)
    for worker in (*policy, *rollout):
        assert worker.result() is None


# In the worker's process.


def _serve(pipe, role: str, rank: int, env: dict, gloo, settings: dict) -> None:
    os.environ.update(env)
    torch.set_num_threads(1)
    if gloo is not None:
        seconds = settings.pop("gloo_s", 5.0)
        dist.init_process_group(
            "gloo", init_method=f"file://{gloo[0]}", rank=rank, world_size=gloo[1],
            timeout=timedelta(seconds=seconds),
        )  # fmt: skip
    settings.pop("gloo_s", None)
    worker = _Worker(pipe, role, rank, make_engine(settings.pop("bucket_size", MIB), **settings))
    answer(pipe, worker)


def answer(pipe, worker) -> None:
    """Run what is asked for through the pipe, until it is closed: methods of the worker, by name."""
    while True:
        try:
            command, kwargs = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send(("value", getattr(worker, command)(**kwargs)))
        except BaseException as error:  # noqa: BLE001 - the outcome
            pipe.send(("error", ErrorRecord.from_exception(error).to_dict()))


class _Worker:
    def __init__(self, pipe, role: str, rank: int, engine) -> None:
        self.pipe, self.role, self.rank, self.engine = pipe, role, rank, engine

    def prepare(self):
        return self.engine.prepare()

    def join(self, train: int, rollout: int, metadata: list) -> None:
        worlds = {"train_world_size": train, "rollout_world_size": rollout, "metadata": metadata}
        if self.role == "policy":
            self.engine.init_policy_process_group(worker_rank=self.rank, **worlds)
        else:
            self.engine.init_rollout_process_group(rollout_rank=self.rank, **worlds)

    def refit(
        self, *, seed=0, count=12, nbytes=300_000, gather=False, manifest=False,
        hold_at=None, fail_at=None, delay_s=0.0, pace_s=0.0,
    ):  # fmt: skip
        """Send or receive `some_weights`; see the tests for what the settings are for."""
        time.sleep(delay_s)
        pairs = some_weights(seed, count, nbytes)
        if self.role == "policy":
            if gather:
                stream = self.gathered(pairs, fail_at)
            elif hold_at is not None:
                stream = self.held(pairs, hold_at)
            else:
                stream = stream_of(pairs, manifest=manifest)
            asyncio.run(self.engine.send_weights(stream))
        elif hold_at is None and fail_at is None and not pace_s:
            assert_same(asyncio.run(collect(self.engine)), pairs)
        else:
            assert_same(asyncio.run(self.slowly(hold_at, fail_at, pace_s)), pairs)
        return "done"

    def gathered(self, pairs, fail_at):
        """Every item takes a collective of all policy ranks, as a sharded model's does."""
        for i, (name, tensor) in enumerate(pairs):
            if i == fail_at:
                raise ValueError("the gather failed")
            parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, tensor)
            yield name, parts[self.rank]

    def held(self, pairs, hold_at):
        for i, pair in enumerate(pairs):
            if i == hold_at:
                self.hold()
            yield pair

    async def slowly(self, hold_at, fail_at, pace_s):
        received, seen = [], 0
        batches = self.engine.receive_weight_batches()
        try:
            async for batch in batches:
                if seen == hold_at or (hold_at == "last" and batch[-1][0].startswith("layer.11.")):
                    self.hold()
                if seen == fail_at:
                    raise ValueError("the load failed")
                seen += 1
                time.sleep(pace_s)
                received += [(name, tensor.clone()) for name, tensor in batch]
        except ValueError as error:
            self.engine.abort_refit(error)
            raise
        finally:
            await batches.aclose()
        return received

    def hold(self) -> None:
        """Tell the test, and wait for its word."""
        self.pipe.send(("held", None))
        assert self.pipe.recv() == "go on"

    def break_packing(self) -> None:
        """Make the third digest of a refit fail, as a broken device would."""
        from weightsync.engines import sender

        digest, calls = sender.digest_bytes, []

        def fails(data):
            calls.append(data)
            if len(calls) == 3:
                raise ZeroDivisionError("broken packing")
            return digest(data)

        self.digest, sender.digest_bytes = digest, fails

    def mend_packing(self) -> None:
        from weightsync.engines import sender

        sender.digest_bytes = self.digest

    def stats(self) -> dict:
        return self.engine.refit_stats()

    def finalize(self) -> None:
        self.engine.finalize()

    def figures(self) -> dict:
        """What must not grow from refit to refit."""
        import psutil

        process = psutil.Process()
        return {
            "rss": process.memory_info().rss,
            "fds": process.num_fds(),
            "threads": process.num_threads(),
            "sockets": len(process.net_connections(kind="all")),
        }

    def refits(self, count: int, **kwargs) -> dict:
        for seed in range(count):
            self.refit(seed=seed, **kwargs)
        return self.figures()

    def collective(self) -> float:
        """A collective of all policy ranks: none of them is left in an earlier one."""
        value = torch.tensor([float(self.rank)])
        dist.all_reduce(value)
        return float(value)

    def close(self) -> dict:
        self.engine.close()
        return self.figures()
