"""Engines that installed distributions bring: found in every process, loaded late, refused by name."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.installed import install, install_module, install_text
from weightsync import entry_points
from weightsync.config import RefitConfig, load_refit_config
from weightsync.engines.registry import (
    create_checkpoint_engine,
    known_checkpoint_engines,
    register_checkpoint_engine,
    resolve_checkpoint_engine,
)
from weightsync.errors import ConfigurationError, MissingDependencyError
from weightsync.names import BUILTIN_ENGINES, engine_targets, portable_backend

MODULE = "carrier_for_tests"
TARGET = f"{MODULE}:CarrierEngine"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path to install into."""
    before = dict(engine_targets)
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(entry_points, "_told", set())
    yield folder
    engine_targets.clear()
    engine_targets.update(before)
    for name in [name for name in sys.modules if name.endswith("_for_tests")]:
        del sys.modules[name]


@pytest.fixture
def carrier(site: Path) -> Path:
    """The same with a distribution whose engine is called carrier."""
    install(site, "carrier-engine", carrier=TARGET)
    install_module(site, MODULE)
    importlib.invalidate_caches()
    return site


def load(transport: str, **refit_cfg: Any) -> RefitConfig:
    generation = {"refit_transport": transport, "refit_cfg": refit_cfg}
    return load_refit_config({"policy": {"generation": generation}})


def refusal(transport: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(transport)
    assert str(caught.value).startswith("policy.generation.refit_transport: ")
    with pytest.raises(ConfigurationError):
        resolve_checkpoint_engine(transport)
    return str(caught.value)


def test_an_installed_name_is_known_and_is_not_imported_for_that(carrier: Path) -> None:
    assert known_checkpoint_engines() == sorted([*BUILTIN_ENGINES, "carrier"])
    assert load("nixl").transport == "nixl"
    assert MODULE not in sys.modules


def test_an_installed_engine_is_selected_by_its_name(carrier: Path) -> None:
    config = load("carrier", carrier={"update_weights_bucket_memory_ratio": 0.7, "note": "x"})
    assert (config.transport, config.bucket_memory_ratio) == ("carrier", 0.7)
    assert config.engine_kwargs() == {"note": "x"}
    engine: Any = create_checkpoint_engine("carrier", bucket_size_bytes=9, engine_kwargs={"note": "x"})
    assert type(engine).__name__ == "CarrierEngine"
    assert (engine.bucket_size, engine.note) == (9, "x")
    assert config.topology(2, 1) is None


@pytest.mark.slow
def test_another_process_finds_it_by_name_and_by_what_the_driver_sends(carrier: Path) -> None:
    assert portable_backend("carrier") == TARGET
    code = (
        "from weightsync.engines.registry import known_checkpoint_engines, create_checkpoint_engine\n"
        "print('carrier' in known_checkpoint_engines())\n"
        f"for name in ('carrier', {TARGET!r}):\n"
        "    engine = create_checkpoint_engine(name, bucket_size_bytes=7, engine_kwargs={'note': 'there'})\n"
        "    print(type(engine).__name__, engine.bucket_size, engine.note)\n"
    )
    path = os.pathsep.join([str(carrier), *filter(None, [os.environ.get("PYTHONPATH")])])
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True", "CarrierEngine 7 there", "CarrierEngine 7 there"]


def test_a_misspelled_installed_name(carrier: Path) -> None:
    assert "did you mean 'carrier'?" in refusal("carier")


def test_extras_and_blanks_of_an_entry_point_are_no_part_of_its_path(site: Path) -> None:
    install(site, "spacious", roomy=f"{MODULE} : CarrierEngine [gpu]")
    install_module(site, MODULE)
    assert portable_backend("roomy") == TARGET
    assert load("roomy").transport == "roomy"


@pytest.mark.parametrize(
    ("target", "code", "text"),
    [
        ("absent_for_tests:Engine", None, "no module named 'absent_for_tests'"),
        (f"{MODULE}:Carier", "", f"'{MODULE}' has no 'Carier'"),
        (TARGET, "raise RuntimeError('no driver')", "importing it raised RuntimeError: no driver"),
        ("carrier_for_tests", "", "its entry point 'carrier_for_tests' is no 'module:ClassName'"),
        ("carrier-for-tests:Engine", "", "is no 'module:ClassName'"),
    ],
)
def test_a_broken_one_is_an_error_only_where_it_is_selected(
    site: Path, target: str, code: str | None, text: str
) -> None:
    install(site, "broken-engines", broken=target)
    if code is not None:
        install_module(site, MODULE, code)
    assert "broken" in known_checkpoint_engines()
    assert load("nixl").transport == "nixl"
    message = refusal("broken")
    assert text in message
    assert "distribution broken-engines 1.2" in message


def test_what_an_engine_misses_is_still_a_missing_dependency(site: Path) -> None:
    install(site, "needy", needy=TARGET)
    code = (
        "from weightsync.errors import MissingDependencyError\nraise MissingDependencyError('pip install x')"
    )
    install_module(site, MODULE, code)
    with pytest.raises(MissingDependencyError, match=r"pip install x .*distribution needy 1\.2"):
        load("needy")


def test_what_is_no_engine_names_its_distribution(site: Path) -> None:
    install(site, "odd", odd="json:JSONDecoder")
    with pytest.raises(ConfigurationError, match=r"no subclass of .*distribution odd 1\.2"):
        resolve_checkpoint_engine("odd")


@pytest.mark.parametrize("name", ["nixl", "shared"])
def test_a_name_of_our_own_is_not_given_away(site: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    install(site, "usurper", **{name: TARGET})
    with caplog.at_level(logging.WARNING):
        assert known_checkpoint_engines() == sorted(BUILTIN_ENGINES)
        assert load("nixl").transport == "nixl"
        assert portable_backend("nixl") == "nixl"
    assert len(caplog.messages) == 1
    assert f"usurper 1.2 brings a checkpoint engine {name!r}" in caplog.messages[0]
    assert f"Write '{TARGET}' as refit_transport" in caplog.messages[0]


def test_two_distributions_with_one_name_are_both_named(site: Path) -> None:
    install(site, "one", double=TARGET)
    install(site, "other", double="other_for_tests:Engine")
    assert "double" in known_checkpoint_engines()
    assert load("nixl").transport == "nixl"
    message = refusal("double")
    assert f"one 1.2 ({TARGET})" in message
    assert "other 1.2 (other_for_tests:Engine)" in message
    with pytest.raises(ConfigurationError, match="several distributions"):
        portable_backend("double")


def test_two_distributions_that_mean_the_same_engine(carrier: Path) -> None:
    install(carrier, "carrier-again", carrier=TARGET)
    assert portable_backend("carrier") == TARGET


def test_an_older_copy_further_down_the_path_does_not_count(
    carrier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "older", "Carrier_Engine", carrier="older_for_tests:Engine")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "older")])
    assert portable_backend("carrier") == TARGET


