"""From a name to an engine: what is found, what is refused, and what each refusal says."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import weightsync.engines
from tests.plugin_example import MyCheckpointEngine
from weightsync.config import load_refit_config
from weightsync.engines.base import CheckpointEngine
from weightsync.engines.registry import (
    create_checkpoint_engine,
    known_checkpoint_engines,
    register_checkpoint_engine,
    resolve_checkpoint_engine,
)
from weightsync.errors import ConfigurationError, MissingDependencyError
from weightsync.names import BUILTIN_ENGINES, engine_targets, portable_backend

PLUGIN = "tests.plugin_example:MyCheckpointEngine"
MIB = 1 << 20

BROKEN_MODULES = {
    "needs_absent": "import a_package_that_is_not_there\n",
    "needs_own_absent": "import {name}.inner\n",
    "needs_absent_name": "from json import a_name_that_is_not_there\n",
    "fails": "raise RuntimeError('no driver found')\n",
    "unfinished": "def broken(:\n",
    "extra": "from weightsync.errors import MissingDependencyError\n"
    "raise MissingDependencyError(\"pip install 'weightsync[nixl]'\")\n",
}


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    before = dict(engine_targets)
    yield
    engine_targets.clear()
    engine_targets.update(before)


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Write a module that cannot be imported; return its name."""

    def write(kind: str) -> str:
        name = f"weightsync_test_{kind}"
        (tmp_path / f"{name}.py").write_text(BROKEN_MODULES[kind].replace("{name}", name), encoding="utf-8")
        importlib.invalidate_caches()
        return name

    monkeypatch.syspath_prepend(tmp_path)
    return write


