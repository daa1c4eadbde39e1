"""Lowering: a plan and a graph become one program for each pipeline coordinate.

Every operator has an option on the data axis (autoplan/batchaxis.py) and on each tensor axis (autoplan/schemes.py; the plan's splits); the emitter
(autoplan/variants.py) writes the local instructions with the collectives that follow. What is decided here:

- **At rest.** A parameter rests split on a tensor axis if every use reads it so; otherwise whole. Where every use of a whole parameter
  is "vary", no collective is placed: its gradient stays a partial sum until the step's reduction (`Stored.partial`). On tensor axes
  that divide rows see autoplan/rowaxes.py.
- **Data axis.** Parameters lie "vary" there: gradients are partial sums, reduced once a step. The same on context and expert axes
  (autoplan/contextaxis.py), whose ranks all read the data rank's rows and take their part of them.
- **Edges.** What leaves a block is brought into the layout of the plan's boundary at its end (autoplan/edges.py), and travels so.
- **Cuts.** A value made in one stage and read in later ones travels once to each rank that reads it, as it lies where it is made; of
  several stages on one rank the first receives it and hands it on.
- **Rows.** Rows are dealt to the data ranks as the plan's shares say or as evenly as possible, then to micro-batches; each number of rows that
  occurs gets a body of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autoplan.arrange import arranged
from autoplan.batchaxis import BatchAxis, batch_axis, step_ops, training_results
from autoplan.contextaxis import DEFAULT_WAY, check_context, context_axis
from autoplan.edges import edge_layouts
from autoplan.errors import UsageError
from autoplan.gathered import gathered_loops
from autoplan.graph import Graph, Option, options
from autoplan.layout import PARTIAL, VARY, WHOLE, Layout, Split
from autoplan.peephole import fuse_bias
from autoplan.plan import Plan, served_by
from autoplan.precision import MASTER
from autoplan.rowaxes import resting, row_options, wanted_rest
from autoplan.schemes import ROLES, feature_axes, parted, row_axes, row_unit
from autoplan.shares import row_shares, scaled_shares
from autoplan.variants import AxisAssignment, Emitter, Layouts, Rows
from runtime.instr import uses
from runtime.program import BlockCode, Body, Chunk, Feed, MicroBatch, Program, StageCode, Stored, Transfer


@dataclass(frozen=True)
class _Context:
    """What every stage of one lowering shares."""

    graph: Graph
    plan: Plan
    batch: BatchAxis
    axes: tuple[AxisAssignment, ...]
    ops: tuple[int, ...]  # of the step, in order
    results: tuple[str, ...]
    stage_of_op: Mapping[int, int]
    given: Mapping[str, str]  # value made by the preamble -> its local name
    edges: Mapping[str, Layouts]  # value that other blocks read -> its layouts outside of its block, where the plan says so

    def edge_name(self, name: str) -> str:
        """The local name of a value outside of its block: another one where it was converted."""
        index = self.graph.producer[name]
        position = self.graph.ops[index].outputs.index(name)
        made = [axis.options[index].writes[position] for axis in self.axes]
        moved = any(axis.degree > 1 and src != dst for axis, src, dst in zip(self.axes, made, self.edges[name], strict=True))
        return f"{name}__edge" if moved else name

    @cached_property
    def step(self) -> frozenset[int]:
        """The ops of the step."""
        return frozenset(self.ops)

    @cached_property
    def ops_of_stage(self) -> Mapping[int, tuple[int, ...]]:
        """Stage -> its ops of the step, in order."""
        found: dict[int, list[int]] = {}
        for index in self.ops:
            found.setdefault(self.stage_of_op[index], []).append(index)
        return {stage: tuple(indices) for stage, indices in found.items()}


def data_shares(plan: Plan, global_rows: int) -> tuple[int, ...]:
    """Rows of a global batch that every data rank takes: the plan's shares, in proportion where the batch is another one; else equal ones, in
    multiples of what the tensor axes that divide rows ask for."""
    if not plan.shares:
        return row_shares(global_rows, plan.degree("dp"), row_unit(plan.axes))
    return plan.shares if global_rows == plan.global_batch else scaled_shares(plan.shares, global_rows)


def deal_rows(plan: Plan, global_rows: int) -> tuple[tuple[MicroBatch, ...], ...]:
    """Rows of every micro-batch of every data rank, in multiples of what the tensor axes that divide rows ask for.

    Raises UsageError where a data rank would get no row.
    """
    dp, unit = plan.degree("dp"), row_unit(plan.axes)
    if global_rows % unit:
        raise UsageError(f"a batch of {global_rows} rows is no multiple of {unit}, by which the tensor axes divide rows: use one that is, or another plan.")
    shares = data_shares(plan, global_rows)
    if any(share % unit for share in shares):
        raise UsageError(f"the plan's shares {shares} are no multiples of {unit}, by which the tensor axes divide rows: plan again.")
    least = min(shares)
    if least == 0:
        raise UsageError(f"a batch of {global_rows} rows does not reach {dp} data ranks: give at least {dp * unit} rows, or plan with a smaller dp.")
    count = plan.num_micro_batches
    if count > 1 and global_rows != plan.global_batch:
        count = min(math.ceil(max(shares) / plan.micro_batch_size), least // unit)
    if count * unit > least:
        raise UsageError(
            f"a batch of {global_rows} rows gives a data rank {least} rows, which do not fill {count} micro-batches: give at least {count * dp * unit} rows."
        )
    dealt, start = [], 0
    for share in shares:
        pieces = []
        for rows in row_shares(share, count, unit):
            pieces.append(MicroBatch(start, start + rows))
            start += rows
        dealt.append(tuple(pieces))
    return tuple(dealt)


def tensor_options(graph: Graph, plan: Plan, number: int) -> tuple[Option, ...]:
    """The option of every op on the plan's feature axis of this number, by block pattern."""
    axes = feature_axes(plan.axes) or (("tp", 1),)
    name, degree = axes[number]
    by_pattern = {block.pattern: block for block in plan.blocks}
    first = {block.pattern: block for block in reversed(graph.blocks)}
    chosen: list[Option] = []
    for block in graph.blocks:
        splits = by_pattern[block.pattern].splits if block.pattern in by_pattern else {}
        model = first[block.pattern]
        for offset in range(block.stop - block.start):
            op = graph.ops[block.start + offset]
            labels = parted(splits.get(graph.ops[model.start + offset].name, ""), len(axes))
            label = labels[number] if len(labels) == len(axes) else str(labels)
            more = gathered_loops(graph, op) if "~" in label else ()
            found = next((option for option in options(graph, op, degree, more) if option.label == label), None)
            if found is None:
                raise UsageError(
                    f"the plan splits {op.name} ({op.instr.target} in {op.module}) as {label!r} on the axis {name!r}, which {degree} ranks cannot: "
                    "plan again for this model."
                )
            chosen.append(found)
    return tuple(chosen)


