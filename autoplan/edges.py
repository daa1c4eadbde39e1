"""Edges of blocks: how values lie that one block makes and another reads, as the plan's boundaries say.

A plan names values as in the first block of each pattern; the same places of the other blocks of the pattern follow. A value is
brought into its layout at the end of the block that makes it, once for all readers, and travels so to other stages. A plan without
boundaries leaves values as they are made.
"""

from __future__ import annotations

from collections.abc import Mapping

from autoplan.errors import UsageError
from autoplan.graph import Graph
from autoplan.layout import WHOLE, Layout, Split
from autoplan.plan import Plan


def edge_layouts(graph: Graph, plan: Plan) -> Mapping[str, Layout]:
    """Value -> its layout on the tensor axis outside of the block that makes it. UsageError for a layout that is none."""
    boundaries = {block.pattern: block.boundary for block in plan.blocks}
    first = {block.pattern: block for block in reversed(graph.blocks)}
    block_of = {i: number for number, block in enumerate(graph.blocks) for i in range(block.start, block.stop)}
    found: dict[str, Layout] = {}
    for number, block in enumerate(graph.blocks):
        boundary = boundaries.get(block.pattern)
        if not boundary:
            continue
        example = first[block.pattern]
        for offset in range(block.stop - block.start):
            outputs = zip(graph.ops[block.start + offset].outputs, graph.ops[example.start + offset].outputs, strict=True)
            for name, named in outputs:
                if named in boundary and any(block_of[i] != number for i in graph.consumers.get(name, ())):
                    found[name] = layout_of(boundary[named], name)
    return found


def layout_of(text: str, name: str) -> Layout:
    """The layout that prints as `text`."""
    if text == str(WHOLE):
        return WHOLE
    digits = text.removeprefix("split(").removesuffix(")").split(".")
    if text.startswith("split(") and len(digits) == 2 and all(d.isdigit() for d in digits):
        return Split(int(digits[0]), int(digits[1]))
    raise UsageError(f"the plan says that {name} lies {text!r} between blocks: it must be 'whole' or 'split(DIM.FACTOR)'")
