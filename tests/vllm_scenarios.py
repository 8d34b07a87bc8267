"""Scenarios on real vLLM, each group in one process of its own: ``python -m tests.vllm_scenarios GROUP DIR``.

Prints one JSON object with what was seen; the tests judge it. Importing vLLM changes the process (threads,
signal handlers, default process group), so the test process itself never does.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
import time
from pathlib import Path

ENGINE = "tests.rollout_engines:FileEngine"
SETTINGS = {
    "max_model_len": 128,
    "enforce_eager": True,
    "max_num_seqs": 4,
    "skip_tokenizer_init": True,
    "seed": 0,
    "kv_cache_memory_bytes": 32 << 20,
}
EXTENSION = "weightsync.rollout.vllm.extension.VllmInternalWorkerExtensionWithCheckpointEngine"
PROMPTS = ([5, 6, 7, 8], [100, 3, 50])


def checkpoint(root, kind, seed, dtype="bfloat16", vocab_size=512):
    import torch

    from weightsync.testing.tiny_models import make_tiny_checkpoint

    path = Path(root) / f"{kind}-{dtype}-{vocab_size}-s{seed}"
    if not path.exists():
        make_tiny_checkpoint(kind, path, seed, getattr(torch, dtype), vocab_size=vocab_size)
    return str(path)


def make_host(path, dtype="bfloat16", **more):
    from weightsync.rollout.vllm.host import VllmEngineHost

    kwargs = {"model": path, "dtype": dtype, "worker_extension_cls": EXTENSION, **SETTINGS, **more}
    return VllmEngineHost(kwargs, rpc_timeout_s=120)


def sampling(tokens=8):
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, logprobs=0, ignore_eos=True, detokenize=False)


def answer(host):
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    outputs = host.generate(prompts, sampling(), use_tqdm=False)
    return [tokens_of(output) for output in outputs]


def tokens_of(output):
    done = output.outputs[0]
    logprobs = [round(next(iter(step.values())).logprob, 5) for step in done.logprobs]
    return [list(done.token_ids), logprobs]


def values(outcomes):
    from weightsync.outcomes import Outcome

    answers = [Outcome.from_dict(o) for o in (outcomes if isinstance(outcomes, list) else [outcomes])]
    for each in answers:
        if each.error is not None:
            raise each.error.to_exception()
    return [each.value for each in answers]


def failures(outcomes):
    return [
        {"kind": o["error"]["kind"], "message": o["error"]["message"], **o["error"]["context"]}
        for o in outcomes
        if "error" in o
    ]


def connect(host, source, world=1, bucket=200_000, **options):
    settings = {"source": source, **options}
    kwargs = {"backend": ENGINE, "bucket_size_bytes": bucket, "engine_kwargs": settings}
    values(host.checkpoint_engine_rpc("init_checkpoint_engine", kwargs))
    metadata = values(host.checkpoint_engine_rpc("prepare_checkpoint_engine"))
    group = {
        "rank_prefix": 0,
        "train_world_size": 1,
        "rollout_world_size": world,
        "metadata": [{"policy": (1, b"\x00\xff")}, *metadata],
    }
    values(host.checkpoint_engine_rpc("init_checkpoint_engine_process_group", group))


def update(host, version):
    values(host.checkpoint_engine_rpc("open_refit", {"epoch": version, "version": version}))
    return host.checkpoint_engine_rpc("update_weights_from_checkpoint_engine")


def refit(host, source, version, world=1, **options):
    connect(host, source, world, **options)
    values(host.refit_control("pause", {"in_flight": "wait"}))
    figures = values(update(host, version))
    committed = values(host.checkpoint_engine_rpc("commit_refit", {"version": version}))
    assert committed == [version] * world
    for action, kwargs in (("reset_caches", {}), ("publish_version", {"version": version}), ("resume", {})):
        values(host.refit_control(action, kwargs))
    return figures


def close(host):
    host.checkpoint_engine_rpc("close_checkpoint_engine")
    host.shutdown()
    del host.llm
    gc.collect()


def fresh_answer(path, **more):
    host = make_host(path, **more)
    try:
        return answer(host)
    finally:
        close(host)


def group_equal(root, kinds=("qwen3", "qwen3tied", "qwen3moe")):
    """Three refits in a row give what engines started on those weights give."""
    return {kind: _three_refits(root, kind) for kind in kinds}


def _three_refits(root, kind):
    paths = {seed: checkpoint(root, kind, seed) for seed in (1, 2, 3)}
    expected = {seed: fresh_answer(paths[seed]) for seed in (2, 3)}
    host = make_host(paths[1])
    expected[1] = answer(host)
    seen = []
    for version, (seed, bucket) in enumerate([(2, 40_000), (3, 200_000), (1, 4 << 20)], 1):
        figures = refit(host, paths[seed], version, bucket=bucket, seed=version)[0]
        got = answer(host)
        wrong = [other for other in (1, 2, 3) if other != seed and got == expected[other]]
        seen.append({"equal": got == expected[seed], "equals_another": wrong, **figures})
    fused = _fused_experts(host, paths[2], expected[2]) if kind == "qwen3moe" else None
    staged = _staged(host, paths[2], expected) if kind == "qwen3" else None
    published = host.llm.get_weight_version()
    status = values(host.checkpoint_engine_rpc("refit_status"))[0]
    close(host)
    return {"refits": seen, "published": published, "status": status, "fused": fused, "staged": staged}


def _staged(host, source, expected):
    """An update waits in host memory while the old version answers, and is then loaded."""
    rpc = host.checkpoint_engine_rpc
    served = values(rpc("weight_digest"))[0]
    connect(host, source, bucket=200_000)
    values(rpc("open_refit", {"epoch": 9, "version": 4}))
    staged = values(rpc("stage_weights_from_checkpoint_engine"))[0]
    meanwhile = answer(host) == expected[1]
    same = values(rpc("weight_digest"))[0]["served"] == served["served"]
    values(host.refit_control("pause", {"in_flight": "wait"}))
    figures = values(rpc("load_staged_weights"))[0]
    values(rpc("commit_refit", {"version": 4}))
    for action, kwargs in (("reset_caches", {}), ("publish_version", {"version": 4}), ("resume", {})):
        values(host.refit_control(action, kwargs))
    after = values(rpc("weight_digest"))[0]
    return {
        "meanwhile": meanwhile,
        "untouched": same,
        "equal": answer(host) == expected[2],
        "changed": after["served"]["total"] != served["served"]["total"],
        "stream": after["stream"]["total"],
        "staged": staged,
        "figures": figures,
    }


def _fused_experts(host, source, expected):
    connect(host, source, fuse_experts=True, drop=["model.norm.weight"])
    refused = failures(update(host, 4))
    figures = refit(host, source, 4, fuse_experts=True)[0]
    return {"equal": answer(host) == expected, "tensors": figures["tensors"], "refused": refused}


def group_faults(root):
    """Streams that do not fit are refused before the first write; a failure in the middle fences."""
    old, new = checkpoint(root, "qwen3", 1), checkpoint(root, "qwen3", 2)
    expected = fresh_answer(new)
    host = make_host(old)
    before = answer(host)
    layer = "model.layers.1."
    spoilers = {
        "dropped": {"drop": [layer + "mlp.down_proj.weight"]},
        "dropped_norm": {"drop": ["model.norm.weight"]},
        "dropped_head": {"drop": ["lm_head.weight"]},
        "q_only": {"drop": [layer + "self_attn.k_proj.weight", layer + "self_attn.v_proj.weight"]},
        "unknown": {"rename": {"model.norm.weight": "model.norm.scale"}},
        "unknown_top": {"rename": {"lm_head.weight": "mtp.head.weight"}},
        "misshapen": {"transpose": [layer + "mlp.gate_proj.weight"]},
        "misshapen_long": {"transpose": [layer + "self_attn.k_proj.weight"]},
        "mistyped": {"dtype": "int32"},
    }
    seen = {}
    for name, options in spoilers.items():
        connect(host, new, **options)
        seen[name] = {"errors": failures(update(host, 1)), "serves_old": answer(host) == before}
    seen["cast"] = _cast(host, new, expected)
    seen["engine_fails"] = _broken(host, old, new, expected, version=2, fail_after=3)
    seen["late_refusal"] = _broken(
        host, old, new, expected, version=4, announce=False, drop=["model.norm.weight"]
    )
    seen["loader_fails"] = _loader_fails(host, old, new, expected)
    seen["deferred"] = _deferred(host)
    close(host)
    return seen


def _cast(host, new, expected):
    figures = refit(host, new, 1, dtype="float32")[0]
    return {"equal": answer(host) == expected, "casts": figures["casts"]}


def _broken(host, old, new, expected, version, **options):
    connect(host, old, bucket=60_000, **options)
    errors = failures(update(host, version))
    return {"errors": errors, **_fenced_then_good(host, new, expected, version)}


def _loader_fails(host, old, new, expected):
    model = host.llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
    real, calls = model.load_weights, []

    def load_weights(weights):
        calls.append(1)
        loaded = real(weights)
        if len(calls) == 4:
            raise ValueError("disk on fire")
        return loaded

    connect(host, old, bucket=60_000)
    model.load_weights = load_weights
    errors = failures(update(host, 6))
    del model.load_weights
    return {"errors": errors, **_fenced_then_good(host, new, expected, 6)}


def _fenced_then_good(host, new, expected, version):
    from weightsync.errors import WorkerFencedError

    values(host.checkpoint_engine_rpc("fence_refit", {"reason": "the refit failed"}))
    status = values(host.checkpoint_engine_rpc("refit_status"))[0]
    pending = _deferred(host)
    try:
        answer(host)
        refused = False
    except WorkerFencedError:
        refused = True
    refit(host, new, version + 1)
    return {
        "status": status, "refused": refused, "pending": pending, "equal_after": answer(host) == expected,
    }  # fmt: skip


def _deferred(host):
    """Count the tensors that vLLM still keeps from a reload."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    model = host.llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
    return sum(len(get_layerwise_info(module).loaded_weights) for module in model.modules())


