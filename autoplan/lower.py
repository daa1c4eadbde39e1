"""Lowering: a plan and a graph become one program for each pipeline coordinate.

Every operator has an option on the data axis (autoplan/batchaxis.py) and on each tensor axis (autoplan/schemes.py; the plan's splits); the emitter
(autoplan/variants.py) writes the local instructions with the collectives that follow.

Rows are dealt first (autoplan/deal.py). What all stages share, the options and tensors at rest, is in autoplan/assignments.py; each stage becomes code
in autoplan/stagecode.py, once for every number of rows that occurs. What is here puts the programs together: the preamble, which counts labels
before the first micro-batch, and the stages of every pipeline rank.
"""

from __future__ import annotations

from dataclasses import replace

from autoplan.arrange import arranged
from autoplan.assignments import Lowering, lowering, parameter_needs, with_rest
from autoplan.deal import data_shares, deal_rows
from autoplan.errors import UsageError
from autoplan.graph import Graph, Option
from autoplan.layout import WHOLE
from autoplan.plan import Plan, served_by
from autoplan.stagecode import feed_of, stage_code, stored_of, with_sends
from autoplan.variants import Emitter, Rows
from runtime.program import BlockCode, Feed, MicroBatch, Program, StageCode, Stored


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
    context = lowering(plan, graph, outputs)
    dealt = deal_rows(plan, rows)
    if len(dealt[0]) > 1 and context.batch.blocker is not None:
        raise UsageError(f"the plan has {len(dealt[0])} micro-batches, but {context.batch.blocker}: use one micro-batch.")
    sizes = sorted({mb.stop - mb.start for share in dealt for mb in share}, reverse=True)
    local_rows = tuple(share[-1].stop - share[0].start for share in dealt)
    preamble, feeds, kept, given = _preamble(context, Rows(local_rows[data_rank], rows, 1 / plan.degree("dp"), len(set(local_rows)) == 1))
    context = replace(context, given=given)
    needs = parameter_needs(context)
    context = replace(context, axes=with_rest(context, needs))
    share = 1 / (plan.degree("dp") * len(dealt[0]))
    stages = []
    for number in range(len(plan.stages)):
        lowered = [stage_code(context, number, needs, Rows(size, rows, share, len(set(local_rows)) == 1)) for size in sizes]
        stages.append(replace(lowered[0], bodies=tuple(stage.bodies[0] for stage in lowered)))
    stages = with_sends(stages)
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