def refusal(backend: Any, **engine_kwargs: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        create_checkpoint_engine(backend, bucket_size_bytes=MIB, engine_kwargs=engine_kwargs)
    return str(caught.value)


class Complete(MyCheckpointEngine):
    """An engine with settings of every kind."""

    def __init__(self, *, bucket_size: int, device: str = "cpu", num_rails: int = 1) -> None:
        super().__init__(bucket_size, device)
        self.num_rails = num_rails


class WithoutBucketSize(MyCheckpointEngine):
    def __init__(self, bucketsize: int) -> None: ...


class PositionalOnly(MyCheckpointEngine):
    def __init__(self, bucket_size: int, /) -> None: ...


class RaisesItself(MyCheckpointEngine):
    def __init__(self, bucket_size: int) -> None:
        raise TypeError("from inside the constructor")


class WithoutAnyConstructor(CheckpointEngine):
    def prepare(self) -> Any: ...
    def init_policy_process_group(self, **_: Any) -> None: ...
    def init_rollout_process_group(self, **_: Any) -> None: ...
    def finalize(self) -> None: ...
    async def send_weights(self, weights: Any) -> None: ...
    async def receive_weight_batches(self) -> AsyncGenerator[Any, None]:
        yield []


class ShardsWithoutLayout(WithoutAnyConstructor):
    shard_expert_weights = True

    def __init__(self, bucket_size: int) -> None: ...


class TakesAnything(WithoutAnyConstructor):
    """With nobody behind its ``**`` that would name what it takes."""

    def __init__(self, bucket_size: int = 0, **settings: Any) -> None:
        self.settings = {"bucket_size": bucket_size, **settings}


class Common(MyCheckpointEngine):
    """What a family of engines shares; like Complete, it takes no other settings."""

    def __init__(self, bucket_size: int, *, topology: str = "pairs", fan_out: int = 2) -> None:
        super().__init__(bucket_size, "common")
        self.common = {"topology": topology, "fan_out": fan_out}


class Rails:
    """A mixin with a setting of its own."""

    def __init__(self, *args: Any, rails: int = 1, **common: Any) -> None:
        super().__init__(*args, **common)
        self.rails = rails


class PassesOn(Rails, Common):
    def __init__(self, bucket_size: int, *, device: str, **common: Any) -> None:
        super().__init__(bucket_size, **common)
        self.device = device


class InheritsAll(PassesOn):
    """Without a constructor of its own."""


class ClosesTheChain(PassesOn):
    def __init__(self, bucket_size: int, *, device: str = "cpu") -> None:
        super().__init__(bucket_size, device=device)


class MadeByNew(WithoutAnyConstructor):
    def __new__(cls, bucket_size: int, device: str = "cpu") -> Any:
        return super().__new__(cls)


class Unfinished(CheckpointEngine):
    def __init__(self, bucket_size: int) -> None: ...
    def prepare(self) -> Any: ...
    def finalize(self) -> None: ...


class Outer:
    Inner = Complete


class NoEngine:
    def __init__(self, bucket_size: int) -> None: ...


def a_function() -> None: ...


# what is found


def test_a_plugin_is_constructed_with_bucket_size_and_its_settings() -> None:
    engine = create_checkpoint_engine(PLUGIN, bucket_size_bytes=MIB, engine_kwargs={"transport": "custom"})
    assert type(engine) is MyCheckpointEngine
    assert (engine.bucket_size, engine.transport) == (MIB, "custom")


def test_the_public_names_of_the_room() -> None:
    assert set(weightsync.engines.__all__) >= {
        "CheckpointEngine", "create_checkpoint_engine", "register_checkpoint_engine",
    }  # fmt: skip
    assert weightsync.engines.CheckpointEngine is CheckpointEngine


def test_a_nested_class_and_one_that_takes_any_settings() -> None:
    assert resolve_checkpoint_engine(f"{__name__}:Outer.Inner") is Complete
    engine = create_checkpoint_engine(
        f"{__name__}:TakesAnything", bucket_size_bytes=MIB, engine_kwargs={"x": 1}
    )
    assert isinstance(engine, TakesAnything)
    assert engine.settings == {"bucket_size": MIB, "x": 1}


BUILTIN = ["gloo", "hccl", "ipc", "kimi_ckpt_engine", "mooncake", "naive", "nccl", "nixl"]


def test_the_built_in_names_are_known_and_are_not_imported_for_that() -> None:
    assert known_checkpoint_engines() == sorted(BUILTIN_ENGINES) == BUILTIN
    assert engine_targets["nixl"] == "weightsync.engines.nixl:NIXLCheckpointEngine"


@pytest.mark.nixl
def test_the_short_name_gives_the_nixl_engine() -> None:
    cls = resolve_checkpoint_engine("nixl")
    assert (cls.__module__, cls.__name__) == ("weightsync.engines.nixl", "NIXLCheckpointEngine")


def test_the_arguments_are_not_changed() -> None:
    kwargs = {"transport": "custom"}
    create_checkpoint_engine(PLUGIN, bucket_size_bytes=MIB, engine_kwargs=kwargs)
    assert kwargs == {"transport": "custom"}


# registering


def test_a_registered_path_and_a_registered_class() -> None:
    register_checkpoint_engine("by_path", PLUGIN)
    register_checkpoint_engine("by-class", Complete)
    assert known_checkpoint_engines() == ["by-class", "by_path", *BUILTIN]
    assert resolve_checkpoint_engine("by_path") is MyCheckpointEngine
    assert isinstance(create_checkpoint_engine("by-class", bucket_size_bytes=MIB), Complete)


def test_the_decorator_returns_the_class() -> None:
    @register_checkpoint_engine("decorated")
    class Decorated(Complete):
        """An engine."""

    assert resolve_checkpoint_engine("decorated") is Decorated


def test_a_path_is_registered_without_importing_it() -> None:
    register_checkpoint_engine("later", "a_package_that_is_not_there:Engine")
    assert "no module named 'a_package_that_is_not_there'" in refusal("later")


def test_registering_the_same_again_does_nothing() -> None:
    for target in (PLUGIN, MyCheckpointEngine, PLUGIN):
        register_checkpoint_engine("mine", target)
    register_checkpoint_engine("nixl", "weightsync.engines.nixl:NIXLCheckpointEngine")
    assert resolve_checkpoint_engine("mine") is MyCheckpointEngine


@pytest.mark.parametrize("name", ["mine", "nixl"])
def test_a_name_stands_for_one_engine(name: str) -> None:
    register_checkpoint_engine("mine", PLUGIN)
    with pytest.raises(ConfigurationError, match=f"{name}' already stands for .*choose another name"):
        register_checkpoint_engine(name, Complete)
    assert resolve_checkpoint_engine("mine") is MyCheckpointEngine


def test_two_classes_made_by_one_function_are_not_the_same() -> None:
    def make() -> type[CheckpointEngine]:
        class Local(Complete):
            pass

        return Local

    first = make()
    register_checkpoint_engine("local", first)
    register_checkpoint_engine("local", first)
    with pytest.raises(ConfigurationError, match="already stands for"):
        register_checkpoint_engine("local", make())


@pytest.mark.parametrize("name", ["", "a:b", "a.b", "a b", "1st", 3])
def test_malformed_names_are_not_registered(name: Any) -> None:
    with pytest.raises(ConfigurationError, match="is no engine name"):
        register_checkpoint_engine(name, PLUGIN)


def test_what_is_no_engine_is_not_registered() -> None:
    with pytest.raises(ConfigurationError, match="no subclass of"):
        register_checkpoint_engine("bad", NoEngine)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="no 'module:ClassName' path"):
        register_checkpoint_engine("bad", "my_pkg.refit.Engine")
    with pytest.raises(ConfigurationError, match=r"'shared' is no engine name: refit_cfg\.shared has"):
        register_checkpoint_engine("shared", PLUGIN)
    assert known_checkpoint_engines() == BUILTIN


