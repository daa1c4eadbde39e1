"""The demonstration keeps its promise on two ranks, and ranks that fail are reported and stopped."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from autoplan import demo
from autoplan.launch import RankError, run_ranks
from autoplan.plan import Plan


@pytest.mark.timeout(900)  # on a busy machine
def test_both_trainings_agree_and_the_plan_the_report_and_the_trace_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(demo, "_OPERATOR_BUDGET_S", 5.0)
    folder = tmp_path / "out"
    assert demo.run(2, 5, folder) == 0
    said = capsys.readouterr().out
    assert "equal" in said
    assert "NOT EQUAL" not in said
    assert "→" in said
    rows = [line.split() for line in said.splitlines() if line[:4].strip().isdigit() and len(line.split()) == 4]
    assert len(rows) == 5
    assert all(float(row[1]) == pytest.approx(float(row[2]), rel=demo.TOLERANCE) for row in rows)
    assert float(rows[-1][1]) < float(rows[0][1])
    plan = Plan.load(folder / "plan.json")
    assert plan.forecast.source == "measured"
    assert "measured" in (folder / "report.html").read_text()
    processes = {e["args"]["name"] for e in json.loads((folder / "trace.json").read_text())["traceEvents"] if e["name"] == "process_name"}
    assert {"measured rank 0", "measured rank 1"} <= processes


def _rank() -> int:
    return int(os.environ["RANK"])


def _fail_on_one() -> None:
    if _rank() == 1:
        raise ValueError("the disk is full")
    time.sleep(60)


def test_ranks_return_in_order() -> None:
    assert run_ranks(_rank, 3, timeout_s=60) == [0, 1, 2]


def test_the_first_error_is_raised_and_the_others_are_stopped() -> None:
    start_s = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1: ValueError: the disk is full"):
        run_ranks(_fail_on_one, 2, timeout_s=100)
    assert time.monotonic() - start_s < 50


def test_ranks_that_do_not_end_are_stopped() -> None:
    with pytest.raises(RankError, match="did not end within 1 s"):
        run_ranks(_fail_on_one, 1, timeout_s=1)
