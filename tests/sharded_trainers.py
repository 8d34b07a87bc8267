"""Policy ranks in processes of their own, joined by gloo: FSDP2, or FSDP2 beside tensor parallelism.

The parent calls them through pipes, as a `LocalPolicyGroup` does. Nothing here imports vLLM.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

SPAWN = multiprocessing.get_context("spawn")


class RemoteTrainer:
    """A policy rank, called through a pipe."""

    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        self.process = None

    def revive(self, meeting):
        """Start a process that knows nothing, in the place of the one that was."""
        self.kill()
        self.pipe, far = SPAWN.Pipe()
        self.process = SPAWN.Process(
            target=serve, args=(far, self.rank, self.world, str(meeting)), daemon=True
        )
        self.process.start()
        far.close()

    def kill(self):
        if self.process is not None:
            self.process.kill()
            self.process.join(10)

    def checkpoint_engine_rpc(self, checkpoint_method, method_kwargs=None):
        return self.call("checkpoint_engine_rpc", checkpoint_method, method_kwargs)

    def call(self, *message):
        self.start(*message)
        return self.end()

    def start(self, *message):
        self.pipe.send(message)

    def end(self):
        value, error = self.pipe.recv()
        if error is not None:
            raise RuntimeError(f"policy rank {self.rank}: {error}")
        return value


class Trainers(list):
    """All policy ranks of a job; what one rank is told is told all of them at once."""

    def __init__(self, root, world=2):
        super().__init__(RemoteTrainer(rank, world) for rank in range(world))
        self.root, self.born = Path(root), 0
        self.revive()

    def revive(self):
        """Start all processes anew, dead or alive."""
        self.born += 1
        meeting = self.root / f"meeting-{os.getpid()}-{id(self)}-{self.born}"
        for trainer in self:
            trainer.revive(meeting)

    def tell(self, *message):
        for trainer in self:
            trainer.start(*message)
        return [trainer.end() for trainer in self]

    def close(self):
        for trainer in self:
            trainer.kill()


def serve(pipe, rank, world, meeting):
    import traceback
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=timedelta(seconds=30)
    )
    trainer = make_trainer(rank)
    while True:
        try:
            name, *arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send((getattr(trainer, name)(*arguments), None))
        except Exception:  # noqa: BLE001 - raised by the parent
            pipe.send((None, traceback.format_exc()))


def make_trainer(rank):
    import torch
    from torch.distributed.tensor import DTensor, distribute_tensor

    from weightsync.engines.regions.sender import RegionSender
    from weightsync.policy import DtypePolicy, PolicyCheckpointEngineMixin, weight_stream_from

    class FailsOnce(DtypePolicy):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def apply(self, name, tensor):
            if name == self.name:
                self.name = None
                raise ValueError("no room for it")
            return super().apply(name, tensor)

    class Trainer(PolicyCheckpointEngineMixin):
        def __init__(self):
            self.rank = rank

        def build(self, kind, dtype, seed, mesh, options, sent=None):
            """Make a model of ``dtype`` whose weights are sent as ``sent``."""
            torch.manual_seed(seed)
            self.model = split(make_model(kind, seed, getattr(torch, dtype), **options), mesh)
            self.policy = DtypePolicy(sent) if sent else None
            self.split_experts = kind == "deepseek"  # vLLM takes them one by one only
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2)

        def weight_stream(self):
            return weight_stream_from(self.model, dtype_policy=self.policy, split_experts=self.split_experts)

        def train(self, seed):
            """Take a step of the optimizer."""
            tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(seed))
            self.optimizer.zero_grad()
            self.model(input_ids=tokens, labels=tokens).loss.backward()
            self.optimizer.step()

        @torch.no_grad()
        def shake(self, seed):
            """Change all weights, whatever the model is made of."""
            make = torch.Generator().manual_seed(seed)
            for parameter in self.model.parameters():
                noise = (torch.randn(parameter.shape, generator=make) * 0.02).to(parameter.dtype)
                if isinstance(parameter, DTensor):
                    noise = distribute_tensor(
                        noise, parameter.device_mesh, parameter.placements, src_data_rank=None
                    )
                parameter.add_(noise)

        def placements(self):
            """Return how the parameters are split, each way once."""
            return sorted({str(getattr(each, "placements", None)) for each in self.model.parameters()})

        def fail_to_cast(self, name):
            """Fail in the next refit behind the gather of a tensor that goes whole."""
            self.policy = FailsOnce(name)

        def die_once_exposed(self):
            """Die in the next refit, when the readers know where to read."""
            RegionSender._send_digests = lambda _: os.kill(os.getpid(), signal.SIGKILL)

    return Trainer()


def make_model(kind, seed, dtype, **options):
    from weightsync.testing.tiny_models import make_tiny_model

    return (
        make_tiny_deepseek(seed, dtype)
        if kind == "deepseek"
        else make_tiny_model(kind, seed, dtype, **options)
    )


def make_tiny_deepseek(seed, dtype):
    """Return a DeepSeek-V3 with latent attention, one dense layer and one of four experts."""
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes = {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "n_shared_experts": 1,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 1.0, "kv_lora_rank": 512, "q_lora_rank": 64, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32, "v_head_dim": 32, "first_k_dense_replace": 1, "topk_method": "noaux_tc",
        "scoring_func": "sigmoid", "norm_topk_prob": True, "max_position_embeddings": 512,
        "initializer_range": 0.08, "tie_word_embeddings": False,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes)).to(dtype).eval()


def split(model, mesh):
    """Shard a model over a mesh of one dimension, or of two: data, then tensor parallel."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    names = ("data", "tensor")[: len(mesh)]
    made = init_device_mesh("cpu", tuple(mesh), mesh_dim_names=names)
    if len(mesh) == 2:
        columns, rows = ColwiseParallel(), RowwiseParallel()
        attention = {
            f"self_attn.{name}_proj": way for name, way in zip("qkvo", (columns,) * 3 + (rows,), strict=True)
        }
        mlp = {"mlp.gate_proj": columns, "mlp.up_proj": columns, "mlp.down_proj": rows}
        for layer in model.model.layers:
            dense = mlp if hasattr(layer.mlp, "gate_proj") else {}
            parallelize_module(layer, made["tensor"], {**attention, **dense})
        parallelize_module(model, made["tensor"], {"lm_head": columns, "model.embed_tokens": rows})
    for layer in model.model.layers:
        fully_shard(layer, mesh=made["data"])
    return fully_shard(model, mesh=made["data"])
