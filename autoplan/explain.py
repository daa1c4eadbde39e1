"""A plan as text: what was decided, why, what it is predicted to cost, and what it was chosen from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields

from autoplan.forecast import Memory
from autoplan.notes import landmarks
from autoplan.plan import BlockPlan, Plan, recomputed, ways_by_pattern
from autoplan.space import RECOMPUTES
from autoplan.units import count, figures, num_bytes, seconds


def explain(plan: Plan) -> str:
    """The whole explanation, a section a paragraph, without trailing newline."""
    sections = [headline(plan), _reasons(plan), ranking(plan), _splits(plan), _stages(plan), _memory(plan), _traffic(plan), _space(plan), _assumptions(plan)]
    return "\n\n".join(section for section in sections if section)


def headline(plan: Plan) -> str:
    """Three lines: the task, the plan, the forecast."""
    forecast = plan.forecast
    limit = max((s.memory_limit_bytes for s in forecast.stages), default=0)
    predicted = [f"step {seconds(forecast.step_time_s)}", f"{count(forecast.tokens_per_s)} tokens/s", f"MFU {forecast.mfu:.1%}"]
    predicted += [f"peak memory {num_bytes(forecast.peak_memory_bytes)}" + (f" of {num_bytes(limit)}" if limit else "")]
    if plan.degree("pp") > 1:
        predicted.append(f"idle {forecast.bubble:.1%}")
    predicted.append(f"proved within {figures(100 * plan.gap)} % of the best plan searched")
    task = f"{plan.model} on {plan.cluster}: global batch {plan.global_batch}, {plan.precision or 'model precision'}, {plan.optimizer}"
    return "\n".join((task, "  " + degrees(plan), "  " + " · ".join(predicted)))


def degrees(plan: Plan) -> str:
    """ "pp 2 × dp 2 × tp 2 · ZeRO 1 · 1f1b · 8 micro-batches of 4"."""
    mesh = " × ".join(f"{axis} {degree}" for axis, degree in plan.axes if degree > 1) or "one device"
    mesh += f" ({own_meshes(plan)})" if plan.stage_meshes else ""
    micro = f"{plan.num_micro_batches} micro-batch{'es' if plan.num_micro_batches != 1 else ''} of {plan.micro_batch_size}"
    facts = [mesh, attends(plan), f"ZeRO {plan.zero}" if plan.zero else "", plan.schedule if plan.degree("pp") > 1 else "", serving(plan), micro]
    facts += [f"gradients as {plan.compression}" if plan.compression else "", f"gradients late by {plan.delay} step" if plan.delay else ""]
    return " · ".join(fact for fact in (*facts, recomputing(plan)) if fact)


def recomputing(plan: Plan) -> str:
    """ "recompute full", "recompute selective (12 of 32 layers)"; "" where nothing is."""
    found = ways_by_pattern(plan)
    several = {pattern for pattern, ways in found.items() if len(ways) > 1}
    if not several:
        ways = sorted({way for own in found.values() for way in own} - {"none"})
        return f"recompute {', '.join(ways)}" if ways else ""
    patterns = {number: block.pattern for block in plan.blocks for number in block.blocks}
    own = [way for number, way in enumerate(recomputed(plan)) if patterns.get(number) in several or way != "none"]
    counts = ", ".join(f"{way} ({own.count(way)} of {len(own)} layers)" for way in RECOMPUTES[1:] if way in own)
    return f"recompute {counts}"


def own_meshes(plan: Plan) -> str:
    """ "tp 4 | dp 2 × tp 2": the mesh of every stage, where they are not all alike."""
    return " | ".join(" × ".join(f"{axis} {degree}" for axis, degree in mesh if degree > 1) or "one device" for mesh in plan.stage_meshes)


def attends(plan: Plan) -> str:
    """How attention exchanges over a divided sequence; "" where there is none."""
    names = {"heads": "attention by heads", "gather": "attention with gathered keys", "self": "ring self-attention"}
    return names.get(plan.context, "ring attention") if plan.degree("cp") > 1 else ""


def short(plan: Plan) -> str:
    """As runners-up are written: "pp 2, dp 2, 1f1b, 4 x 2 rows"."""
    mesh = [f"{axis} {degree}" for axis, degree in plan.axes if degree > 1] or ["one device"]
    mesh += [f"of {own_meshes(plan)}"] if plan.stage_meshes else []
    facts = [
        attends(plan),
        f"ZeRO {plan.zero}" if plan.zero else "",
        plan.schedule if plan.degree("pp") > 1 else "",
        serving(plan),
        f"{plan.num_micro_batches} x {plan.micro_batch_size} rows",
    ]
    return ", ".join(fact for fact in (*mesh, *facts) if fact)


def serving(plan: Plan) -> str:
    """ "parameter servers on data ranks 0, 2", "asynchronous, servers on all data ranks, at most 3 steps ahead"; empty for all_reduce."""
    if plan.sync == "allreduce":
        return ""
    where = f"data rank{'s' if len(plan.servers) > 1 else ''} {', '.join(map(str, plan.servers))}" if plan.servers else "all data ranks"
    if plan.workers:
        where += f" (data rank{'s' if len(plan.workers) > 1 else ''} {', '.join(map(str, plan.workers))} compute{'s' if len(plan.workers) == 1 else ''})"
    if plan.sync == "ps":
        return f"parameter servers on {where}"
    bound = "without a bound of staleness" if plan.staleness is None else f"at most {plan.staleness} step{'s' if plan.staleness != 1 else ''} ahead"
    return f"asynchronous, servers on {where}, {bound}"


def ranking(plan: Plan) -> str:
    """The chosen plan, marked, and the runners-up with the reason why each lost."""
    chosen_s = plan.forecast.step_time_s
    rows = [("→", seconds(chosen_s), "1.00×", num_bytes(plan.forecast.peak_memory_bytes), short(plan), "chosen")]
    for place, other in enumerate(plan.alternatives, start=2):
        ratio = f"{other.step_time_s / chosen_s:.2f}×" if chosen_s else ""
        rows.append((str(place), seconds(other.step_time_s), ratio, num_bytes(other.peak_memory_bytes), other.summary, other.reason))
    return _titled("Plans, best first", _table(("", "step", "", "memory", "plan", "reason"), rows, right=(1, 2, 3)))


def _reasons(plan: Plan) -> str:
    return "\n\n".join(part for part in (_titled("Why", _bullets(plan.reasons)), _titled("Mind", _bullets(plan.warnings))) if part)


def _splits(plan: Plan) -> str:
    """Per pattern: what is divided on the tensor axis, and where."""
    if plan.most("tp") == 1:
        return ""
    lines: list[str] = []
    for block in plan.blocks:
        by_split = _by_split(block)
        if not by_split:
            continue
        lines.append(f"{block.example} × {len(block.blocks)}" if len(block.blocks) > 1 else block.example)
        lines += _table((), [(f"  {split}", ", ".join(names)) for split, names in by_split.items()])
    return _titled(f"Divided on the tensor axis ({plan.forecast.split_share:.1%} of the FLOPs)", lines)


def _by_split(block: BlockPlan) -> dict[str, list[str]]:
    """Split -> modules (or ops) in order."""
    found: dict[str, list[str]] = {}
    notes = [(note.split, note.module or note.target) for note in landmarks(block.ops)]
    for split, name in notes or [(split.partition(":")[0], name) for name, split in block.splits.items()]:
        if name not in found.setdefault(split, []):
            found[split].append(name)
    return found


def _stages(plan: Plan) -> str:
    rows = [
        (str(s.stage), f"{s.first_block} … {s.last_block}", seconds(s.forward_s), seconds(s.backward_s), seconds(s.busy_s), seconds(s.idle_s))
        for s in plan.forecast.stages
    ]
    gathering = ", ".join(str(number) for number, stage in enumerate(plan.stages) if stage.gathers)
    note = [f"what tensor ranks hold alike is sent in pieces, and gathered by stages {gathering}"] if gathering else []
    return _titled("Stages", [*_table(("stage", "blocks", "forward", "backward", "busy", "idle"), rows, right=(2, 3, 4, 5)), *note])


def _memory(plan: Plan) -> str:
    kinds = [f.name for f in fields(Memory) if any(getattr(s.memory, f.name) for s in plan.forecast.stages)]
    rows = [
        (
            str(s.stage),
            *(num_bytes(getattr(s.memory, kind)) for kind in kinds),
            num_bytes(s.memory.total),
            num_bytes(s.memory_limit_bytes) if s.memory_limit_bytes else "",
        )
        for s in plan.forecast.stages
    ]
    return _titled("Memory of the fullest rank", _table(("stage", *kinds, "total", "limit"), rows, right=range(1, len(kinds) + 3)))


def _traffic(plan: Plan) -> str:
    rows = [(c.kind, c.axis, c.phase, f"{c.count:,}", num_bytes(c.num_bytes)) for c in plan.collectives]
    return _titled("Communication of one rank and step", _table(("operation", "axis", "phase", "count", "bytes"), rows, right=(3, 4)))


def _space(plan: Plan) -> str:
    rows = [(name, ", ".join("default" if value is None else str(value) for value in values)) for name, values in plan.space.items()]
    return _titled("Searched", _table((), rows))


def _assumptions(plan: Plan) -> str:
    return _titled(f"Assumptions ({plan.forecast.source} prices)", _bullets(plan.forecast.assumptions))


def _titled(title: str, lines: Sequence[str]) -> str:
    return "\n".join((title, *(f"  {line}" for line in lines))) if lines else ""


def _bullets(items: Iterable[str]) -> list[str]:
    return [f"- {item}" for item in items]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    if not rows:
        return []
    cells = [head, *rows] if head else list(rows)
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    to_right = set(right)
    return ["  ".join(cell.rjust(w) if i in to_right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))).rstrip() for row in cells]
