"""From a graph and prices to a plan: search, forecast of the best few, reasons."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from autoplan.constraints import Constraints
from autoplan.errors import InfeasibleError
from autoplan.explore import Searcher, too_large
from autoplan.forecast import MEMORY_KINDS, Forecast
from autoplan.graph import Graph
from autoplan.lower import lower
from autoplan.notes import blocks_of_pattern, op_notes
from autoplan.outcome import Outcome, Result
from autoplan.plan import Alternative, BlockPlan, Plan, StagePlan
from autoplan.rankmemory import by_rank
from autoplan.simulate import assemble, forecast
from autoplan.space import MIXED, RECOMPUTES
from autoplan.task import Task
from autoplan.units import figures, num_bytes, seconds
from autoplan.workload import model_of
from costmodel.cluster import Cluster
from costmodel.prices import Prices

_NUM_ALTERNATIVES = 5
_NUM_FINALISTS = 3
_NUM_SEARCHES = 4  # with less memory each, where programs need more than was thought
_CLOSE = 1.02  # times of the best, within which finalists are lowered too
_MANY_OPS = 1000  # of a graph, beyond which the best alone is lowered: its price is the same before and after


def search(
    graph: Graph,
    cluster: Cluster,
    prices: Prices,
    constraints: Constraints,
    *,
    optimizer: str = "adamw",
    precision: str | None = None,
    time_limit_s: float | None = None,
) -> Plan:
    """The best plan of the space, its proved gap, its runners-up and why they lost.

    Raises InfeasibleError where no plan satisfies the constraints or fits the memory, AutoplanError where the solver fails.
    With `time_limit_s` the best plan found by then, with its true gap.
    """
    task = Task(graph, cluster, prices, constraints, optimizer, precision, time_limit_s)
    from autoplan.unequal import is_unequal, unequal_search

    if is_unequal(prices, cluster.num_devices):
        if constraints.sync not in (None, "allreduce"):
            raise InfeasibleError(f"constraint sync={constraints.sync!r} cannot be had on unequal devices: leave it out, or plan for like devices")
        if constraints.placement is not None:
            raise InfeasibleError("constraint placement cannot be had on unequal devices yet: leave it out, or plan for like devices")
        for name, ways in (("schedule", (None, "1f1b", "gpipe")), ("num_chunks", (None, 1))):
            if (asked := getattr(constraints, name)) not in ways:
                fix = " or ".join(f"{name}={way!r}" for way in ways if way is not None)
                raise InfeasibleError(f"constraint {name}={asked!r} cannot be had on unequal devices: their stages run in order, one on each. Use {fix}")
        if (constraints.ep or 1) > 1:
            raise InfeasibleError(
                f"constraint ep={constraints.ep} cannot be had on unequal devices: rows are dealt by speed. Use ep=1, or plan for like devices"
            )
        return unequal_search(task, plan_of)
    if constraints.placement is not None:
        from autoplan.placed import placed_search  # which searches for each placement

        return placed_search(task, constraints.placement, search_task)
    return search_task(task)


def search_task(task: Task) -> Plan:
    """The best plan of one search. Raises InfeasibleError where nothing fits.

    The search weighs plans from its own choices. Where every plan that it found has a program that needs more than there is, it searches again with as
    much less memory as the nearest program missed; the first bounds hold for all of these plans.
    """
    asked, limit_bytes, bounds = task, 0, {}
    dropped: list[Result] = []
    for _ in range(_NUM_SEARCHES):
        searcher = Searcher(task)
        outcome = searcher.run()
        limit_bytes = limit_bytes or searcher.shapes.limit_bytes
        bounds = bounds or dict(outcome.bounds)
        if not outcome.fitting:
            break
        plan, missed_bytes = _confirmed(searcher, replace(outcome, bounds=bounds), dropped, limit_bytes)
        if plan is not None:
            return plan
        task = replace(task, constraints=replace(asked.constraints, max_memory_bytes=max(1, limit_bytes - missed_bytes)))
    rest = dropped or [replace(result, limit_bytes=limit_bytes) for result in outcome.too_large]
    raise too_large(replace(outcome, too_large=rest, fitting=[]), asked)


def _confirmed(searcher: Searcher, outcome: Outcome, dropped: list[Result], limit_bytes: int) -> tuple[Plan | None, int]:
    """The best plan once the best few were lowered and replayed from their programs, which is what their forecasts say; None where all are `dropped`, to which
    those that need more than `limit_bytes` are added with their program's memory, and the bytes by which programs need more than was thought, at least."""
    task = searcher.task
    best_s = outcome.best().step_s
    ranked = sorted(outcome.fitting, key=lambda r: r.order)
    several = len(task.graph.ops) <= _MANY_OPS
    found: list[tuple[Plan, Result]] = []
    refused: list[Result] = []
    missed: list[int] = []
    for result in ranked:
        close = result.step_s <= best_s * _CLOSE and len(found) < _NUM_FINALISTS and several
        if found and not close:
            break
        plan = plan_of(result, searcher, outcome)
        told = forecast(lower(plan, task.graph), plan, task.graph, task.prices, overlap=searcher.shapes.overlap)
        told = _limited(told, limit_bytes)
        if told.peak_memory_bytes <= limit_bytes:
            found.append((replace(plan, forecast=told), replace(result, limit_bytes=limit_bytes)))
        else:
            held = by_rank([stage.memory for stage in told.stages], result.stage_ranks)
            fullest = max(range(len(held)), key=lambda stage: held[stage].total)
            refused.append(result)
            missed.append(held[fullest].total - result.memory.total)
            dropped.append(replace(result, memory=held[fullest], fullest=fullest, limit_bytes=limit_bytes))
    if not found:
        return None, min(missed)
    kept = [result for result in outcome.fitting if not any(result is seen for seen in refused)]
    known = replace(outcome, fitting=kept, too_large=[*dropped, *outcome.too_large])
    plan, best = min(found, key=lambda pair: pair[0].forecast.step_time_s)
    return replace(plan, gap=known.gap(best), alternatives=alternatives(best, known), reasons=_reasons(best, known)), 0


