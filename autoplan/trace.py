"""Events as a Chrome trace, for Perfetto and chrome://tracing: one process for each rank, one track for each stream.

Format: "Trace Event Format" (Google), complete events ("X") with times in microseconds and metadata events ("M").
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from autoplan.forecast import Event, Measured
from autoplan.plan import Plan

_STREAMS = ("compute", "tp", "dp", "pp")


def trace(plan: Plan, measured: Measured | None = None) -> str:
    """The forecast of a plan as JSON text; with `measured`, the real step as further processes beside it."""
    entries = _entries(plan.forecast.events, "predicted rank" if measured else "rank", 0)
    if measured:
        offset = 1 + max((event.rank for event in plan.forecast.events), default=0)
        entries += _entries(measured.events, "measured rank", offset)
    meshes = [dict(mesh) for mesh in plan.stage_meshes]
    about = {
        "model": plan.model,
        "cluster": plan.cluster,
        "axes": dict(plan.axes),
        "stage_meshes": meshes,
        "schedule": plan.schedule,
        "step_time_s": plan.forecast.step_time_s,
    }
    return json.dumps({"traceEvents": entries, "displayTimeUnit": "ms", "otherData": about}, indent=None, separators=(",", ":")) + "\n"


def _entries(events: Sequence[Event], name: str, first_pid: int) -> list[dict[str, Any]]:
    streams = tuple(dict.fromkeys((*_STREAMS, *(event.stream for event in events))))
    entries: list[dict[str, Any]] = []
    for rank in sorted({event.rank for event in events}):
        own = [event for event in events if event.rank == rank]
        entries += _names(first_pid + rank, f"{name} {rank}", [(streams.index(s), s) for s in streams if any(e.stream == s for e in own)])
        entries += [_complete(first_pid + rank, streams.index(event.stream), event) for event in sorted(own, key=lambda e: (e.start_s, e.end_s, e.stream))]
    return entries


def _names(pid: int, name: str, tracks: Iterable[tuple[int, str]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}},
        {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}},
    ]
    for tid, stream in tracks:
        found.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": stream}})
        found.append({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}})
    return found


def _complete(pid: int, tid: int, event: Event) -> dict[str, Any]:
    args = {key: value for key, value in (("stage", event.stage), ("micro_batch", event.micro_batch)) if value >= 0}
    times = {"ts": round(event.start_s * 1e6, 3), "dur": round((event.end_s - event.start_s) * 1e6, 3)}
    return {"ph": "X", "name": event.name, "cat": event.kind, "pid": pid, "tid": tid, **times, "args": args}
