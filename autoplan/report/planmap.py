"""The plan map: stages down, blocks across, every op coloured by what is divided on the tensor axis.

Repeated blocks are one group of columns. Neighbouring ops of one module are one column, which shows the op with the
most FLOPs.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from autoplan.notes import landmarks
from autoplan.plan import BlockPlan, OpNote, Plan, StagePlan
from autoplan.report.markup import esc, legend, line, rect, svg, text
from autoplan.units import count

_PAGE, _ROW, _GAP, _LEFT, _HEAD, _LETTER = 1172, 30, 34, 222, 150, 7.0
ROLES = {
    "heads": ("heads", "H"),
    "features": ("features", "F"),
    "vocabulary": ("vocabulary", "V"),
    "sequence": ("sequence", "S"),
    "batch": ("batch", "B"),
    "experts": ("experts", "E"),
    "partial": ("partial", "+"),
    "whole": ("whole", ""),
}


@dataclass(frozen=True, slots=True)
class _Column:
    label: str
    ops: tuple[OpNote, ...]

    @property
    def main(self) -> OpNote:
        return max(self.ops, key=lambda op: (op.flops, op.split != "whole"))


@dataclass(frozen=True, slots=True)
class _Group:
    block: BlockPlan
    columns: tuple[_Column, ...]

    @property
    def title(self) -> str:
        times = len(self.block.blocks)
        name = _short(self.block.example)
        return name if times < 2 else f"{name.rstrip('0123456789')}* × {times}"


def plan_map(plan: Plan) -> str:
    """SVG and legend, as HTML."""
    groups = [_Group(block, columns) for block in plan.blocks if (columns := _columns(block))]
    if not groups:
        return '<p class="quiet">This plan divides no operator on the tensor axis.</p>'
    groups.sort(key=lambda group: group.block.blocks[:1])
    num_columns = sum(len(group.columns) for group in groups)
    cell = min(40.0, max(20.0, (_PAGE - _LEFT - len(groups) * (_GAP + 24)) / num_columns))
    height = _HEAD + len(plan.stages) * _ROW + 8
    parts, x = [], float(_LEFT)
    for i, stage in enumerate(plan.stages):
        y = _HEAD + i * _ROW
        parts += [text(0, y + 17, f"stage {i}", "strong"), text(58, y + 17, _span(stage), "quiet")]
    for group in groups:
        parts += _drawn(plan, group, x, cell)
        x += max(len(group.columns) * cell, len(group.title) * _LETTER) + _GAP
    used = dict.fromkeys(op.main.split.removesuffix(" (sum)") for group in groups for op in group.columns)
    keys = [(f"split {ROLES.get(role, (role, ''))[0]}", role if role in ("whole", "partial") else f"split on {role}") for role in ROLES if role in used]
    summed = any(op.main.split.endswith("(sum)") for group in groups for op in group.columns)
    names = {"split whole": "whole on every tensor rank" if plan.most("tp") > 1 else "whole", "split partial": "passes partial sums on"}
    keys = [(css, names.get(css, label)) for css, label in keys]
    if plan.most("dp") > 1 and any(op.main.rows for group in groups for op in group.columns):
        keys.append(("split batch", "rows divided on the data axis"))
    if summed:
        keys.append(("split summed", "Σ: contraction divided, result summed"))
    return _HATCH + svg(max(x, _PAGE), height, "Plan map: which dimension of every operator is divided, by stage", parts) + legend(keys)


_HATCH = (
    '<svg width="0" height="0" aria-hidden="true" style="position:absolute"><defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="2.2" height="6" class="hatch"/></pattern></defs></svg>'
)


def _drawn(plan: Plan, group: _Group, x: float, cell: float) -> list[str]:
    end = x + len(group.columns) * cell
    parts = [text(x, 13, group.title, "strong"), line(x, 20, end - 3, 20, "rule")]
    for c, column in enumerate(group.columns):
        parts.append(text(0, 0, column.label, "label", f'transform="translate({x + (c + 0.5) * cell + 1:.1f} {_HEAD - 8}) rotate(-55)"'))
    for i, stage in enumerate(plan.stages):
        inside = sum(stage.start <= index < stage.stop for index in group.block.blocks)
        if inside == 0 and group.block.blocks:
            continue
        y = _HEAD + i * _ROW
        for c, column in enumerate(group.columns):
            parts.append(_cell(column, x + c * cell, y, cell - 3, f"stage {i}"))
            if plan.most("dp") > 1 and column.main.rows:
                parts.append(rect(x + c * cell, y + _ROW - 8, cell - 3, 4, "split batch", radius=2))
        if inside and len(group.block.blocks) > 1:
            parts.append(text(end + 2, y + 17, f"×{inside}", "quiet"))
    return parts


def _cell(column: _Column, x: float, y: float, width: float, where: str) -> str:
    op, height = column.main, _ROW - 4
    role = op.split.removesuffix(" (sum)")
    css, letter = ROLES.get(role, ("features", role[:1].upper()))
    tip = f"{where}: {column.label}\n" + "\n".join(f"{note.target} ({note.name}): {note.split}, {count(note.flops, 'FLOP')}" for note in column.ops[:12])
    shape = rect(x, y, width, height, f"split {css}", tip, 4)
    if op.split.endswith("(sum)"):
        shape += rect(x, y, width, height, "hatched", radius=4)
        letter = "Σ"
    mixed = any(note.split != op.split and note.flops * 4 > op.flops > 0 for note in column.ops)
    mark = f'<circle cx="{x + width - 4:.1f}" cy="{y + 4:.1f}" r="2" class="dot"/>' if mixed else ""
    return shape + mark + f'<text x="{x + width / 2:.1f}" y="{y + 17:.1f}" class="letter" aria-hidden="true">{esc(letter)}</text>'


def _columns(block: BlockPlan) -> tuple[_Column, ...]:
    grouped = itertools.groupby(_notes(block), key=lambda op: op.module or op.target)
    return tuple(_Column(label, tuple(ops)) for label, ops in grouped)


def _notes(block: BlockPlan) -> tuple[OpNote, ...]:
    """The ops that readers look for, or all that are divided where the plan carries no notes."""
    return landmarks(block.ops) if block.ops else tuple(OpNote(name, name, "", 0, split.partition(":")[0]) for name, split in block.splits.items())


def _span(stage: StagePlan) -> str:
    first, last = _short(stage.first), _short(stage.last)
    return first if first == last else f"{first} … {last}"


def _short(name: str) -> str:
    return name.removeprefix("model.").removeprefix("transformer.")
