"""Engines whose ranks divide layers or experts: ``python -m tests.vllm_parallel_scenarios GROUP DIR``."""

from __future__ import annotations

import hashlib
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
from weightsync.rollout.vllm.emulation import EnginePlace, config_at, standing_at
from weightsync.rollout.vllm.extension import VllmInternalWorkerExtensionWithCheckpointEngine
from weightsync.rollout.vllm.layout import rank_table
from weightsync.rollout.vllm.trial import TrialModel
from weightsync.tensors import TensorSpec, WeightManifest


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

    def layout_digest(self, source):
        """Return a digest of the table of this rank."""
        loader = self._get_refit_loader()
        loader.check_manifest(manifest_of(source))
        report, trial = loader.coverage(manifest_of(source)), loader._trial
        return table_digest(report, trial)


mend_expert_kernels()


def table_digest(report, trial):
    table = rank_table(report, trial.parameters, sharding="all")
    assert table.whole == {}
    return hashlib.sha256(table.encode()).hexdigest()


def manifest_of(source):
    from safetensors.torch import load_file

    state = load_file(os.path.join(source, "model.safetensors"))
    return WeightManifest.build(TensorSpec.of(name, state[name]) for name in sorted(state))


def emulated_digests(host, source, **sizes):
    """Return the digests of the tables of two ranks, made in this process."""
    from vllm.config import set_current_vllm_config

    axis = "stage" if "pp" in sizes else "tensor"
    for rank in range(2):
        place = EnginePlace(**sizes, **{axis: rank})
        config = config_at(host.llm.llm_engine.vllm_config, place)
        with standing_at(place), set_current_vllm_config(config):
            trial = TrialModel(config)
            report = trial.try_manifest(manifest_of(source))
        yield table_digest(report, trial)


def divided(root, kind, spoil, sizes, **parallel):
    """Refit two ranks; the answer is that of one rank. ``spoil`` are tensors that no rank knows."""
    from weightsync.rollout.vllm.cpu import engine_environment

    os.environ.update(engine_environment(2))
    form = {"dtype": "float32", "vocab_size": 500}
    old, new = checkpoint(root, kind, 1, **form), checkpoint(root, kind, 2, **form)
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
        "layouts": host.llm.collective_rpc("layout_digest", args=(new,)),
        "emulated": list(emulated_digests(host, new, **sizes)),
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
    return divided(root, "qwen3tied", spoil, {"pp": 2}, pipeline_parallel_size=2)


def group_experts(root):
    """Two ranks with half of the experts each."""
    experts = "model.layers.1.mlp.experts."
    spoil = {f"{experts}3.up_proj.weight": f"{experts}4.up_proj.weight"}
    parallel = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    return divided(root, "qwen3moe", spoil, {"tp": 2, "expert_parallel": True}, **parallel)


GROUPS = {"stages": group_stages, "experts": group_experts}

if __name__ == "__main__":
    result = GROUPS[sys.argv[1]](sys.argv[2])
    print("RESULT " + json.dumps(result), flush=True)
    os._exit(0)
