"""The command line: help without heavy imports, errors as one line, and what `doctor` finds."""

from __future__ import annotations

import json
import subprocess
import sys
import types

import pytest
import typer

from weightsync import __version__
from weightsync.cli import app, checks
from weightsync.cli.doctor import doctor
from weightsync.errors import ConfigurationError


def run(*arguments: str) -> int:
    """Run the command line in this process; return its exit status."""
    with pytest.raises(SystemExit) as stopped:
        app.main(arguments)
    code = stopped.value.code
    return 0 if code is None else int(code)


@pytest.fixture
def failing_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ConfigurationError("the bucket is too small", side="driver", phase="init")

    module = types.ModuleType("failing_command")
    module.fail = fail  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "failing_command", module)
    monkeypatch.setitem(app.COMMANDS, "fail", app.Command("failing_command", "fail", "Fail."))


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in app.COMMANDS)


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 2
    assert "Usage: weightsync" in capsys.readouterr().out


def test_help_imports_no_command_and_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from weightsync.cli.app import main\n"
        "try:\n"
        "    main(['--help'])\n"
        "except SystemExit as stopped:\n"
        "    code = stopped.code\n"
        "names = ['torch', 'ray', 'vllm', 'nixl', 'transformers', 'weightsync.cli.doctor']\n"
        "print('loaded', [each for each in names if each in sys.modules], code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded [] 0"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"weightsync {__version__}\n"


@pytest.mark.parametrize("arguments", [["nosuch"], ["doctor", "--nosuch"], ["--nosuch"]])
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    assert "nosuch" in capsys.readouterr().err


@pytest.mark.usefixtures("failing_command")
def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fail") == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "weightsync: ConfigurationError: the bucket is too small [driver, phase init]\n"


@pytest.mark.usefixtures("failing_command")
@pytest.mark.parametrize("arguments", [["--debug", "fail"], ["fail", "--debug"]])
def test_debug_shows_the_traceback(arguments: list[str]) -> None:
    with pytest.raises(ConfigurationError):
        app.main(arguments)


def test_commands_have_options_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", "--help") == 0
    printed = capsys.readouterr().out
    assert "--transport" in printed
    assert "--json" in printed


def test_commands_are_where_the_table_says() -> None:
    for name, command in app.COMMANDS.items():
        assert callable(app._load(command)), name


@pytest.mark.nixl
@pytest.mark.slow
def test_doctor_finds_nixl_ready(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    status = {check["name"]: check["status"] for check in found["checks"]}
    assert {status[name] for name in ("torch", "transport", "nixl", "ray", "vllm")} == {"ok"}


def test_doctor_without_nixl_fails_and_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checks, "_version", lambda name: None)
    with pytest.raises(typer.Exit) as stopped:
        doctor(transport="nixl", deep=False, as_json=True)
    assert stopped.value.exit_code == 1
    found = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert found["nixl"]["status"] == "missing"
    assert "weightsync[nixl]" in found["nixl"]["fix"]
    assert found["ray"]["status"] == "missing"
    assert found["ray"]["needed"] is False


def test_doctor_needs_nixl_for_nixl_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_version", lambda name: None)
    found = {check.name: check for check in checks.run_checks("weightsync.engines.base:CheckpointEngine")}
    assert found["nixl"].status == "missing"
    assert not any(check.fails for check in found.values())


@pytest.mark.parametrize(
    ("failure", "status", "text", "fix"),
    [
        (None, "ok", "starts an engine", ""),
        ("libibverbs.so.1: cannot open", "broken", "without libibverbs", "apt-get install libibverbs1"),
        ("Killed", "broken", "Killed", "weightsync[mooncake"),
    ],
)
def test_doctor_says_what_mooncake_lacks(monkeypatch: pytest.MonkeyPatch, failure, status, text, fix) -> None:
    monkeypatch.setattr(checks, "_version", lambda name: "1.0" if name.endswith("non-cuda") else None)
    monkeypatch.setattr(checks, "_run_child", lambda code: failure)
    check = checks.check_mooncake(needed=True)
    assert (check.status, check.fails) == (status, failure is not None)
    assert text in check.detail
    assert fix in check.fix


def test_doctor_reports_an_unknown_transport(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checks, "_run_child", lambda code: None)
    assert run("doctor", "--transport", "nixxl") == 1
    assert "cannot run here yet: transport" in capsys.readouterr().out


def test_a_child_that_dies_is_reported_in_one_line() -> None:
    assert checks._run_child("pass") is None
    assert checks._run_child("raise ValueError('two\\nlines')") == "lines"
    assert checks._run_child("import os, signal; os.kill(os.getpid(), signal.SIGKILL)") == "exit status -9"


def test_a_child_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_CHILD_TIMEOUT_S", 0.5)
    assert checks._run_child("import time; time.sleep(60)") == "no answer in 0.5 s"


@pytest.mark.slow
@pytest.mark.parametrize(("package", "check"), [("nixl", "check_nixl"), ("mooncake", "check_mooncake")])
def test_doctor_tries_what_is_installed(package: str, check: str) -> None:
    pytest.importorskip(package)
    answer = getattr(checks, check)(needed=True)
    assert (answer.status, answer.fails) == ("ok", False), answer