def lower(plan: Plan, graph: Graph, global_rows: int | None = None, *, data_rank: int = 0, outputs: bool = False) -> tuple[Program, ...]:
    """One program for each "pp" coordinate, for a global batch of `global_rows` rows (default: the plan's).

    `data_rank` matters only to the preamble where data ranks have unequal rows. `outputs` keeps the model's outputs besides
    the loss (evaluation). Raises UsageError for rows that cannot be dealt.
    An asynchronous plan's program is that of the worker `data_rank`; evaluation is synchronous.
    """
    rows = plan.global_batch if global_rows is None else global_rows
    if plan.sync == "async" and not outputs:
        return _worker(plan, graph, rows, data_rank)
    graph = arranged(graph, plan)
    context = _context(plan, graph, outputs)
    dealt = deal_rows(plan, rows)
    if len(dealt[0]) > 1 and context.batch.blocker is not None:
        raise UsageError(f"the plan has {len(dealt[0])} micro-batches, but {context.batch.blocker}: use one micro-batch.")
    sizes = sorted({mb.stop - mb.start for share in dealt for mb in share}, reverse=True)
    local_rows = tuple(share[-1].stop - share[0].start for share in dealt)
    preamble, feeds, kept, given = _preamble(context, Rows(local_rows[data_rank], rows, 1 / plan.degree("dp"), len(set(local_rows)) == 1))
    context = replace(context, given=given)
    needs = _parameter_needs(context)
    context = replace(context, axes=_with_rest(context, needs))
    share = 1 / (plan.degree("dp") * len(dealt[0]))
    stages = []
    for number in range(len(plan.stages)):
        lowered = [_stage(context, number, needs, Rows(size, rows, share, len(set(local_rows)) == 1)) for size in sizes]
        stages.append(replace(lowered[0], bodies=tuple(stage.bodies[0] for stage in lowered)))
    stages = _with_sends(stages)
    stage_ranks = tuple(stage.rank for stage in plan.stages)
    stages, readers = _with_kept(stages, stage_ranks, preamble, kept)
    programs = []
    for coordinate in range(plan.degree("pp")):
        own = tuple(stage for stage in stages if stage_ranks[stage.index] == coordinate)
        wanted = preamble is not None and any(stage.index in readers for stage in own)
        programs.append(
            Program(
                axes=plan.axes,
                num_stages=len(plan.stages),
                stage_ranks=stage_ranks,
                stages=own,
                schedule=plan.schedule,
                micro_batches=dealt,
                preamble=preamble if wanted else None,
                preamble_feeds=feeds if wanted else (),
                preamble_rows=local_rows,
                zero=plan.zero,
                zero_group=plan.zero_group,
                global_rows=rows,
                sync=plan.sync if plan.sync == "ps" else "allreduce",
                servers=plan.servers,
                compression=plan.compression or "",
                delay=plan.delay,
            )
        )
    return tuple(programs)


