"""One stage of a plan becomes code: blocks of local instructions, what it keeps, reads, sends and receives.

A value made in one stage and read in later ones travels once to each rank that reads it, as it lies where it is made; of several stages
on one rank the first receives it and hands it on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoplan.assignments import Lowering
from autoplan.graph import Graph
from autoplan.layout import PARTIAL, VARY, WHOLE, Split
from autoplan.peephole import fuse_bias
from autoplan.precision import MASTER
from autoplan.stagemeshes import spread_of
from autoplan.transit import AXIS, pieces_dim
from autoplan.variants import Emitter, Rows
from runtime.instr import uses
from runtime.program import BlockCode, Body, Chunk, Feed, StageCode, Stored, Transfer
from runtime.traffic import body_specs


def feed_of(graph: Graph, name: str) -> Feed:
    """An input of the model as a rank reads it from the batch."""
    value = graph.values[name]
    has_rows = bool(value.dims) and graph.batch_factor is not None and graph.batch_factor in value.dims[0]
    return Feed(name, value.fqn, value.spec, 0 if has_rows else None)


def stage_code(context: Lowering, number: int, needs: Mapping[str, object], rows: Rows) -> StageCode:
    """Lower one stage for one number of rows."""
    graph, plan = context.graph, context.plan
    outside = {name: layouts for name, layouts in context.edges.items() if context.stage_of_op[graph.producer[name]] != number}
    emitter = Emitter(graph, context.axes, rows, {**context.given, **{name: context.edge_name(name) for name in outside}})
    emitter.settled.update(outside)
    spans = range(plan.stages[number].start, plan.stages[number].stop)
    for block in spans:
        emitter.begin()
        settling: list[str] = []
        for index in range(graph.blocks[block].start, graph.blocks[block].stop):
            if index in context.step:
                emitter.emit(index)
                settling += [name for name in graph.ops[index].outputs if name in context.edges]
        for name in settling:
            emitter.settle(name, context.edges[name], context.edge_name(name))
    if not emitter.pieces:
        emitter.begin()
    finals, loss = _finals(context, emitter, number)
    leaving = tuple(emitter.read(name, emitter.produced(name)) for name in _leaving(context, number))
    keep = {*finals.values(), *leaving, *([loss] if loss else [])}
    codes = _blocks(context, emitter, spans, keep, plan.stages[number].recompute)
    updates = tuple((buffer, finals[value]) for buffer, value in graph.buffer_updates if value in finals)
    updated = [buffer for buffer, _ in updates if buffer not in emitter.stored]
    for name in updated:
        emitter.read(name, emitter.produced(name))
    feeds = tuple(feed_of(graph, name) for local, name in emitter.external.items() if graph.values[name].kind == "input")
    receives = tuple(_receives(context, emitter, number))
    partial = () if loss is None else _loss_axes(context)
    predictions = tuple(finals[name] for name in graph.outputs if name in finals)
    for value in graph.values.values():
        if number == 0 and value.kind in ("parameter", "buffer") and value.name not in needs and value.name not in emitter.stored:
            emitter.read(value.name, emitter.produced(value.name))  # what the step does not use is kept by the first stage
    stored = tuple(stored_of(context, emitter, local) for local in emitter.stored)
    return StageCode(number, stored, feeds, (Body(rows.local, codes, receives, ()),), loss, partial, updates, predictions)


def _finals(context: Lowering, emitter: Emitter, number: int) -> tuple[dict[str, str], str | None]:
    """Local names of the step's results that this stage makes: buffers as they rest, outputs and loss complete on tensor axes."""
    graph = context.graph
    finals: dict[str, str] = {}
    loss = None
    for buffer, value in graph.buffer_updates:
        if context.stage_of_op.get(graph.producer.get(value, -1)) == number:
            finals[value] = emitter.read(value, emitter.produced(buffer))
    for name in context.results:
        if context.stage_of_op.get(graph.producer.get(name, -1)) != number or name in finals:
            continue
        data = context.batch.layouts[name]
        if name == graph.loss and data == VARY:
            data = PARTIAL  # all data ranks, and micro-batches, have the same loss: each counts its portion of it
        others = emitter.produced(name)[1:]
        kept = [
            PARTIAL if name == graph.loss and axis.factors is not None and at == PARTIAL else WHOLE for axis, at in zip(context.axes[1:], others, strict=True)
        ]
        local = emitter.read(name, (data, *kept))
        if name == graph.loss:
            loss = local
        else:
            finals[name] = local
    return finals, loss


def _loss_axes(context: Lowering) -> tuple[str, ...]:
    """The axes over which the loss of a rank is a partial sum."""
    loss = context.graph.loss
    if loss is None:
        return ()
    found = ["dp"] if context.batch.layouts.get(loss, WHOLE) != WHOLE else []
    index = context.graph.producer.get(loss)
    for axis in context.axes[1:]:
        if index is not None and axis.factors is not None and axis.options[index].writes[context.graph.ops[index].outputs.index(loss)] == PARTIAL:
            found.append(axis.name)
    return tuple(found)


def _leaving(context: Lowering, number: int) -> tuple[str, ...]:
    """Values made in this stage that a later stage reads, in the order in which they are made."""
    graph, step = context.graph, context.step
    found: list[str] = []
    for index in context.ops_of_stage.get(number, ()):
        for name in graph.ops[index].outputs:
            if name not in context.given and any(c in step and context.stage_of_op[c] != number for c in graph.consumers.get(name, ())):
                found.append(name)
    return tuple(found)


