"""The page of one plan: its sections in reading order."""

from __future__ import annotations

from collections.abc import Iterable

from autoplan.explain import degrees, short
from autoplan.forecast import Measured
from autoplan.plan import Plan
from autoplan.report.document import document, section
from autoplan.report.markup import esc, table
from autoplan.report.memory import memory_bars
from autoplan.report.planmap import plan_map
from autoplan.report.timeline import timeline
from autoplan.units import count, figures, num_bytes, seconds


def html(plan: Plan, measured: Measured | None = None) -> str:
    """One HTML document that opens offline. With `measured`, the real step stands beside the forecast."""
    forecast = plan.forecast
    longest_s = max(forecast.step_time_s, measured.step_time_s if measured else 0.0, *(e.end_s for e in forecast.events), 1e-9)
    if measured:
        longest_s = max([longest_s, *(e.end_s for e in measured.events)])
    timelines = _captioned("predicted" if measured else "", timeline(plan, forecast.events, longest_s, "Predicted timeline of one step"))
    if measured:
        timelines += _captioned("measured", timeline(plan, measured.events, longest_s, "Measured timeline of one step"))
    sections = [
        section("why", "Why this plan", _list(plan.reasons) + _warnings(plan) if plan.reasons or plan.warnings else ""),
        section(
            "map",
            "Plan map",
            plan_map(plan),
            "What is divided on the tensor axis (colour and letter) and on the data axis (bar below), for every operator that computes.",
        ),
        section("timeline", "One step", timelines, "One rank of each pipeline stage. Numbers are micro-batches; gaps are idle time."),
        section("memory", "Memory", memory_bars(plan), "The fullest rank of each stage at its fullest moment; the line marks what the device has."),
        section("alternatives", "Ranked alternatives", _alternatives(plan)),
        section("stages", "Stages", _stages(plan)),
        section("collectives", "Communication of one rank and step", _collectives(plan)),
        section("space", "What was searched", _space(plan)),
        section("assumptions", "Assumptions", _list(forecast.assumptions)),
    ]
    body = (
        f'<header><p class="brand">autoplan</p><h1>{esc(plan.model)} <span>on {esc(plan.cluster)}</span></h1><p class="lead">{_summary(plan)}</p></header>'
        f"{_tiles(plan, measured)}{''.join(sections)}"
        f"<footer>plan version {plan.version} · model {esc(plan.model_fingerprint[:12])} · cluster {esc(plan.cluster_fingerprint[:12])}"
        f" · prices {esc(forecast.source)}</footer>"
    )
    return document(f"{plan.model} on {plan.cluster}", body)


def _summary(plan: Plan) -> str:
    mesh, _, rest = degrees(plan).partition(" · ")
    facts = [rest, f"global batch {plan.global_batch:,}", plan.precision or "model precision", plan.optimizer]
    return " · ".join((f"<b>{esc(mesh)}</b>", *map(esc, facts)))


def _tiles(plan: Plan, measured: Measured | None) -> str:
    forecast = plan.forecast
    limit = max((s.memory_limit_bytes for s in forecast.stages), default=0)
    real = measured or Measured(0.0, 0.0, 0.0, ())
    step_note = f"measured {seconds(real.step_time_s)}, {forecast.step_time_s / real.step_time_s - 1:+.0%}" if real.step_time_s else ""
    memory_note = f"of {num_bytes(limit)}" if limit else ""
    memory_note = f"measured {num_bytes(real.peak_memory_bytes)}" if real.peak_memory_bytes else memory_note
    tiles = [
        ("Step time", seconds(forecast.step_time_s), step_note),
        ("Tokens a second", count(forecast.tokens_per_s), f"measured {count(real.tokens_per_s)}" if real.tokens_per_s else ""),
        ("Model FLOPs utilisation", f"{forecast.mfu:.1%}", f"measured {real.mfu:.1%}" if real.mfu else ""),
        ("Peak memory", num_bytes(forecast.peak_memory_bytes), memory_note),
        ("Idle in the pipeline", f"{forecast.bubble:.1%}", f"{forecast.split_share:.0%} of FLOPs divided by tp" if plan.most("tp") > 1 else ""),
        ("Proved gap", f"{plan.gap:.1%}", "to the best plan searched"),
    ]
    cells = "".join(f'<div><dt>{esc(name)}</dt><dd>{esc(value)}</dd><dd class="note">{esc(note) or "&nbsp;"}</dd></div>' for name, value, note in tiles)
    return f'<dl class="tiles">{cells}</dl>'


def _alternatives(plan: Plan) -> str:
    if not plan.alternatives:
        return ""
    chosen_s = plan.forecast.step_time_s
    rows = [("<b>chosen</b>", _bar(1.0), seconds(chosen_s), num_bytes(plan.forecast.peak_memory_bytes), f"<b>{esc(short(plan))}</b>", "")]
    for i, other in enumerate(plan.alternatives):
        ratio = other.step_time_s / chosen_s
        rows.append((str(i + 2), _bar(ratio), seconds(other.step_time_s), num_bytes(other.peak_memory_bytes), esc(other.summary), esc(other.reason)))
    return table(("", "against chosen", "step", "peak memory", "plan", "why not"), rows, numeric=(2, 3), marked=0)


def _bar(ratio: float) -> str:
    return f'<span class="bar" style="--share:{min(ratio, 4) / 4:.3f}"></span> {ratio:.2f}×'


def _stages(plan: Plan) -> str:
    rows = [
        (
            str(s.stage),
            esc(s.first_block if s.first_block == s.last_block else f"{s.first_block} … {s.last_block}"),
            seconds(s.forward_s),
            seconds(s.backward_s),
            seconds(s.busy_s),
            seconds(s.idle_s),
            count(s.flops, "FLOP"),
        )
        for s in plan.forecast.stages
    ]
    return table(("stage", "blocks", "forward", "backward", "busy", "idle", "a rank computes"), rows, numeric=range(2, 7))


def _collectives(plan: Plan) -> str:
    if not plan.collectives:
        return '<p class="quiet">Nothing is sent: one device runs the whole model.</p>'
    rows = [(esc(c.kind), esc(c.axis), esc(c.phase), f"{c.count:,}", num_bytes(c.num_bytes)) for c in plan.collectives]
    return table(("operation", "axis", "phase", "count", "bytes"), rows, numeric=(3, 4))


def _space(plan: Plan) -> str:
    rows = [(f"<b>{esc(name)}</b>", ", ".join("default" if v is None else esc(v) for v in values)) for name, values in plan.space.items()]
    note = f'<p class="quiet">The chosen plan is within {figures(plan.gap * 100)} % of the best in this space.</p>'
    return note + table(("axis", "values"), rows) if rows else ""


def _warnings(plan: Plan) -> str:
    return f'<div class="warning" role="note"><b>Mind</b>{_list(plan.warnings)}</div>' if plan.warnings else ""


def _list(items: Iterable[str]) -> str:
    inner = "".join(f"<li>{esc(item)}</li>" for item in items)
    return f"<ul>{inner}</ul>" if inner else ""


def _captioned(caption: str, body: str) -> str:
    return f"<figure>{f'<figcaption>{esc(caption)}</figcaption>' if caption else ''}{body}</figure>"
