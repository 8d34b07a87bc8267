"""The configuration contract: what is read, what is left alone, and what each refusal tells to write."""

from __future__ import annotations

import dataclasses
from collections import ChainMap
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from weightsync.config import (
    MIB,
    NixlRefitConfig,
    RefitConfig,
    RefitLifecycle,
    load_refit_config,
    resolve_bucket_size,
)
from weightsync.errors import ConfigurationError

PLUGIN = "my_pkg.refit:MyCheckpointEngine"
NIXL = "policy.generation.refit_cfg.nixl"
PLUGIN_SCOPE = f"policy.generation.refit_cfg['{PLUGIN}']"

# The example of the design document, within a configuration of a framework.
SPEC_YAML = """
defaults: grpo_base.yaml
grpo:
  num_steps: 10
  lr: ${oc.env:LR}
data: !dataset {path: !env DATA}
policy:
  model_name: Qwen/Qwen3-0.6B
  generation:
    backend: vllm
    temperature: 1.0
    vllm_cfg: {tensor_parallel_size: 2, custom: !python_object x}
    colocated:
      enabled: false
      resources: {gpus_per_node: 4}
    refit_transport: nixl
    refit_cfg:
      nixl:
        update_weights_bucket_memory_ratio: 0.05
        device: cuda
        release_after_refit: false
        backend_name: UCX
        # Optional, cluster-specific eight-rail tuning.
        backend_init_params:
          engine_config: MAX_RMA_RAILS=8
          device_list: "mlx5_0,mlx5_1,mlx5_2,mlx5_4,mlx5_5,mlx5_6,mlx5_7,mlx5_8"
"""

NIXL_DEFAULTS = {
    "device": "cuda",
    "topology": "pairs",
    "fan_out": 2,
    "backend_name": "UCX",
    "backend_init_params": {},
    "release_after_refit": False,
    "shard_weights": "none",
    "shard_expert_weights": False,
    "bind_host": None,
    "advertise_host": None,
    "connect_s": 60.0,
    "stall_s": 300.0,
    "total_s": 3600.0,
    "silence_s": 15.0,
    "verify": "full",
    "poison_released": False,
}


def load(**generation: Any) -> RefitConfig:
    return load_refit_config({"policy": {"generation": {"refit_transport": "nixl", **generation}}})


def load_nixl(**scope: Any) -> RefitConfig:
    return load(refit_cfg={"nixl": scope})


def load_plugin(**scope: Any) -> RefitConfig:
    return load(refit_transport=PLUGIN, refit_cfg={PLUGIN: scope})


