"""Small planning problems, and all their executable plans priced by the simulator.

Nothing of the search is used: plans are enumerated from the operators' options, lowered, and their programs forecast.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from handmade import Builder, FlatPrices, moved_bytes

from autoplan.choose import Outline
from autoplan.constraints import Constraints
from autoplan.errors import UsageError
from autoplan.forecast import Forecast
from autoplan.graph import Block, Graph, options
from autoplan.layout import PARTIAL, Split
from autoplan.load import Model, StageLoad
from autoplan.lower import lower
from autoplan.plan import BlockPlan, Plan, StagePlan
from autoplan.price import Pricer
from autoplan.rankmemory import by_rank, memories
from autoplan.reading import Reader
from autoplan.replay import Step
from autoplan.search import search
from autoplan.simulate import assemble
from autoplan.space import RECOMPUTES, Shape, space
from autoplan.workload import load_of
from costmodel.cluster import Cluster
from costmodel.opkey import Collective, OpKey, OpTime
from runtime.program import Program, StageCode

ASKED = Constraints(tensor="1d")  # grids of tensor axes are left out
_MODEL = Model(1, 1, "float32", 1.0)  # which no time and no memory depends on
NO_FORECAST = Forecast(0.0, 0, 0.0, 0.0, 0.0, 1.0, (), (), (), "analytic")


class RandomPrices(FlatPrices):
    """Devices and links of any balance."""

    def __init__(self, seed: int, limit_bytes: int) -> None:
        super().__init__(limit_bytes)
        draw = random.Random(seed)
        self.flops_per_s = 10 ** draw.uniform(8, 11)
        self.bytes_per_s = 10 ** draw.uniform(8, 10)
        self.launch_s = 10 ** draw.uniform(-8, -5)
        self.link_bytes_per_s = 10 ** draw.uniform(7, 10)
        self.latency_s = 10 ** draw.uniform(-8, -5)

    def op(self, key: OpKey, device: int = 0) -> OpTime:
        once = max(key.flops / self.flops_per_s, moved_bytes(key) / self.bytes_per_s) + self.launch_s
        return OpTime(once, 2 * once if key.flops else once, once if len(key.operands) > 1 and key.flops else 0.0)

    def collective(self, collective: Collective) -> float:
        p = collective.group.size
        rounds = 2 if collective.kind == "all_reduce" else 1
        if collective.kind == "send":
            return self.latency_s + collective.num_bytes / self.link_bytes_per_s
        return rounds * (self.latency_s * (p - 1) + collective.num_bytes * (p - 1) / p / self.link_bytes_per_s)

    def optimizer_s(self, num_elements: int, optimizer: str, num_bytes_per_element: float, device: int = 0) -> float:
        return num_elements * num_bytes_per_element / self.bytes_per_s

    def peak_flops_per_s(self, dtype: str, device: int = 0) -> float:
        return self.flops_per_s


@dataclass(frozen=True)
class Instance:
    graph: Graph
    cluster: Cluster
    prices: RandomPrices


def instance(seed: int) -> Instance:
    """A random graph of one to three equal layers and a head, one to four devices, and a memory limit that often binds. Its values have
    positions, or features alone: then there is one more product in front. A layer that reads the batch is of a pattern of its own: no gradient leaves it."""
    draw = random.Random(seed)
    has_rows = draw.random() < 0.5
    b = Builder(batch=draw.choice([2, 4]))
    s = b.factor(draw.choice([2, 4, 6]))
    h, v = b.factor(draw.choice([4, 6, 8, 16])), b.factor(draw.choice([4, 10]))
    lead = (0, s) if has_rows else (0,)
    b.value("given", "input", (*lead, h), grad=False)
    size, kind, inner = b.sizes[h], draw.choice(["plain", "wide"]) if not has_rows else "plain", draw.choice([4, 8, 12, 32])
    x = "given"
    if not has_rows:
        first = b.factor(size)
        b.value("w0", "parameter", (first, h))
        x, h = b.linear("x0", "given", "w0"), first
        b.block("prologue", 0, "prologue")
    for i in range(draw.choice([1, 1, 2] if has_rows else [1, 2, 3])):
        start, f, pattern = len(b.ops), b.factor(size if kind == "plain" else inner), "first" if x == "given" else "layer"
        b.value(f"up{i}", "parameter", (f, h))
        x = b.linear(f"u{i}", x, f"up{i}")
        x = b.elementwise(f"g{i}", [x], (x,))
        h = f
        if kind == "wide":
            h = b.factor(size)
            b.value(f"down{i}", "parameter", (h, f))
            x = b.linear(f"d{i}", x, f"down{i}")
        b.block(f"layers.{i}", start, pattern, layer=True)
    start = len(b.ops)
    b.value("head", "parameter", (v, h))
    x = b.linear("logits", x, "head")
    b.op("loss", "aten.sum.default", [x], (), [(0, "sum"), *([(s, "sum")] if has_rows else []), (v, "sum")], (x,), ((0,),))
    b.block("epilogue", start, "epilogue")
    graph = b.graph(loss="loss")
    devices = draw.choice([1, 2, 2, 2, 4]) if not has_rows else 2
    prices = RandomPrices(seed, 1 << 40)
    cluster = Cluster.parse(f"a100-sxm-80gb:1x{devices}")
    free = search(graph, cluster, prices, Constraints())
    return Instance(graph, cluster, RandomPrices(seed, int(free.forecast.peak_memory_bytes * draw.choice([0.4, 0.6, 0.8, 0.95, 1.0, 10.0]))))


def least_step_s(case: Instance) -> float:
    """Seconds of the fastest executable plan that fits; infinity where none does.

    Each plan is lowered once for all schedules, ZeRO stages and recomputations, none of which changes what a stage runs. It is not replayed where the
    passes of a rank, without gathers, sums, transfers and idle times, already take as long as the fastest plan so far; and not lowered where its blocks
    do: a block takes what it took in another plan with the same splits of its operators and layouts at its ends, which every lowered plan is checked for.
    """
    graph, outline, pricer = case.graph, Outline(case.graph), Pricer(case.prices, None)
    found = space(case.cluster.num_devices, graph.batch_size or 1, len(outline.blocks), ASKED, can_micro_batch=outline.batch.blocker is None)
    alike: dict[tuple, list[Shape]] = {}
    for shape in sorted(found.shapes, key=lambda shape: shape.tp):  # few splits first, so that there is soon a fast plan
        alike.setdefault((shape.axes, shape.rows, shape.stage_ranks), []).append(shape)
    least_s = float("inf")
    known: dict[tuple, float] = {}
    for shapes in alike.values():
        shape = shapes[0]
        for plan in _plans(case, outline, shape):
            keys = _keys(graph, plan)
            busy = [0.0] * shape.pp
            for stage in plan.stages:
                busy[stage.rank] += shape.num_micro_batches * sum(known.get(key, 0.0) for key in keys[stage.start : stage.stop])
            if max(busy) * (1 - 1e-9) >= least_s:
                continue
            try:
                programs = lower(plan, graph)
            except (AssertionError, UsageError):
                continue  # some operator cannot read what another one makes
            for key, spent_s in zip(keys, _blocks_s(programs, graph, pricer), strict=True):
                assert abs(spent_s - known.setdefault(key, spent_s)) <= 1e-9 * spent_s, "a block's seconds depend on what is outside of it"
            if all(_is_in_pieces(programs, number) for number, stage in enumerate(plan.stages) if stage.gathers):  # else it is another plan's program
                least_s = min(least_s, _least_of(case, programs, shapes, pricer, least_s))
    return least_s


def _is_in_pieces(programs: tuple[Program, ...], number: int) -> bool:
    """Whether a stage receives something in pieces."""
    return any(t.pieces is not None for p in programs for stage in p.stages if stage.index == number for body in stage.bodies for t in body.receives)


def _plans(case: Instance, outline: Outline, shape: Shape) -> Iterator[Plan]:
    """Every way to divide the operators and to cut the stages, and for each stage whether it gets what tensor ranks hold alike in pieces."""
    blocks, num_stages = len(case.graph.blocks), len(shape.stage_ranks)
    cuts = [(0, *inner, blocks) for inner in itertools.combinations(range(1, blocks), num_stages - 1)]
    values = case.graph.values
    for plans in _block_plans(outline, shape.tp):
        alike = any(lies == "whole" and values[name].requires_grad and shape.tp > 1 for plan in plans for name, lies in plan.boundary.items())
        ways = itertools.product((False, True) if alike else (False,), repeat=num_stages - 1)
        for starts, gathers in itertools.product(cuts, ways):
            yield _plan(case, shape, plans, starts, (False, *gathers))


def _keys(graph: Graph, plan: Plan) -> list[tuple]:
    """What each block's seconds depend on."""
    of_pattern = {block.pattern: (tuple(block.splits.items()), tuple(block.boundary.items())) for block in plan.blocks}
    return [(block.name, plan.axes, plan.micro_batch_size, of_pattern[block.pattern]) for block in graph.blocks]