def group_tp2(root):
    """Two tensor-parallel ranks, tied embeddings, a vocabulary that is padded, fp32: equal to one rank."""
    from weightsync.rollout.vllm.cpu import engine_environment

    os.environ.update(engine_environment(2))
    kind = {"kind": "qwen3tied", "dtype": "float32", "vocab_size": 500}
    old, new = checkpoint(root, seed=1, **kind), checkpoint(root, seed=2, **kind)
    expected = fresh_answer(new, dtype="float32")
    host = make_host(old, dtype="float32", tensor_parallel_size=2)
    before = answer(host)
    dropped = {"drop": ["model.layers.0.self_attn.v_proj.weight"]}
    connect(host, new, 2, **dropped)
    errors = failures(update(host, 1))
    connect(host, new, 2, transpose=["model.layers.0.mlp.gate_proj.weight"])
    misshapen = failures(update(host, 1))
    still = answer(host) == before
    figures = refit(host, new, 1, world=2, bucket=100_000)
    got = answer(host)
    described = values(host.refit_control("describe"))[0]
    close(host)
    return {
        "tokens_equal": [t for t, _ in got] == [t for t, _ in expected],
        "largest_difference": _difference(got, expected),
        "changed": [t for t, _ in got] != [t for t, _ in before],
        "errors": errors, "misshapen": misshapen, "serves_old": still, "figures": figures,
        "world_size": described["world_size"],
    }  # fmt: skip


