"""A tiny Qwen3 policy and vLLM in one process: ``python -m tests.colocated_vllm DIR`` prints what was seen.

Importing vLLM changes a process (threads, signal handlers), so the test process never does.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from weightsync.capacity import total_memory_bytes
from weightsync.config import load_refit_config
from weightsync.policy import ColocatedWorkerMixin, weight_stream_from

# One MiB, and so two batches.
RATIO = 1.05 * (1 << 20) / total_memory_bytes("cpu")
CONFIG = {
    "policy": {
        "generation": {
            "backend": "vllm",
            "colocated": {"enabled": True},
            "refit_transport": None,
            "refit_cfg": {"naive": {"device": "cpu", "update_weights_bucket_memory_ratio": RATIO}},
            "refit_lifecycle": {"connect_s": 20, "stall_s": 60, "total_s": 120, "silence_s": 5},
        }
    }
}
ENGINE = {
    "dtype": "float32",
    "seed": 0,
    "max_model_len": 128,
    "max_num_seqs": 4,
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 32 << 20,
}
PROMPTS = ([5, 6, 7, 8], [100, 3, 50])


class TinyWorker(ColocatedWorkerMixin):
    """A policy that is not trained but changed, and an engine that starts from other weights."""

    def __init__(self, directory):
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        from weightsync.rollout.vllm.host import VllmEngineHost
        from weightsync.testing.tiny_models import make_tiny_checkpoint, make_tiny_model

        start = Path(directory) / "start"
        if not start.exists():
            make_tiny_checkpoint("qwen3", start, 1, torch.float32)
        self.rank = 0
        self.model = make_tiny_model("qwen3", 2, torch.float32)
        self.breaks = False
        self.offloaded = 0
        self.engine_host = VllmEngineHost(
            {"model": str(start), **ENGINE}, refit_config=load_refit_config(CONFIG), rpc_timeout_s=120
        )

    def weight_stream(self):
        return self._breaking() if self.breaks else weight_stream_from(self.model)

    def _breaking(self):
        for number, item in enumerate(weight_stream_from(self.model)):
            if number == 24:
                raise ValueError("gather failed")
            yield item

    def offload_policy(self):
        self.offloaded += 1

    def change(self, seed):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))

    def set_breaking(self, breaks):
        self.breaks = breaks

    def pid(self):
        return os.getpid()

    def gap(self):
        """Return the largest |policy - engine| log-probability; inf where their greedy tokens differ."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
        outputs = self.engine_host.generate(prompts, sampling, use_tqdm=False)
        return max(self._gap(ids, output.outputs[0]) for ids, output in zip(PROMPTS, outputs, strict=True))

    @torch.no_grad()
    def _gap(self, prompt, output):
        tokens = list(output.token_ids)
        logits = self.model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1)
        if logprobs.argmax(-1).tolist() != tokens:
            return float("inf")
        served = [step[token].logprob for step, token in zip(output.logprobs, tokens, strict=True)]
        return (logprobs[range(len(tokens)), tokens] - torch.tensor(served)).abs().max().item()


def main(directory):
    from weightsync.cluster.local import local_colocated_groups
    from weightsync.errors import RefitError, WorkerFencedError
    from weightsync.synchronizer import CheckpointEngineWeightSynchronizer

    worker = TinyWorker(directory)
    host = worker.engine_host
    seen = {"gaps": [worker.gap()], "sleeps": host.sleep(level=2)}
    with CheckpointEngineWeightSynchronizer(
        *local_colocated_groups([worker]), CONFIG, progress=False
    ) as synchronizer:
        synchronizer.init_communicator()
        for seed in (1, 2):
            worker.change(seed)
            report = synchronizer.sync_weights()
            seen["gaps"].append(worker.gap())
        seen |= {"steps": worker.refit_steps(), "version": host.llm.get_weight_version()}
        seen |= {"tensors": report.tensors, "bytes": report.bytes, "batches": report.batches}
        worker.breaks = True
        worker.change(3)
        try:
            synchronizer.sync_weights()
        except RefitError as error:
            seen["error"] = str(error)
        try:
            worker.gap()
        except WorkerFencedError as error:
            seen["fenced"] = str(error)
        worker.breaks = False
        # vLLM's own sleep, behind the host's back: on a CPU it keeps the memory, but its bookkeeping is real.
        host.llm.sleep(level=1)
        seen["asleep"] = host.llm.llm_engine.is_sleeping()
        synchronizer.sync_weights()
        seen["awake"] = not host.llm.llm_engine.is_sleeping()
        seen["gaps"].append(worker.gap())
    seen["offloaded"] = worker.offloaded
    return seen


if __name__ == "__main__":
    result = main(sys.argv[1])
    print("RESULT " + json.dumps(result), flush=True)
    os._exit(0)
