"""The trace has one track for each rank and stream, and every event with its true times."""

from __future__ import annotations

import json

import pytest
from sampleplan import sample_measured, sample_plan

from autoplan.trace import trace


def test_every_event_is_in_the_trace_with_its_times() -> None:
    plan = sample_plan()
    entries = json.loads(trace(plan))["traceEvents"]
    complete = [e for e in entries if e["ph"] == "X"]
    assert len(complete) == len(plan.forecast.events)
    assert sum(e["dur"] for e in complete) / 1e6 == pytest.approx(sum(e.end_s - e.start_s for e in plan.forecast.events))
    assert max(e["ts"] + e["dur"] for e in complete) / 1e6 == pytest.approx(plan.forecast.step_time_s)


def test_a_track_is_a_rank_and_a_stream() -> None:
    plan = sample_plan()
    entries = json.loads(trace(plan))["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    assert {(e.rank, e.stream) for e in plan.forecast.events} == {(pid, name) for (pid, _), name in names.items()}
    for entry in entries:
        if entry["ph"] == "X":
            assert (entry["pid"], entry["tid"]) in names


def test_a_measured_step_stands_beside_the_forecast() -> None:
    entries = json.loads(trace(sample_plan(), sample_measured()))["traceEvents"]
    processes = [e["args"]["name"] for e in entries if e["name"] == "process_name"]
    assert processes == [*(f"predicted rank {r}" for r in (0, 4, 8, 12)), *(f"measured rank {r}" for r in (0, 4, 8, 12))]
    assert len({e["pid"] for e in entries}) == len(processes)