def test_a_registered_name_is_a_refit_transport() -> None:
    generation = {"refit_transport": "mine", "refit_cfg": {"mine": {"transport": "custom"}}}
    with pytest.raises(ConfigurationError, match="unknown checkpoint engine 'mine'"):
        load_refit_config({"policy": {"generation": generation}})
    register_checkpoint_engine("mine", PLUGIN)
    config = load_refit_config({"policy": {"generation": generation}})
    assert (config.transport, config.engine_kwargs()) == ("mine", {"transport": "custom"})


def test_what_other_processes_understand() -> None:
    register_checkpoint_engine("by_path", PLUGIN)
    register_checkpoint_engine("by_class", Complete)
    assert portable_backend("by_path") == PLUGIN
    assert portable_backend("by_class") == f"{__name__}:Complete"
    assert portable_backend("nixl") == "nixl"
    assert portable_backend("a.b:C") == "a.b:C"


# what is refused


@pytest.mark.parametrize("name", ["nixle", "NIXL", "nxil", "nixl "])
def test_an_unknown_name_and_the_nearest_known(name: str) -> None:
    text = refusal(name)
    assert f"unknown checkpoint engine {name!r}" in text
    assert "did you mean 'nixl'?" in text
    assert "'module:ClassName' works everywhere" in text


def test_an_unknown_name_far_from_all_names_what_is_known() -> None:
    register_checkpoint_engine("carrier", PLUGIN)
    text = refusal("zzz")
    assert "known names: 'carrier', 'gloo', 'hccl', 'ipc'" in text
    assert "did you mean" not in text


@pytest.mark.parametrize(
    ("path", "example"),
    [
        ("my_pkg.refit.Engine", "my_pkg.refit:Engine"),
        ("my_pkg:refit:Engine", "my_pkg.refit:Engine"),
        ("my-pkg.refit:Engine", "my_pkg.refit:MyCheckpointEngine"),
        ("my_pkg/refit.py:Engine", "my_pkg.refit:MyCheckpointEngine"),
        (".refit:Engine", "refit:Engine"),
        ("my_pkg.refit:", "my_pkg:refit"),
        (":", "my_pkg.refit:MyCheckpointEngine"),
    ],
)
def test_a_malformed_path_and_a_right_one(path: str, example: str) -> None:
    text = refusal(path)
    assert f"{path!r} is no class path" in text
    assert f"such as {example!r}" in text


@pytest.mark.parametrize("backend", [None, 3, MyCheckpointEngine])
def test_a_selector_must_be_a_string(backend: Any) -> None:
    assert "is selected by a string" in refusal(backend)