def plan_of(best: Result, searcher: Searcher, outcome: Outcome) -> Plan:
    """The plan of one result, with everything that the search knows beside it."""
    task, graph, shape = searcher.task, searcher.task.graph, best.shape
    ranks = best.stage_ranks
    gathering = {send.dst for load in best.loads for send in load.sends if send.gathered_bytes}
    stages = tuple(
        StagePlan(a, b, graph.blocks[a].name, graph.blocks[b - 1].name, rank, number in gathering, best.modes[a:b])
        for number, (rank, a, b) in enumerate(zip(ranks, best.starts, best.starts[1:], strict=False))
    )
    return Plan(
        model=graph.name,
        model_fingerprint=graph.fingerprint,
        cluster=task.cluster.name,
        cluster_fingerprint=task.cluster.fingerprint(),
        global_batch=searcher.shapes.batch,
        micro_batch_size=shape.rows,
        num_micro_batches=shape.num_micro_batches,
        axes=shape.axes,
        zero=best.storing.zero,
        zero_group=task.constraints.zero_group if best.storing.zero else None,
        schedule=shape.schedule,
        num_chunks=max(ranks.count(rank) for rank in ranks),
        precision=task.precision,
        optimizer=task.optimizer,
        stages=stages,
        blocks=_block_plans(best, searcher),
        forecast=forecast_of(best, searcher),
        gap=outcome.gap(best),
        space=outcome.space.axes,
        alternatives=alternatives(best, outcome),
        reasons=_reasons(best, outcome),
        context=shape.context,
        placement=graph.runs,
        sync=task.constraints.sync or "allreduce",
        servers=task.constraints.servers or (),
        workers=task.constraints.workers or (),
        staleness=task.constraints.staleness,
        warnings=(*graph.warnings, *_warnings(searcher), *_mode_warnings(searcher, shape.dp)),
        compression=searcher.shapes.sums.compression or None,
        delay=searcher.shapes.sums.delay,
    )