def refusal(**generation: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(**generation)
    return str(caught.value)


def nixl_refusal(**scope: Any) -> str:
    return refusal(refit_cfg={"nixl": scope})


def from_yaml(tmp_path: Path, text: str) -> RefitConfig:
    path = tmp_path / "rl.yaml"
    path.write_text(text, encoding="utf-8")
    return load_refit_config(path)


def yaml_refusal(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        from_yaml(tmp_path, text)
    assert "rl.yaml" in str(caught.value)
    return str(caught.value)


# what is read


def test_the_example_of_the_design_document(tmp_path: Path) -> None:
    config = from_yaml(tmp_path, SPEC_YAML)
    assert (config.transport, config.device, config.bucket_memory_ratio) == ("nixl", "cuda", 0.05)
    assert config.engine_kwargs() == NIXL_DEFAULTS | {
        "backend_init_params": {
            "engine_config": "MAX_RMA_RAILS=8",
            "device_list": "mlx5_0,mlx5_1,mlx5_2,mlx5_4,mlx5_5,mlx5_6,mlx5_7,mlx5_8",
        }
    }
    assert config == load_refit_config(str(tmp_path / "rl.yaml"))


def test_the_example_of_the_pull_request(tmp_path: Path) -> None:
    section = {
        "backend": "vllm",
        "colocated": {"enabled": False},
        "refit_transport": "nixl",
        "refit_cfg": {
            "nixl": {
                "update_weights_bucket_memory_ratio": 0.05,
                "device": "cuda",
                "backend_name": "UCX",
                "release_after_refit": False,
                "shard_expert_weights": False,
            }
        },
    }
    config = load_refit_config({"policy": {"generation": section}})
    assert config.engine_kwargs() == NIXL_DEFAULTS
    assert config == from_yaml(tmp_path, yaml.safe_dump({"policy": {"generation": section}}))


def test_the_plugin_example() -> None:
    config = load_plugin(update_weights_bucket_memory_ratio=0.1, transport="custom")
    assert (config.transport, config.device, config.bucket_memory_ratio) == (PLUGIN, "auto", 0.1)
    assert config.engine_kwargs() == {"transport": "custom"}


@pytest.mark.parametrize("scopes", [None, {}, {"nixl": None}, {"nixl": {}}])
def test_a_missing_scope_means_the_defaults(scopes: dict | None) -> None:
    config = load(refit_cfg=scopes)
    assert config.scope == NixlRefitConfig()
    assert config.lifecycle == RefitLifecycle()
    assert config.engine_kwargs() == NIXL_DEFAULTS


def test_the_defaults_of_the_lifecycle() -> None:
    assert load().lifecycle.model_dump() == {
        "connect_s": 60, "stall_s": 300, "total_s": 3600, "silence_s": 15, "verify": "full",
        "in_flight": "abort", "on_failure": "fail", "commit": "in_place",
        "allow_missing": [], "allow_unused": [], "poison_released": False,
    }  # fmt: skip


def test_every_setting_arrives() -> None:
    scope = {
        "update_weights_bucket_memory_ratio": 0.5,
        "device": "cpu",
        "topology": "tree",
        "fan_out": 4,
        "backend_name": "LIBFABRIC",
        "backend_init_params": {"num_workers": 2, "flag": True, "share": 0.5, "devices": "a,b"},
        "release_after_refit": True,
        "bind_host": "::",
        "advertise_host": "node-1",
    }
    lifecycle = {
        "connect_s": 1,
        "stall_s": 2.5,
        "total_s": 30,
        "silence_s": 0.5,
        "verify": "sample",
        "in_flight": "keep",
        "on_failure": "continue",
        "commit": "staged",
        "allow_missing": ["lm_head.*"],
        "allow_unused": ["mtp.*", "*.bias"],
        "poison_released": True,
    }
    config = load(refit_cfg={"nixl": scope}, refit_lifecycle=lifecycle)
    assert (config.bucket_memory_ratio, config.device) == (0.5, "cpu")
    assert config.lifecycle.model_dump() == lifecycle
    passed_on = {"connect_s", "stall_s", "total_s", "silence_s", "verify", "poison_released"}
    expected = {
        **scope, **{key: lifecycle[key] for key in passed_on},
        "shard_weights": "none", "shard_expert_weights": False,
    }  # fmt: skip
    del expected["update_weights_bucket_memory_ratio"]
    assert config.engine_kwargs() == expected
    params = config.engine_kwargs()["backend_init_params"]
    assert [type(value) for value in params.values()] == [int, bool, float, str]


def test_a_yaml_off_switches_verification_off(tmp_path: Path) -> None:
    text = "policy: {generation: {refit_transport: nixl, refit_lifecycle: {verify: off}}}"
    assert from_yaml(tmp_path, text).lifecycle.verify == "off"


def test_a_yaml_number_in_scientific_notation(tmp_path: Path) -> None:
    scope = "{nixl: {update_weights_bucket_memory_ratio: 5e-2}}"
    text = f"policy: {{generation: {{refit_transport: nixl, refit_cfg: {scope}}}}}"
    assert from_yaml(tmp_path, text).bucket_memory_ratio == 0.05


def test_anchors_and_merges_are_followed(tmp_path: Path) -> None:
    text = (
        "base: &base\n  refit_transport: nixl\n  refit_cfg: {nixl: {device: cuda}}\n"
        "scope: &scope {device: cpu, backend_name: POSIX}\n"
        "policy:\n  generation:\n    <<: *base\n    refit_cfg:\n      nixl: {<<: *scope, backend_name: UCX}\n"
    )
    assert from_yaml(tmp_path, text).scope == NixlRefitConfig(device="cpu", backend_name="UCX")


def test_any_mapping_will_do_and_stays_as_it_is() -> None:
    scope = MappingProxyType({"device": "cpu"})
    source = ChainMap({"policy": {"generation": {"refit_transport": "nixl", "refit_cfg": {"nixl": scope}}}})
    before = repr(source)
    assert load_refit_config(source).device == "cpu"
    assert repr(source) == before


class Unresolvable(Mapping[str, Any]):
    """A mapping like those whose interpolations fail when they are looked at."""

    def __init__(self, values: dict[str, Any], forbidden: str) -> None:
        self.values_, self.forbidden = values, forbidden

    def __getitem__(self, key: str) -> Any:
        if key == self.forbidden:
            raise AssertionError(f"{key} belongs to the framework and was looked at")
        return self.values_[key]

    def __iter__(self) -> Any:
        return iter(self.values_)

    def __len__(self) -> int:
        return len(self.values_)


def test_what_belongs_to_the_framework_is_not_looked_at() -> None:
    generation = Unresolvable({"refit_transport": "nixl", "vllm_cfg": 0}, "vllm_cfg")
    policy = Unresolvable({"generation": generation, "optimizer": 0}, "optimizer")
    assert load_refit_config(Unresolvable({"policy": policy, "data": 0}, "data")).transport == "nixl"


@pytest.mark.parametrize(
    "key",
    ["vllm_cfg", "vllm_kwargs", "temperature", "top_p", "top_k", "max_new_tokens", "stop_strings",
     "model_name", "stop_token_ids", "mcore_generation_config", "port_range_low", "sglang_cfg", 3],
)  # fmt: skip
def test_keys_of_the_framework_are_left_alone(key: Any) -> None:
    assert load(refit_cfg={}) == load_refit_config(
        {"policy": {"generation": {"refit_transport": "nixl", key: object()}}}
    )


def test_a_configuration_cannot_be_changed() -> None:
    config = load()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.transport = "other"  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        config.lifecycle.total_s = 1.0
    config.engine_kwargs()["backend_init_params"]["x"] = 1
    assert config.engine_kwargs() == load().engine_kwargs() == NIXL_DEFAULTS


# which transport


@pytest.mark.parametrize("backend", ["sglang", "megatron", "VLLM", None, 3])
def test_other_generation_backends_are_refused(backend: Any) -> None:
    text = refusal(backend=backend)
    assert "policy.generation.backend" in text
    assert repr(backend) in text
    assert "write vllm" in text


def test_colocated_generation_is_refused_with_what_to_use() -> None:
    for name in ("nixl", "nccl", PLUGIN):
        text = refusal(refit_transport=name, colocated={"enabled": True, "resources": {}})
        assert f"enabled is true, but {name} refits generation on workers of its own" in text
        assert "policy.generation.colocated.enabled: false" in text
        assert "policy.generation.refit_transport: null" in text
        assert "IPC" in text


@pytest.mark.parametrize(
    ("colocated", "text"),
    [
        (True, "policy.generation.colocated must be a mapping, got True"),
        ({"enabled": "no"}, "policy.generation.colocated.enabled: got 'no'; write false, or true"),
        ({"enabled": None}, "policy.generation.colocated.enabled: got None; write false"),
        ({"enabeld": True}, "unknown key policy.generation.colocated.enabeld; write "),
    ],
)
def test_a_wrong_colocated_section(colocated: Any, text: str) -> None:
    assert text in refusal(colocated=colocated)


@pytest.mark.parametrize("colocated", [None, {}, {"enabled": False}, {"resources": {"num_nodes": 1}}])
def test_separate_generation(colocated: Any) -> None:
    assert load(colocated=colocated).transport == "nixl"


@pytest.mark.parametrize("colocated", [None, {"enabled": False}])
def test_a_missing_transport(colocated: dict | None) -> None:
    generation = {"colocated": colocated, "refit_cfg": {}}
    with pytest.raises(ConfigurationError, match=r"policy\.generation\.refit_transport is missing; write"):
        load_refit_config({"policy": {"generation": generation}})


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("nixel", ["unknown checkpoint engine 'nixel'", "'naive', 'nccl', 'nixl'", "did you mean 'nixl'?"]),
        ("NIXL", ["did you mean 'nixl'?"]),
        (
            "zzz",
            ["known names: 'gloo', 'hccl', 'ipc', 'kimi_ckpt_engine', 'mooncake', 'naive', 'nccl', 'nixl'"],
        ),
        ("mooncacke", ["did you mean 'mooncake'?"]),
        ("null", ["'null' is a text here; write null, without quotes"]),
        ("None", ["write null, without quotes"]),
        ("shared", ["unknown checkpoint engine 'shared'"]),
        ("my_pkg.refit.Engine", ["'my_pkg.refit:Engine'"]),
        (["nixl", PLUGIN], ["two transports at once"]),
        ({"nixl": {}}, ["two transports at once"]),
        (3, ["got 3", "write nixl"]),
    ],
)
def test_a_wrong_transport(name: Any, texts: list[str]) -> None:
    message = refusal(refit_transport=name)
    assert message.startswith("policy.generation.refit_transport: ")
    assert all(text in message for text in texts), message


