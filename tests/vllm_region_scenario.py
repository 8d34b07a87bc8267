"""Refits by regions on real vLLM: ``python -m tests.vllm_region_scenario KIND DIR``, or ``all``.

The engine writes parts that were cut from whole tensors; the full-weight path into the same vLLM is the
oracle. Prints one JSON object.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from tests.region_engine import RegionEngine
from tests.vllm_scenarios import PROMPTS, _deferred, checkpoint, close, failures, make_host, sampling, values

REGIONS = "tests.vllm_region_scenario:RegionFileEngine"
WHOLE = "tests.rollout_engines:FileEngine"


class RegionFileEngine(RegionEngine):
    """Takes its stream from the ``model.safetensors`` of the directory ``source``, cast to ``dtype``."""

    def __init__(self, bucket_size, source, dtype="", **options):
        super().__init__(bucket_size, **options)
        self.source, self.dtype = Path(source), dtype

    def weights(self):
        import torch
        from safetensors.torch import load_file

        state = load_file(self.source / "model.safetensors")
        return [(n, t.to(getattr(torch, self.dtype)) if self.dtype else t) for n, t in state.items()]


def worker_of(host):
    return host.llm.llm_engine.model_executor.driver_worker.worker


def engine_of(host):
    return worker_of(host)._get_refit_endpoint().receiver.engine


def manifest(source, dtype=""):
    import msgspec

    from weightsync.tensors import TensorSpec

    items = RegionFileEngine(1, source, dtype).weights()
    return msgspec.msgpack.encode([TensorSpec.of(name, tensor) for name, tensor in items])


class Refits:
    """Refits one host, again and again."""

    def __init__(self, host):
        self.host, self.version = host, 0
        self.warnings = Warnings()

    def rpc(self, method, **kwargs):
        return self.host.checkpoint_engine_rpc(method, kwargs)

    def connect(self, source, sharding=None, **options):
        backend, settings = (REGIONS if sharding else WHOLE), {"source": source, **options}
        values(
            self.rpc(
                "init_checkpoint_engine", backend=backend, bucket_size_bytes=1 << 20, engine_kwargs=settings
            )
        )
        told = None
        if sharding:
            specs = manifest(source, options.get("dtype", ""))
            told = values(self.rpc("describe_layout", manifest=specs, sharding=sharding))[0]
        group = {"rank_prefix": 0, "train_world_size": 1, "rollout_world_size": 1, "metadata": []}
        values(self.rpc("init_checkpoint_engine_process_group", **group))
        return told

    def open(self):
        self.version += 1
        values(self.rpc("open_refit", epoch=self.version, version=self.version))
        values(self.host.refit_control("pause", {"in_flight": "wait"}))

    def end(self):
        values(self.rpc("commit_refit", version=self.version))
        for action in ("reset_caches", "resume"):
            values(self.host.refit_control(action, {}))

    def refit(self, source, sharding=None, staged=False, **options):
        told = self.connect(source, sharding, **options)
        self.warnings.seen.clear()
        self.open()
        if staged:
            values(self.rpc("stage_weights_from_checkpoint_engine"))
            figures = values(self.rpc("load_staged_weights"))[0]
        else:
            figures = values(self.rpc("update_weights_from_checkpoint_engine"))[0]
        self.end()
        engine = engine_of(self.host)
        ways = {"in_place": engine.in_place, "handed": engine.handed} if sharding else {}
        return {**figures, **ways, "told": told, "warnings": list(self.warnings.seen)}

    def served(self):
        return values(self.rpc("weight_digest"))[0]["served"]["total"], exact_answer(self.host)

    def fail(self, source, sharding, **options):
        self.connect(source, sharding, **options)
        self.open()
        errors = failures(self.rpc("update_weights_from_checkpoint_engine"))
        values(self.rpc("fence_refit", reason="the refit failed"))
        status = values(self.rpc("refit_status"))[0]
        return {"errors": errors, "status": status, "pending": _deferred(self.host)}


class Warnings(logging.Handler):
    """Keeps what vLLM's reload warns of."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.seen = []
        logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
        logger.setLevel(logging.WARNING)
        logger.addHandler(self)

    def emit(self, record):
        self.seen.append(record.getMessage())


def exact_answer(host):
    outputs = host.generate([{"prompt_token_ids": ids} for ids in PROMPTS], sampling(), use_tqdm=False)
    done = [output.outputs[0] for output in outputs]
    return [[list(d.token_ids), [next(iter(s.values())).logprob for s in d.logprobs]] for d in done]


def other_checkpoint(kind, root, seed):
    """Save a model with biases (``qwen2``), or with MLA and a router's correction bias (``dsv3``)."""
    import torch
    import transformers

    path = Path(root) / f"{kind}-s{seed}"
    if path.exists():
        return str(path)
    torch.manual_seed(seed)
    common = {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 512, "tie_word_embeddings": False,
        "initializer_range": 0.08,
    }  # fmt: skip
    if kind == "qwen2":
        config = transformers.Qwen2Config(**common, num_key_value_heads=2)
        network = transformers.Qwen2ForCausalLM(config)
    else:
        config = transformers.DeepseekV3Config(
            **common, num_key_value_heads=4, moe_intermediate_size=64, n_shared_experts=1, n_routed_experts=4,
            num_experts_per_tok=2, n_group=1, topk_group=1, routed_scaling_factor=1.0, kv_lora_rank=512,
            q_lora_rank=64, qk_rope_head_dim=64, qk_nope_head_dim=32, v_head_dim=32, first_k_dense_replace=1,
            topk_method="noaux_tc", scoring_func="sigmoid", norm_topk_prob=True,
        )  # fmt: skip
        network = transformers.DeepseekV3ForCausalLM(config)
    with torch.no_grad():
        for name, tensor in (*network.named_parameters(), *network.named_buffers()):
            if name.endswith("bias"):
                tensor.normal_(0, 0.1)
    network.to(torch.bfloat16).save_pretrained(path)
    return str(path)


