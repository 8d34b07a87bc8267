"""The names that users write: renaming or dropping one is a change of the interface, and shows here."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest

from weightsync import errors
from weightsync.engines.base import CAPABILITIES, CheckpointEngine
from weightsync.engines.registry import create_checkpoint_engine, resolve_checkpoint_engine
from weightsync.names import BUILTIN_ENGINES

PUBLIC = {
    "weightsync": {"__version__"},
    "weightsync.buckets": {
        "align_up",
        "merge_weight_chunk_batches",
        "place_chunks",
        "split_weight_chunks",
        "unpack_bucket",
    },
    "weightsync.cluster.base": {
        "ColocatedGroup",
        "PendingCall",
        "RolloutGroup",
        "WorkerGroup",
        "lost_outcome",
    },
    "weightsync.cluster.local": {"LocalPolicyGroup", "LocalRolloutGroup", "local_colocated_groups"},
    "weightsync.cluster.ray": {"RayPolicyGroup", "RayRolloutGroup", "ray_colocated_groups"},
    "weightsync.config": {
        "NixlRefitConfig",
        "PluginRefitConfig",
        "RefitConfig",
        "RefitLifecycle",
        "load_refit_config",
        "resolve_bucket_size",
    },
    "weightsync.engines.base": {"CAPABILITIES", "CheckpointEngine"},
    "weightsync.engines.bucketed": {"BucketedCheckpointEngine"},
    "weightsync.engines.nixl": {"NIXLCheckpointEngine", "preinit_nixl_agent"},
    "weightsync.engines.registry": {
        "create_checkpoint_engine",
        "known_checkpoint_engines",
        "register_checkpoint_engine",
        "resolve_checkpoint_engine",
    },
    "weightsync.engines.transport": {"BucketTransport", "Peer", "Place"},
    "weightsync.policy": {
        "AsyncPolicyCheckpointEngineMixin",
        "ColocatedWorkerMixin",
        "DtypePolicy",
        "PolicyCheckpointEngineMixin",
        "fsdp_weights",
        "module_weights",
        "preinit_checkpoint_engine",
        "weight_stream_from",
    },
    "weightsync.report": {"RankFigures", "RefitReport"},
    "weightsync.rollout.loader": {"WeightLoader"},
    "weightsync.rollout.module": {"ModuleLoader", "ModuleRolloutWorker"},
    "weightsync.rollout.vllm.arguments": {"configure_vllm_kwargs"},
    "weightsync.rollout.vllm.async_host": {"AsyncVllmEngineHost"},
    "weightsync.rollout.vllm.host": {"VllmEngineHost"},
    "weightsync.synchronizer": {"CheckpointEngineWeightSynchronizer"},
    "weightsync.tensors": {"TensorMeta", "TensorSpec", "WeightManifest", "WeightStream"},
    "weightsync.testing": {"EngineConformance"},
    "weightsync.topology": {"RankId", "Topology", "choose_topology", "make_topology"},
}

ENGINES = {
    "gloo": "weightsync.engines.collective:GlooCheckpointEngine",
    "hccl": "weightsync.engines.collective:HCCLCheckpointEngine",
    "ipc": "weightsync.engines.ipc:IPCCheckpointEngine",
    "kimi_ckpt_engine": "weightsync.engines.kimi:KimiCheckpointEngine",
    "mooncake": "weightsync.engines.mooncake:MooncakeCheckpointEngine",
    "naive": "weightsync.engines.naive:NaiveCheckpointEngine",
    "nccl": "weightsync.engines.collective:NCCLCheckpointEngine",
    "nixl": "weightsync.engines.nixl:NIXLCheckpointEngine",
}

METHODS = {
    "prepare": [],
    "get_target_weight_layout": [],
    "init_policy_process_group": ["worker_rank", "train_world_size", "rollout_world_size", "metadata"],
    "init_rollout_process_group": ["rollout_rank", "train_world_size", "rollout_world_size", "metadata"],
    "finalize": [],
    "send_weights": ["weights"],
    "receive_weight_batches": [],
    "refuses": ["train_world_size", "rollout_world_size"],
    "join_late": ["rollout_rank", "train_world_size", "rollout_world_size", "metadata"],
    "update_process_group": ["rank", "train_world_size", "rollout_world_size", "metadata"],
    "arrived_digest": ["name"],
    "open_refit": ["epoch", "version", "receivers"],
    "abort_refit": ["error"],
    "refit_stats": [],
    "close": [],
}


@pytest.mark.parametrize(("module", "names"), PUBLIC.items())
def test_public_names_exist(module: str, names: set[str]) -> None:
    found = importlib.import_module(module)
    assert {name for name in names if not hasattr(found, name)} == set()


@pytest.mark.parametrize(("module", "names"), PUBLIC.items())
def test_what_a_module_exports_exists_and_holds_its_public_names(module: str, names: set[str]) -> None:
    found = importlib.import_module(module)
    exported = getattr(found, "__all__", None)
    if exported is not None:
        assert names <= set(exported)
        assert {name for name in exported if not hasattr(found, name)} == set()


def test_every_transport_has_its_name() -> None:
    assert ENGINES == BUILTIN_ENGINES
    for name in ENGINES:
        assert resolve_checkpoint_engine(name).transport_name == name  # type: ignore[attr-defined]


def test_what_an_engine_may_lack() -> None:
    assert set(CAPABILITIES) == {"processes", "hosts", "losses", "checks", "latecomers"}
    for name in ENGINES:
        lacks = resolve_checkpoint_engine(name).lacks
        assert set(lacks) <= set(CAPABILITIES)
        assert all(lacks.values())


@pytest.mark.nixl
@pytest.mark.parametrize(("transport", "lacks"), [("nixl", set()), ("ipc", {"hosts"})])
def test_what_the_parameter_server_lacks_is_what_moves_its_bytes(transport: str, lacks: set[str]) -> None:
    engine = create_checkpoint_engine(
        "kimi_ckpt_engine", bucket_size_bytes=1 << 20, engine_kwargs={"transport": transport}
    )
    assert set(engine.lacks) == lacks
    engine.close()


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_classes_are_where_vllm_is_told_to_find_them() -> None:
    from weightsync.rollout.vllm.arguments import EXTENSION, NIXL_WORKER

    assert EXTENSION.endswith(".VllmInternalWorkerExtensionWithCheckpointEngine")
    assert NIXL_WORKER.endswith(".NixlVllmWorker")
    for path in (EXTENSION, NIXL_WORKER):
        module, _, name = path.rpartition(".")
        assert inspect.isclass(getattr(importlib.import_module(module), name))


def test_the_contract_of_an_engine() -> None:
    found = {
        name: [
            each for each in inspect.signature(getattr(CheckpointEngine, name)).parameters if each != "self"
        ]
        for name in METHODS
    }
    assert found == METHODS
    abstract = {"finalize", "init_policy_process_group", "init_rollout_process_group", "prepare"}
    assert CheckpointEngine.__abstractmethods__ == abstract | {"receive_weight_batches", "send_weights"}
    assert inspect.iscoroutinefunction(CheckpointEngine.send_weights)


def test_rank_arguments_are_keywords_only() -> None:
    for name in ("init_policy_process_group", "init_rollout_process_group"):
        parameters = list(inspect.signature(getattr(CheckpointEngine, name)).parameters.values())[1:]
        assert {each.kind for each in parameters} == {inspect.Parameter.KEYWORD_ONLY}


def test_the_drawn_tree_of_errors_is_the_real_one() -> None:
    drawn: dict[str, str] = {}
    above: dict[int, str] = {}
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^ {4}([│├└─ ]*)(\w+Error)\b", line)
        if match:
            depth = len(match[1]) // 4
            above[depth] = match[2]
            drawn[match[2]] = above[depth - 1] if depth else "RuntimeError"
    real = {
        name: value.__bases__[0].__name__
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.WeightSyncError)
    }
    assert drawn == real
