"""The 3D grid's assignment: which loop of every operator the axes "tpy" and "tpz" of a cube of q^3 ranks divide ("tpx" divides rows).

Between products a value lies divided over rows on one of the two axes and over features on the other. A product gathers its x over the
rows' axis and contracts over the features' axis, so its output features take the first axis, and rows, by a reduce-scatter, the second: the two
change their parts, and products come in pairs (Bian et al. 2021, arXiv 2105.14450). Other operators follow their operands:

    rows' axis       the loop over the batch
    features' axis   a loop that reads an operand as it lies; an operator that has none is whole there
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoplan.gathered import gathered_loops
from autoplan.graph import Graph, Op, Option, options
from autoplan.layout import PARTIAL, WHOLE, Layout, Split, conversion
from autoplan.schemes import joined, parted

Pair = tuple[Layout, Layout]  # on "tpy", on "tpz"


def cube_splits(graph: Graph, body: Sequence[int], degree: int) -> Mapping[str, Mapping[str, str]]:
    """Block pattern -> {op of the pattern's first block: labels on both axes}, for axes of `degree` ranks."""
    lies: dict[str, Pair] = {}
    found: dict[str, dict[str, str]] = {}
    starts: dict[str, int] = {}
    step = frozenset(body)
    for block in graph.blocks:
        fresh = block.pattern not in found
        picks = found.setdefault(block.pattern, {})
        first = starts.setdefault(block.pattern, block.start)
        for index in (i for i in range(block.start, block.stop) if i in step):
            op, like = graph.ops[index], graph.ops[first + index - block.start]
            if not fresh:
                lies.update((out, lies[named]) for out, named in zip(op.outputs, like.outputs, strict=True))
                continue
            pair = _chosen(graph, op, lies, degree)
            if label := joined((pair[0].label, pair[1].label)):
                picks[op.name] = label
            lies.update((out, (pair[0].writes[j], pair[1].writes[j])) for j, out in enumerate(op.outputs))
    return found


def undivided_by(graph: Graph, splits: Mapping[str, Mapping[str, str]], ops: Sequence[int]) -> Op | None:
    """The first of `ops`, of a pattern's first block, that one of the two axes leaves whole."""
    labels = {name: label for picks in splits.values() for name, label in picks.items()}
    is_whole = lambda label: label == "whole" or label.startswith("partial:")  # noqa: E731
    return next((graph.ops[i] for i in ops if any(map(is_whole, parted(labels.get(graph.ops[i].name, ""), 2)))), None)


def _chosen(graph: Graph, op: Op, lies: Mapping[str, Pair], degree: int) -> tuple[Option, Option]:
    every = options(graph, op, degree, gathered_loops(graph, op))
    rows = _rows_axis(graph, op, lies)
    have = [tuple(lies.get(name, (WHOLE, WHOLE))) for name in op.operands]
    features = 1 - rows
    of_rows, of_features = every[0], every[0]
    by_row = [o for o in every if _is_over(graph, op, o, graph.batch_factor)]
    inside = [o for o in every if _gathers_rows(graph, op, o)]
    contracted = [o for o in every if any(loop.label == o.label and loop.kind == "sum" for loop in op.loops) and o not in by_row]
    if inside and contracted:
        agreeing = [o for o in contracted if o.reads[0] == have[0][features]] or contracted
        return (inside[0], agreeing[0]) if rows == 0 else (agreeing[0], inside[0])
    if by_row:
        of_rows = by_row[0]
    held = [pair[features] for pair in have]
    rest = [o for o in every if o not in by_row and o not in inside and _readable(o, held)]
    begins = not any(name in lies for name in op.operands)  # nothing divided comes in: it is divided here
    of_features = max(rest, key=lambda o: _fit(graph, op, o, held, begins=begins))
    return (of_rows, of_features) if rows == 0 else (of_features, of_rows)


def _rows_axis(graph: Graph, op: Op, lies: Mapping[str, Pair]) -> int:
    """The axis on which the operands are divided over rows, or are about to be: where they are partial sums."""
    for name in op.operands:
        for axis, layout in enumerate(lies.get(name, ())):
            if layout == PARTIAL or (isinstance(layout, Split) and graph.batch_factor == graph.values[name].dims[layout.dim][layout.factor]):
                return axis
    return 0


def _is_over(graph: Graph, op: Op, option: Option, factor: int | None) -> bool:
    return any(loop.label == option.label and loop.factor == factor and not loop.even for loop in op.loops)


def _gathers_rows(graph: Graph, op: Op, option: Option) -> bool:
    return any(loop.label == option.label and (0, graph.batch_factor) in loop.gathers for loop in gathered_loops(graph, op))


def _readable(option: Option, have: Sequence[Layout]) -> bool:
    return all(conversion(src, dst) is not None for src, dst in zip(have, option.reads, strict=True))


def _fit(graph: Graph, op: Op, option: Option, have: Sequence[Layout], *, begins: bool) -> tuple[int, int]:
    """Operands that are read as they lie, divided ones before; then outputs that are divided."""
    same = sum(isinstance(src, Split) and src == dst for src, dst in zip(have, option.reads, strict=True))
    last = sum(layout == Split(len(graph.values[out].dims) - 1, 0) for out, layout in zip(op.outputs, option.writes, strict=True))
    divided = sum(isinstance(layout, Split) for layout in option.writes)
    return same, divided if same else 2 * last if begins and last else int(option.label == "whole")
