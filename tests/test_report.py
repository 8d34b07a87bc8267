"""The report of a refit, and the progress of a long one."""

from __future__ import annotations

import io
import json

import pytest

from weightsync import progress as progress_module
from weightsync.errors import ProtocolError
from weightsync.progress import NoProgress, RefitProgress
from weightsync.report import RankFigures, RefitReport
from weightsync.topology import RankId

FIGURES = {"bytes": 2_000_000_000, "tensors": 3, "batches": 2, "seconds": {"receive": 1.0, "total": 1.5}}


def report(**changes):
    rollout = tuple(RankFigures.from_value("rollout", rank, FIGURES) for rank in range(2))
    seconds = {"transfer": 2.0, "total": 2.5}
    whole = {"version": 7, "epoch": 9, "seconds": seconds, "policy": (), "rollout": rollout}
    return RefitReport(**(whole | changes))


def test_bytes_are_added_up_and_divided_by_the_transfer():
    assert report().bytes == 4_000_000_000
    assert report().gb_per_s == 2.0
    assert str(report()) == (
        "refit 9 to version 7: 3 tensors, 4.000 GB in 2.50 s (2.00 GB/s; seconds: transfer 2.00); "
        "slowest rollout rank 0: 1.50 s (receive 1.00 s)"
    )


def test_a_report_of_nothing():
    empty = report(rollout=(), seconds={})
    assert (empty.tensors, empty.bytes, empty.batches, empty.gb_per_s, empty.slowest) == (0, 0, 0, 0.0, None)
    assert str(empty) == "refit 9 to version 7: 0 tensors, 0 bytes in 0.00 s (0.00 GB/s; seconds: )"


def test_a_report_goes_through_json():
    data = json.loads(json.dumps(report().to_dict()))
    assert data["gb_per_s"] == 2.0
    assert data["slowest"] == data["rollout"][0] == {"side": "rollout", "rank": 0, "notes": {}} | FIGURES
    assert data["policy"] == []


def test_a_refit_by_regions_says_how_the_bytes_came_and_what_took_the_full_path():
    ways = {"in_place": 1_500_000_000, "staged": 0, "whole": 400}
    figures = [FIGURES | {"copies": ways}, FIGURES | {"copies": ways, "bytes": 1_000_000_000}]
    rollout = tuple(RankFigures.from_value("rollout", rank, value) for rank, value in enumerate(figures))
    whole = {f"t{index}": f"why {index}" for index in range(7)}
    by_regions = report(rollout=rollout, whole=whole)
    assert by_regions.copies == {"in_place": 3_000_000_000, "staged": 0, "whole": 800}
    assert (
        "; by regions: 3.000 GB in place, 0 bytes staged, 800 bytes whole, 1.000 GB to 2.000 GB a rank; 7 "
        "tensors took the full path ('t0': why 0; 't1': why 1; 't2': why 2; 't3': why 3; 't4': why 4; and 2 "
        "more); slowest rollout"
    ) in str(by_regions)
    data = json.loads(json.dumps(by_regions.to_dict()))
    assert data["whole"] == whole
    assert data["copies"] == by_regions.copies
    assert data["bytes_by_rank"] == {"0": 2_000_000_000, "1": 1_000_000_000}


def test_of_other_refits_it_says_nothing_of_that():
    assert "regions" not in str(report())
    assert report().to_dict()["copies"] == report().to_dict()["whole"] == {}


def test_what_else_a_worker_says_is_kept():
    extra = {"casts": {"float32 -> bfloat16": 3}, "detached_bytes": 4096}
    figures = RankFigures.from_value("rollout", 2, FIGURES | extra)
    assert figures.notes == extra
    assert figures.to_dict() == {"side": "rollout", "rank": 2, "notes": extra} | FIGURES


@pytest.mark.parametrize(
    "value", [None, 3, {}, {**FIGURES, "bytes": None}, {**FIGURES, "seconds": {"total": "x"}}]
)
def test_malformed_figures_are_refused(value):
    with pytest.raises(ProtocolError, match="malformed figures") as caught:
        RankFigures.from_value("policy", 4, value)
    assert (caught.value.context.side, caught.value.context.rank) == ("policy", 4)


class Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(progress_module.time, "monotonic", lambda: self.now)


class Terminal(io.StringIO):
    def isatty(self):
        return True


AWAITED = frozenset({RankId("policy", 1), RankId("rollout", 0), RankId("rollout", 3)})


def run(shown, clock, until_s):
    shown.begin("refit 3")
    for _ in range(int(until_s * 5)):
        clock.now += 0.2
        shown.update("transfer", 5, AWAITED)
    shown.end()


def test_a_short_refit_shows_nothing(monkeypatch):
    clock = Clock(monkeypatch)
    for stream in (io.StringIO(), Terminal()):
        run(RefitProgress(stream), clock, until_s=1.8)
        assert stream.getvalue() == ""


def test_a_long_refit_writes_a_line_now_and_then_where_there_is_no_terminal(monkeypatch):
    stream = io.StringIO()
    shown = RefitProgress(stream, every_s=10)
    run(shown, Clock(monkeypatch), until_s=25)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0].startswith(
        "refit 3: transfer, 5 of 8 ranks done, waiting for policy rank 1 and rollout ranks 0, 3, 2"
    )


def test_a_long_refit_shows_a_bar_on_a_terminal(monkeypatch):
    stream = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    shown = RefitProgress(stream)
    shown.begin("refit 3")
    shown._started -= 5
    shown.update("transfer", 5, AWAITED)
    shown.end()
    text = stream.getvalue()
    assert "refit 3: transfer" in text
    assert "5/8 ranks" in text
    assert "waiting for policy rank 1 and rollout ranks 0, 3" in text
    shown.end()


def test_many_ranks_are_cut_short(monkeypatch):
    stream = io.StringIO()
    shown = RefitProgress(stream, quiet_s=0)
    shown.begin("refit 1")
    shown.update("transfer", 0, frozenset(RankId("policy", rank) for rank in range(20)))
    assert "policy ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more" in stream.getvalue()


def test_no_progress_shows_nothing(capsys):
    silent = NoProgress()
    silent.begin("refit 1")
    silent.update("transfer", 0, AWAITED)
    silent.end()
    assert capsys.readouterr() == ("", "")