def _worker(plan: Plan, graph: Graph, rows: int, data_rank: int) -> tuple[Program, ...]:
    """The program of one asynchronous worker: its own rows of the batch as a batch of their own, with nobody on the data axis."""
    dp, shares = plan.degree("dp"), data_shares(plan, rows)
    if min(shares) == 0:
        raise UsageError(f"a batch of {rows} rows does not reach {dp} workers: give at least {dp} rows, or plan with a smaller dp.")
    axes = tuple((axis, 1 if axis == "dp" else size) for axis, size in plan.axes)
    planned = data_shares(plan, plan.global_batch)[data_rank]
    alone = replace(plan, axes=axes, sync="allreduce", servers=(), staleness=None, global_batch=planned, shares=())
    start = sum(shares[:data_rank])
    found = []
    for program in lower(alone, graph, shares[data_rank]):
        dealt = tuple(tuple(MicroBatch(m.start + start, m.stop + start) for m in own) for own in program.micro_batches)
        found.append(replace(program, micro_batches=dealt, global_rows=rows, sync=plan.sync, servers=served_by(plan), staleness=plan.staleness))
    return tuple(found)


def _context(plan: Plan, graph: Graph, outputs: bool) -> _Context:
    batch = batch_axis(graph)
    inputs = {name: WHOLE for name in graph.values if graph.values[name].kind != "activation"} | dict.fromkeys(batch.preamble_outputs, WHOLE)
    data_rest = {name: batch.layouts[name] for name in inputs}
    axes = [AxisAssignment("dp", plan.degree("dp"), batch.options, data_rest)]
    for name in ("cp", "ep"):
        if plan.degree(name) > 1:
            divided = context_axis(graph, name, batch.preamble_outputs, plan.context or DEFAULT_WAY)
            check_context(graph, name, plan.degree(name), divided, plan.context or None)
            axes.append(AxisAssignment(name, plan.degree(name), divided.options, inputs, divided.factors))
    row_rest = {name: batch.layouts[name] if graph.values[name].kind == "parameter" else WHOLE for name in inputs}
    axes += [AxisAssignment(name, degree, batch.options, row_rest) for name, degree in row_axes(plan.axes)]
    features = feature_axes(plan.axes) or (("tp", 1),)
    axes += [AxisAssignment(name, degree, tensor_options(graph, plan, number), inputs) for number, (name, degree) in enumerate(features)]
    results = training_results(graph) + (graph.outputs if outputs and graph.loss is not None else ())
    ops = step_ops(graph, results, frozenset(batch.preamble_outputs))
    stage_of_block = {block: number for number, stage in enumerate(plan.stages) for block in range(stage.start, stage.stop)}
    stage_of_op = {i: stage_of_block[number] for number, block in enumerate(graph.blocks) for i in range(block.start, block.stop)}
    running = frozenset(ops)
    edges = {  # boundaries speak of one tensor axis
        name: (batch.layouts[name], layout)
        for name, layout in (edge_layouts(graph, plan).items() if len(axes) == 2 else ())
        if graph.producer[name] in running and name not in batch.preamble_outputs
    }
    return _Context(graph, plan, batch, tuple(axes), ops, results, stage_of_op, {}, edges)


