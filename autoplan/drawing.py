"""Where a random operator's tensor lies in the dense one: the arguments by which it finds its part of a mask (runtime/sharded/stochastic.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autoplan.graph import Graph, Value
from autoplan.layout import Layout, Split
from runtime.instr import Arg

Chunk = tuple[int, int, int, int]


def drawing(
    graph: Graph, value: Value, axes: Sequence[tuple[str, int]], layouts: Sequence[Layout], chunk: Callable[[Value, Split, int], Chunk], nest: Sequence[int]
) -> tuple[tuple[str, Arg], ...]:
    """The arguments `axes`, `windows` and `rows` for `value`, which lies as `layouts[i]` on `axes[i]` = (name, degree).

    `chunk(value, where, i)` is (dim, outer, size, inner) of what axis i divides, as the axes before it in `nest` leave it. The
    rows of the batch are cut by "dp" even where that axis has one rank: in time, by micro-batches.
    """
    names: list[Arg] = []
    windows: list[Arg] = []
    rows: Arg = None
    for number in nest:
        (name, degree), layout = axes[number], layouts[number]
        if not isinstance(layout, Split):
            continue
        dim, outer, size, inner = chunk(value, layout, number)
        by_row = name == "dp" and value.dims[layout.dim][layout.factor] == graph.batch_factor
        if by_row:
            rows = (dim, outer, inner)
        if degree > 1:
            names.append(name)
            windows.append(() if by_row else (dim, outer, size, inner))
    return ("axes", tuple(names)), ("windows", tuple(windows)), ("rows", rows)