@pytest.mark.parametrize(
    ("scopes", "texts"),
    [
        ({"nixl": {}, PLUGIN: {}}, ["two transports at once", PLUGIN, f"keep only {NIXL}"]),
        ({PLUGIN: {"x": 1}}, ["two transports at once", "refit_transport selects 'nixl'"]),
        ({"nixel": {}}, ["'nixel' is not the selected transport", "did you mean 'nixl'"]),
        ({"device": "cpu"}, [f"refit_cfg.device has no scope; write it under {NIXL}", "refit_cfg.shared"]),
        ({"backend_name": "UCX"}, ["refit_cfg.backend_name has no scope"]),
        ({"nccl": {}}, ["two transports at once", "refit_transport selects 'nixl'", "refit_cfg.shared"]),
        ({"nixl": {}, "nccl": {}}, ["two transports at once", f"keep only {NIXL}"]),
        ({"nixl": {}, "shraed": {}}, ["'shraed' is not the selected transport; did you mean 'shared'?"]),
        ({None: {}}, ["settings for None"]),
        ({"shared": 3}, ["policy.generation.refit_cfg.shared must be a mapping, got 3"]),
        ({"cleanup_after_load": True}, ["has no scope"]),
        ("nixl", ["policy.generation.refit_cfg must be a mapping, got 'nixl'"]),
        ({"nixl": [1]}, [f"{NIXL} must be a mapping, got [1]"]),
    ],
)  # fmt: skip
def test_scopes_that_do_not_fit_the_transport(scopes: Any, texts: list[str]) -> None:
    message = refusal(refit_cfg=scopes)
    assert all(text in message for text in texts), message