def _preamble(context: _Context, rows: Rows) -> tuple[BlockCode | None, tuple[Feed, ...], tuple[Stored, ...], dict[str, str]]:
    """The preamble's code, what it reads of the batch, the constants that it keeps, and the local names of what it gives."""
    graph, batch = context.graph, context.batch
    if not batch.preamble_outputs:
        return None, (), (), {}
    whole = [Option("whole", (WHOLE,) * len(op.operands), (WHOLE,) * len(op.outputs)) for op in graph.ops]
    made = set(batch.preamble_outputs)
    before = replace(context.axes[0], rest={name: layout for name, layout in context.axes[0].rest.items() if name not in made})
    rest = dict.fromkeys(before.rest, WHOLE)
    emitter = Emitter(graph, [before, *(replace(axis, options=whole, rest=rest) for axis in context.axes[1:])], rows, {})
    emitter.begin()
    for index in batch.preamble:
        emitter.emit(index)
    rest_axes = (WHOLE,) * (len(context.axes) - 1)
    given = {name: emitter.read(name, (batch.layouts[name], *rest_axes)) for name in batch.preamble_outputs}
    code = BlockCode("preamble", tuple(emitter.external), tuple(emitter.stored), tuple(emitter.pieces[0]), tuple(dict.fromkeys(given.values())))
    kept = tuple(_stored(context, emitter, local) for local in emitter.stored)
    assert all(stored.kind in ("constant", "buffer") for stored in kept), "the preamble reads the batch, constants and buffers alone"
    return code, tuple(_feed(graph, name) for name in emitter.external), kept, given


def _with_kept(
    stages: list[StageCode], stage_ranks: tuple[int, ...], preamble: BlockCode | None, kept: tuple[Stored, ...]
) -> tuple[list[StageCode], frozenset[int]]:
    """The stages with what the preamble reads, held by the first stage of every rank that runs it; and those first stages."""
    if preamble is None:
        return stages, frozenset()
    made = frozenset(preamble.outputs)
    wanting = {stage_ranks[s.index] for s in stages if any(made & set(block.inputs) for body in s.bodies for block in body.blocks)}
    first = frozenset(min(s.index for s in stages if stage_ranks[s.index] == rank) for rank in wanting)
    shared = {stored.name for stored in kept if stored.kind == "buffer"}
    holders = {name: {s.index for s in stages if any(stored.name == name for stored in s.stored)} | first for name in shared}

    def held(stage: StageCode) -> StageCode:
        names = {stored.name for stored in stage.stored}
        stored = stage.stored + (tuple(s for s in kept if s.name not in names) if stage.index in first else ())
        return replace(stage, stored=tuple(replace(s, stages=tuple(sorted(holders[s.name]))) if s.name in shared else s for s in stored))

    return [held(stage) for stage in stages], first


def _feed(graph: Graph, name: str) -> Feed:
    value = graph.values[name]
    has_rows = bool(value.dims) and graph.batch_factor is not None and graph.batch_factor in value.dims[0]
    return Feed(name, value.fqn, value.spec, 0 if has_rows else None)


def _parameter_needs(context: _Context) -> dict[str, tuple[tuple[Layout, ...], ...]]:
    """For every parameter or buffer: how it is read on each axis, over all its uses (one tuple for each axis)."""
    graph = context.graph
    found: dict[str, list[dict[Layout, None]]] = {}
    for index in context.ops:
        for i, name in enumerate(graph.ops[index].operands):
            if graph.values[name].kind in ("parameter", "buffer"):
                uses = found.setdefault(name, [{} for _ in context.axes])
                for axis, seen in zip(context.axes, uses, strict=True):
                    seen[axis.options[index].reads[i]] = None
    for index in context.batch.preamble:
        for name in graph.ops[index].operands:
            if graph.values[name].kind == "buffer":
                for seen in found.setdefault(name, [{} for _ in context.axes]):
                    seen[WHOLE] = None
    return {name: tuple(tuple(seen) for seen in uses) for name, uses in found.items()}


def _with_rest(context: _Context, needs: Mapping[str, tuple[tuple[Layout, ...], ...]]) -> tuple[AxisAssignment, ...]:
    """The tensor axes with the layout at rest of every parameter and buffer; on axes that gather them, with the options that do."""
    axes = [context.axes[0]]
    for number, axis in enumerate(context.axes[1:], start=1):
        rest = dict(axis.rest)
        for name, by_axis in needs.items() if ROLES.get(axis.name, "features") == "features" else ():
            reads = by_axis[number]
            if len(reads) == 1 and isinstance(reads[0], Split):
                rest[name] = reads[0]
            elif reads == (VARY,):
                rest[name] = VARY
        axes.append(replace(axis, rest=rest))
    return tuple(_gathered(context, axes, axis) if ROLES.get(axis.name) == "gathered" else axis for axis in axes)