def _blocks_s(programs: tuple[Program, ...], graph: Graph, pricer: Pricer) -> list[float]:
    """Seconds of every block, both passes of a micro-batch."""
    found: dict[str, float] = {}
    stages = [(program, stage, body) for program in programs for stage in program.stages for body in stage.bodies]
    for program, stage, body in stages:
        reader = Reader(program, stage, body, graph, pricer)
        for code in body.blocks:
            tally = reader.block(code)
            found[code.name] = tally.forward_s + tally.forward_moved_s + tally.backward_s + tally.backward_moved_s
    return [found[block.name] for block in graph.blocks]


def _least_of(case: Instance, programs: tuple[Program, ...], shapes: list[Shape], pricer: Pricer, known_s: float) -> float:
    """Seconds of the fastest plan of these programs that fits and is faster than `known_s`; infinity where there is none. Every layer is recomputed in a
    way of its own; where a plan fits, those that recompute some of its layers further are slower."""
    least_s, stage_ranks = float("inf"), programs[0].stage_ranks
    stages = sorted(((p, stage) for p in programs for stage in p.stages), key=lambda item: item[1].index)
    layers = [[code.name for code in stage.bodies[0].blocks if code.name.startswith("layers")] for _, stage in stages]
    priced: list[dict[tuple[str, ...], StageLoad]] = []
    for (program, stage), names in zip(stages, layers, strict=True):
        ways = itertools.product(RECOMPUTES, repeat=len(names))
        priced.append({own: load_of(program, _recomputed(stage, dict(zip(names, own, strict=True))), case.graph, pricer) for own in ways})
    plans = []
    for number, ways in enumerate(itertools.product(*priced)):
        loads = tuple(own[way] for own, way in zip(priced, ways, strict=True))
        busy_s = shapes[0].num_micro_batches * max(sum(load.slot_s for load in loads if stage_ranks[load.index] == rank) for rank in stage_ranks)
        plans.append((busy_s, number, tuple(RECOMPUTES.index(way) for own in ways for way in own), loads))
    fitting: dict[tuple[Shape, int], list[tuple[int, ...]]] = {}
    for busy_s, _, rungs, loads in sorted(plans, key=lambda plan: plan[:2]):
        if busy_s >= min(known_s, least_s):
            break
        for shape, zero in itertools.product(shapes, (0, 1, 2, 3) if shapes[0].dp > 1 else (0,)):
            fit = fitting.setdefault((shape, zero), [])
            if busy_s < least_s and not any(all(a <= b for a, b in zip(other, rungs, strict=True)) for other in fit):
                step = Step(shape.axes, shape.schedule, shape.num_micro_batches, zero, None, "adamw", None, stage_ranks)
                if max(memory.total for memory in by_rank(memories(loads, step), stage_ranks)) <= case.prices.limit_bytes:
                    fit.append(rungs)
                    least_s = min(least_s, assemble(loads, step, _MODEL, pricer, with_events=False).step_time_s)
    return least_s


