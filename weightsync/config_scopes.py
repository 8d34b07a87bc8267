"""``refit_cfg``: the settings of each built-in transport, one model a scope, and those of all of them.

What a transport cannot do by nature is no value of its settings; the description of the field says why.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, StrictInt, ValidationInfo

from weightsync.config_models import DEFAULT_BUCKET_RATIO, Ratio, Section, Text, any_ratio
from weightsync.config_sharding import Sharding, read_off
from weightsync.names import NAIVE
from weightsync.topology import AUTO, DEFAULT_FAN_OUT


def _reachable(value: Any) -> Any:
    if value in ("0.0.0.0", "::", "[::]", "*"):
        raise ValueError("peers cannot connect to a wildcard address")
    return value


def _over_rdma(value: str, info: ValidationInfo) -> str:
    if value and info.data.get("protocol") == "tcp":
        raise ValueError("protocol: tcp uses no RDMA device")
    return value


_TOPOLOGIES = "'pairs', 'star', 'ring', 'tree', 'stripes' or 'auto'"
_ONE_SENDER = "'star' or 'auto' (a collective has one sender)"


class EngineScope(Section):
    """What the scopes of all built-in engines have."""

    update_weights_bucket_memory_ratio: Ratio = Field(
        DEFAULT_BUCKET_RATIO,
        gt=0,
        le=0.5,
        description="a fraction of the smallest memory, above 0 and at most 0.5 (there are two buckets)",
    )
    device: str = Field("cuda", description="'cuda' or 'cpu'")
    topology: Literal["pairs", "star", "ring", "tree", "stripes", "auto"] = Field(
        "pairs", description=_TOPOLOGIES
    )
    fan_out: StrictInt = Field(DEFAULT_FAN_OUT, ge=1, description="a whole number of at least 1")
    release_after_refit: StrictBool = Field(False, description="true or false")
    bind_host: Text | None = Field(None, description="an address of this host, such as '0.0.0.0' or '::'")
    advertise_host: Annotated[Text | None, BeforeValidator(_reachable)] = Field(
        None, description="a name or address at which peers reach this host"
    )

    @classmethod
    def topologies(cls) -> tuple[str, ...]:
        """Return the topologies that the transport can do, without ``auto``."""
        names = get_args(cls.model_fields["topology"].annotation)
        return tuple(name for name in names if name != AUTO)


class SharedRefitConfig(EngineScope):
    """``refit_cfg.shared``: settings for whichever engine is selected; its own scope overrules them."""

    update_weights_bucket_memory_ratio: Ratio = any_ratio()
    device: Literal["cuda", "cpu", "npu"] = Field("cuda", description="'cuda', 'cpu' or 'npu'")


class _HostOrGpu(EngineScope):
    device: Literal["cuda", "cpu"] = Field("cuda", description="'cuda' or 'cpu'")


class NixlRefitConfig(_HostOrGpu):
    """``refit_cfg.nixl``: settings of the NIXL engine."""

    backend_name: Text = Field("UCX", description="the name of a NIXL backend, such as UCX")
    backend_init_params: dict[str, str | int | float | bool] = Field(
        {}, description="a mapping of names to strings, numbers or booleans"
    )
    shard_weights: Annotated[Sharding, BeforeValidator(read_off)] = Field(
        "none",
        description="'none', 'experts', 'all' or 'auto': which tensors each rollout rank gets only its own "
        "regions of",
    )
    shard_expert_weights: StrictBool = Field(
        False, description="true or false; true is the same as shard_weights: experts"
    )

    @property
    def sharding(self) -> Sharding:
        """Which tensors are moved by regions, by whichever of the two settings says it."""
        return "experts" if self.shard_expert_weights else self.shard_weights


class MooncakeRefitConfig(_HostOrGpu):
    """``refit_cfg.mooncake``: settings of the Mooncake engine."""

    protocol: Literal["tcp", "rdma"] = Field("tcp", description="'tcp' or 'rdma'")
    device_name: Annotated[str, AfterValidator(_over_rdma)] = Field(
        "", description="names of RDMA devices, such as 'mlx5_0', with protocol: rdma, or '' for any"
    )


class IpcRefitConfig(_HostOrGpu):
    """``refit_cfg.ipc``: settings of the engine for other processes of one host."""

    topology: Literal["pairs", "star", "stripes", "auto"] = Field(
        "pairs",
        description="'pairs', 'star', 'stripes' or 'auto' (receivers read the sender's own memory: they have "
        "nothing to send on)",
    )


class CollectiveRefitConfig(EngineScope):
    """What the scopes of the collective engines have in common."""

    topology: Literal["star", "auto"] = Field("star", description=_ONE_SENDER)
    rebuild_group: StrictBool = Field(False, description="true or false")


class GlooRefitConfig(CollectiveRefitConfig):
    """``refit_cfg.gloo``: settings of the collective engine over gloo."""

    device: Literal["cpu"] = Field("cpu", description="'cpu' (gloo moves host memory)")


class NcclRefitConfig(CollectiveRefitConfig):
    """``refit_cfg.nccl``: settings of the collective engine over NCCL."""

    device: Literal["cuda"] = Field("cuda", description="'cuda' (NCCL moves GPU memory)")


class HcclRefitConfig(CollectiveRefitConfig):
    """``refit_cfg.hccl``: settings of the collective engine over HCCL."""

    device: Literal["npu"] = Field("npu", description="'npu' (HCCL moves NPU memory)")


class KimiRefitConfig(EngineScope):
    """``refit_cfg.kimi_ckpt_engine``: settings of the parameter server."""

    device: Literal["cpu"] = Field("cpu", description="'cpu' (the shares are kept in host memory)")
    topology: Literal["stripes", "auto"] = Field(
        "stripes", description="'stripes' or 'auto' (every policy rank keeps its share for all receivers)"
    )
    transport: Literal["nixl", "ipc"] = Field("nixl", description="'nixl' or 'ipc': what moves the bytes")


class NaiveRefitConfig(_HostOrGpu):
    """``refit_cfg.naive``: settings of the path within one process, whose buckets are no buffers."""

    update_weights_bucket_memory_ratio: Ratio = any_ratio()
    topology: Literal["pairs", "auto"] = Field(
        "pairs", description="'pairs' or 'auto' (a rollout rank is in the process of one policy rank)"
    )


SCOPES: dict[str, type[EngineScope]] = {
    "nixl": NixlRefitConfig,
    "ipc": IpcRefitConfig,
    "gloo": GlooRefitConfig,
    "nccl": NcclRefitConfig,
    "hccl": HcclRefitConfig,
    "mooncake": MooncakeRefitConfig,
    "kimi_ckpt_engine": KimiRefitConfig,
    NAIVE: NaiveRefitConfig,
}
"""The scope of each built-in engine."""
