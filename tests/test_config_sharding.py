"""Which tensors are moved by regions, as the configuration says it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weightsync.config import RefitConfig, load_refit_config
from weightsync.config_scopes import SCOPES
from weightsync.engines.base import CheckpointEngine
from weightsync.errors import ConfigurationError

REFIT_CFG = "policy.generation.refit_cfg"
PLUGIN = "tests.test_config_sharding:Plugin"
OWN_WAY = "tests.test_config_sharding:OwnWay"
MISSING = "a_package_that_is_not_there:Engine"


class Plugin(CheckpointEngine):
    """Moves regions on the layouts that the workers report."""

    def use_memory(self, memory: Any) -> None: ...


class Heir(Plugin):
    """Inherits that."""


class OwnWay(CheckpointEngine):
    """Shards in its own way, as the checkpoint-engine contract has it."""

    def get_target_weight_layout(self) -> dict[str, Any] | None:
        return {}


def select(transport: str, **scope: Any) -> RefitConfig:
    generation = {
        "refit_transport": transport,
        "refit_cfg": {transport: scope},
        "colocated": {"enabled": transport == "naive"},
    }
    return load_refit_config({"policy": {"generation": generation}})


def refusal(transport: str, **scope: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        _ = select(transport, **scope).sharding
    return str(caught.value)


@pytest.mark.parametrize(
    ("scope", "sharding"),
    [
        ({}, "none"),
        *[({"shard_weights": value}, value) for value in ("none", "experts", "all", "auto")],
        ({"shard_weights": False}, "none"),
        ({"shard_expert_weights": False}, "none"),
        ({"shard_expert_weights": True}, "experts"),
        ({"shard_expert_weights": True, "shard_weights": "experts"}, "experts"),
        ({"shard_expert_weights": False, "shard_weights": "none"}, "none"),
        ({"shard_expert_weights": False, "shard_weights": False}, "none"),
    ],
)
def test_either_setting_says_it_and_the_engine_is_told_both(scope: dict[str, Any], sharding: str) -> None:
    config = select("nixl", **scope)
    assert config.sharding == sharding
    kwargs = config.engine_kwargs()
    assert kwargs["shard_weights"] == sharding
    assert kwargs["shard_expert_weights"] is (sharding == "experts")


@pytest.mark.parametrize(
    ("weights", "experts", "text"),
    [
        ("all", True, "true means shard_weights: experts, but shard_weights is all"),
        ("none", True, "true means shard_weights: experts, but shard_weights is none"),
        (False, True, "true means shard_weights: experts, but shard_weights is none"),
        ("auto", False, "false means shard_weights: none, but shard_weights is auto"),
        ("experts", False, "false means shard_weights: none, but shard_weights is experts"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(weights: Any, experts: bool, text: str) -> None:
    message = refusal("nixl", shard_weights=weights, shard_expert_weights=experts)
    kept = "none" if weights is False else weights
    assert message == (
        f"{REFIT_CFG}.nixl.shard_expert_weights: {text}; keep only {REFIT_CFG}.nixl.shard_weights: {kept}"
    )


@pytest.mark.parametrize(("written", "sharding"), [("none", "none"), ("off", "none"), ("auto", "auto")])
def test_as_it_stands_in_yaml(tmp_path: Path, written: str, sharding: str) -> None:
    path = tmp_path / "rl.yaml"
    scope = f"{{nixl: {{shard_weights: {written}}}}}"
    path.write_text(f"policy: {{generation: {{refit_transport: nixl, refit_cfg: {scope}}}}}")
    assert load_refit_config(path).sharding == sharding


@pytest.mark.parametrize("name", [name for name in SCOPES if name != "nixl"])
@pytest.mark.parametrize("key", ["shard_weights", "shard_expert_weights"])
def test_no_other_transport_moves_regions(name: str, key: str) -> None:
    assert select(name).sharding == "none"
    told = "only refit_transport nixl moves weights by regions: select that, or leave the key out"
    assert refusal(name, **{key: "all"}) == f"unknown key {REFIT_CFG}.{name}.{key}; {told}"
    generation = {
        "refit_transport": name,
        "refit_cfg": {"shared": {key: "all"}},
        "colocated": {"enabled": name == "naive"},
    }
    with pytest.raises(ConfigurationError, match=told):
        load_refit_config({"policy": {"generation": generation}})


@pytest.mark.parametrize("transport", [PLUGIN, "tests.test_config_sharding:Heir"])
def test_a_plugin_that_takes_regions_is_asked_for_them(transport: str) -> None:
    assert select(transport).sharding == "none"
    assert select(transport, shard_weights="auto").sharding == "auto"
    assert select(transport, shard_expert_weights=True).sharding == "experts"
    assert select(transport, shard_weights=False).sharding == "none"
    assert "write one of none, experts, all, auto" in refusal(transport, shard_weights=True)
    assert "keep only" in refusal(transport, shard_weights="all", shard_expert_weights=True)


@pytest.mark.parametrize("transport", [OWN_WAY, MISSING])
def test_a_plugin_that_shards_in_its_own_way_is_left_to_it(transport: str) -> None:
    config = select(transport, shard_expert_weights=True, shard_weights="mine")
    assert config.sharding == "none"
    assert config.engine_kwargs() == {"shard_expert_weights": True, "shard_weights": "mine"}
