"""The pipeline timeline: one band for each pipeline rank, one lane for each stream, true durations."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from autoplan.forecast import Event
from autoplan.plan import Plan
from autoplan.report.markup import legend, line, rect, svg, text
from autoplan.units import seconds
from runtime.mesh import first_ranks

_LEFT, _WIDTH, _LANE, _THIN, _PAD = 96, 1064, 24, 8, 10
KINDS = {
    "forward": "forward",
    "backward": "backward",
    "recompute": "recompute",
    "collective": "collective",
    "transfer": "transfer between stages",
    "reduce": "gradient reduction",
    "optimizer": "optimizer",
    "preamble": "preamble",
}
_STREAMS = ("compute", "tp", "dp", "pp")


def timeline(plan: Plan, events: Sequence[Event], total_s: float, label: str) -> str:
    """One representative rank for each pipeline coordinate (the first). `total_s` is the length of the time axis."""
    shown = _representatives(plan, events)
    if not shown:
        return '<p class="quiet">No events were recorded.</p>'
    scale = _WIDTH / total_s
    lanes_drawn, parts, y = [], [], 8.0
    for rank, own in shown:
        lanes = [stream for stream in dict.fromkeys((*_STREAMS, *(e.stream for e in own))) if any(e.stream == stream for e in own)]
        top = y
        for stream in lanes:
            height = _LANE if stream == "compute" else _THIN
            lanes_drawn.append(rect(_LEFT, y, _WIDTH, height, "lane", radius=3))
            parts += _lane([e for e in own if e.stream == stream], y, height, scale)
            if stream != "compute":
                parts.append(text(_LEFT - 6, y + _THIN - 0.5, stream, "tiny end"))
            y += height + 3
        stages = sorted({e.stage for e in own if e.stage >= 0})
        name = f"stage {', '.join(map(str, stages))}" if stages else f"rank {rank}"
        parts += [text(0, top + 11, name, "strong"), text(0, top + 23, f"rank {rank}", "tiny quiet")]
        y = max(y, top + _LANE + 3) + _PAD
    parts = lanes_drawn + _axis(total_s, scale, y) + parts
    used = {e.kind for _, own in shown for e in own}
    return svg(_LEFT + _WIDTH + 8, y + 26, label, parts) + legend((f"kind {kind}", name) for kind, name in KINDS.items() if kind in used)


def _representatives(plan: Plan, events: Sequence[Event]) -> list[tuple[int, list[Event]]]:
    by_rank: dict[int, list[Event]] = {}
    for event in events:
        if event.kind != "idle":
            by_rank.setdefault(event.rank, []).append(event)
    starts = first_ranks(plan.stage_meshes) if plan.stage_meshes else ()
    size = math.prod(degree for axis, degree in plan.axes if axis != "pp")
    first: dict[int, int] = {}
    for rank in sorted(by_rank):
        first.setdefault(bisect_right(starts, rank) if starts else rank // size, rank)
    return [(rank, sorted(by_rank[rank], key=lambda e: (e.start_s, e.end_s))) for rank in first.values()]


def _lane(events: Sequence[Event], y: float, height: float, scale: float) -> list[str]:
    parts = []
    for run in _merged(events, 1.0 / scale):
        first, last = run[0], run[-1]
        x, width = _LEFT + first.start_s * scale, (last.end_s - first.start_s) * scale
        name = first.name if len(run) == 1 else f"{len(run)} × {first.kind}: {first.name} … {last.name}"
        tip = f"{name}\n{seconds(last.end_s - first.start_s)}, from {seconds(first.start_s)} to {seconds(last.end_s)}"
        parts.append(rect(x, y, max(width - 0.6, 0.4), height, f"kind {first.kind if first.kind in KINDS else 'collective'}", tip, min(3, height / 3)))
        if height == _LANE and width > 15 and len(run) == 1 and first.micro_batch >= 0:
            parts.append(text(x + width / 2, y + 16, first.micro_batch, "inbar middle"))
    return parts


def _merged(events: Sequence[Event], resolution_s: float) -> list[list[Event]]:
    """Neighbours of one kind that are closer and shorter than a pixel are drawn as one."""
    runs: list[list[Event]] = []
    for event in events:
        short = event.end_s - event.start_s < resolution_s
        if runs and short and runs[-1][-1].kind == event.kind and event.start_s - runs[-1][-1].end_s < resolution_s:
            previous = runs[-1][-1]
            if previous.end_s - previous.start_s < resolution_s:
                runs[-1].append(event)
                continue
        runs.append([event])
    return runs


def _axis(total_s: float, scale: float, y: float) -> list[str]:
    step = 10 ** math.floor(math.log10(total_s / 4))
    step *= next(k for k in (1, 2, 5, 10) if total_s / (step * k) <= 8)
    parts = [line(_LEFT, y, _LEFT + _WIDTH, y, "rule")]
    for k in range(math.floor(total_s / step + 1e-9) + 1):
        x = _LEFT + k * step * scale
        parts += [line(x, 4, x, y, "grid"), line(x, y, x, y + 4, "rule"), text(x, y + 17, seconds(k * step) if k else "0", "tiny middle quiet")]
    return parts
