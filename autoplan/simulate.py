"""Forecasts: loads of the stages, replayed (autoplan/replay.py), as the figures and the timeline that a plan carries.

`forecast` reads the loads off the lowered program, so that what is priced is what runs; the search assembles the same
from its own choices. MFU = 3 * (FLOPs of the forward pass) / (step time * peak of all devices), recomputation not counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autoplan.arrange import arranged
from autoplan.datasums import Mode
from autoplan.forecast import CollectiveUse, Event, Forecast, Memory, StageForecast
from autoplan.graph import Graph
from autoplan.load import Model, StageLoad
from autoplan.plan import Plan, served_by
from autoplan.price import Pricer, axis_group, precision_left
from autoplan.rankmemory import by_rank, memories
from autoplan.replay import Durations, Step, Timeline, durations, late_s, replay, stage_widths, tails_s
from autoplan.workload import load_of, model_of
from costmodel.opkey import RankGroup
from costmodel.prices import Prices
from runtime.program import Program
from runtime.traffic import traffic

LATE = " of the step before"  # ends the names of late sums
MAX_EVENTS = 2000  # kept of a step, so that plan files stay small


def assemble(
    loads: tuple[StageLoad, ...],
    step: Step,
    model: Model,
    pricer: Pricer,
    *,
    times: tuple[Durations, ...] | None = None,
    line: Timeline | None = None,
    with_events: bool = True,
) -> Forecast:
    """The forecast of a step from the loads of its stages, on the ranks that share a pipeline with `pricer.device`; `times` and what they make of the
    step where they are known."""
    times = times or tuple(durations(load, step, pricer) for load in loads)
    line = line or replay(loads, times, step, pricer)
    tails, kept = tails_s(times, step), memories(loads, step)
    step_s = max(late_s(times, step), *(end + tail for end, tail in zip(line.end_s, tails, strict=True)))
    line_of = axis_group(step.axes, "pp", pricer.device)
    forecasts = []
    for load, time in zip(loads, times, strict=True):
        rank = step.stage_ranks[load.index]
        limit_bytes = pricer.prices.memory_limit_bytes(line_of.start + rank * line_of.stride)
        forecasts.append(stage_forecast(load, time, step, line.busy_s[rank] + tails[rank], step_s, kept[load.index], limit_bytes))
    world = math.prod(size for _, size in step.axes)
    peak = pricer.prices.peak_flops_per_s(model.dtype) * world
    return Forecast(
        step_time_s=step_s,
        peak_memory_bytes=max(memory.total for memory in by_rank(kept, step.stage_ranks)),
        tokens_per_s=model.tokens / step_s if step_s else 0.0,
        mfu=3 * model.flops / (step_s * peak) if step_s and peak else 0.0,
        bubble=sum(idle_s(step_s, busy + tail) for busy, tail in zip(line.busy_s, tails, strict=True)) / (step_s * len(tails)) if step_s else 0.0,
        split_share=model.split_share,
        stages=tuple(forecasts),
        collectives=collective_uses(loads, step),
        events=events_of(line, times, step, line_of) if with_events else (),
        source=pricer.prices.source,
        assumptions=pricer.prices.assumptions(),
    )


def stage_forecast(load: StageLoad, time: Durations, step: Step, busy_s: float, step_s: float, memory: Memory, limit_bytes: int) -> StageForecast:
    """A stage's figures, whose rank is busy for `busy_s` of the `step_s`."""
    return StageForecast(
        stage=load.index,
        first_block=load.first_block,
        last_block=load.last_block,
        forward_s=time.forward_s,
        backward_s=time.backward_s + time.weights_s,
        busy_s=busy_s,
        idle_s=idle_s(step_s, busy_s),
        flops=load.flops * step.num_micro_batches,
        memory=memory,
        memory_limit_bytes=limit_bytes,
    )


def idle_s(step_s: float, busy_s: float) -> float:
    """What a rank waits in a step."""
    rest_s = step_s - busy_s
    return rest_s if rest_s > 1e-9 * step_s else 0.0  # sums of the same terms in another order


def collective_uses(loads: tuple[StageLoad, ...], step: Step) -> tuple[CollectiveUse, ...]:
    """Traffic of one rank of the stage that moves most bytes."""
    found = [stage_uses(load, step) for load in loads]
    return max(found, key=lambda uses: sum(use.num_bytes for use in uses))


