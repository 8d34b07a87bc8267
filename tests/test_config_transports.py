"""The settings of every transport: colocated generation, shared settings, and who sends to whom."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from weightsync.class_paths import load_class_path
from weightsync.config import NixlRefitConfig, PluginRefitConfig, RefitConfig, load_refit_config
from weightsync.config_scopes import SCOPES, SharedRefitConfig
from weightsync.engines.registry import create_checkpoint_engine, register_checkpoint_engine
from weightsync.errors import ConfigurationError
from weightsync.names import BUILTIN_ENGINES, engine_targets
from weightsync.signatures import constructor_of
from weightsync.topology import TOPOLOGIES

GENERATION = "policy.generation"
SHARED = f"{GENERATION}.refit_cfg.shared"
PLUGIN = "tests.test_config_transports:Plugin"
REMOTE = [name for name in SCOPES if name != "naive"]
RATIO = "update_weights_bucket_memory_ratio"
SIZES = [(1, 1), (1, 3), (3, 1), (4, 2), (2, 4), (2, 5)]
COMMON = {
    "update_weights_bucket_memory_ratio", "device", "topology", "fan_out", "bind_host", "advertise_host",
    "release_after_refit",
}  # fmt: skip


class Plugin:
    """Takes two of the shared settings, and hands on what it does not know."""

    def __init__(self, bucket_size: int, *, bind_host: str | None = None, rails: int = 1) -> None: ...


class TakesAnything:
    def __init__(self, bucket_size: int, **settings: Any) -> None: ...


def load(**generation: Any) -> RefitConfig:
    return load_refit_config({"policy": {"generation": generation}})


def select(transport: str | None, **refit_cfg: Any) -> RefitConfig:
    colocated = {"enabled": transport in (None, "naive")}
    return load(refit_transport=transport, colocated=colocated, refit_cfg=refit_cfg)


def refusal(transport: str | None, **refit_cfg: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        select(transport, **refit_cfg)
    return str(caught.value)


# one scope for each


def test_every_built_in_engine_has_a_scope_with_the_common_settings() -> None:
    assert set(SCOPES) == set(BUILTIN_ENGINES)
    for name, model in SCOPES.items():
        assert set(model.model_fields) >= COMMON, name
        assert model.__doc__ is not None
        assert f"``refit_cfg.{name}``" in model.__doc__
    assert set(SharedRefitConfig.model_fields) == COMMON


@pytest.mark.parametrize("name", SCOPES)
def test_a_scope_and_its_engine_agree(name: str) -> None:
    try:
        cls = load_class_path(BUILTIN_ENGINES[name])
    except (ImportError, ConfigurationError) as error:
        pytest.skip(f"not there: {error}")
    config = select(name)
    if name != "naive":  # it connects nothing
        assert SCOPES[name].topologies() == cls.topologies
        assert SCOPES[name].model_fields["topology"].default == cls.default_topology
    constructor = constructor_of(cls)
    assert [key for key in config.engine_kwargs() if not constructor.takes(key)] == []
    assert constructor.takes("bucket_size")


@pytest.mark.parametrize("name", ["gloo", "ipc", "naive"])
def test_engines_take_what_the_configuration_gives_them(name: str) -> None:
    config = select(name, shared={"device": "cpu"})
    engine = create_checkpoint_engine(name, bucket_size_bytes=1 << 20, engine_kwargs=config.engine_kwargs())
    engine.close()


@pytest.mark.parametrize("name", ["gloo", "kimi_ckpt_engine"])
def test_engines_of_host_memory_take_what_they_are_given_by_default(name: str) -> None:
    kwargs = select(name).engine_kwargs()
    create_checkpoint_engine(name, bucket_size_bytes=1 << 20, engine_kwargs=kwargs).close()


@pytest.mark.parametrize(
    ("name", "own"),
    [
        (
            "nixl",
            {
                "backend_name": "UCX",
                "backend_init_params": {},
                "shard_weights": "auto",
                "shard_expert_weights": False,
            },
        ),
        ("ipc", {}),
        ("gloo", {"rebuild_group": True}),
        ("nccl", {"rebuild_group": True}),
        ("hccl", {"rebuild_group": False}),
        ("mooncake", {"protocol": "rdma", "device_name": "mlx5_0"}),
        ("kimi_ckpt_engine", {"transport": "ipc"}),
    ],
)
def test_the_settings_of_a_transport_reach_its_engine(name: str, own: dict[str, Any]) -> None:
    common = {"bind_host": "::", "advertise_host": "a", "fan_out": 3, "release_after_refit": True}
    written = {key: value for key, value in own.items() if value is not False or key == "rebuild_group"}
    config = select(name, **{name: {**common, **written, "topology": "auto"}})
    drivers = {"in_flight", "on_failure", "commit", "allow_missing", "allow_unused"}
    waits = config.lifecycle.model_dump(exclude=drivers)
    assert config.engine_kwargs() == {
        **common, **own, **waits, "topology": "auto", "device": SCOPES[name]().device,
    }  # fmt: skip
    assert not config.colocated


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("nixl", "cuda"),
        ("ipc", "cuda"),
        ("gloo", "cpu"),
        ("nccl", "cuda"),
        ("hccl", "npu"),
        ("kimi_ckpt_engine", "cpu"),
    ],
)
def test_the_default_device(name: str, device: str) -> None:
    assert select(name).device == device


@pytest.mark.parametrize(
    ("name", "key", "value", "text"),
    [
        ("gloo", "device", "cuda", "write 'cpu' (gloo moves host memory)"),
        ("nccl", "device", "cpu", "write 'cuda' (NCCL moves GPU memory)"),
        ("hccl", "device", "cuda", "write 'npu'"),
        ("ipc", "device", "npu", "write 'cuda' or 'cpu'"),
        *[
            (name, "topology", value, "write 'star' or 'auto' (a collective has one sender)")
            for name in ("gloo", "nccl", "hccl")
            for value in ("pairs", "ring", "tree", "stripes", "mesh")
        ],
        ("ipc", "topology", "ring", "they have nothing to send on"),
        ("ipc", "topology", "tree", "they have nothing to send on"),
        ("kimi_ckpt_engine", "device", "cuda", "write 'cpu' (the shares are kept in host memory)"),
        ("kimi_ckpt_engine", "topology", "pairs", "every policy rank keeps its share"),
        ("mooncake", "topology", "mesh", "'tree', 'stripes' or 'auto'"),
        ("naive", "topology", "star", "in the process of one policy rank"),
        *[(name, "update_weights_bucket_memory_ratio", 0.6, "at most 0.5") for name in REMOTE],
        ("naive", "update_weights_bucket_memory_ratio", 1.1, "at most 1"),
        ("gloo", "rebuild_group", "yes", "write true or false"),
        ("mooncake", "protocol", "ucx", "write 'tcp' or 'rdma'"),
        ("mooncake", "device_name", None, "names of RDMA devices"),
        ("mooncake", "device_name", "mlx5_0", "(protocol: tcp uses no RDMA device); write"),
        ("kimi_ckpt_engine", "transport", "nccl", "write 'nixl' or 'ipc'"),
        *[(name, "fan_out", 0, "a whole number of at least 1") for name in SCOPES],
        *[(name, "advertise_host", "0.0.0.0", "wildcard") for name in SCOPES],
    ],
)
def test_what_a_transport_cannot_do_is_refused_with_the_reason(
    name: str, key: str, value: Any, text: str
) -> None:
    message = refusal(name, **{name: {key: value}})
    assert message.startswith(f"{GENERATION}.refit_cfg.{name}.{key}: got {value!r}")
    assert text in message


@pytest.mark.parametrize("name", SCOPES)
def test_settings_of_another_transport_are_unknown(name: str) -> None:
    assert f"unknown key {GENERATION}.refit_cfg.{name}.rails" in refusal(name, **{name: {"rails": 1}})
    others = {key for model in SCOPES.values() for key in model.model_fields} - {*SCOPES[name].model_fields}
    for key in others:
        assert f"unknown key {GENERATION}.refit_cfg.{name}.{key}" in refusal(name, **{name: {key: 1}})


# colocated


@pytest.mark.parametrize(
    "generation",
    [
        {"refit_transport": None, "colocated": {"enabled": True}},
        {"refit_transport": "naive", "colocated": {"enabled": True}},
        {"colocated": {"enabled": True, "resources": {"gpus_per_node": 4}}},
    ],
)
def test_colocated_generation_has_no_transport(generation: dict[str, Any], tmp_path: Path) -> None:
    config = load(**generation, refit_cfg={"naive": {"update_weights_bucket_memory_ratio": 1}})
    assert (config.transport, config.colocated, config.bucket_memory_ratio) == ("naive", True, 1.0)
    assert config.topology(2, 2) is None
    path = tmp_path / "rl.yaml"
    path.write_text(yaml.safe_dump({"policy": {"generation": generation}}))
    assert load_refit_config(path).transport == "naive"


@pytest.mark.parametrize("colocated", [None, {}, {"enabled": False}])
@pytest.mark.parametrize(("name", "told"), [(None, "is null"), ("naive", "naive hands weights over")])
def test_no_transport_between_processes_is_refused(name: str | None, told: str, colocated: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(refit_transport=name, colocated=colocated)
    message = str(caught.value)
    assert message.startswith(f"{GENERATION}.refit_transport")
    assert told in message
    assert f"write {GENERATION}.colocated.enabled: true, or name a transport" in message


@pytest.mark.parametrize("enabled", [True, False])
def test_ipc_reaches_colocated_processes_and_others(enabled: bool) -> None:
    config = load(refit_transport="ipc", colocated={"enabled": enabled})
    assert (config.transport, config.colocated) == ("ipc", enabled)


@pytest.mark.parametrize("name", [name for name in REMOTE if name != "ipc"])
def test_other_transports_are_for_generation_on_workers_of_its_own(name: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(refit_transport=name, colocated={"enabled": True})
    assert f"colocated.enabled is true, but {name} refits" in str(caught.value)
    assert f"{GENERATION}.refit_transport: null" in str(caught.value)


def test_the_scope_of_null_is_that_of_naive() -> None:
    message = refusal(None, nixl={})
    assert (
        f"refit_transport selects null (naive), but {GENERATION}.refit_cfg has settings for 'nixl'" in message
    )
    assert f"keep only {GENERATION}.refit_cfg.naive" in message


# shared settings


@pytest.mark.parametrize("name", [None, *SCOPES])
def test_shared_settings_hold_for_whichever_transport_is_selected(name: str | None) -> None:
    shared = {
        "update_weights_bucket_memory_ratio": 0.25,
        "topology": "auto",
        "fan_out": 5,
        "bind_host": "::",
        "advertise_host": "node-1",
        "release_after_refit": True,
    }
    config = select(name, shared=shared)
    given = {**config.engine_kwargs(), "update_weights_bucket_memory_ratio": config.bucket_memory_ratio}
    assert {key: given[key] for key in shared} == shared


def test_only_the_transport_has_to_change() -> None:
    shared = {"update_weights_bucket_memory_ratio": 0.003, "device": "cpu"}
    for name in ("nixl", "ipc", "gloo", "mooncake", "kimi_ckpt_engine"):
        config = load(refit_transport=name, refit_cfg={"shared": shared})
        assert (config.transport, config.device, config.bucket_memory_ratio) == (name, "cpu", 0.003)


def test_the_scope_of_the_transport_wins() -> None:
    config = select(
        "nixl", shared={"device": "cpu", "fan_out": 3}, nixl={"device": "cuda", "backend_name": "X"}
    )
    assert config.scope == NixlRefitConfig(device="cuda", fan_out=3, backend_name="X")
    assert select("gloo", shared={"device": "cuda"}, gloo={"device": "cpu"}).device == "cpu"


@pytest.mark.parametrize("shared", [None, {}])
def test_nothing_shared(shared: Any) -> None:
    assert select("nixl", shared=shared).scope == NixlRefitConfig()


@pytest.mark.parametrize(
    ("name", "key", "value", "text"),
    [
        ("gloo", "device", "cuda", "write 'cpu' (gloo moves host memory)"),
        ("nccl", "device", "cpu", "write 'cuda' (NCCL moves GPU memory)"),
        ("nixl", "device", "npu", "write 'cuda' or 'cpu'"),
        ("nccl", "topology", "ring", "write 'star' or 'auto' (a collective has one sender)"),
        ("naive", "topology", "tree", "write 'pairs' or 'auto'"),
        ("ipc", "update_weights_bucket_memory_ratio", 0.8, "at most 0.5"),
    ],
)
def test_a_shared_setting_that_the_transport_cannot_use_names_both(
    name: str, key: str, value: Any, text: str
) -> None:
    message = refusal(name, shared={key: value})
    assert message.startswith(f"{SHARED}.{key}: refit_transport {name!r} cannot use {value!r}; write ")
    assert text in message
    assert message.endswith(f"for this transport alone as {GENERATION}.refit_cfg.{name}.{key}")


@pytest.mark.parametrize("name", ["nixl", PLUGIN])
@pytest.mark.parametrize(
    ("shared", "text"),
    [
        ({"devise": "cpu"}, f"unknown key {SHARED}.devise; did you mean 'device'?"),
        ({"cleanup_after_load": True}, "write release_after_refit"),
        ({"zzz": 1}, f"unknown key {SHARED}.zzz (known: update_weights_bucket_memory_ratio, device"),
        ({"device": "gpu"}, f"{SHARED}.device: got 'gpu'; write 'cuda', 'cpu' or 'npu'"),
        ({"topology": "mesh"}, f"{SHARED}.topology: got 'mesh'; write 'pairs', 'star'"),
        ({"update_weights_bucket_memory_ratio": 2}, "above 0, at most 1"),
        ({"fan_out": True}, "a whole number of at least 1"),
        ({"protocol": "tcp"}, f"{SHARED}.protocol is a setting of one transport"),
        ({3: 4}, f"unknown key {SHARED}.3"),
    ],
)
def test_a_wrong_shared_setting(name: str, shared: dict, text: str) -> None:
    assert text in refusal(name, shared=shared)


def test_a_setting_of_one_transport_is_not_shared() -> None:
    assert refusal("ipc", shared={"protocol": "tcp"}).endswith("leave it out, ipc does not take it")
    message = refusal("nixl", shared={"backend_name": "UCX"})
    assert message == (
        f"{SHARED}.backend_name is a setting of one transport; write it under {GENERATION}.refit_cfg.nixl"
    )


def test_what_was_overruled_is_checked_all_the_same() -> None:
    assert f"{SHARED}.device: got 'gpu'" in refusal("nixl", shared={"device": "gpu"}, nixl={"device": "cpu"})


def test_a_plugin_gets_what_its_constructor_takes(caplog: pytest.LogCaptureFixture) -> None:
    shared = {"update_weights_bucket_memory_ratio": 0.9, "device": "cpu", "bind_host": "::", "fan_out": 3}
    with caplog.at_level(logging.INFO):
        config = select(PLUGIN, shared=shared, **{PLUGIN: {"rails": 2}})
    assert config.scope == PluginRefitConfig(
        update_weights_bucket_memory_ratio=0.9, settings={"bind_host": "::", "rails": 2}
    )
    assert config.device == "auto"
    assert caplog.messages == [f"{SHARED}: {PLUGIN} does not take device, fan_out"]
    config = select(PLUGIN, shared=shared, **{PLUGIN: {"bind_host": "a", RATIO: 0.1}})
    assert (config.engine_kwargs(), config.bucket_memory_ratio) == ({"bind_host": "a"}, 0.1)


def test_a_plugin_that_takes_anything_gets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "tests.test_config_transports:TakesAnything"
    config = select(path, shared={"device": "cpu", "fan_out": 3})
    assert (config.device, config.engine_kwargs()) == ("cpu", {"device": "cpu", "fan_out": 3})
    monkeypatch.setitem(engine_targets, "any", TakesAnything)
    assert select("any", shared={"fan_out": 3}).engine_kwargs() == {"fan_out": 3}


def test_a_plugin_that_only_workers_can_import() -> None:
    path = "a_package_that_is_not_there:Engine"
    assert select(path, shared={RATIO: 0.2}, **{path: {"x": 1}}).engine_kwargs() == {"x": 1}
    message = refusal(path, shared={"device": "cpu"})
    assert f"{SHARED}: whether {path!r} takes device cannot be seen here; write it under" in message
    assert "no module named 'a_package_that_is_not_there'" in message


def test_a_plugin_that_is_no_class() -> None:
    message = refusal("tests.test_config_transports:load", shared={"device": "cpu"})
    assert "is no class; name the class" in message


def test_no_engine_is_called_shared() -> None:
    with pytest.raises(ConfigurationError, match="is no engine name"):
        register_checkpoint_engine("shared", PLUGIN)


# who sends to whom


@pytest.mark.parametrize("name", REMOTE)
@pytest.mark.parametrize(("train", "rollout"), SIZES)
def test_auto_fits_every_pair_of_world_sizes(
    name: str, train: int, rollout: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        topology = select(name, shared={"topology": "auto"}).topology(train, rollout)
    assert topology is not None
    assert topology.name in SCOPES[name].topologies()
    assert (topology.train_world_size, topology.rollout_world_size) == (train, rollout)
    assert caplog.messages == [
        f"topology of {name}: {topology.name}: {train} policy to {rollout} rollout ({topology.reason})"
    ]
    assert topology.reason.startswith("auto: ")


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_named_topology_is_made_and_not_announced(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        topology = select("nixl", nixl={"topology": name, "fan_out": 3}).topology(5, 4)
    assert topology is not None
    assert (topology.name, topology.reason) == (name, "")
    assert caplog.messages == []


def test_the_fan_out_of_a_tree() -> None:
    topology = select("nixl", shared={"topology": "tree", "fan_out": 3}).topology(1, 4)
    assert topology is not None
    assert [str(sender) for sender, _ in topology.edges] == [*["policy rank 0"] * 3, "rollout rank 0"]


def test_pairs_need_policy_ranks_and_say_what_to_do() -> None:
    config = select("nixl")
    topology = config.topology(3, 3)
    assert topology is not None
    assert topology.name == "pairs"
    with pytest.raises(ConfigurationError, match=r"2 policy and 3 rollout workers: .*write topology: auto"):
        config.topology(2, 3)
    with pytest.raises(ConfigurationError, match="at least one policy and one rollout worker"):
        config.topology(0, 0)


@pytest.mark.parametrize("name", [None, PLUGIN])
def test_where_the_engine_decides_there_is_no_topology(name: str | None) -> None:
    assert select(name).topology(1, 7) is None