def forecast_of(result: Result, searcher: Searcher) -> Forecast:
    """The search's own forecast of a result."""
    step = searcher.shapes.step(result.shape, result.storing)
    splits = {block.pattern: block.splits for block in _block_plans(result, searcher)}
    model = model_of(searcher.task.graph, splits, result.shape.tp, searcher.task.precision)
    told = assemble(result.loads, step, model, searcher.shapes.pricer)
    return _limited(told, result.limit_bytes)


def _limited(told: Forecast, limit_bytes: int) -> Forecast:
    return replace(told, stages=tuple(replace(s, memory_limit_bytes=min(limit_bytes, s.memory_limit_bytes)) for s in told.stages))


def _block_plans(best: Result, searcher: Searcher) -> tuple[BlockPlan, ...]:
    graph, outline = searcher.task.graph, searcher.shapes.outline
    has_layers = any(block.layer for block in graph.blocks)
    found = []
    for pattern, number in outline.examples.items():
        block = graph.blocks[number]
        labels = best.chosen.point(pattern).labels
        splits = {graph.ops[i].name: label for i, label in zip(outline.indices(block), labels, strict=True) if label != "whole"}
        enters, leaves = outline.boundary_of(number, best.chosen.boundary)
        boundary = {name: str(layout) for name, layout in (*enters.items(), *leaves)}
        recompute = best.storing.recompute if best.storing.recompute != MIXED and (block.layer or not has_layers) else "none"
        found.append(BlockPlan(pattern, block.name, splits, boundary, recompute, blocks_of_pattern(graph, pattern), op_notes(graph, block, splits)))
    return tuple(found)


def summary(result: Result) -> str:
    """ "pp 2, dp 4, tp 2, ZeRO 1, 1f1b, 8 micro-batches of 4"."""
    shape, storing = result.shape, result.storing
    ways = {"ring": " (ring attention)", "heads": " (attention by heads)", "": ""}
    parts = [f"{axis} {degree}{ways[shape.context] if axis == 'cp' else ''}" for axis, degree in shape.axes if degree > 1] or ["one device"]
    if storing.zero:
        parts.append(f"ZeRO {storing.zero}")
    if shape.pp > 1:
        parts.append(shape.schedule if shape.schedule != "interleaved" else f"interleaved {shape.num_chunks}")
    parts.append(f"{shape.num_micro_batches} x {shape.rows} rows")
    if storing.recompute == MIXED:
        counts = {way: sum(mode == way for mode in result.modes) for way in RECOMPUTES[1:]}
        parts += [f"recompute {way} in {number} layers" for way, number in counts.items() if number]
    elif storing.recompute != "none":
        parts.append(f"recompute {storing.recompute}")
    if result.chosen.boundary.factor is not None:
        parts.append("sequence split")
    return ", ".join(parts)


def alternatives(best: Result, outcome: Outcome) -> tuple[Alternative, ...]:
    """The best result of every other mesh and way of saving memory that was worked out, fastest first."""
    seen = {_kind(best)}
    found: list[Alternative] = []
    for result in sorted((*outcome.fitting, *outcome.too_large), key=lambda r: (not r.fits, r.order)):
        if _kind(result) not in seen and len(found) < _NUM_ALTERNATIVES:
            seen.add(_kind(result))
            found.append(Alternative(summary(result), result.step_s, result.memory.total, why_lost(result, best)))
    return tuple(found)


def _kind(result: Result) -> tuple:
    return (result.shape.axes, result.storing.zero)


def fullest_of(result: Result) -> str:
    """The stage with the most memory; the pipeline rank, where one has several stages."""
    ranks = result.stage_ranks
    return f"pipeline rank {ranks[result.fullest]}" if len(set(ranks)) < len(ranks) else f"stage {result.fullest}"


def why_lost(result: Result, best: Result) -> str:
    """The reason in one line: memory and its kind, or the part of the time that grew most."""
    if not result.fits:
        kinds = {name: getattr(result.memory, name) for name in MEMORY_KINDS}
        kind = max(kinds, key=lambda name: kinds[name])
        over = result.memory.total - result.limit_bytes
        return f"does not fit: {fullest_of(result)} needs {num_bytes(over)} more than the limit, mostly {kind} ({num_bytes(kinds[kind])})"
    slower = result.step_s / best.step_s - 1
    if slower <= 0:
        return "as fast, needs more memory"
    mine, theirs = parts_of(best), parts_of(result)
    part = max(theirs, key=lambda name: theirs[name] - mine[name])
    stage = max(range(len(result.loads)), key=lambda j: result.loads[j].slot_s)
    where = f" on stage {stage}" if result.shape.pp > 1 and part in ("operators", "tensor collectives", "recomputation") else ""
    return f"{figures(100 * slower)} % slower: {part}{where} take {seconds(theirs[part])} instead of {seconds(mine[part])}"


