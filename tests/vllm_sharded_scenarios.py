"""Whole jobs that refit real vLLM by regions: ``python -m tests.vllm_sharded_scenarios GROUP DIR``.

Sharded policy ranks in processes of their own, real NIXL, real vLLM, and the synchronizer. The full path of
the same policy into the same vLLM is the oracle. Prints one JSON object with what was seen.
"""

from __future__ import annotations

import json
import os
import sys
import time

from tests.sharded_trainers import Trainers
from tests.vllm_scenarios import checkpoint, close, make_host, values

WAITS = {"connect_s": 30.0, "silence_s": 3.0, "stall_s": 30.0, "total_s": 60.0}


def config(lifecycle, **scope):
    nixl = {"device": "cpu", "update_weights_bucket_memory_ratio": 0.00006, "topology": "auto", **scope}
    generation = {
        "backend": "vllm",
        "colocated": {"enabled": False},
        "refit_transport": "nixl",
        "refit_cfg": {"nixl": nixl},
        "refit_lifecycle": {**WAITS, **lifecycle},
    }
    return {"policy": {"generation": generation}}


def exact_answer(host):
    from tests.vllm_region_scenario import exact_answer

    return exact_answer(host)


class Job:
    """Policy ranks, vLLM engines, and refits in whatever way.

    The full path goes into ``judge``, an engine that never hears of regions, where there is one.
    """

    def __init__(self, trainers, hosts, change="shake", judge=None):
        from weightsync.cluster.local import LocalPolicyGroup, LocalRolloutGroup

        self.trainers, self.hosts, self.change, self.judge = trainers, hosts, change, judge
        self.policy, self.rollout = LocalPolicyGroup(trainers), LocalRolloutGroup(hosts)
        self.judges = self.rollout if judge is None else LocalRolloutGroup([judge])
        self.changes = 0
        self.replaced = []
        """Engines that are kept alive: with one would go what all vLLM engines of this process share."""

    def connected(self, lifecycle=None, rollout=None, **scope):
        """Return a synchronizer that has connected all of them, or other engines."""
        from weightsync.synchronizer import CheckpointEngineWeightSynchronizer

        made = CheckpointEngineWeightSynchronizer(
            self.policy, rollout or self.rollout, config(lifecycle or {}, **scope), progress=False
        )
        made.init_communicator()
        return made

    def train(self):
        self.changes += 1
        self.trainers.tell(self.change, self.changes)

    def served(self, hosts=None):
        """Return digests and answer of every engine."""
        return [
            (
                [each["served"]["total"] for each in values(host.checkpoint_engine_rpc("weight_digest"))],
                exact_answer(host),
            )
            for host in hosts or self.hosts
        ]

    def oracle(self):
        """Refit by the full path; returns what every engine should serve."""
        with self.connected(rollout=self.judges, shard_weights="none") as synchronizer:
            report = synchronizer.sync_weights()
        assert report.copies == {}
        return self.served() if self.judge is None else self.served([self.judge]) * len(self.hosts)

    def judged(self, refits=2, lifecycle=None, **scope):
        """Refit some times with other weights each time, then compare with the full path."""
        before = [exact_answer(host) for host in self.hosts]
        with self.connected(lifecycle, **scope) as synchronizer:
            for _ in range(refits):
                self.train()
                synchronizer.mark_stale()
                report = synchronizer.sync_weights()
        got = self.served()
        return {
            **told(report),
            "changed": [answer for _, answer in got] != before,
            "same": got == self.oracle(),
        }


def told(report):
    rollout = [{"bytes": f.bytes, "tensors": f.tensors, "batches": f.batches} for f in report.rollout]
    return {
        "copies": report.copies, "whole": dict(report.whole), "rollout": rollout, "bytes": report.bytes,
        "topology": report.topology, "commit": report.commit, "seconds": dict(report.seconds),
        "policy": [dict(f.notes) for f in report.policy],
    }  # fmt: skip


def stored_bytes(path, itemsize, tensor=1):
    """Return the bytes that a tensor-parallel rank stores of a checkpoint, from the names alone."""
    from safetensors import safe_open

    total = 0
    with safe_open(os.path.join(path, "model.safetensors"), "pt") as file:
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            shape = file.get_slice(name).get_shape()
            count = itemsize
            for size in shape:
                count *= size
            split = not (len(shape) == 1 or name.endswith("mlp.gate.weight"))
            total += count // tensor if split else count
    return total


def end(*hosts):
    for host in hosts:
        close(host)


def build(trainers, kind, dtype, seed=2, mesh=(2,), sent=None, **options):
    trainers.tell("build", kind, dtype, seed, mesh, options, sent)


