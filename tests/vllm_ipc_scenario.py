"""vLLM with two tensor-parallel ranks, refitted through IPC by policy workers in processes of their own.

Run as ``python -m tests.vllm_ipc_scenario tp2 DIR``; prints one JSON object with what was seen, as
`tests.vllm_scenarios` does.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

SPAWN = multiprocessing.get_context("spawn")
KIND = {"kind": "qwen3", "dtype": "float32"}
CONFIG = {
    "policy": {
        "generation": {
            "backend": "vllm",
            "colocated": {"enabled": False},
            "refit_transport": "ipc",
            "refit_cfg": {
                "shared": {
                    "device": "cpu",
                    "topology": "stripes",
                    "update_weights_bucket_memory_ratio": 0.0001,
                }
            },
            "refit_lifecycle": {"connect_s": 30.0, "silence_s": 3.0, "stall_s": 20.0, "total_s": 60.0},
        }
    }
}


class RemoteTrainer:
    """A policy worker in a process of its own, called through a pipe."""

    def __init__(self, rank, path):
        self.rank = rank
        self.start(path)

    def start(self, path):
        """Start the process, also in the place of one that died."""
        self.pipe, far = SPAWN.Pipe()
        self.process = SPAWN.Process(target=serve_trainer, args=(far, self.rank, path), daemon=True)
        self.process.start()
        far.close()

    def checkpoint_engine_rpc(self, checkpoint_method, method_kwargs=None):
        return self.call("checkpoint_engine_rpc", checkpoint_method, method_kwargs)

    def call(self, *message):
        self.pipe.send(message)
        return self.pipe.recv()


def serve_trainer(pipe, rank, path):
    import torch
    from safetensors.torch import load_file

    from weightsync.policy import PolicyCheckpointEngineMixin
    from weightsync.tensors import TensorSpec, WeightManifest, WeightStream

    torch.set_num_threads(1)

    class Trainer(PolicyCheckpointEngineMixin):
        def load(self, path):
            self.rank, self.dies = rank, False
            self.weights = load_file(str(Path(path) / "model.safetensors"))

        def die(self):
            self.dies = True

        def weight_stream(self):
            manifest = WeightManifest.build(TensorSpec.of(*pair) for pair in self.weights.items())
            return WeightStream(manifest, self.items())

        def items(self):
            for number, pair in enumerate(self.weights.items()):
                if self.dies and number == 15:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield pair

    trainer = Trainer()
    trainer.load(path)
    while True:
        name, *arguments = pipe.recv()
        pipe.send(getattr(trainer, name)(*arguments))


def main(root):
    from weightsync.rollout.vllm.cpu import engine_environment

    os.environ.update(engine_environment(2))
    from tests.own_files import left_by_tests
    from tests.vllm_scenarios import answer, checkpoint, fresh_answer, make_host
    from weightsync.cluster.local import LocalPolicyGroup, LocalRolloutGroup
    from weightsync.errors import RefitError
    from weightsync.synchronizer import CheckpointEngineWeightSynchronizer
    from weightsync.testing.shared_files import shared_files

    paths = {seed: checkpoint(root, seed=seed, **KIND) for seed in (1, 2)}
    trainers = [RemoteTrainer(rank, paths[2]) for rank in range(2)]
    expected = fresh_answer(paths[2], dtype="float32")
    host = make_host(paths[1], dtype="float32", tensor_parallel_size=2)
    before = answer(host)
    files = shared_files()
    groups = LocalPolicyGroup(trainers), LocalRolloutGroup([host])
    seen = {}
    with CheckpointEngineWeightSynchronizer(*groups, CONFIG, progress=False) as synchronizer:
        synchronizer.init_communicator()
        report = synchronizer.sync_weights(1)
        got = answer(host)
        seen["tokens_equal"] = [tokens for tokens, _ in got] == [tokens for tokens, _ in expected]
        seen["largest_difference"] = max(
            abs(a - b)
            for (_, x), (_, y) in zip(got, expected, strict=True)
            for a, b in zip(x, y, strict=True)
        )
        seen["changed"] = got != before
        seen["tensors"], seen["bytes"] = report.tensors, report.bytes
        for trainer in trainers:
            trainer.call("load", paths[1])
        synchronizer.sync_weights(2)
        seen["back"] = answer(host) == before
        trainers[1].call("die")
        started = time.monotonic()
        try:
            synchronizer.sync_weights(3)
        except RefitError as error:
            seen["lost"], seen["serving"] = str(error), list(error.serving.values())
        seen["lost_s"] = time.monotonic() - started
        trainers[1].process.join(10)
        trainers[1].start(paths[1])
        with contextlib.suppress(RefitError):  # it shows that this worker has no engine yet
            synchronizer.sync_weights(4)
        seen["recovered"] = synchronizer.sync_weights(5).tensors
        seen["as_before"] = answer(host) == before
    host.shutdown()
    for trainer in trainers:
        trainer.process.kill()
    seen["left"] = left_by_tests(files)
    return seen


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(sys.argv[2])), flush=True)
    # As in `tests.vllm_scenarios`: nothing may keep this process.
    os._exit(0)