def _recomputed(stage: StageCode, ways: dict[str, str]) -> StageCode:
    """The stage with its layers recomputed so."""
    bodies = tuple(replace(body, blocks=tuple(replace(code, recompute=ways.get(code.name, "none")) for code in body.blocks)) for body in stage.bodies)
    return replace(stage, bodies=bodies)


def _block_plans(outline: Outline, degree: int) -> Iterator[tuple[BlockPlan, ...]]:
    """Every combination of options of all patterns' operators, and of layouts between blocks."""
    graph = outline.graph
    patterns = [(pattern, graph.blocks[number]) for pattern, number in outline.examples.items()]
    for boundary in outline.boundaries(degree, None):
        edges = []
        for pattern, _ in patterns:
            enters, leaves = outline.boundary_of(outline.examples[pattern], boundary)
            edges.append({name: str(layout) for name, layout in (*enters.items(), *leaves)})
        for picks in itertools.product(*(_labels(graph, block, degree) for _, block in patterns)):
            yield tuple(
                BlockPlan(pattern, block.name, {op.name: label for op, label in zip(graph.ops[block.start : block.stop], labels, strict=True)}, edge)
                for (pattern, block), labels, edge in zip(patterns, picks, edges, strict=True)
            )


def _labels(graph: Graph, block: Block, degree: int) -> list[tuple[str, ...]]:
    """Options of a block's operators: without the batch, which the data axis divides; of operators that weigh only those that divide them."""
    choices = []
    ops = graph.ops[block.start : block.stop]
    for op in ops:
        batch = {loop.label for loop in op.loops if loop.factor == graph.batch_factor}
        given = [graph.values[name].kind != "activation" for name in op.operands]
        found = [o for o in options(graph, op, degree) if o.label not in batch and not any(g and r == PARTIAL for g, r in zip(given, o.reads, strict=True))]
        divided = [o for o in found if any(isinstance(x, Split) for x in (*o.reads, *o.writes))]
        heavy = op.flops >= 0.01 * sum(o.flops for o in ops) and op.flops > 0
        choices.append([o.label for o in (divided if heavy and divided else found)])
    return list(itertools.product(*choices))


def _plan(case: Instance, shape: Shape, blocks: tuple[BlockPlan, ...], starts: tuple[int, ...], gathers: tuple[bool, ...]) -> Plan:
    graph = case.graph
    each = zip(shape.stage_ranks, itertools.pairwise(starts), gathers, strict=True)
    stages = tuple(StagePlan(a, b, graph.blocks[a].name, graph.blocks[b - 1].name, rank, in_pieces) for rank, (a, b), in_pieces in each)
    return Plan(
        model=graph.name, model_fingerprint=graph.fingerprint, cluster=case.cluster.name, cluster_fingerprint="", global_batch=graph.batch_size or 1,
        micro_batch_size=shape.rows, num_micro_batches=shape.num_micro_batches, axes=shape.axes, zero=0, zero_group=None, schedule=shape.schedule,
        num_chunks=shape.num_chunks, precision=None, optimizer="adamw", stages=stages, blocks=blocks, forecast=NO_FORECAST, gap=0.0, space={},
    )  # fmt: skip