def test_a_plugin_scope_has_exactly_the_class_path() -> None:
    near = {"my_pkg.refit:MyCheckpointEngin": {}}
    assert f"did you mean '{PLUGIN}'" in refusal(refit_transport=PLUGIN, refit_cfg=near)
    assert "two transports at once" in refusal(refit_transport=PLUGIN, refit_cfg={"nixl": {}})


# unknown keys


@pytest.mark.parametrize(
    ("key", "right"),
    [
        ("refit_transprot", "refit_transport"),
        ("refit-transport", "refit_transport"),
        ("refitTransport", "refit_transport"),
        ("refit_config", "refit_cfg"),
        ("refit_cfgs", "refit_cfg"),
        ("refit_lifecylce", "refit_lifecycle"),
        ("collocated", "colocated"),
        ("backends", "backend"),
    ],
)
def test_a_misspelled_key_of_ours_is_caught(key: str, right: str) -> None:
    assert refusal(**{key: {}}) == f"unknown key policy.generation.{key}; write policy.generation.{right}"


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("devise", "did you mean 'device'?"),
        ("bind_hosts", "did you mean 'bind_host'?"),
        ("release_after_refits", "did you mean 'release_after_refit'?"),
        ("zzz", "known: update_weights_bucket_memory_ratio, device"),
        ("update_weights_bucket_megabytes", "write update_weights_bucket_memory_ratio"),
        ("cleanup_after_load", "write release_after_refit"),
    ],
)
def test_an_unknown_key_of_the_nixl_scope(key: str, text: str) -> None:
    message = nixl_refusal(**{key: 1})
    assert f"unknown key {NIXL}.{key}" in message
    assert text in message


