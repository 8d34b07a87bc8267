"""Standing in for any rank of an engine in one process, without process groups: vLLM is told where it is.

For models on the meta device, whose loader is watched: how many ranks there are and which of them this one is
decides what they store, and nothing is ever sent.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch


@dataclass(frozen=True)
class EnginePlace:
    """A rank of an engine: the sizes of the engine's mesh, and the rank's coordinates in it."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    expert_parallel: bool = False
    tensor: int = 0
    stage: int = 0
    data: int = 0

    @property
    def expert_ranks(self) -> int:
        """Ranks among which experts are distributed, or cut."""
        return self.tp * self.dp


def private_config(vllm_config: Any) -> Any:
    """Copy a configuration so that a second model does not enter itself into the first one's registries."""
    config = copy.copy(vllm_config)
    compilation = config.compilation_config = copy.copy(vllm_config.compilation_config)
    compilation.static_forward_context = {}
    compilation.static_all_moe_layers = []
    compilation.enabled_custom_ops = Counter()
    compilation.disabled_custom_ops = Counter()
    config.device_config = copy.copy(vllm_config.device_config)
    config.device_config.device = torch.device("meta")  # the transformers backend makes its weights there
    return config


def config_at(vllm_config: Any, place: EnginePlace) -> Any:
    """Copy a configuration for one rank of an engine of other sizes."""
    config = private_config(vllm_config)
    parallel = config.parallel_config = copy.copy(vllm_config.parallel_config)
    parallel.tensor_parallel_size, parallel.pipeline_parallel_size = place.tp, place.pp
    parallel.data_parallel_size, parallel.enable_expert_parallel = place.dp, place.expert_parallel
    parallel.decode_context_parallel_size = parallel.prefill_context_parallel_size = 1
    return config


@contextmanager
def standing_at(place: EnginePlace) -> Iterator[None]:
    """Make vLLM believe that this process is one rank of an engine. No model may run meanwhile."""
    from vllm.distributed import parallel_state

    one, within = _Group(0, 1), place.data * place.tp + place.tensor
    groups = {
        "_TP": _Group(place.tensor, place.tp),
        "_PP": _Group(place.stage, place.pp),
        "_DP": _Group(place.data, place.dp),
        "_EP": _Group(within, place.expert_ranks),
        "_EPLB": None, "_PCP": one, "_DCP": one,
        "_WORLD": _Group(place.stage * place.tp + place.tensor, place.pp * place.tp),
    }  # fmt: skip
    with ExitStack() as patches:
        for name, group in groups.items():
            if hasattr(parallel_state, name):
                patches.enter_context(patch.object(parallel_state, name, group))
        patches.enter_context(on_meta())
        yield


@contextmanager
def on_meta() -> Iterator[None]:
    """Let models be made and loaded on the meta device, whichever rank they are for."""
    from vllm.model_executor.layers.fused_moe import expert_map_manager
    from vllm.model_executor.models import utils

    determine = expert_map_manager.determine_expert_map

    def on_host(*args: Any, **kwargs: Any) -> Any:
        with torch.device("cpu"):  # its values decide which experts are loaded
            return determine(*args, **kwargs)

    with ExitStack() as patches:
        # Kept by the identity of the model, which a freed one hands on to the next rank's.
        patches.enter_context(patch.object(utils, "_model_to_pp_missing_layer_names", {}))
        patches.enter_context(patch.object(expert_map_manager, "determine_expert_map", on_host))
        yield


class _Group:
    """Stands for a process group that is asked for its size and this rank's place, and for nothing else."""

    device_communicator = None
    mq_broadcaster = None

    def __init__(self, rank: int, size: int) -> None:
        self.rank = self.rank_in_group = self.local_rank = rank
        self.world_size = size
        self.ranks = list(range(size))
        self.device_group = self.cpu_group = self
        self.is_first_rank, self.is_last_rank = rank == 0, rank == size - 1
        self.first_rank, self.last_rank = 0, size - 1

    def size(self) -> int:
        return self.world_size