def stage_uses(load: StageLoad, step: Step) -> tuple[CollectiveUse, ...]:
    """Traffic of one rank of a stage in a step, parameters and gradients under ZeRO included."""
    m = step.num_micro_batches
    totals: dict[tuple[str, str, str], tuple[int, int]] = {}

    def add(kind: str, axis: str, phase: str, num_bytes: int, count: int) -> None:
        size, times = totals.get((kind, axis, phase), (0, 0))
        totals[kind, axis, phase] = (size + num_bytes * count, times + count)

    for item in load.traffic:
        add(item.kind, item.axis, item.phase, item.num_bytes, m)
    for send in load.sends:
        if step.stage_ranks[send.dst] != step.stage_ranks[load.index]:
            add("send", "pp", "forward", send.num_bytes, m)
    width = stage_widths(load, step)
    if step.zero and step.shards > 1:
        share = load.trained_elements / max(1, load.parameter_elements)
        zero, units = (1, (sum(load.units),)) if step.is_split else (step.zero, load.units)
        for unit in units:
            add("all_gather", "dp", "forward", unit * width.parameter, m if zero == 3 else 1)
            if zero == 3:
                add("all_gather", "dp", "backward", unit * width.parameter, m)
            if not step.sums.is_own:
                add("reduce_scatter", "dp", "reduce", int(unit * share) * width.gradient, 1 if zero == 1 else m)
    elif step.degree("dp") > 1 and step.sync == "allreduce" and not step.sums.is_own:
        total = load.trained_elements * width.gradient
        add("all_reduce", "dp", "reduce", total, 1)
    elif step.degree("dp") > 1 and step.sync != "allreduce":
        weights = load.trained_elements * (width.master or width.parameter)
        add("push", "dp", "reduce", load.trained_elements * width.gradient, 1)
        add("pull", "dp", "update", weights, 1)
    if step.sums.compression and step.degree("dp") > 1:
        add("all_to_all", "dp", "reduce", load.compressed_bytes * step.degree("dp"), 1)
        if not step.zero:
            add("all_gather", "dp", "reduce", load.compressed_bytes, 1)
    elif step.sums.is_own and step.degree("dp") > 1:
        add("reduce_scatter" if step.zero else "all_reduce", "dp", "reduce", load.trained_elements * width.gradient, 1)
    for axis, num_bytes in load.deferred:
        add("all_reduce", axis, "reduce", num_bytes // step.shards, 1)
    if load.tied_bytes:
        add("send", "tied", "reduce", load.tied_bytes, 1)
    return tuple(CollectiveUse(kind, axis, phase, size, count) for (kind, axis, phase), (size, count) in sorted(totals.items()))


def events_of(line: Timeline, times: tuple[Durations, ...], step: Step, ranks: RankGroup) -> tuple[Event, ...]:
    """`ranks`: those of one pipeline."""
    first, stride = ranks.start, ranks.stride
    events = [
        Event(
            first + step.stage_ranks[a.stage] * stride, "compute", f"{a.kind} {a.stage}.{a.micro_batch}", "forward" if a.kind == "F" else "backward",
            round(start, 9), round(end, 9), a.stage, a.micro_batch,
        )
        for a, start, end in line.actions
    ]  # fmt: skip
    for src, dst, k, kind, start, end in line.transfers:
        events.append(Event(first + step.stage_ranks[src] * stride, "pp", f"send {kind} {src}>{dst}.{k}", "transfer", round(start, 9), round(end, 9), src, k))
    ends = list(line.end_s)
    for stage, time in enumerate(times):
        rank = step.stage_ranks[stage]
        at = 0.0
        for name, stream, seconds in time.late:
            events.append(Event(first + rank * stride, stream, name + LATE, "reduce", round(at, 9), round(at + seconds, 9), stage))
            at += seconds
        at = ends[rank]
        for name, stream, seconds in time.tail:
            kind = "optimizer" if name == "optimizer" else "reduce"
            events.append(Event(first + rank * stride, stream, name, kind, round(at, 9), round(at + seconds, 9), stage))
            at += seconds
        ends[rank] = at
    if len(events) > MAX_EVENTS:  # the beginning of the step tells how the rest goes
        events = sorted(events, key=lambda e: (e.start_s, e.rank, e.name))[:MAX_EVENTS]
    return tuple(sorted(events, key=lambda e: (e.rank, e.start_s, e.stream, e.name)))


def forecast(programs: tuple[Program, ...], plan: Plan, graph: Graph, prices: Prices, *, overlap: bool = True) -> Forecast:
    """The forecast of a plan from its lowered programs, one for each "pp" coordinate: what is priced is what runs.

    `plan` may lack its own forecast's figures; its precision, optimizer and splits are used.
    """
    from autoplan.replicas import forecast_replicas, kinds, replicas  # which read the functions above
    from autoplan.stageforecast import forecast_stages

    pricer = Pricer(prices, precision_left(graph, plan.precision), overlap=overlap)
    graph = arranged(graph, plan)
    stages = sorted(((stage, program) for program in programs for stage in program.stages), key=lambda item: item[0].index)
    first = programs[0]
    devices = kinds(prices, plan.num_ranks)
    classes = replicas(first, devices) if plan.sync == "allreduce" and not plan.stage_meshes else ()
    step = replace(step_of(first, plan, overlap=overlap), slowdown=pricer.slowdown)
    model = model_of(graph, {b.pattern: b.splits for b in plan.blocks}, plan.most("tp"), plan.precision)
    if plan.stage_meshes:
        told = forecast_stages(programs, graph, prices, step, model, pricer.precision)
    elif plan.sync == "allreduce" and (len(classes) > 1 or len(set(devices)) > 1):
        told = forecast_replicas(programs, classes, graph, prices, step, model, pricer.precision)
    else:
        loads = tuple(load_of(program, stage, graph, pricer) for stage, program in stages)
        told = assemble(loads, step, model, pricer)
    # the programs move what the model was captured with; another precision is priced, not lowered
    return replace(told, collectives=program_uses(programs)) if precision_left(graph, plan.precision) in (None, "fp32") else told


def step_of(program: Program, plan: Plan, *, overlap: bool = False) -> Step:
    """What is the same for all stages of a plan, of which `program` is any rank's."""
    return Step(
        plan.axes, program.schedule, program.num_micro_batches, program.zero, program.zero_group, plan.optimizer, plan.precision, program.stage_ranks,
        overlap, plan.sync, served_by(plan), plan.workers, Mode(program.compression, program.delay),
    )  # fmt: skip


def program_uses(programs: Sequence[Program]) -> tuple[CollectiveUse, ...]:
    """What runs: the listed traffic of the first data rank that computes, of the pipeline rank that moves most bytes."""
    found = [traffic(program, {"pp": rank, "dp": program.first_worker}) for rank, program in enumerate(programs)]
    most = max(found, key=lambda uses: sum(use.num_bytes for use in uses))
    return tuple(CollectiveUse(use.kind, use.axis, use.phase, use.num_bytes, use.count) for use in most)