def single_cast(root, trainers):
    """float32 masters of a tied model are served as bfloat16; the vocabulary is padded."""
    sizes = {"vocab_size": 500}
    path = checkpoint(root, "qwen3tied", 1, **sizes)
    build(trainers, "qwen3tied", "float32", sent="bfloat16", **sizes)
    host, judge = make_host(path), make_host(path)
    job = Job(trainers, [host], "train", judge)
    seen = {"all": job.judged(shard_weights="all"), "stored": stored_bytes(path, 2)}
    seen["staged"] = guarded(job.judged, shard_weights="auto", lifecycle={"commit": "staged"})
    seen["released"] = guarded(job.judged, shard_weights="all", release_after_refit=True)
    end(host, judge)
    return seen


def single_experts(root, trainers):
    """Experts that the policy keeps fused, on a mesh of two dimensions."""
    path = checkpoint(root, "qwen3moe", 1)
    build(trainers, "qwen3moe", "bfloat16", mesh=(1, 2))
    host, judge = make_host(path), make_host(path)
    job = Job(trainers, [host], judge=judge)
    seen = {"placements": trainers[0].call("placements"), "stored": stored_bytes(path, 2)}
    seen["experts"] = job.judged(shard_expert_weights=True)
    seen["auto"] = job.judged(shard_weights="auto")
    seen["all"] = job.judged(shard_weights="all")
    seen["gather"] = guarded(failing_gather, job)
    end(host, judge)
    return seen


def failing_gather(job):
    """One rank fails while it sends what goes whole, when the regions have been read."""
    with job.connected(shard_weights="experts") as synchronizer:
        job.train()
        job.trainers[1].call("fail_to_cast", "model.norm.weight")
        first = failed(synchronizer)
        good = told(synchronizer.sync_weights())
        got = job.served()
    return {"failed": first, "good": good, "same": got == job.oracle()}


def single_dense(root, trainers):
    """Everything in float32, so that nothing is cast: plain, elastic, and with ranks that fail."""
    path = checkpoint(root, "llama", 1, "float32")
    build(trainers, "llama", "float32")
    hosts = [make_host(path, dtype="float32")]
    job = Job(trainers, hosts, "train")
    seen = {"stored": stored_bytes(path, 4), "all": guarded(job.judged, shard_weights="all")}
    seen["elastic"] = guarded(elastic, job, path)
    seen["loader"] = guarded(failing_loader, job)
    seen["goes_on"] = guarded(going_on, job)
    seen["lost"] = guarded(lost_rank, job)
    end(*hosts, *job.replaced)
    return seen


def elastic(job, path):
    """Engines join and are replaced while the others serve."""
    with job.connected(shard_weights="all") as synchronizer:
        job.train()
        synchronizer.sync_weights()
        new = make_host(path, dtype="float32")
        joined = told(synchronizer.add_rollout(new))
        job.hosts.append(new)
        alike = [job.served()]
        job.train()
        both = told(synchronizer.sync_weights())
        alike.append(job.served())
        newer = make_host(path, dtype="float32")
        replaced = told(synchronizer.replace_rollout(1, newer))
        job.hosts[1] = newer
        job.replaced.append(new)
        alike.append(job.served())
        job.train()
        synchronizer.sync_weights()
        got = job.served()
    return {
        "joined": joined, "both": both, "replaced": replaced, "alike": [a == b for a, b in alike],
        "same": got == job.oracle(),
    }  # fmt: skip


def broken_loader(host, call):
    """Let a loader fail when it is given parameters for the ``call``-th time."""
    loader = loader_of(host)
    real, calls = loader.load_parameters, []

    def load_parameters(batch):
        calls.append(1)
        real(batch)
        if len(calls) == call:
            del loader.load_parameters
            raise ValueError("disk on fire")

    loader.load_parameters = load_parameters


def loader_of(host):
    worker = host.llm.llm_engine.model_executor.driver_worker.worker
    return worker._get_refit_endpoint().receiver.loader


def failed(synchronizer):
    """Refit, which fails; returns how."""
    from weightsync.errors import RefitError

    started = time.monotonic()
    try:
        synchronizer.sync_weights()
    except RefitError as error:
        return {
            "error": str(error), "serving": list(error.serving.values()), "s": time.monotonic() - started,
        }  # fmt: skip
    return {"error": None}


def failing_loader(job):
    with job.connected(shard_weights="all") as synchronizer:
        job.train()
        broken_loader(job.hosts[0], 1)
        first = failed(synchronizer)
        good = told(synchronizer.sync_weights())
        got = job.served()
    return {"failed": first, "good": good, "same": got == job.oracle()}


def going_on(job):
    """One engine fails, and the other gets its weights all the same."""
    with job.connected({"on_failure": "continue"}, shard_weights="all") as synchronizer:
        job.train()
        broken_loader(job.hosts[1], 1)
        report = synchronizer.sync_weights()
        left, first = [str(each) for each in report.failed], job.served(job.hosts[:1])[0]
        one = told(report)
        good = told(synchronizer.sync_weights())
        got = job.served()
    return {
        "left": left, "one": one, "good": good, "served": first == got[0], "same": got == job.oracle(),
    }  # fmt: skip


