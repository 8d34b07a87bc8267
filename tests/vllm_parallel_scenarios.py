"""Engines whose ranks divide layers or experts: ``python -m tests.vllm_parallel_scenarios GROUP DIR``."""

from __future__ import annotations

import json
import os
import sys

from tests.vllm_scenarios import (
    _difference,
    answer,
    checkpoint,
    close,
    connect,
    failures,
    fresh_answer,
    make_host,
    refit,
    update,
    values,
)
from weightsync.rollout.vllm.extension import VllmInternalWorkerExtensionWithCheckpointEngine


def mend_expert_kernels():
    """vLLM's CPU kernels take global expert numbers for local ones, and read beyond the weights."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts as Experts

    real = Experts.apply
    if hasattr(real, "mended"):  # a worker imports this module twice: as a copy of the main one, too
        return

    def apply(self, *args, topk_weights, topk_ids, expert_map, **kwargs):
        if expert_map is not None:
            local = expert_map[topk_ids.long()].to(topk_ids.dtype)
            topk_weights = topk_weights.masked_fill(local < 0, 0)
            topk_ids = local.masked_fill(local < 0, 0)
        routing = {"topk_weights": topk_weights, "topk_ids": topk_ids, "expert_map": expert_map}
        return real(self, *args, **routing, **kwargs)

    apply.mended = True
    Experts.apply = apply


class ParallelExtension(VllmInternalWorkerExtensionWithCheckpointEngine):
    """The extension, with what vLLM leaves out on a CPU."""

    def make_stage_ready(self):
        """Allocate what passes between stages: without a warm-up, vLLM does not."""
        runner = self.model_runner
        if runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )

    def stored_names(self):
        """Return the names of this rank's parameters."""
        return [name for name, _ in self.model_runner.get_model().named_parameters()]


mend_expert_kernels()


def divided(root, kind, spoil, **parallel):
    """Refit two ranks; the answer is that of one rank. ``spoil`` are tensors that no rank knows."""
    from weightsync.rollout.vllm.cpu import engine_environment

    os.environ.update(engine_environment(2))
    sizes = {"dtype": "float32", "vocab_size": 500}
    old, new = checkpoint(root, kind, 1, **sizes), checkpoint(root, kind, 2, **sizes)
    expected = fresh_answer(new, dtype="float32")
    extension = f"{__name__.replace('__main__', 'tests.vllm_parallel_scenarios')}.ParallelExtension"
    host = make_host(old, dtype="float32", worker_extension_cls=extension, **parallel)
    host.llm.collective_rpc("make_stage_ready")
    before = answer(host)
    refused = {}
    for name, instead in spoil.items():
        connect(host, new, 2, rename={name: instead})
        refused[instead] = failures(update(host, 1))
    still = answer(host) == before
    figures = refit(host, new, 1, world=2, bucket=100_000)
    got = answer(host)
    seen = {
        "stored": host.llm.collective_rpc("stored_names"),
        "world_size": values(host.refit_control("describe"))[0]["world_size"],
        "tokens_equal": [t for t, _ in got] == [t for t, _ in expected],
        "largest_difference": _difference(got, expected),
        "changed": [t for t, _ in got] != [t for t, _ in before],
        "refused": refused, "serves_old": still, "figures": figures,
    }  # fmt: skip
    close(host)
    return seen


def group_stages(root):
    """Two pipeline stages, tied embeddings, a vocabulary that is padded."""
    layer = "model.layers.{}.self_attn."
    spoil = {
        layer.format(0) + "q_proj.weight": layer.format(0) + "z_proj.weight",
        layer.format(1) + "q_norm.weight": layer.format(5) + "q_norm.weight",
    }
    return divided(root, "qwen3tied", spoil, pipeline_parallel_size=2)


def group_experts(root):
    """Two ranks with half of the experts each."""
    experts = "model.layers.1.mlp.experts."
    spoil = {f"{experts}3.up_proj.weight": f"{experts}4.up_proj.weight"}
    parallel = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    return divided(root, "qwen3moe", spoil, **parallel)


GROUPS = {"stages": group_stages, "experts": group_experts}

if __name__ == "__main__":
    result = GROUPS[sys.argv[1]](sys.argv[2])
    print("RESULT " + json.dumps(result), flush=True)
    os._exit(0)
