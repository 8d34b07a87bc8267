"""Ray actors for refits that go wrong: they die, stop or raise at a chosen point."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time

import torch
import xxhash

import weightsync.rollout.module as module_rollout
from weightsync.policy import PolicyCheckpointEngineMixin, preinit_checkpoint_engine, weight_stream_from
from weightsync.tensors import WeightStream

LAYERS = 6
SIZE = 600  # a layer's weight is larger than the smallest bucket


def make_model(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(*(torch.nn.Linear(SIZE, SIZE) for _ in range(LAYERS)))


def digest_of(model):
    digest = xxhash.xxh3_64()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


class Fault:
    """What happens when an armed point is reached."""

    def __init__(self):
        self.point = self.action = None

    def arm(self, point, action):
        self.point, self.action = point, action

    def reach(self, point):
        if self.point != point:
            return
        self.point = None
        if isinstance(self.action, Exception):
            raise self.action
        if self.action == "slow":
            time.sleep(60)
            return
        os.kill(os.getpid(), self.action)
        time.sleep(0.5 if self.action == signal.SIGKILL else 0)  # until the signal is delivered


class Actor:
    """What both sides' actors offer to a test."""

    fault: Fault

    def pid(self):
        return os.getpid()

    def arm(self, point, action):
        self.fault.arm(point, action)

    def holdings(self):
        """What this process holds: resident KiB, descriptors, threads."""
        with open("/proc/self/statm") as statm:
            pages = int(statm.read().split()[1])
        return {
            "rss_kib": pages * resource.getpagesize() // 1024,
            "fds": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "python_threads": threading.active_count(),
        }


class FaultyPolicy(Actor, PolicyCheckpointEngineMixin):
    """Points: ``first``, ``middle``, ``last`` of the stream, ``end`` after it, ``finish`` after the send."""

    def __init__(self, rank, config):
        preinit_checkpoint_engine(config)
        self.rank = rank
        self.fault = Fault()
        self.model = make_model(0)

    def train(self, seed):
        self.model.load_state_dict(make_model(seed).state_dict())

    def weight_stream(self):
        stream = weight_stream_from(self.model)
        return WeightStream(stream.manifest, self._with_faults(stream))

    def _with_faults(self, stream):
        points = {0: "first", LAYERS: "middle", 2 * LAYERS - 1: "last"}
        for number, item in enumerate(stream):
            self.fault.reach(points.get(number, ""))
            yield item
        self.fault.reach("end")

    def finish_weight_send(self):
        self.fault.reach("finish")


class FaultyRollout(Actor, module_rollout.ModuleRolloutWorker):
    """Points: ``first`` and ``middle`` of loading, ``end`` after all of it, ``commit``."""

    def __init__(self):
        self.fault = fault = Fault()

        class Loader(module_rollout.ModuleLoader):
            def begin(self):
                super().begin()
                self.loaded = 0

            def load(self, batch):
                fault.reach("first" if self.loaded == 0 else "")
                super().load(batch)
                self.loaded += 1
                fault.reach("middle" if self.loaded == LAYERS // 2 else "")

            def finish(self):
                fault.reach("end")
                super().finish()

        # In this actor's process only: the worker makes its loader by this name.
        module_rollout.ModuleLoader = Loader
        super().__init__(make_model(99))

    async def checkpoint_engine_rpc_async(self, checkpoint_method, method_kwargs=None):
        if checkpoint_method == "commit_refit":
            self.fault.reach("commit")
        return await super().checkpoint_engine_rpc_async(checkpoint_method, method_kwargs)

    def served(self):
        """Return a digest of the weights; raises while this worker must not serve."""
        self.require_serving()
        return digest_of(self.model)
