"""Lowering: a plan and a graph become one program for each pipeline coordinate.

Every operator has an option on the data axis (autoplan/batchaxis.py) and on each tensor axis (autoplan/schemes.py; the plan's splits); the emitter
(autoplan/variants.py) writes the local instructions with the collectives that follow.

Rows are dealt first (autoplan/deal.py). What all stages share, the options and tensors at rest, is in autoplan/assignments.py; each stage becomes code
in autoplan/stagecode.py, once for every number of rows that occurs. What is here puts the programs together: the preamble, which counts labels
before the first micro-batch, and the stages of every pipeline rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autoplan.arrange import arranged
from autoplan.assignments import Lowering, lowering, parameter_needs, with_rest
from autoplan.deal import data_shares, deal_rows
from autoplan.errors import UsageError
from autoplan.graph import Graph, Option
from autoplan.layout import WHOLE, Layout
from autoplan.plan import Plan, served_by, workers_of
from autoplan.schemes import Axes
from autoplan.serving import check_serving
from autoplan.stagecode import feed_of, stage_code, stored_of, with_sends
from autoplan.stagemeshes import check_stage_meshes, meshes_of
from autoplan.variants import AxisAssignment, Emitter, Rows
from runtime.program import BlockCode, Feed, MicroBatch, Program, StageCode, StageMesh, Stored


def lower(
    plan: Plan, graph: Graph, global_rows: int | None = None, *, data_rank: int | None = None, outputs: bool = False, only: tuple[int, ...] | None = None
) -> tuple[Program, ...]:
    """One program for each "pp" coordinate, for a global batch of `global_rows` rows (default: the plan's).

    `data_rank` (default: the first that computes) matters only to the preamble where data ranks have unequal rows. `outputs` keeps the model's
    outputs besides the loss (evaluation). `only`: the stages that are wanted, for prices. Raises UsageError for rows that cannot be dealt,
    InfeasibleError for a model whose passes need data ranks that serve alone.
    An asynchronous plan's program is that of the worker `data_rank`, or of the first for a rank that serves alone; evaluation is synchronous.
    """
    rows = plan.global_batch if global_rows is None else global_rows
    data_rank = workers_of(plan)[0] if data_rank is None else data_rank
    if plan.sync == "async" and not outputs:
        return _worker(plan, graph, rows, data_rank)
    graph = arranged(graph, plan)
    _check_buffers(plan, graph)
    sides = _sides(plan, graph, rows, data_rank, outputs)
    stage_ranks = tuple(stage.rank for stage in plan.stages)
    side_of = [sides[rank if plan.stage_meshes else 0] for rank in range(plan.degree("pp"))]
    stages = [_stage(side_of[stage.rank], number, rows) for number, stage in enumerate(plan.stages) if only is None or number in only]
    stages = with_sends(stages, [dict(side_of[rank].axes) for rank in stage_ranks] if plan.stage_meshes else None)
    preamble, feeds, kept = sides[0].preamble, sides[0].feeds, sides[0].kept
    stages, readers = _with_kept(stages, stage_ranks, preamble, kept)
    programs = []
    for coordinate, side in enumerate(side_of):
        own = tuple(stage for stage in stages if stage_ranks[stage.index] == coordinate)
        wanted = preamble is not None and any(stage.index in readers for stage in own)
        programs.append(
            Program(
                axes=side.axes,
                num_stages=len(plan.stages),
                stage_ranks=stage_ranks,
                stages=own,
                schedule=plan.schedule,
                micro_batches=side.dealt,
                preamble=preamble if wanted else None,
                preamble_feeds=feeds if wanted else (),
                preamble_rows=(rows,) * len(side.dealt) if plan.stage_meshes else side.local_rows,
                zero=plan.zero,
                zero_group=plan.zero_group,
                global_rows=rows,
                sync=plan.sync if plan.sync == "ps" else "allreduce",
                servers=plan.servers,
                workers=plan.workers,
                compression=plan.compression or "",
                delay=plan.delay,
                meshes=side.meshes,
            )
        )
    for program in programs if len(workers_of(plan)) < plan.degree("dp") else ():
        check_serving(program)
    return tuple(programs)


def _check_buffers(plan: Plan, graph: Graph) -> None:
    """Raises UsageError where a buffer that the step updates is used on several stages, of which one alone would have its new value."""
    stage_of = {number: s for s, stage in enumerate(plan.stages) for number in range(stage.start, stage.stop)}
    block_of = {i: number for number, block in enumerate(graph.blocks) for i in range(block.start, block.stop)}
    for buffer, value in graph.buffer_updates:
        uses = [*graph.consumers.get(buffer, ()), *([graph.producer[value]] if value in graph.producer else [])]
        stages = sorted({stage_of[block_of[i]] for i in uses})
        if len(stages) > 1:
            name = graph.values[buffer].fqn or buffer
            raise UsageError(
                f"buffer {name} is updated by every step and used on stages {', '.join(map(str, stages))}: keep all that uses it on one stage, or use one stage"
            )


@dataclass(frozen=True)
class _Side:
    """What the stages of one mesh share: `dealt` are the micro-batches of its data ranks, `meshes` those of all "pp" coordinates where they
    are not alike, `preamble` the code that runs before the first micro-batch, with what it reads and keeps."""

    axes: Axes
    context: Lowering
    needs: Mapping[str, tuple[tuple[Layout, ...], ...]]
    dealt: tuple[tuple[MicroBatch, ...], ...]
    meshes: tuple[StageMesh, ...]
    preamble: BlockCode | None
    feeds: tuple[Feed, ...]
    kept: tuple[Stored, ...]

    @property
    def local_rows(self) -> tuple[int, ...]:
        """Rows of every data rank in a step."""
        return tuple(sum(mb.stop - mb.start for mb in share) for share in self.dealt)

    @property
    def is_even(self) -> bool:
        """Whether all data ranks that compute have equally many rows at once."""
        pieces = zip(*self.dealt, strict=True) if self.meshes else [self.local_rows]
        sizes = [[p if isinstance(p, int) else p.stop - p.start for p in own if p] for own in pieces]
        return all(len(set(own)) == 1 for own in sizes)


def _sides(plan: Plan, graph: Graph, rows: int, data_rank: int, outputs: bool) -> tuple[_Side, ...]:
    """One for all stages, or one for each "pp" coordinate where they have meshes of their own."""
    if plan.stage_meshes:
        check_stage_meshes(plan)
    dealt = deal_rows(plan, rows)
    meshes = meshes_of(plan, dealt[0]) if plan.stage_meshes else ()
    if not meshes:
        return (_side(plan, graph, plan.axes, dealt, (), rows, data_rank, outputs),)
    return tuple(_side(plan, graph, plan.axes_of(number), mesh.micro_batches, meshes, rows, 0, outputs) for number, mesh in enumerate(meshes))


def _side(
    plan: Plan,
    graph: Graph,
    axes: Axes,
    dealt: tuple[tuple[MicroBatch, ...], ...],
    meshes: tuple[StageMesh, ...],
    rows: int,
    data_rank: int,
    outputs: bool,
) -> _Side:
    asked = ("lowering", outputs, axes, repr(plan.blocks), plan.stages, plan.stage_meshes, plan.context)  # all that this needs of a plan
    context, needs, rested = graph.known(asked, lambda: _rested(lowering(plan, graph, outputs, axes)))
    context = replace(context, plan=plan)
    if len(dealt[0]) > 1 and context.batch.blocker is not None:
        raise UsageError(f"the plan has {len(dealt[0])} micro-batches, but {context.batch.blocker}: use one micro-batch.")
    side = _Side(axes, context, {}, dealt, meshes, None, (), ())
    if meshes:  # every rank counts the labels of all rows
        alone = replace(context, axes=(replace(context.axes[0], degree=1), *context.axes[1:]))
        preamble, feeds, kept, given = _preamble(alone, Rows(rows, rows, 1.0, True))
    else:
        own = side.local_rows[data_rank]
        everywhere = side.is_even and min(side.local_rows) > 0
        preamble, feeds, kept, given = _preamble(context, Rows(own, rows, 1 / len(workers_of(plan)) if own else 0.0, everywhere))
    return replace(side, context=replace(context, given=given, axes=rested), needs=needs, preamble=preamble, feeds=feeds, kept=kept)


def _rested(context: Lowering) -> tuple[Lowering, Mapping[str, tuple[tuple[Layout, ...], ...]], tuple[AxisAssignment, ...]]:
    """A lowering, how its parameters are read, and its axes with where they rest."""
    needs = parameter_needs(context)
    return context, needs, with_rest(context, needs)


def _stage(side: _Side, number: int, rows: int) -> StageCode:
    """One stage, with a body for every number of rows that occurs."""
    sizes = sorted({mb.stop - mb.start for share in side.dealt for mb in share}, reverse=True)
    share = 1 / sum(len(own) for own in side.dealt)
    lowered = [stage_code(side.context, number, side.needs, Rows(size, rows, share, side.is_even)) for size in sizes]
    return replace(lowered[0], bodies=tuple(stage.bodies[0] for stage in lowered))


def _worker(plan: Plan, graph: Graph, rows: int, data_rank: int) -> tuple[Program, ...]:
    """The program of one asynchronous worker: its own rows of the batch as a batch of their own, with nobody on the data axis."""
    dp, shares = len(workers_of(plan)), data_shares(plan, rows)
    data_rank = data_rank if data_rank in workers_of(plan) else workers_of(plan)[0]
    if min(shares[worker] for worker in workers_of(plan)) == 0:
        raise UsageError(f"a batch of {rows} rows does not reach {dp} workers: give at least {dp} rows, or plan with a smaller dp.")
    axes = tuple((axis, 1 if axis == "dp" else size) for axis, size in plan.axes)
    planned = data_shares(plan, plan.global_batch)[data_rank]
    alone = replace(plan, axes=axes, sync="allreduce", servers=(), workers=(), staleness=None, global_batch=planned, shares=())
    start = sum(shares[:data_rank])
    found = []
    for program in lower(alone, graph, shares[data_rank]):
        dealt = tuple(tuple(MicroBatch(m.start + start, m.stop + start) for m in own) for own in program.micro_batches)
        served = replace(program, sync=plan.sync, servers=served_by(plan), workers=workers_of(plan), staleness=plan.staleness)
        found.append(replace(served, micro_batches=dealt, global_rows=rows))
    return tuple(found)


def _preamble(context: Lowering, rows: Rows) -> tuple[BlockCode | None, tuple[Feed, ...], tuple[Stored, ...], dict[str, str]]:
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
    kept = tuple(stored_of(context, emitter, local) for local in emitter.stored)
    assert all(stored.kind in ("constant", "buffer") for stored in kept), "the preamble reads the batch, constants and buffers alone"
    return code, tuple(feed_of(graph, name) for name in emitter.external), kept, given


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