def lost_rank(job):
    """A policy rank dies while it is read from; all of them are started anew."""
    with job.connected(shard_weights="all") as synchronizer:
        job.trainers[1].call("die_once_exposed")
        first = failed(synchronizer)
        job.trainers.revive()
        build(job.trainers, "llama", "float32", seed=3)
        again = failed(synchronizer)  # it may show that these workers have no engines yet
        good = told(synchronizer.sync_weights())
        got = job.served()
    return {"failed": first, "again": again, "good": good, "same": got == job.oracle()}


def guarded(what, *arguments, **keywords):
    """Return what was seen, or how it failed: the other parts are worth having."""
    try:
        return what(*arguments, **keywords)
    except Exception:  # noqa: BLE001 - the test says so
        import traceback

        return {"traceback": traceback.format_exc()}


def single_deepseek(root, trainers):
    """Latent attention."""
    from tests.sharded_trainers import make_tiny_deepseek
    from weightsync.testing.tiny_models import byte_tokenizer

    path = os.path.join(root, "deepseek-s1")
    if not os.path.exists(path):
        import torch

        make_tiny_deepseek(1, torch.bfloat16).save_pretrained(path)
        byte_tokenizer().save_pretrained(path)
    build(trainers, "deepseek", "float32", sent="bfloat16")
    host, judge = (make_host(path, attention_config={"backend": "CPU_MLA"}) for _ in range(2))
    job = Job(trainers, [host], judge=judge)
    seen = {"stored": stored_bytes(path, 2)}
    for way in ("auto", "experts", "all"):
        seen[way] = guarded(job.judged, shard_weights=way)
    end(host, judge)
    return seen


def divided(root, kind, ways, served, masters, sizes, **parallel):
    """An engine of two ranks."""
    from weightsync.rollout.vllm.cpu import engine_environment

    os.environ.update(engine_environment(2))
    trainers = Trainers(root)
    try:
        path = checkpoint(root, kind, 1, served, **sizes)
        build(trainers, kind, masters, sent=served, **sizes)
        host = make_host(
            path, served, worker_extension_cls="tests.vllm_parallel_scenarios.ParallelExtension", **parallel
        )
        host.llm.collective_rpc("make_stage_ready")
        job = Job(trainers, [host])
        seen = {way: guarded(job.judged, shard_weights=way) for way in ways}
        seen["stored"] = [stored_bytes(path, 2 if served == "bfloat16" else 4, n) for n in (1, 2)]
        close(host)
        return seen
    finally:
        trainers.close()


def group_tp2(root):
    return divided(root, "qwen3moe", ("all", "experts"), "bfloat16", "bfloat16", {}, tensor_parallel_size=2)


def group_pp2(root):
    sizes = {"vocab_size": 500}
    return divided(root, "qwen3tied", ("all", "auto"), "bfloat16", "float32", sizes, pipeline_parallel_size=2)


def group_ep2(root):
    parallel = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    return divided(root, "qwen3moe", ("all", "experts"), "float32", "float32", {}, **parallel)


SINGLES = {"cast": single_cast, "experts": single_experts, "dense": single_dense}
MORE = {"deepseek": single_deepseek}


def group_single(root, names=tuple(SINGLES)):
    trainers = Trainers(root)
    try:
        return {name: timed({**SINGLES, **MORE}[name], root, trainers) for name in names}
    finally:
        trainers.close()


def timed(what, *arguments):
    started = time.monotonic()
    return {**guarded(what, *arguments), "taken_s": time.monotonic() - started}


def group_mesh(root):
    """Four policy ranks: two that share data parallel shards, two tensor parallel ones."""
    trainers = Trainers(root, 4)
    try:
        path = checkpoint(root, "qwen3", 1)
        build(trainers, "qwen3", "float32", mesh=(2, 2), sent="bfloat16")
        host = make_host(path)
        job = Job(trainers, [host])
        seen = {"placements": trainers[0].call("placements"), "stored": stored_bytes(path, 2)}
        seen["all"] = guarded(job.judged, shard_weights="all")
        close(host)
        return seen
    finally:
        trainers.close()


GROUPS = {"mesh": group_mesh, "single": group_single, "tp2": group_tp2, "pp2": group_pp2, "ep2": group_ep2}


def main(name, root):
    if name in GROUPS:
        return timed(GROUPS[name], root)
    return group_single(root, name.split(","))


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(sys.argv[1], sys.argv[2])), flush=True)
    # As in `tests.vllm_scenarios`: nothing may keep this process.
    os._exit(0)