@pytest.mark.parametrize(
    ("path", "missing"),
    [
        ("nowhere.refit:E", "nowhere"),
        ("tests.nowhere:E", "tests.nowhere"),
        ("json.decoder.x:E", "json.decoder.x"),
    ],
)
def test_a_missing_module_is_said_to_be_missing(path: str, missing: str) -> None:
    text = refusal(path)
    assert f"no module named {missing!r}" in text
    assert "PYTHONPATH" in text


@pytest.mark.parametrize(
    ("kind", "cause", "text"),
    [
        ("needs_absent", ModuleNotFoundError, "No module named 'a_package_that_is_not_there'"),
        ("needs_own_absent", ModuleNotFoundError, ".inner"),
        ("needs_absent_name", ImportError, "a_name_that_is_not_there"),
        ("fails", RuntimeError, "no driver found"),
        ("unfinished", SyntaxError, "invalid syntax"),
    ],
)
def test_a_module_that_fails_is_not_said_to_be_missing(
    broken: Callable[[str], str], kind: str, cause: type[Exception], text: str
) -> None:
    with pytest.raises(ConfigurationError, match="was found, but importing it raised") as caught:
        resolve_checkpoint_engine(f"{broken(kind)}:Engine")
    assert text in str(caught.value)
    assert isinstance(caught.value.__cause__, cause)


def test_a_missing_extra_is_passed_on_as_it_is(broken: Callable[[str], str]) -> None:
    with pytest.raises(MissingDependencyError, match="weightsync\\[nixl\\]"):
        resolve_checkpoint_engine(f"{broken('extra')}:Engine")


def test_a_missing_class_and_the_nearest_in_the_module() -> None:
    text = refusal("tests.plugin_example:MyCheckpointEngin")
    assert "has no 'MyCheckpointEngin'; did you mean 'MyCheckpointEngine'?" in text
    assert "engines in it: MyCheckpointEngine" in text
    assert "it has no checkpoint engine" in refusal("json:Engine")


def test_what_is_no_class() -> None:
    assert "is no class but function" in refusal(f"{__name__}:a_function")
    assert "is no class but int" in refusal(f"{__name__}:MIB")


def test_what_is_no_engine() -> None:
    text = refusal(f"{__name__}:NoEngine")
    assert "no subclass of weightsync.engines.base.CheckpointEngine" in text


def test_an_unfinished_engine_names_its_missing_methods() -> None:
    text = refusal(f"{__name__}:Unfinished")
    missing = "init_policy_process_group, init_rollout_process_group, receive_weight_batches, send_weights"
    assert text.endswith(f"does not implement {missing}")


def test_settings_that_the_constructor_does_not_take() -> None:
    path = f"{__name__}:Complete"
    text = refusal(path, num_rail=2, devise="cpu", zzz=1)
    assert "'num_rail' (did you mean 'num_rails'?), 'devise' (did you mean 'device'?), 'zzz'" in text
    assert f"policy.generation.refit_cfg[{path!r}]" in text
    assert text.endswith("it takes device, num_rails")


@pytest.mark.parametrize("name", ["PassesOn", "InheritsAll"])
def test_settings_that_the_constructor_hands_on(name: str) -> None:
    kwargs = {"device": "cuda", "rails": 3, "topology": "ring", "fan_out": 4}
    engine = create_checkpoint_engine(f"{__name__}:{name}", bucket_size_bytes=MIB, engine_kwargs=kwargs)
    assert isinstance(engine, PassesOn)
    assert (engine.device, engine.rails) == ("cuda", 3)
    assert engine.common == {"topology": "ring", "fan_out": 4}


def test_settings_that_no_constructor_on_the_way_takes() -> None:
    text = refusal(f"{__name__}:PassesOn", device="cpu", topolgy="ring", transport="x")
    assert "'topolgy' (did you mean 'topology'?), 'transport'" in text
    assert text.endswith("it takes device, rails, topology, fan_out")
    assert refusal(f"{__name__}:PassesOn").endswith("needs device")
    assert refusal(f"{__name__}:ClosesTheChain", topology="ring").endswith("it takes device")