def _difference(got, expected):
    return max(
        abs(a - b) for (_, x), (_, y) in zip(got, expected, strict=True) for a, b in zip(x, y, strict=True)
    )


CONFIG = {
    "policy": {
        "generation": {
            "backend": "vllm",
            "colocated": {"enabled": False},
            "refit_transport": "nixl",
            "refit_cfg": {"nixl": {"device": "cpu"}},
        }
    }
}


def group_async(root):
    """AsyncLLM in processes of its own, with the NIXL worker class."""
    return asyncio.run(_async(root))


async def _async(root):
    from weightsync.config import load_refit_config
    from weightsync.rollout.vllm.async_host import AsyncVllmEngineHost

    old, new = checkpoint(root, "qwen3", 1), checkpoint(root, "qwen3", 2)
    kwargs = {
        "model": old,
        "dtype": "bfloat16",
        **SETTINGS,
        "max_model_len": 512,
        "enable_prefix_caching": True,
    }
    host = AsyncVllmEngineHost(kwargs, refit_config=load_refit_config(CONFIG), rpc_timeout_s=60)
    seen = {"before": await _ask(host, "r0")}
    await _connect_async(host, new, drop=["model.norm.weight"])
    seen["dropped"] = failures(await _update_async(host, 1))
    seen["serves_old"] = await _ask(host, "r1") == seen["before"]
    seen["kept"] = await _refit_with_request_in_flight(host, new)
    seen["after"] = await _ask(host, "r2")
    seen["version"] = await host.engine.get_weight_version()
    seen["status"] = values(await host.checkpoint_engine_rpc_async("refit_status"))
    seen["fenced"] = await _fenced_async(host, old, new)
    seen["after_fence"] = await _ask(host, "r3")
    seen["lost"] = await _lost(host)
    host.shutdown()
    return seen


async def _ask(host, request_id, tokens=8, under_way=None):
    output = None
    async for output in host.generate({"prompt_token_ids": PROMPTS[0]}, sampling(tokens), request_id):
        if under_way is not None and len(output.outputs[0].token_ids) >= 10:
            under_way.set()
    return tokens_of(output)