def test_entry_points_that_cannot_be_read_do_not_stop_others(
    carrier: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install_text(carrier, "garbage", f"[{entry_points.GROUP}]\nno equals sign\n")
    nameless = carrier / "nameless-1.0.dist-info"
    nameless.mkdir()
    (nameless / "entry_points.txt").write_text(f"[{entry_points.GROUP}]\nnameless = {TARGET}\n")
    with caplog.at_level(logging.WARNING):
        assert load("carrier").transport == "carrier"
        assert load("nameless").transport == "nameless"
    assert [
        text
        for text in caplog.messages
        if "distribution garbage: its entry_points.txt cannot be read" in text
    ]


def test_registering_what_a_distribution_brings(carrier: Path) -> None:
    register_checkpoint_engine("carrier", TARGET)
    assert resolve_checkpoint_engine("carrier").__name__ == "CarrierEngine"
    with pytest.raises(ConfigurationError, match=f"'carrier' already stands for {TARGET}"):
        register_checkpoint_engine("carrier", "another:Engine")


def test_shared_settings_reach_it_where_its_constructor_takes_them(
    carrier: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared = {"update_weights_bucket_memory_ratio": 0.9, "device": "cpu", "fan_out": 3}
    with caplog.at_level(logging.INFO):
        config = load("carrier", shared=shared, carrier={"note": "x"})
    assert config.engine_kwargs() == {"device": "cpu", "note": "x"}
    assert (config.device, config.bucket_memory_ratio) == ("cpu", 0.9)
    assert "policy.generation.refit_cfg.shared: carrier does not take fan_out" in caplog.messages