def _receives(context: Lowering, emitter: Emitter, number: int) -> list[Transfer]:
    graph = context.graph
    found = []
    for local, name in emitter.external.items():
        if graph.values[name].kind == "activation" and name not in context.given:
            source, stages = _holder(context, name, number), context.plan.stages
            spec, grad = emitter.specs[local], graph.values[name].requires_grad
            if context.plan.stage_meshes and stages[source].rank != stages[number].rank:
                spread = spread_of(graph, name, [axis.name for axis in context.axes], emitter.produced(name), context.plan.stage_meshes)
                found.append(Transfer(local, source, number, spec, grad, spread=spread))
            else:
                found.append(Transfer(local, source, number, spec, grad, _pieces(context, emitter, name, spec.shape, source, number)))
    return found


def _pieces(context: Lowering, emitter: Emitter, name: str, shape: tuple[int, ...], source: int, number: int) -> Chunk | None:
    """How a value that stage `number` receives is cut in transit (autoplan/transit.py)."""
    stages = context.plan.stages
    if not stages[number].gathers or stages[source].rank == stages[number].rank or not context.graph.values[name].requires_grad:
        return None
    degree = next((axis.degree for axis, lies in zip(context.axes, emitter.produced(name), strict=True) if axis.name == AXIS and lies == WHOLE), 1)
    dim = pieces_dim(shape, degree)
    return None if dim is None else Chunk(AXIS, dim, 1, shape[dim], 1)


def _holder(context: Lowering, name: str, number: int) -> int:
    """The stage from which stage `number` gets a value: the one that makes it, or an earlier one of its own rank that received it."""
    graph, ranks = context.graph, [stage.rank for stage in context.plan.stages]
    source, step = context.stage_of_op[graph.producer[name]], context.step
    if ranks[source] == ranks[number]:
        return source
    readers = {context.stage_of_op[i] for i in graph.consumers.get(name, ()) if i in step}
    return min((stage for stage in readers if stage < number and ranks[stage] == ranks[number]), default=source)


def _blocks(context: Lowering, emitter: Emitter, spans: range, keep: set[str], ways: tuple[str, ...]) -> tuple[BlockCode, ...]:
    """The stage's blocks with what crosses between them. `ways`: how each is recomputed, () as its pattern."""
    graph = context.graph
    by_pattern = {block.pattern: block.recompute for block in context.plan.blocks}
    pieces = emitter.pieces
    used_later: list[set[str]] = [set() for _ in pieces]
    reads = [list(dict.fromkeys(name for instr in piece for name in uses(instr))) for piece in pieces]
    for piece, names in enumerate(reads):
        for name in names:
            home = emitter.home.get(name)
            if home is not None and home != piece:
                used_later[home].add(name)
    codes = []
    for piece, (block, instrs) in enumerate(zip(spans, pieces, strict=True)):
        stored = tuple(name for name in reads[piece] if name in emitter.stored)
        inputs = tuple(name for name in reads[piece] if name not in emitter.stored and emitter.home.get(name) != piece)
        made = [out.name for instr in instrs for out in instr.outputs if out.spec is not None]
        outputs = tuple(name for name in made if name in used_later[piece] or name in keep)
        how = ways[block - spans.start] if ways else by_pattern.get(graph.blocks[block].pattern, "none")
        assert how in ("none", "selective", "full")
        code = fuse_bias(BlockCode(graph.blocks[block].name, inputs, stored, tuple(instrs), outputs, how))
        if instrs:
            codes.append(code)
    return tuple(codes)


def stored_of(context: Lowering, emitter: Emitter, local: str) -> Stored:
    """A tensor that the emitter reads, as it lies at rest: the parts that the axes take of it, and over which its gradient is a partial sum."""
    name, layouts = emitter.stored[local]
    value = context.graph.values[name]
    chunks: list[Chunk] = []
    for number in emitter.nest(value, layouts):
        axis, layout = context.axes[number], layouts[number]
        if isinstance(layout, Split) and axis.degree > 1 and axis.name != "dp":
            chunks.append(Chunk(axis.name, *emitter.chunk(value, layout, number, layouts)))
    partial = tuple(axis.name for axis, layout in zip(context.axes, layouts, strict=True) if axis.degree > 1 and layout == VARY) if value.requires_grad else ()
    readers = sorted({context.stage_of_op[i] for i in context.graph.consumers.get(name, ()) if i in context.step})
    stages = tuple(readers) or (0,)
    kind = value.kind
    assert kind in ("parameter", "buffer", "constant")
    at_rest = context.graph.at_rest(name) if kind != "constant" else value.spec.dtype
    master = at_rest if context.graph.precision is not None and at_rest == MASTER else ""
    return Stored(
        local, value.fqn or name, value.aliases or (value.fqn or name,), kind, value.spec, tuple(chunks), value.requires_grad, partial, stages, master
    )


def with_sends(stages: Sequence[StageCode], degrees: Sequence[Mapping[str, int]] | None = None) -> list[StageCode]:
    """Add to every stage the transfers that later stages receive from it. `degrees`: of the axes of each stage, where they are not all alike."""
    result = []
    for stage in stages:
        bodies = []
        for number, body in enumerate(stage.bodies):
            if degrees is None:
                sends = tuple(t for other in stages for t in other.bodies[number].receives if t.src == stage.index)
            else:
                specs = body_specs(stage, body, degrees[stage.index])
                sends = tuple(replace(t, spec=specs[t.value]) for other in stages for t in other.bodies[0].receives if t.src == stage.index)
            bodies.append(replace(body, sends=sends))
        result.append(replace(stage, bodies=tuple(bodies)))
    return result
