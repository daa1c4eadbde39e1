"""Memory bars: what the fullest rank of every stage holds, by kind, against what its device has."""

from __future__ import annotations

from dataclasses import fields

from autoplan.forecast import Memory
from autoplan.plan import Plan
from autoplan.report.markup import legend, line, rect, svg, text
from autoplan.units import num_bytes

_LEFT, _WIDTH, _ROW, _BAR, _RIGHT = 96, 860, 34, 22, 212
NAMES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "buffers": "buffers",
    "communication": "communication",
    "residuals": "residuals of compressed gradients",
    "reserve": "context and allocator",
}
assert set(NAMES) == {f.name for f in fields(Memory)}


def memory_bars(plan: Plan) -> str:
    """SVG and legend, as HTML."""
    stages = plan.forecast.stages
    fullest = max([1, *(stage.memory.total for stage in stages)])
    longest = max([fullest, *(min(stage.memory_limit_bytes, 3 * fullest) for stage in stages)])  # a far limit is not drawn to scale
    scale = _WIDTH / longest
    parts = []
    for i, stage in enumerate(stages):
        y, x = 6 + i * _ROW, float(_LEFT)
        limit, total = stage.memory_limit_bytes, stage.memory.total
        parts += [text(0, y + 15, f"stage {stage.stage}", "strong"), rect(_LEFT, y, min(limit or total, longest) * scale, _BAR, "lane", radius=3)]
        for kind, name in NAMES.items():
            size = getattr(stage.memory, kind)
            if size:
                share = f", {size / total:.0%} of the total"
                parts.append(rect(x, y, max(size * scale - 0.6, 0.4), _BAR, f"mem {kind}", f"stage {stage.stage}: {name} {num_bytes(size)}{share}"))
                x += size * scale
        if 0 < limit <= longest:
            at = _LEFT + limit * scale
            parts.append(line(at, y - 3, at, y + _BAR + 3, "limit"))
        said = f"{num_bytes(total)} of {num_bytes(limit)} ({total / limit:.0%})" if limit else num_bytes(total)
        parts.append(text(_LEFT + _WIDTH + 10, y + 15, said, "quiet"))
    used = [kind for kind in NAMES if any(getattr(s.memory, kind) for s in stages)]
    drawing = svg(_LEFT + _WIDTH + _RIGHT, len(stages) * _ROW + 8, "Peak memory of the fullest rank of each stage, by kind, against the limit", parts)
    return drawing + legend((f"mem {kind}", NAMES[kind]) for kind in used)