def test_an_unknown_key_of_the_lifecycle() -> None:
    message = refusal(refit_lifecycle={"stall_seconds": 3})
    assert message == "unknown key policy.generation.refit_lifecycle.stall_seconds; did you mean 'stall_s'?"


def test_old_names_in_a_plugin_scope() -> None:
    for key in ("update_weights_bucket_megabytes", "update_weights_bucket_memory_ration"):
        message = refusal(refit_transport=PLUGIN, refit_cfg={PLUGIN: {key: 1}})
        assert f"unknown key {PLUGIN_SCOPE}.{key}; write update_weights_bucket_memory_ratio" in message


# wrong values


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        *[
            ("update_weights_bucket_memory_ratio", value, "above 0 and at most 0.5")
            for value in (0, -0.1, 0.51, 5, float("nan"), float("inf"), True, None, "much", [0.1])
        ],
        *[("device", value, "write 'cuda' or 'cpu'") for value in ("gpu", "cuda:0", "CPU", None, 1)],
        *[("backend_name", value, "the name of a NIXL backend") for value in ("", None, 3)],
        *[("backend_init_params", value, "a mapping of names") for value in ("x", None, ["a"], {1: 2})],
        ("backend_init_params", {"a": None}, "backend_init_params.a: got None"),
        ("backend_init_params", {"a": {"b": 1}}, "backend_init_params.a: got {'b': 1}"),
        *[("release_after_refit", value, "write true or false") for value in ("yes", 1, None)],
        *[
            ("topology", value, "'tree', 'stripes' or 'auto'")
            for value in ("mesh", "Pairs", None, 2, ["ring"])
        ],
        *[("fan_out", value, "a whole number of at least 1") for value in (0, -1, 1.5, True, "2", None)],
        *[("shard_expert_weights", value, "write true or false") for value in ("true", 1, None)],
        ("shard_weights", True, "got True (true does not say which tensors); write 'none', 'experts', 'all'"),
        *[("shard_weights", value, "'all' or 'auto'") for value in ("expert", "ALL", None, 1, ["all"])],
        *[("bind_host", value, "an address of this host") for value in ("", 3, ["::"])],
        *[("advertise_host", value, "wildcard") for value in ("0.0.0.0", "::", "*")],
        ("advertise_host", "", "at which peers reach this host"),
    ],
)
def test_a_wrong_value_in_the_nixl_scope(key: str, value: Any, text: str) -> None:
    message = nixl_refusal(**{key: value})
    assert f"{NIXL}.{key}" in message
    assert text in message


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        *[
            (key, value, "write seconds above 0")
            for key in ("connect_s", "stall_s", "total_s", "silence_s")
            for value in (0, -1, float("inf"), float("nan"), True, None, "soon")
        ],
        *[
            ("verify", value, "write 'full' (digests of every chunk), 'sample' (of one in 16) or 'off'")
            for value in ("none", 1, None)
        ],
        *[("in_flight", value, "write 'abort', 'wait' or 'keep'") for value in ("drop", True, None)],
        *[("allow_missing", value, "a list of name patterns") for value in ("lm_head.*", None, [1], [""])],
        *[("allow_unused", value, "a list of name patterns") for value in ("mtp.*", {"a": 1})],
        ("poison_released", "no", "write true or false"),
    ],
)
def test_a_wrong_value_in_the_lifecycle(key: str, value: Any, text: str) -> None:
    message = refusal(refit_lifecycle={key: value})
    assert f"policy.generation.refit_lifecycle.{key}: got" in message
    assert text in message