async def _connect_async(host, source, **options):
    settings = {"source": source, **options}
    kwargs = {"backend": ENGINE, "bucket_size_bytes": 100_000, "engine_kwargs": settings}
    group = {"rank_prefix": 3, "train_world_size": 1, "rollout_world_size": 4, "metadata": [[1], [2]]}
    rpc = host.checkpoint_engine_rpc_async
    values(await host.refit_control("assign_ranks", {"rank_prefix": 3}))
    values(await rpc("init_checkpoint_engine", kwargs))
    values(await rpc("prepare_checkpoint_engine"))
    values(await rpc("init_checkpoint_engine_process_group", group))


async def _update_async(host, version):
    rpc = host.checkpoint_engine_rpc_async
    values(await rpc("open_refit", {"epoch": version, "version": version}))
    return await rpc("update_weights_from_checkpoint_engine")


async def _refit_with_request_in_flight(host, new):
    under_way = asyncio.Event()
    running = asyncio.create_task(_ask(host, "long", tokens=400, under_way=under_way))
    await asyncio.wait_for(under_way.wait(), 30)
    values(await host.refit_control("pause", {"in_flight": "keep"}))
    unfinished = not running.done()
    await _connect_async(host, new)
    figures = values(await _update_async(host, 1))[0]
    values(await host.checkpoint_engine_rpc_async("commit_refit", {"version": 1}))
    values(await host.refit_control("release_kv_cache"))
    values(await host.refit_control("reset_caches"))
    values(await host.refit_control("publish_version", {"version": 1}))
    queued = asyncio.create_task(_ask(host, "queued"))
    await asyncio.sleep(0.2)
    waited = not queued.done()
    values(await host.refit_control("resume"))
    tokens = (await running)[0]
    return {
        "unfinished_at_pause": unfinished, "waited": waited, "tokens": len(tokens),
        "queued": await queued, "figures": figures,
    }  # fmt: skip


async def _fenced_async(host, old, new):
    from weightsync.errors import WorkerFencedError

    values(await host.refit_control("pause", {"in_flight": "keep"}))
    waiting = asyncio.create_task(_ask(host, "waiting"))
    await asyncio.sleep(0.1)
    await _connect_async(host, old, fail_after=2)
    errors = failures(await _update_async(host, 2))
    values(await host.checkpoint_engine_rpc_async("fence_refit", {"reason": "the refit failed"}))
    values(await host.refit_control("resume"))
    refused = []
    for task in (waiting, asyncio.create_task(_ask(host, "late"))):
        try:
            await asyncio.wait_for(task, 20)
        except WorkerFencedError:
            refused.append(True)
    await _connect_async(host, new)
    values(await _update_async(host, 3))
    values(await host.checkpoint_engine_rpc_async("commit_refit", {"version": 3}))
    values(await host.refit_control("reset_caches"))
    values(await host.refit_control("resume"))
    return {"errors": errors, "refused": refused}


async def _lost(host):
    core = host.engine.engine_core.resources.engine_manager.processes[0].pid
    os.kill(core, signal.SIGKILL)
    outcomes = await host.checkpoint_engine_rpc_async("refit_status")
    again = await host.checkpoint_engine_rpc_async("refit_status")
    return {"first": failures(outcomes), "again": failures(again)}


def group_stalled(root):
    """A synchronous engine in processes of its own, refitted, then stopped: the host gives up in time."""
    old, new = checkpoint(root, "llama", 1), checkpoint(root, "llama", 2)
    host = make_host(old)
    before = answer(host)
    figures = refit(host, new, 1)[0]
    changed = answer(host) != before
    host._timeout_s = 3
    core = host.llm.llm_engine.engine_core.resources.engine_manager.processes[0].pid
    os.kill(core, signal.SIGSTOP)
    started = time.monotonic()
    lost = failures(host.checkpoint_engine_rpc("refit_status"))
    waited = time.monotonic() - started
    again = failures([host.refit_control("resume")])
    os.kill(core, signal.SIGKILL)
    return {"figures": figures, "changed": changed, "lost": lost, "waited": waited, "again": again}


GROUPS = {
    "stalled": group_stalled,
    "equal": group_equal,
    "faults": group_faults,
    "tp2": group_tp2,
    "async": group_async,
}

if __name__ == "__main__":
    result = GROUPS[sys.argv[1]](sys.argv[2])
    print("RESULT " + json.dumps(result), flush=True)
    # Engine threads of a killed EngineCore must not keep this process.
    os._exit(0)