def _gathered(context: _Context, axes: Sequence[AxisAssignment], axis: AxisAssignment) -> AxisAssignment:
    """`axis` with its parameters divided at rest, and the products that gather them inside."""
    graph = context.graph
    others = [other for other in axes if ROLES.get(other.name) == "features"]
    step = frozenset(context.ops)
    users = {value.name: [i for i in graph.consumers.get(value.name, ()) if i in step] for value in graph.parameters()}
    wanted = wanted_rest(graph, [other.options for other in others], users)
    rest = dict(axis.rest)
    for value in graph.parameters():
        place = resting(graph, value, [(other.rest[value.name], other.degree) for other in others], axis.degree, wanted[value.name])
        rest[value.name] = rest[value.name] if place is None else place
    return replace(axis, options=row_options(graph, context.batch, rest, [other.options for other in others]), rest=rest)


def _stage(context: _Context, number: int, needs: Mapping[str, object], rows: Rows) -> StageCode:
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
    codes = _blocks(context, emitter, spans, keep)
    updates = tuple((buffer, finals[value]) for buffer, value in graph.buffer_updates if value in finals)
    updated = [buffer for buffer, _ in updates if buffer not in emitter.stored]
    for name in updated:
        emitter.read(name, emitter.produced(name))
    feeds = tuple(_feed(graph, name) for local, name in emitter.external.items() if graph.values[name].kind == "input")
    receives = tuple(_receives(context, emitter, number))
    partial = () if loss is None else _loss_axes(context)
    predictions = tuple(finals[name] for name in graph.outputs if name in finals)
    for value in graph.values.values():
        if number == 0 and value.kind in ("parameter", "buffer") and value.name not in needs and value.name not in emitter.stored:
            emitter.read(value.name, emitter.produced(value.name))  # what the step does not use is kept by the first stage
    stored = tuple(_stored(context, emitter, local) for local in emitter.stored)
    return StageCode(number, stored, feeds, (Body(rows.local, codes, receives, ()),), loss, partial, updates, predictions)


def _finals(context: _Context, emitter: Emitter, number: int) -> tuple[dict[str, str], str | None]:
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


def _loss_axes(context: _Context) -> tuple[str, ...]:
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


def _leaving(context: _Context, number: int) -> tuple[str, ...]:
    """Values made in this stage that a later stage reads, in the order in which they are made."""
    graph, step = context.graph, context.step
    found: list[str] = []
    for index in context.ops_of_stage.get(number, ()):
        for name in graph.ops[index].outputs:
            if name not in context.given and any(c in step and context.stage_of_op[c] != number for c in graph.consumers.get(name, ())):
                found.append(name)
    return tuple(found)


def _receives(context: _Context, emitter: Emitter, number: int) -> list[Transfer]:
    graph = context.graph
    found = []
    for local, name in emitter.external.items():
        if graph.values[name].kind == "activation" and name not in context.given:
            source = _holder(context, name, number)
            found.append(Transfer(local, source, number, emitter.specs[local], graph.values[name].requires_grad))
    return found


def _holder(context: _Context, name: str, number: int) -> int:
    """The stage from which stage `number` gets a value: the one that makes it, or an earlier one of its own rank that received it."""
    graph, ranks = context.graph, [stage.rank for stage in context.plan.stages]
    source, step = context.stage_of_op[graph.producer[name]], context.step
    if ranks[source] == ranks[number]:
        return source
    readers = {context.stage_of_op[i] for i in graph.consumers.get(name, ()) if i in step}
    return min((stage for stage in readers if stage < number and ranks[stage] == ranks[number]), default=source)


def _blocks(context: _Context, emitter: Emitter, spans: range, keep: set[str]) -> tuple[BlockCode, ...]:
    """The stage's blocks with what crosses between them."""
    graph = context.graph
    recompute = {block.pattern: block.recompute for block in context.plan.blocks}
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
        how = recompute.get(graph.blocks[block].pattern, "none")
        assert how in ("none", "selective", "full")
        code = fuse_bias(BlockCode(graph.blocks[block].name, inputs, stored, tuple(instrs), outputs, how))
        if instrs:
            codes.append(code)
    return tuple(codes)


def _stored(context: _Context, emitter: Emitter, local: str) -> Stored:
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


def _with_sends(stages: Sequence[StageCode]) -> list[StageCode]:
    """Add to every stage the transfers that later stages receive from it."""
    result = []
    for stage in stages:
        bodies = []
        for number, body in enumerate(stage.bodies):
            sends = tuple(t for other in stages for t in other.bodies[number].receives if t.src == stage.index)
            bodies.append(replace(body, sends=sends))
        result.append(replace(stage, bodies=tuple(bodies)))
    return result
