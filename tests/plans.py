"""Plans made by hand or by chance, without a search: for tests of lowering and running."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from autoplan.forecast import Forecast
from autoplan.gathered import gathered_loops, loop_of
from autoplan.graph import Graph, Op, Option, options
from autoplan.layout import PARTIAL, VARY, WHOLE, Layout, conversion
from autoplan.plan import BlockPlan, Plan, StagePlan, with_ways
from autoplan.schemes import Axes

NO_FORECAST = Forecast(0.0, 0, 0.0, 0.0, 0.0, 1.0, (), (), (), "analytic")


def even_stages(graph: Graph, num_stages: int) -> tuple[StagePlan, ...]:
    """Blocks dealt to stages by FLOPs, each stage at least one block."""
    weights = [sum(op.flops for op in graph.ops[b.start : b.stop]) + 1 for b in graph.blocks]
    total, cuts, seen = sum(weights), [0], 0
    for i, weight in enumerate(weights):
        left_blocks, left_stages = len(weights) - i, num_stages - len(cuts)
        if left_stages and i > cuts[-1] and (seen >= total * len(cuts) / num_stages or left_blocks <= left_stages):
            cuts.append(i)
        seen += weight
    cuts.append(len(weights))
    assert len(cuts) == num_stages + 1, "fewer blocks than stages"
    return tuple(StagePlan(a, b, graph.blocks[a].name, graph.blocks[b - 1].name, n) for n, (a, b) in enumerate(pairwise(cuts)))


def _axes(pp: int, dp: int, cp: int, ep: int, tensor: tuple[tuple[str, int], ...], order: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    more = tuple((name, size) for name, size in (("cp", cp), ("ep", ep)) if size > 1)
    axes = (("pp", pp), ("dp", dp), *more, *tensor)
    return tuple(sorted(axes, key=lambda axis: order.index(axis[0]))) if order else axes


def manual_plan(
    graph: Graph,
    *,
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    context: str = "",
    zero: int = 0,
    num_micro_batches: int = 1,
    schedule: str = "1f1b",
    recompute: str | tuple[str, ...] = "none",
    splits: Mapping[str, Mapping[str, str]] | None = None,
    precision: str | None = None,
    sync: str = "allreduce",
    servers: tuple[int, ...] = (),
    workers: tuple[int, ...] = (),
    staleness: int | None = None,
    tensor: Axes | None = None,
    shares: tuple[int, ...] = (),
    order: tuple[str, ...] = (),
    gathers: bool = False,
    stage_meshes: tuple[Axes, ...] = (),
) -> Plan:
    """A plan with these degrees, or with `stage_meshes` those of each of `pp` stages; `splits` maps block pattern to {op name: option label}
    (default: nothing split). `tensor`: the tensor axes, where they are others than ("tp", tp). `recompute`: several ways are those of the blocks, in turn."""
    assert graph.batch_size is not None
    splits = splits or {}
    patterns = {block.pattern: block.name for block in reversed(graph.blocks)}
    alike = recompute if isinstance(recompute, str) else "none"
    blocks = tuple(BlockPlan(pattern, name, splits.get(pattern, {}), {}, alike) for pattern, name in patterns.items())
    plan = Plan(
        model=graph.name,
        model_fingerprint=graph.fingerprint,
        cluster="cpu",
        cluster_fingerprint="",
        global_batch=graph.batch_size,
        micro_batch_size=max(1, (max(shares) if shares else graph.batch_size // (len(workers) or dp)) // num_micro_batches),
        num_micro_batches=num_micro_batches,
        axes=(("pp", pp),) if stage_meshes else _axes(pp, dp, cp, ep, tensor or (("tp", tp),), order),
        stage_meshes=stage_meshes,
        context=context,
        zero=zero,
        zero_group=None,
        schedule=schedule,
        num_chunks=1,
        precision=precision,
        optimizer="sgd",
        stages=tuple(replace(stage, gathers=gathers) for stage in even_stages(graph, pp)),
        blocks=blocks,
        forecast=NO_FORECAST,
        gap=0.0,
        space={},
        sync=sync,
        servers=servers,
        workers=workers,
        staleness=staleness,
        shares=shares,
    )
    return plan if isinstance(recompute, str) else with_ways(plan, [recompute[i % len(recompute)] for i in range(len(graph.blocks))])


def random_splits(graph: Graph, tp: int, seed: int, *, gathered: bool = False) -> dict[str, dict[str, str]]:
    """For every block pattern, a random option for every op that its operands can be read as: any such choice has to be exact.
    `gathered`: with the loops of schemes of several tensor axes."""
    rng = random.Random(seed)
    produced: dict[str, Layout] = {}
    chosen: dict[str, dict[str, str]] = {}
    for block in graph.blocks:
        known = chosen.get(block.pattern)
        fresh = known is None
        picks = {} if known is None else known
        first = next(b for b in graph.blocks if b.pattern == block.pattern)
        for offset in range(block.stop - block.start):
            op = graph.ops[block.start + offset]
            name = graph.ops[first.start + offset].name
            more = gathered_loops(graph, op) if gathered else ()
            allowed = [o for o in options(graph, op, tp, more) if _readable(graph, op, o, produced, block.start)]
            if fresh:
                picks[name] = rng.choice(allowed).label
            option = next(o for o in allowed if o.label == picks[name])
            produced.update(zip(op.outputs, option.writes, strict=True))
        chosen[block.pattern] = picks
    return chosen


def domain_splits(graph: Graph, tp: int, dim: int = 2) -> dict[str, dict[str, str]]:
    """Every op that can divides the positions of dimension `dim` of the first input: domain parallelism."""
    positions = {graph.inputs()[0].dims[dim][0]}
    chosen: dict[str, dict[str, str]] = {}
    for block in graph.blocks:
        picks = chosen.setdefault(block.pattern, {})
        for op in graph.ops[block.start : block.stop] if not picks else ():
            loops = {loop.label: loop for loop in op.loops if loop.factor in positions}
            found = [option.label for option in options(graph, op, tp) if option.label in loops]
            if found:
                picks[op.name] = found[0]
                made = loops[found[0]].writes[0]
                positions |= {graph.values[op.outputs[0]].dims[made.dim][made.factor]} if made else set()
    return chosen


def splits_by_name(graph: Graph, labels: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """For every block pattern, the labels of its first block's operators that `labels` names."""
    first = {block.pattern: block for block in reversed(graph.blocks)}
    ops = {pattern: graph.ops[block.start : block.stop] for pattern, block in first.items()}
    return {pattern: {op.name: labels[op.name] for op in found if op.name in labels} for pattern, found in ops.items()}


def _readable(graph: Graph, op: Op, option: Option, produced: Mapping[str, Layout], block_start: int) -> bool:
    loop = loop_of(graph, op, option.label)
    if loop is not None and graph.batch_factor in (loop.factor, *(factor for _, factor in loop.gathers)):
        return False
    for name, read in zip(op.operands, option.reads, strict=True):
        inside = graph.producer.get(name, -1) >= block_start
        src = produced.get(name, WHOLE)
        read = WHOLE if read == VARY and not graph.values[name].requires_grad else read
        # another instance of the block may find a complete value where this one finds a partial sum
        if conversion(src, read) is None or (read == PARTIAL and not inside):
            return False
    return True