def test_everything_wrong_is_told_at_once() -> None:
    message = nixl_refusal(device="gpu", devise="cpu", update_weights_bucket_memory_ratio=2)
    assert message.count(NIXL) == 3


@pytest.mark.parametrize("ratio", [0, -1, 1.01, float("nan"), True, "x"])
def test_a_wrong_ratio_in_a_plugin_scope(ratio: Any) -> None:
    scopes = {PLUGIN: {"update_weights_bucket_memory_ratio": ratio}}
    message = refusal(refit_transport=PLUGIN, refit_cfg=scopes)
    assert f"{PLUGIN_SCOPE}.update_weights_bucket_memory_ratio: got {ratio!r}" in message


def test_plugin_settings_are_keywords() -> None:
    assert "the key 3 is no string; write '3'" in refusal(refit_transport=PLUGIN, refit_cfg={PLUGIN: {3: 4}})
    message = refusal(refit_transport=PLUGIN, refit_cfg={PLUGIN: {"bucket_size": 4}})
    assert f"write {PLUGIN_SCOPE}.update_weights_bucket_memory_ratio" in message


@pytest.mark.parametrize(
    ("value", "device"),
    [("tpu", "auto"), ("cpu", "cpu"), ("cpu:0", "cpu"), ("cuda", "cuda"), ("cuda:1", "cuda")],
)
def test_the_device_of_a_plugin(value: str, device: str) -> None:
    config = load_plugin(device=value)
    assert config.device == device
    assert config.engine_kwargs() == {"device": value}


_JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
_KEYS = (
    st.sampled_from([*NixlRefitConfig.model_fields, *RefitLifecycle.model_fields, "nixl", "shared", PLUGIN])
    | st.text()
)


@given(
    st.dictionaries(
        st.sampled_from(["backend", "colocated", "refit_transport", "refit_cfg", "refit_lifecycle", "other"]),
        _JUNK | st.dictionaries(_KEYS, _JUNK | st.dictionaries(_KEYS, _JUNK, max_size=3), max_size=3),
    )
)
def test_whatever_is_written_gives_a_configuration_or_a_configuration_error(generation: dict) -> None:
    for section in (
        generation,
        {**generation, "refit_transport": "nixl", "backend": "vllm", "colocated": None},
    ):
        try:
            config = load_refit_config({"policy": {"generation": section}})
        except ConfigurationError as error:
            assert "policy.generation" in str(error)
        else:
            assert config.engine_kwargs() is not None


# files


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is empty, or no mapping"),
        ("# only a comment\n", "is empty, or no mapping"),
        ("[1, 2]", "is empty, or no mapping"),
        ("grpo: {}\n", "has no policy"),
        ("polcy: {}\n", "has no policy; did you mean 'polcy'?"),
        ("policy: {generaton: {}}\n", "has no policy.generation; did you mean 'generaton'?"),
        ("policy: 3\n", "policy must be a mapping, got '3'"),
        ("policy: {generation: [a]}\n", "policy.generation must be a mapping"),
        ("policy: {generation: null}\n", "policy.generation must be a mapping"),
        ("policy: {generation: {refit_transport: nixl}\n", "as YAML"),
        ("a: 1\n---\nb: 2\n", "as YAML"),
        ("policy: {generation: {refit_transport: !env X}}\n", "as YAML"),
        (
            "policy:\n generation:\n  refit_transport: nixl\n  refit_cfg:\n   nixl: {}\n   nixl: {}\n",
            "policy.generation.refit_cfg.nixl is written twice, again in line 6",
        ),
        (
            "policy:\n  generation:\n    refit_transport: nixl\n    refit_transport: a:B\n",
            "policy.generation.refit_transport is written twice, again in line 4",
        ),
        ("policy: {}\npolicy: {}\n", "policy is written twice, again in line 2"),
        ("policy: {generation: {refit_transport: nixel}}\n", "did you mean 'nixl'?"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in yaml_refusal(tmp_path, text)


def test_what_the_framework_repeats_is_its_own_affair(tmp_path: Path) -> None:
    text = "data: {a: 1, a: 2}\npolicy:\n  generation: {refit_transport: nixl, top_p: 1, top_p: 2, [1]: x}\n"
    assert from_yaml(tmp_path, text).transport == "nixl"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"policy: \xe9")
    for source in (tmp_path / "absent.yaml", tmp_path, tmp_path / "latin.yaml", "a\0b", "x" * 5000):
        with pytest.raises(ConfigurationError, match="cannot read the configuration"):
            load_refit_config(source)


