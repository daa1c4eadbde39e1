"""A picture of several strategies' plans for one model and cluster: seconds of a step and memory, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoplan.explain import short
from autoplan.plan import Plan
from autoplan.report.document import document, section
from autoplan.report.markup import esc, legend, rect, svg, table, text
from autoplan.report.memory import NAMES
from autoplan.units import num_bytes, seconds

_LEFT, _WIDTH, _ROW, _BAR, _RIGHT = 110, 760, 30, 20, 200


@dataclass(frozen=True, slots=True)
class Row:
    """One strategy: its plan, or why it has none."""

    name: str
    plan: Plan | None
    reason: str = ""


def comparison(rows: Sequence[Row]) -> str:
    """One HTML document that opens offline. The first row's plan is what the others are compared with."""
    found = [(row.name, row.plan) for row in rows if row.plan is not None]
    assert found, "the first row has a plan"
    first = found[0][1]
    body = f'<header><p class="brand">autoplan</p><h1>{esc(first.model)} <span>on {esc(first.cluster)}</span></h1></header>'
    body += section("steps", "One step", _steps(found), "The busiest pipeline rank of each plan: what it computes and sends, and how long it waits.")
    body += section("memory", "Memory", _memory(found), "The fullest rank of each plan.")
    body += section("plans", "Plans", _plans(rows, first.forecast.step_time_s), "Predicted, all by one cost model.")
    return document(f"strategies for {first.model} on {first.cluster}", body)


def _steps(found: Sequence[tuple[str, Plan]]) -> str:
    longest_s = max(plan.forecast.step_time_s for _, plan in found)
    best_s = found[0][1].forecast.step_time_s
    parts = []
    for i, (name, plan) in enumerate(found):
        step_s, busy_s = plan.forecast.step_time_s, max(stage.busy_s for stage in plan.forecast.stages)
        busy = min(1.0, busy_s / step_s) * step_s / longest_s * _WIDTH
        y = 4 + i * _ROW
        parts += [text(0, y + 14, name, "strong"), rect(_LEFT, y, step_s / longest_s * _WIDTH, _BAR, "lane", f"{name}: waits {seconds(step_s - busy_s)}")]
        parts.append(rect(_LEFT, y, busy, _BAR, "mem parameters", f"{name}: busy {seconds(busy_s)}"))
        parts.append(text(_LEFT + step_s / longest_s * _WIDTH + 8, y + 14, f"{seconds(step_s)} ({step_s / best_s:.2f}×)", "quiet"))
    drawing = svg(_LEFT + _WIDTH + _RIGHT, len(found) * _ROW + 6, "Seconds of a step of every strategy's plan", parts)
    return drawing + legend([("mem parameters", "busy"), ("lane", "waiting")])


def _memory(found: Sequence[tuple[str, Plan]]) -> str:
    fullest = [(name, max(plan.forecast.stages, key=lambda stage: stage.memory.total)) for name, plan in found]
    longest = max(1, *(stage.memory.total for _, stage in fullest))
    parts = []
    for i, (name, stage) in enumerate(fullest):
        y, x = 4 + i * _ROW, float(_LEFT)
        parts.append(text(0, y + 14, name, "strong"))
        for kind, label in NAMES.items():
            width = getattr(stage.memory, kind) / longest * _WIDTH
            if width:
                parts.append(rect(x, y, max(width - 0.6, 0.4), _BAR, f"mem {kind}", f"{name}: {label} {num_bytes(getattr(stage.memory, kind))}"))
                x += width
        parts.append(text(x + 8, y + 14, num_bytes(stage.memory.total), "quiet"))
    used = [kind for kind in NAMES if any(getattr(stage.memory, kind) for _, stage in fullest)]
    drawing = svg(_LEFT + _WIDTH + _RIGHT, len(fullest) * _ROW + 6, "Memory of the fullest rank of every strategy's plan, by kind", parts)
    return drawing + legend((f"mem {kind}", NAMES[kind]) for kind in used)


def _plans(rows: Sequence[Row], best_s: float) -> str:
    told = []
    for row in rows:
        if row.plan is None:
            told.append((f"<b>{esc(row.name)}</b>", "", "", "", esc(row.reason)))
        else:
            step_s = row.plan.forecast.step_time_s
            why = row.plan.reasons[0] if row.plan.reasons else ""
            told.append((f"<b>{esc(row.name)}</b>", seconds(step_s), f"{step_s / best_s:.2f}×", esc(short(row.plan)), esc(why)))
    return table(("", "step", "against autoplan", "plan", "why"), told, numeric=(1, 2), marked=0)