def begin(model, root, **options):
    """Return a host on the first of two checkpoints, and both."""
    if model not in ("qwen2", "dsv3"):
        one, two = (checkpoint(root, model, seed, **options) for seed in (1, 2))
        return make_host(one), one, two
    one, two = (other_checkpoint(model, root, seed) for seed in (1, 2))
    return (
        make_host(one, **({"attention_config": {"backend": "CPU_MLA"}} if model == "dsv3" else {})),
        one,
        two,
    )


def scenario(kind, root):
    model, _, rest = kind.partition("-")
    if rest == "unpacked":
        return unpacked(model, root)
    options = {"vocab_size": 500} if rest == "padded" else {}
    host, one, two = begin(model, root, **options)
    refits = Refits(host)
    refits.connect(one)
    start = refits.served()
    refits.refit(two)
    expected = {two: refits.served()}
    seen = {"changed": expected[two] != start}
    refits.refit(one)
    expected[one] = refits.served()
    seen["oracle"] = expected[one] == start

    def judged(name, source, sharding, **options):
        figures = refits.refit(source, sharding, **options)
        same = [got == want for got, want in zip(refits.served(), expected[source], strict=True)]
        seen[name] = {**figures, "same": same}

    judged("all", two, "all")
    judged("all_again", one, "all")
    judged("whole_after", two, None)
    judged("staged", one, "all", staged=True)
    layer = "model.layers.0.self_attn."
    policy = ["model.norm.weight", layer + "o_proj.weight"]
    policy += [f"{layer}{part}_proj.{what}" for part in "qkv" for what in ("weight", "bias")]
    judged("partly_whole", two, "auto", also_whole=policy)
    judged("cast", one, "all", dtype="float32")
    if model in ("qwen3moe", "dsv3"):
        judged("experts", two, "experts")
    seen["failed"] = refits.fail(one, "all", fail_at=9)
    judged("healed", one, "all")
    seen["failed_early"] = refits.fail(two, "all", fail_at=0)
    seen["pending"] = _deferred(host)
    memory = worker_of(host)._get_refit_endpoint().receiver.loader._memory
    seen["reasons"] = memory.handed_over
    close(host)
    return seen


def unpacked(model, root):
    """Linear layers that compute with what is loaded, as on a GPU: all in place, and nothing is reloaded."""
    from vllm.model_executor.layers import utils

    from weightsync.rollout.vllm import canonical, reload

    with (
        patch.object(utils, "dispatch_cpu_unquantized_gemm", compute_plainly),
        patch.object(canonical, "is_cpu_platform", lambda: False),
        patch.object(canonical, "_is_known_platform", lambda: True),
        patch.object(reload, "begin_reload", wraps=reload.begin_reload) as begun,
    ):
        host, one, two = begin(model, root)
        refits, network = Refits(host), worker_of(host).model_runner.get_model()
        refits.refit(two)
        expected = refits.served()
        refits.refit(one)
        addresses = [parameter.data_ptr() for parameter in network.parameters()]
        before = begun.call_count
        figures = refits.refit(two, "all")
        seen = {
            **figures,
            "same": [got == want for got, want in zip(refits.served(), expected, strict=True)],
            "reloads": begun.call_count - before,
            "kept": [parameter.data_ptr() for parameter in network.parameters()] == addresses,
            "policy_whole": refits.refit(one, "auto", also_whole=["model.layers.0.mlp.up_proj.weight"])[
                "copies"
            ],
            "again": refits.refit(two, "all", staged=True)["copies"],
            "all_reloads": begun.call_count - before,
            "same_again": refits.served() == expected,
            "experts": experts_on_gpu(canonical),
        }
        close(host)
    return seen


def compute_plainly(layer, remove_weight):
    import torch

    layer.cpu_linear = torch.nn.functional.linear


def experts_on_gpu(canonical):
    """Say which experts would be written in place, by the backend that vLLM chose for them."""
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    found = {}
    for backend in UnquantizedMoeBackend:
        for kernel in (None, object()):
            method = SimpleNamespace(unquantized_backend=backend, moe_kernel=kernel)
            for moves in (False, True):
                parallel = SimpleNamespace(enable_eplb=moves)
                layer = SimpleNamespace(moe_config=SimpleNamespace(moe_parallel_config=parallel))
                if canonical._why_not_experts(layer, method) is None:
                    found[backend.name] = [kernel is not None, moves]
    return found


KINDS = ("qwen3", "qwen3tied-padded", "qwen3moe")
OTHERS = ("qwen2", "dsv3")

if __name__ == "__main__":
    chosen = (*KINDS, "qwen3-unpacked") if sys.argv[1] == "all" else [sys.argv[1]]
    result = {kind: scenario(kind, sys.argv[2]) for kind in chosen}
    print("RESULT " + json.dumps(result), flush=True)
    os._exit(0)
