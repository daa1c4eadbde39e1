"""Graphs whose stages are sets of operators: the operators in stage order, the blocks cut again.

A plan made by hand may put any set of operators on a stage. `Runs` says which: a run is (index of its first operator in the captured order,
stage), the runs cover the graph. Operators sorted by (stage, captured order) are again a topological order exactly if no value flows to
an earlier stage; then every stage is one span of blocks, as everything else in this package expects. The graph stays the captured one
in all but order, so its fingerprint stays too; `Graph.runs` tells the order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from autoplan.blocks import pattern
from autoplan.errors import UsageError
from autoplan.graph import Block, Graph, Runs
from autoplan.plan import Plan


def runs_of(stages: Sequence[int]) -> Runs:
    """The runs of a list that gives the stage of every operator in the captured order."""
    starts = [i for i, stage in enumerate(stages) if i == 0 or stages[i - 1] != stage]
    return tuple((i, stages[i]) for i in starts)


def stages_of(runs: Runs, num_ops: int) -> tuple[int, ...]:
    """The stage of every operator in the captured order."""
    ends = [start for start, _ in runs[1:]] + [num_ops]
    return tuple(stage for (start, stage), end in zip(runs, ends, strict=True) for _ in range(end - start))


def arrange(graph: Graph, runs: Runs) -> Graph:
    """`graph` with its operators in stage order. Equal runs give equal graphs; a graph that has them already is returned.

    Raises UsageError where a value would flow to an earlier stage, naming it, or where the runs are not of this graph.
    """
    if graph.runs == runs:
        return graph
    assert not graph.runs, "a graph is arranged from its captured order"
    if runs[0][0] != 0 or any(a >= b for (a, _), (b, _) in itertools.pairwise(runs)) or runs[-1][0] >= len(graph.ops):
        raise UsageError(f"the placement {runs} does not cover the {len(graph.ops)} operators of {graph.name}: plan again for this model.")
    stages = stages_of(runs, len(graph.ops))
    for index, op in enumerate(graph.ops):
        for name in op.operands:
            source = graph.producer.get(name)
            if source is not None and stages[source] > stages[index]:
                raise UsageError(
                    f"{name}, made by {graph.ops[source].module or 'the model'} on stage {stages[source]}, is read by {op.module or 'the model'} "
                    f"on the earlier stage {stages[index]}: a stage reads what earlier stages make."
                )
    order = sorted(range(len(graph.ops)), key=lambda i: (stages[i], i))
    block_of = {i: number for number, block in enumerate(graph.blocks) for i in range(block.start, block.stop)}
    ops = tuple(graph.ops[i] for i in order)
    users = {name: place for place, op in enumerate(ops) for name in op.operands}
    exported = (*((graph.loss,) if graph.loss else ()), *graph.outputs, *(value for _, value in graph.buffer_updates))
    blocks, start = [], 0
    for (_, number), group in itertools.groupby(order, key=lambda i: (stages[i], block_of[i])):
        stop = start + len(list(group))
        blocks.append(Block(graph.blocks[number].name, start, stop, pattern(graph.values, ops[start:stop], stop, users, exported), graph.blocks[number].layer))
        start = stop
    return replace(graph, ops=ops, blocks=tuple(blocks), runs=runs)


def first_blocks(graph: Graph, runs: Runs) -> tuple[int, ...]:
    """Of an arranged graph: the first block of every stage, and the number of blocks."""
    counts: dict[int, int] = {}
    for stage in stages_of(runs, len(graph.ops)):
        counts[stage] = counts.get(stage, 0) + 1
    starts = [0, *itertools.accumulate(counts[stage] for stage in sorted(counts))]
    at = {block.start: number for number, block in enumerate(graph.blocks)}
    return (*(at[start] for start in starts[:-1]), len(graph.blocks))


def arranged(graph: Graph, plan: Plan) -> Graph:
    """`graph` in the order of the plan's stages: itself, where the plan's stages are spans of the captured order."""
    return arrange(graph, plan.placement) if plan.placement else graph