def test_a_class_without_a_constructor_takes_what_makes_its_instances() -> None:
    assert refusal(f"{__name__}:MadeByNew", zzz=1).endswith("it takes device")


def test_settings_that_the_constructor_needs() -> None:
    text = refusal(PLUGIN)
    assert text.endswith("needs transport")
    assert f"policy.generation.refit_cfg[{PLUGIN!r}]" in text


def test_bucket_size_must_be_taken_and_is_not_a_setting() -> None:
    text = refusal(f"{__name__}:WithoutBucketSize")
    assert "must take 'bucket_size' (bytes); did you mean 'bucketsize'?" in text
    assert "must take 'bucket_size'" in refusal(f"{__name__}:PositionalOnly")
    text = refusal(PLUGIN, transport="x", bucket_size=3)
    assert "set update_weights_bucket_memory_ratio instead" in text


@pytest.mark.parametrize("size", [0, -1, 1.5, True, None])
def test_the_bucket_size_is_a_positive_whole_number(size: Any) -> None:
    with pytest.raises(ConfigurationError, match="must be a positive whole number"):
        create_checkpoint_engine(PLUGIN, bucket_size_bytes=size, engine_kwargs={"transport": "x"})


def test_an_error_of_the_constructor_itself_passes_through() -> None:
    with pytest.raises(TypeError, match="from inside the constructor"):
        create_checkpoint_engine(f"{__name__}:RaisesItself", bucket_size_bytes=MIB)


def test_sharding_needs_a_layout() -> None:
    assert "must implement get_target_weight_layout" in refusal(f"{__name__}:ShardsWithoutLayout")


# the example of the design document, at work


def test_the_plugin_example_moves_weights() -> None:
    config = load_refit_config({
        "policy": {
            "generation": {
                "backend": "vllm",
                "colocated": {"enabled": False},
                "refit_transport": PLUGIN,
                "refit_cfg": {PLUGIN: {"update_weights_bucket_memory_ratio": 0.05, "transport": "custom"}},
            }
        }
    })  # fmt: skip

    def make() -> CheckpointEngine:
        return create_checkpoint_engine(
            config.transport, bucket_size_bytes=64, engine_kwargs=config.engine_kwargs()
        )

    policy, rollout = [make(), make()], [make()]
    metadata = [engine.prepare() for engine in (*policy, *rollout)]
    sizes = {"train_world_size": 2, "rollout_world_size": 1, "metadata": metadata}
    for rank, engine in enumerate(policy):
        engine.init_policy_process_group(worker_rank=rank, **sizes)
    rollout[0].init_rollout_process_group(rollout_rank=0, **sizes)
    weights = {f"layers.{i}": torch.full((4,), float(i)) for i in range(9)}
    drained: list[list[str]] = [[], []]

    def stream(rank: int) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights.items():
            drained[rank].append(name)
            yield name, tensor

    async def receive() -> list[list[tuple[str, torch.Tensor]]]:
        return [batch async for batch in rollout[0].receive_weight_batches()]

    async def refit() -> list[list[tuple[str, torch.Tensor]]]:
        sends = (engine.send_weights(stream(rank)) for rank, engine in enumerate(policy))  # type: ignore[arg-type]
        batches, *_ = await asyncio.wait_for(asyncio.gather(receive(), *sends), timeout=10)
        return batches

    for _ in range(2):
        batches = asyncio.run(refit())
        assert [len(batch) for batch in batches] == [4, 4, 1]
        received = {name: tensor for batch in batches for name, tensor in batch}
        assert list(received) == list(weights)
        assert all(torch.equal(received[name], weights[name]) for name in weights)
        # Both ranks came through their whole stream, the one without a peer too.
        assert drained[0] == drained[1]
    for engine in (*policy, *rollout):
        engine.finalize()
        engine.abort_refit(RuntimeError("nothing is open"))
        assert engine.refit_stats() == {}
        engine.close()