@pytest.mark.parametrize("source", [None, 3, [("policy", {})], b"rl.yaml"])
def test_sources_of_another_kind(source: Any) -> None:
    with pytest.raises(ConfigurationError, match="path of a YAML file, or a mapping"):
        load_refit_config(source)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ({}, "has no policy"),
        ({"policy": None}, "policy must be a mapping, got None"),
        ({"policy": {}}, "has no policy.generation"),
        ({"policy": {"generation": "vllm"}}, "policy.generation must be a mapping, got 'vllm'"),
    ],
)
def test_mappings_without_the_section(source: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        load_refit_config(source)


# the size of a bucket


@pytest.mark.parametrize(
    ("capacities", "ratio", "mib"),
    [
        ([80 << 30], 0.05, 4096),
        ([80 << 30, 24 << 30, 40 << 30], 0.05, 1228),
        ([20 * MIB], 0.05, 1),
        ([100 * MIB], 0.07, 7),  # in binary fractions a little less than 7
        ([100 * MIB + 1, 100 * MIB - 1], 0.07, 6),
        ([3 * MIB], 0.5, 1),
        ([MIB], 1, 1),
    ],
)
def test_the_smallest_capacity_decides_and_whole_mebibytes_count(
    capacities: list[int], ratio: float, mib: int
) -> None:
    assert resolve_bucket_size(capacities, ratio) == mib * MIB


@given(st.lists(st.integers(MIB, 1 << 40), min_size=1, max_size=5), st.floats(1e-6, 1))
def test_a_bucket_is_the_largest_whole_number_of_mebibytes(capacities: list[int], ratio: float) -> None:
    wanted = min(capacities) * ratio
    try:
        size = resolve_bucket_size(capacities, ratio)
    except ConfigurationError as error:
        assert wanted < MIB * 1.000001
        assert str(min(capacities)) in str(error)
        return
    assert size % MIB == 0
    assert MIB <= size <= wanted * 1.000001
    assert size + MIB > wanted * 0.999999


@pytest.mark.parametrize("capacity", [19 * MIB, 2 * MIB + 1, 7_777_777, 1 << 20])
def test_a_bucket_below_a_mebibyte_names_the_least_ratio_that_works(capacity: int) -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolve_bucket_size([capacity, capacity * 9], 0.05)
    text = str(caught.value)
    assert "0.05" in text
    assert str(capacity) in text
    least = text.split("update_weights_bucket_memory_ratio to ")[1].partition(" ")[0]
    assert resolve_bucket_size([capacity], float(least)) == MIB
    if float(least) < 1:
        with pytest.raises(ConfigurationError):
            resolve_bucket_size([capacity], float(least) * 0.998)
    assert ("transports take at most 0.5" in text) == (capacity < 2 * MIB)


def test_a_worker_with_less_than_a_mebibyte() -> None:
    with pytest.raises(ConfigurationError, match="no ratio makes one"):
        resolve_bucket_size([MIB - 1], 0.5)


@pytest.mark.parametrize("capacities", [[], [0], [-1], [80 << 30, 0], [1.5], [None], ["80"], [True]])
def test_capacities_that_cannot_be(capacities: list[Any]) -> None:
    with pytest.raises(ConfigurationError, match="capacity"):
        resolve_bucket_size(capacities, 0.05)


@pytest.mark.parametrize("ratio", [0, -0.1, 1.1, float("nan"), float("inf"), True, None, "0.05"])
def test_ratios_that_cannot_be(ratio: Any) -> None:
    with pytest.raises(ConfigurationError, match="must be above 0 and at most 1"):
        resolve_bucket_size([80 << 30], ratio)