def parts_of(result: Result) -> dict[str, float]:
    """Seconds of a step on the slowest stage, by what they are spent on."""
    m = result.shape.num_micro_batches
    stage = max(range(len(result.loads)), key=lambda j: result.loads[j].slot_s)
    ranks = result.stage_ranks
    own = [j for j in range(len(result.loads)) if ranks[j] == ranks[stage]]  # the stages of its rank
    loads, times = [result.loads[j] for j in own], [result.times[j] for j in own]
    passes, tail_s = sum(time.passes_s(m) for time in times), sum(time.tail_s for time in times)
    found = {
        "operators": m * sum(load.forward.compute_s + load.backward.compute_s for load in loads),
        "tensor collectives": m * sum(load.forward.collective_s + load.backward.collective_s for load in loads),
        "recomputation": m * sum(load.recompute.seconds for load in loads),
        "parameter gathers": max(0.0, passes - m * sum(load.slot_s for load in loads)),
        "idle times of the pipeline": max(0.0, result.step_s - passes - tail_s),
        "gradient sums and optimizer": tail_s,
    }
    return {name: spent if spent > 1e-9 * result.step_s else 0.0 for name, spent in found.items()}


def _reasons(best: Result, outcome: Outcome) -> tuple[str, ...]:
    parts = parts_of(best)
    shares = sorted(((name, spent) for name, spent in parts.items() if spent > 0.005 * best.step_s), key=lambda item: -item[1])
    lines = ["the step spends " + ", ".join(f"{spent / best.step_s:.0%} on {name}" for name, spent in shares)]
    lines.append(f"{fullest_of(best)} is the fullest: {num_bytes(best.memory.total)} of {num_bytes(best.limit_bytes)}")
    fitting = {(r.shape.axes, r.storing) for r in outcome.fitting}
    lines.append(
        f"{len(outcome.bounds)} combinations of mesh, micro-batch and schedule: {len(outcome.worked_out)} worked out, "
        f"the others proved no better by a lower bound; {len(fitting)} meshes and ways of storing fit"
    )
    return tuple(lines)


def _mode_warnings(searcher: Searcher, num_replicas: int) -> Iterable[str]:
    sums = searcher.shapes.sums
    if sums.is_own and num_replicas == 1:
        yield "compressed or late gradients change nothing here: there is one data rank, and nothing is summed over it"
    elif sums.compression:
        yield f"gradients are sent as {sums.compression}: what is not sent stays as a residual and is sent later, so a step's gradients are not the exact ones"
    if sums.delay and num_replicas > 1:
        yield "a step leaves the gradients of the step before it (delay 1); the first step leaves none"


def _warnings(searcher: Searcher) -> Iterable[str]:
    graph, batch = searcher.task.graph, searcher.shapes.outline.batch
    if graph.loss is None:
        yield f"{graph.name} gives no loss, so this is a plan of its forward pass: to train, give labels in the batch, or loss_fn"
    if batch.blocker is not None and searcher.shapes.batch > 1:
        yield f"one micro-batch only: {batch.blocker}"
    if searcher.task.constraints.sync == "async":
        yield (
            "asynchronous: every worker's gradient updates the weights by itself, in the order in which it arrives, so a step is not the one of the whole "
            "batch and runs differ; docs/training-modes.md says what still holds"
        )
    total = sum(op.flops for op in graph.ops)
    whole = [op for op in graph.ops if not op.loops and op.flops]
    if whole and total:
        share = sum(op.flops for op in whole) / total
        names = ", ".join(sorted({op.instr.target for op in whole}))
        yield f"{share:.1%} of the FLOPs are in operators without a rule and stay whole: {names}"
