"""Kimi engines in processes of their own, which latecomers join and leave: each driven by a pipe."""

from __future__ import annotations

import asyncio
import multiprocessing
import time

import torch

from tests.engine_crew import MIB, assert_same, make_engine, some_weights
from tests.engine_processes import PipedProcess, answer
from weightsync.engines.kimi import KimiCheckpointEngine
from weightsync.errors import ErrorRecord

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "weightsync.engines.kimi", "tests.engine_crew"])


class Remote(PipedProcess):
    """One engine in one process; ``rank`` counts on its side."""

    def __init__(self, side: str, rank: int, **settings) -> None:
        self.name = f"{side} rank {rank}"
        self.launch(_CONTEXT, _serve, side, rank, settings)

    def start(self, command: str, **kwargs) -> Remote:
        self._pipe.send((command, kwargs))
        return self

    def result(self, timeout_s: float = 20.0):
        """Return the command's value, or the `ErrorRecord` of what it raised."""
        kind, value = self.heard(timeout_s)
        return ErrorRecord.from_dict(value) if kind == "error" else value

    def call(self, command: str, **kwargs):
        return self.start(command, **kwargs).result()

    def heard(self, timeout_s: float = 20.0):
        assert self._pipe.poll(timeout_s), f"{self.name} said nothing for {timeout_s} s"
        return self._pipe.recv()

    @property
    def has_spoken(self) -> bool:
        return self._pipe.poll(0)


class Group:
    """Policy and rollout processes, joined, and the latecomers; killed at the end of the ``with`` block."""

    def __init__(self, policy: int, rollout: int, **settings) -> None:
        self.settings = {"connect_s": 5.0, "stall_s": 5.0, "silence_s": 2.0, **settings}
        self.policy = [Remote("policy", rank, **self.settings) for rank in range(policy)]
        self.rollout = [Remote("rollout", rank, **self.settings) for rank in range(rollout)]
        self.late: list[Remote] = []
        self.epoch = 0
        self.join()

    def join(self) -> None:
        """Prepare and connect all."""
        everyone = [*self.policy, *self.rollout]
        for worker in everyone:
            worker.start("prepare")
        self.metadata = [worker.result() for worker in everyone]
        for worker in everyone:
            assert worker.call("join", metadata=self.metadata, **self.worlds) is None

    @property
    def worlds(self) -> dict:
        return {"train_world_size": len(self.policy), "rollout_world_size": len(self.rollout)}

    def refit(self, seed: int) -> None:
        """A refit of all under the next version; its values follow from ``seed``."""
        self.begin(seed)
        self.end()

    def begin(self, seed: int, **policy) -> None:
        self.epoch += 1
        for worker in self.policy:
            worker.start("send", epoch=self.epoch, seed=seed, **policy)
        for worker in self.rollout:
            worker.start("receive", epoch=self.epoch, seed=seed)

    def end(self) -> None:
        assert [worker.result() for worker in (*self.policy, *self.rollout)] == [None] * (
            len(self.policy) + len(self.rollout)
        )

    def latecomer(self) -> Remote:
        """A process that has joined late."""
        worker = Remote("rollout", len(self.rollout) + len(self.late), **self.settings)
        self.late.append(worker)
        worker.call("prepare")
        assert worker.call("join_late", metadata=self.metadata[: len(self.policy)], **self.worlds) is None
        return worker

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in (*self.late, *self.policy, *self.rollout):
            worker.close()


# In the worker's process.


def _serve(pipe, side: str, rank: int, settings: dict) -> None:
    torch.set_num_threads(1)
    worker = _Worker(pipe, side, rank, settings)
    answer(pipe, worker)


class _Worker:
    def __init__(self, pipe, side: str, rank: int, settings: dict) -> None:
        self.pipe, self.side, self.rank = pipe, side, rank
        self.engine = make_engine(MIB, engine=KimiCheckpointEngine, **settings)

    def prepare(self):
        return self.engine.prepare()

    def join(self, **worlds) -> None:
        if self.side == "policy":
            self.engine.init_policy_process_group(worker_rank=self.rank, **worlds)
        else:
            self.engine.init_rollout_process_group(rollout_rank=self.rank, **worlds)

    def join_late(self, **worlds) -> None:
        self.engine.join_late(rollout_rank=self.rank, **worlds)

    def send(self, *, epoch: int, seed: int, hold_at: int | None = None) -> None:
        self.engine.open_refit(epoch=epoch, version=epoch)

        def stream():
            for i, pair in enumerate(some_weights(seed)):
                if i == hold_at:
                    self.hold()
                yield pair

        asyncio.run(self.engine.send_weights(stream()))

    def receive(self, *, seed: int, epoch: int | None = None, hold_at: str | None = None) -> None:
        """Receive `some_weights`, with a pause at the first batch, or at that of the last tensor."""
        if epoch is not None:
            self.engine.open_refit(epoch=epoch, version=epoch)
        received = asyncio.run(self.received(hold_at))
        wanted = some_weights(seed)
        by_name = dict(received)
        assert len(by_name) == len(received) == len(wanted)
        assert_same([(name, by_name[name]) for name, _ in wanted], wanted)

    async def received(self, hold_at):
        received = []
        async for batch in self.engine.receive_weight_batches():
            first, received = not received, received + [(name, tensor.clone()) for name, tensor in batch]
            if (hold_at == "first" and first) or (hold_at == "last" and len(received) == len(some_weights())):
                self.hold()
        return received

    def hold(self) -> None:
        """Tell the test, and wait for its word."""
        self.pipe.send(("held", None))
        assert self.pipe.recv() == "go on"

    def compute(self, *, kind: str, seconds: float) -> float:
        """What a trainer's main thread does between two refits; returns how long it took."""
        started = time.monotonic()
        self.pipe.send(("computing", None))
        if kind == "sleep":
            time.sleep(seconds)
        while kind == "python" and time.monotonic() < started + seconds:
            sum(range(1000))
        return time.monotonic() - started

    def version(self) -> float:
        return self.engine.refit_stats()["version"]

    def figures(self) -> dict:
        """What must not grow."""
        import psutil

        process = psutil.Process()
        return {
            "rss": process.memory_info().rss,
            "fds": process.num_fds(),
            "threads": process.num_threads(),
        }
