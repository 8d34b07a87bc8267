"""The fault matrix: which cells there are, how they are judged, and a small part of it that is run."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from rich.text import Text
from typer.testing import CliRunner

from tests.mooncake_support import real_mooncake
from weightsync.cli import app as cli
from weightsync.cli.faults import _chosen, _line, _table
from weightsync.drills.fault_cells import (
    ACTORS,
    FAULTS,
    NOT_APPLICABLE,
    PHASES,
    Cell,
    Expected,
    Verdict,
    make_cells,
)
from weightsync.drills.fault_matrix import FaultMatrix
from weightsync.drills.fault_points import Faults, InjectedError, Order
from weightsync.drills.stage import Deadlines, Scene, Stage
from weightsync.errors import ConfigurationError

ALL = list(make_cells(["nixl", "ipc"], ACTORS, FAULTS, PHASES))
# A few of each kind, over the transport that starts fastest.
PART = [
    Cell("ipc", actor, fault, phase)
    for actor, fault, phase in [
        ("sender", "raise", "connect"),
        ("sender", "raise", "middle"),
        ("sender", "drop", "last"),
        ("sender", "corrupt", "first"),
        ("receiver", "kill", "commit"),
        ("receiver", "corrupt", "middle"),
        ("receiver", "delay", "first"),
        ("receiver", "corrupt", "commit"),
        ("driver", "kill", "middle"),
        ("driver", "raise", "commit"),
        ("driver", "raise", "connect"),
        ("driver", "corrupt", "connect"),
        ("sender", "stop", "last"),
        ("sender", "raise", "finalize"),
    ]
]


def test_every_fault_strikes_everyone_everywhere_over_every_transport():
    assert len(ALL) == len(set(ALL)) == 2 * len(ACTORS) * len(FAULTS) * len(PHASES)


def test_cells_that_make_no_sense_say_why():
    reasons = {cell.why_not for cell in ALL if cell.why_not}
    assert reasons == {
        "no rollout rank sends on what it has received",
        "the sender takes no part in the commit",
        "the driver says nothing while buckets move",
        "nothing is said there that could be altered",
    }
    assert sum(not cell.why_not for cell in ALL if cell.transport == "nixl") == 130
    assert sum(not cell.why_not for cell in ALL if cell.transport == "ipc") == 95


def test_what_is_connected_changes_three_times_for_each_transport():
    scenes = [(cell.transport, cell.actor == "forwarder", cell.phase == "finalize") for cell in ALL]
    changes = sum(one != other for one, other in pairwise(scenes))
    assert changes == 7


@pytest.mark.parametrize(
    ("actor", "fault", "phase", "expected"),
    [
        ("receiver", "delay", "middle", Expected(success=True)),
        ("receiver", "kill", "first", Expected(error=True, names=True)),
        ("forwarder", "corrupt", "last", Expected(error=True, kind="DigestError")),
        ("receiver", "corrupt", "commit", Expected(error=True, kind="ProtocolError")),
        ("sender", "raise", "connect", Expected(error=True, kind="InjectedError", names=True)),
        ("sender", "drop", "connect", Expected(success=True, error=True)),
        ("driver", "kill", "last", Expected(lost=True)),
        ("driver", "drop", "commit", Expected(error=True)),
    ],
)
def test_how_each_kind_of_cell_must_end(actor, fault, phase, expected):
    assert Cell("nixl", actor, fault, phase).expected == expected


@pytest.mark.parametrize(
    ("actor", "fault", "phase", "expected"),
    [
        ("receiver", "kill", "first", Expected(success=True, left_out=True)),
        ("forwarder", "raise", "finalize", Expected(success=True, left_out=True)),
        ("sender", "corrupt", "last", Expected(success=True, error=True)),
        ("sender", "kill", "last", Expected(error=True, names=True)),
        ("driver", "raise", "commit", Expected(error=True, kind="InterruptedDriverError")),
        ("driver", "stop", "commit", Expected(lost=True)),
    ],
)
def test_how_each_kind_of_cell_must_end_where_the_others_go_on(actor, fault, phase, expected):
    assert Cell("nixl", actor, fault, phase).expected_where_the_others_go_on == expected


def test_a_fault_strikes_once_at_its_place():
    faults = Faults()
    faults.arm(Order("raise", "middle"))
    assert faults.reach("first") == ""
    assert not faults.struck
    with pytest.raises(InjectedError):
        faults.reach("middle")
    assert faults.struck
    assert faults.reach("middle") == ""


def test_buckets_are_counted_against_those_of_the_refit_before():
    faults = Faults()
    for _ in range(5):
        faults.count("bucket")
    faults.complete()
    for phase, place in {"first": 0, "middle": 2, "last": 4}.items():
        faults.begin()
        faults.arm(Order("drop", phase, kind="bucket"))
        assert [faults.count("bucket") for _ in range(5)] == ["drop" if n == place else "" for n in range(5)]


def test_a_frame_is_lost_or_altered_by_one_bit():
    faults = Faults()
    faults.damage_next_frame("drop")
    assert faults.frame([b"head", b"body"]) is None
    faults.damage_next_frame("corrupt")
    head, body = faults.frame([b"head", b"body"])
    assert head == b"head"
    assert sum((one ^ other).bit_count() for one, other in zip(body, b"body", strict=True)) == 1
    assert faults.frame([b"head", b"body"]) == [b"head", b"body"]


def test_options_name_what_is_known():
    assert _chosen("--phases", "first, last", PHASES) == ["first", "last"]
    with pytest.raises(ConfigurationError, match="--phases must be some of connect, first"):
        _chosen("--phases", "first,third", PHASES)


def test_the_table_counts_what_could_be_and_what_passed():
    cell = Cell("ipc", "sender", "kill", "first")
    verdicts = [
        Verdict(cell, "RefitError", passed=True),
        Verdict(replace(cell, phase="last"), "succeeded"),
        Verdict(replace(cell, actor="forwarder"), NOT_APPLICABLE, detail="why"),
    ]
    columns = [list(column.cells) for column in _table(verdicts).columns]
    assert columns == [["ipc"], ["[bold red]1 of 2"], ["[bold red]1 of 2"], ["1"]]


def test_a_line_shows_what_a_failed_cell_says_brackets_and_all():
    verdict = Verdict(
        Cell("ipc", "sender", "kill", "first"), "RefitError", 1.25, detail="late [policy rank 0]"
    )
    shown = Text.from_markup(_line(verdict)).plain
    assert shown == "ipc sender kill first: RefitError in 1.2 s, FAILED (late [policy rank 0])"


@pytest.mark.slow
def test_a_part_of_the_matrix_passes():
    verdicts = list(FaultMatrix(deadlines=Deadlines()).run(PART))
    assert [(str(each.cell), each.detail) for each in verdicts if not each.passed] == []
    assert all(each.recovered and each.seconds < Deadlines().total_s for each in verdicts)
    outcomes = {str(each.cell): each.outcome for each in verdicts}
    assert outcomes["ipc driver kill middle"] == "driver lost"
    assert outcomes["ipc receiver delay first"] == "succeeded"
    assert outcomes["ipc sender corrupt first"].startswith("RefitError (DigestError")


@pytest.mark.slow
@pytest.mark.nixl
def test_a_rank_that_is_at_another_epoch_than_its_two_senders_is_not_left_paused():
    pytest.importorskip("nixl")
    # The peers give up first; then that rank, too, and tells the sender in vain that it has not met.
    cell = Cell("kimi_ckpt_engine", "driver", "corrupt", "connect")
    (verdict,) = FaultMatrix(deadlines=Deadlines()).run([cell])
    assert verdict.passed, verdict.detail


@real_mooncake
@pytest.mark.slow
def test_mooncake_goes_on_without_a_receiver_that_dies_or_fails_with_staged_updates():
    cells = [
        Cell("mooncake", "receiver", fault, phase)
        for fault, phase in [("kill", "connect"), ("corrupt", "middle"), ("raise", "first")]
    ]
    matrix = FaultMatrix(deadlines=Deadlines(), commit="staged", on_failure="continue")
    verdicts = list(matrix.run(cells))
    assert [(str(each.cell), each.detail) for each in verdicts if not each.passed] == []
    assert {each.outcome for each in verdicts} == {"succeeded"}


@pytest.mark.slow
def test_the_command_says_what_became_of_each_cell_and_what_is_not_applicable():
    line = "faults --json --transports ipc --actors receiver --faults corrupt --phases middle,finalize"
    result = CliRunner().invoke(cli._build("faults"), line.split())
    assert result.exit_code == 0, result.output
    good, absent = json.loads(result.stdout)
    assert set(good) == {
        "transport", "actor", "fault", "phase", "outcome", "seconds", "recovered", "passed", "detail",
    }  # fmt: skip
    assert (good["phase"], good["passed"], good["recovered"]) == ("middle", True, True)
    assert (absent["phase"], absent["outcome"]) == ("finalize", NOT_APPLICABLE)
    assert absent["detail"] == "nothing is said there that could be altered"


@pytest.mark.slow
def test_a_cell_whose_fault_is_not_reached_fails():
    class Deaf(FaultMatrix):
        def _make_stage(self, transport):
            stage = super()._make_stage(transport)
            for worker in stage.policy:
                ask = worker.remote.ask
                worker.remote.ask = lambda method, *arguments, ask=ask, **named: (
                    ask(method, None, **named) if method == "arm" else ask(method, *arguments, **named)
                )
            return stage

    (verdict,) = Deaf(deadlines=Deadlines()).run([Cell("ipc", "sender", "raise", "middle")])
    assert not verdict.passed
    assert "the fault was not reached" in verdict.detail
    assert "the refit succeeded, which it must not" in verdict.detail


@pytest.mark.slow
def test_a_stage_ends_all_its_processes():
    with Stage("ipc", policy_ranks=1, rollout_ranks=1) as stage:
        stage.connect(Scene("ipc"))
        processes = list(stage.processes.values())
        assert len({process.pid for process in processes}) == 3
    assert all(process.await_end(0) for process in processes)
