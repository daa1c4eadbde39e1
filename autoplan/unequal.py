"""Plans for devices that are not alike: uneven data shares, uneven stages, meshes that put like devices together.

Every shape of the mesh is drafted in two orders (autoplan/drafts.py): pipeline outermost, where a stage is a group of devices, and data outermost,
where a replica is one: model parallelism inside, data parallelism across. The most promising drafts, and the same with even shares, are
lowered and forecast (autoplan/replicas.py), and the best is improved by moving rows and blocks one at a time as long as the forecast gets better.

Bound, for the gap: no plan is faster than all work dealt freely, every block on the kind that suits it,

    minimise T   where   sum over k of x[p, k] = 1,   sum over p of w_pk x[p, k] <= T n_k

with n_k devices of kind k and w_pk the least device-seconds of all blocks of pattern p for the whole batch on kind k, over all shapes.

Sources: Ling et al. 2024 (IEEE TPDS 36(2)); Metis (Um et al. 2024); Sailor (Strati et al. 2025).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from autoplan.drafts import Draft, OnDevice, drafts_of, slowest_kind
from autoplan.errors import InfeasibleError, UsageError
from autoplan.explore import Searcher
from autoplan.graph import Graph
from autoplan.lower import lower
from autoplan.outcome import Outcome, Result
from autoplan.plan import Alternative, Plan
from autoplan.replicas import Kind, kinds, slowest
from autoplan.shares import row_shares
from autoplan.simulate import forecast
from autoplan.solver import Program, minimise
from autoplan.stagework import Work
from autoplan.task import Task
from costmodel.prices import Prices

_NUM_FORECAST = 8  # combinations that are lowered
_NUM_MOVES = 12  # of rows or blocks, in the end


def is_unequal(prices: Prices, world_size: int) -> bool:
    """Whether prices tell the devices of some ranks apart."""
    return len(set(kinds(prices, world_size))) > 1


def unequal_search(task: Task, plan_of: Callable[[Result, Searcher, Outcome], Plan]) -> Plan:
    """The best plan on unequal devices. Raises InfeasibleError where nothing fits."""
    end_s = math.inf if task.time_limit_s is None else time.monotonic() + task.time_limit_s  # counts once there is a plan
    found = kinds(task.prices, task.cluster.num_devices)
    searchers = {kind: Searcher(replace(task, prices=OnDevice(task.prices, found.index(kind)))) for kind in dict.fromkeys(found)}
    drafts = sorted(drafts_of(task, found, searchers), key=lambda d: (d.seconds, d.shape, d.order, d.storing, d.shares))
    best, tried = _forecast_best(task, searchers, drafts, plan_of, end_s)
    best = _improved(task, best, found, end_s)
    bound_s = _bound_s(task, found, searchers)
    gap = max(0.0, 1 - min(bound_s, best.forecast.step_time_s) / best.forecast.step_time_s)
    return replace(best, gap=gap, alternatives=_alternatives(best, tried), reasons=_reasons(best, tried, len(drafts)))


# -- forecasts --------------------------------------------------------------------------------------------------------------


def _forecast_best(
    task: Task, searchers: dict[Kind, Searcher], drafts: Sequence[Draft], plan_of: Callable[[Result, Searcher, Outcome], Plan], end_s: float
) -> tuple[Plan, list[Plan]]:
    """The best of the most promising drafts by its forecast, and all that were forecast; until `end_s` of the monotonic clock, once one fits."""
    reference = searchers[slowest_kind(searchers)]
    tried: list[Plan] = []
    refused: list[str] = []
    for draft in drafts:
        num_fitting = sum(_fits_memory(plan) for plan in tried)
        if num_fitting >= _NUM_FORECAST or (num_fitting and time.monotonic() > end_s):
            break
        try:
            tried.append(_forecast(task, _plan(draft, reference, plan_of)))
        except UsageError as error:  # rows of all ranks are needed in equal parts, for example
            refused.append(str(error))
    fitting = [plan for plan in tried if _fits_memory(plan)]
    if not fitting:
        raise InfeasibleError(_nothing_fits(task, tried, refused))
    return min(fitting, key=lambda plan: plan.forecast.step_time_s), tried


def _plan(draft: Draft, reference: Searcher, plan_of: Callable[[Result, Searcher, Outcome], Plan]) -> Plan:
    shape, storing = draft.shape, draft.storing
    work = Work(reference.shapes.outline, reference.shapes.chooser(shape).local, draft.chosen, storing.recompute, reference.shapes.step(shape, storing))
    result = reference.works.result(shape, storing, work, draft.starts)
    even = draft.shares == row_shares(reference.shapes.batch, shape.dp)
    largest = -(-max(draft.shares) // shape.num_micro_batches)
    made = plan_of(result, reference, Outcome(reference.space))
    return replace(
        made, axes=draft.axes, shares=() if even else draft.shares, micro_batch_size=largest, cluster_fingerprint=reference.task.cluster.fingerprint()
    )


def _forecast(task: Task, plan: Plan) -> Plan:
    """`plan` with its forecast, and with memory limits as the constraints leave them. Raises UsageError where it cannot be lowered."""
    told = forecast(lower(plan, task.graph), plan, task.graph, task.prices, overlap=task.cluster.overlaps)
    limit = task.constraints.max_memory_bytes
    stages = tuple(replace(s, memory_limit_bytes=min(limit, s.memory_limit_bytes)) for s in told.stages) if limit is not None else told.stages
    return replace(plan, forecast=replace(told, stages=stages))


def _fits_memory(plan: Plan) -> bool:
    return all(stage.memory.total <= stage.memory_limit_bytes for stage in plan.forecast.stages)


def _improved(task: Task, best: Plan, found: Sequence[Kind], end_s: float) -> Plan:
    """Move micro-batch rows between replicas, and blocks between stages, as long as the forecast gets better and there is time."""
    for _ in range(_NUM_MOVES):
        better = best
        for plan in itertools.chain(_other_shares(best, found), _other_cuts(task.graph, best) if task.constraints.stage_layers is None else ()):
            if time.monotonic() > end_s:
                return better
            try:
                other = _forecast(task, plan)
            except UsageError:
                continue
            if _fits_memory(other) and other.forecast.step_time_s < better.forecast.step_time_s * (1 - 1e-6):
                better = other
        if better is best:
            break
        best = better
    return best


def _other_shares(plan: Plan, found: Sequence[Kind]) -> Iterator[Plan]:
    """One row from a replica of every class (devices and rows) to one of every other class."""
    dp, m, cells = plan.degree("dp"), plan.num_micro_batches, slowest(plan.axes, found)
    shares = plan.shares or row_shares(plan.global_batch, dp)
    firsts: dict[tuple, int] = {}
    for i, rows in enumerate(shares):
        firsts.setdefault((rows, *(found[cells[j, i]] for j in range(plan.degree("pp")))), i)
    for giver, taker in itertools.permutations(firsts.values(), 2):
        moved = list(shares)
        moved[giver] -= 1
        moved[taker] += 1
        if moved[giver] >= m:
            yield replace(plan, shares=tuple(moved), micro_batch_size=-(-max(moved) // m))


def _other_cuts(graph: Graph, plan: Plan) -> Iterator[Plan]:
    starts = [stage.start for stage in plan.stages]
    for j in range(1, len(starts)):
        for step in (-1, 1):
            moved = [*starts, len(graph.blocks)]
            moved[j] += step
            if moved[j - 1] < moved[j] < moved[j + 1]:
                stages = tuple(
                    replace(old, start=a, stop=b, first=graph.blocks[a].name, last=graph.blocks[b - 1].name)
                    for (a, b), old in zip(itertools.pairwise(moved), plan.stages, strict=True)
                )
                yield replace(plan, stages=stages)


def _bound_s(task: Task, found: Sequence[Kind], searchers: dict[Kind, Searcher]) -> float:
    """The module's bound."""
    least: dict[tuple[str, Kind], float] = {}
    for kind, searcher in searchers.items():
        for shape in {shape.inside: shape for shape in searcher.space.shapes}.values():
            num_ranks = math.prod(size for name, size in shape.axes if name not in ("pp", "dp"))
            for pattern, block in searcher.shapes.least(shape).items():
                spent = block.count * block.seconds * num_ranks * searcher.shapes.batch / shape.rows
                least[pattern, kind] = min(least.get((pattern, kind), float("inf")), spent)
    patterns = list(dict.fromkeys(pattern for pattern, _ in least))

    def build(program: Program) -> None:
        step = program.number(1.0)
        dealt = {key: program.number() for key in least}
        for pattern in patterns:
            program.equal([(dealt[pattern, kind], 1.0) for kind in searchers], 1.0)
        for kind in searchers:
            program.at_most([*((dealt[p, kind], least[p, kind]) for p in patterns), (step, -float(found.count(kind)))], 0.0)

    solved = minimise(build, "bound")
    return 0.0 if solved is None else solved[1] * (1 - 1e-6)


# -- what is told -----------------------------------------------------------------------------------------------------------


def _alternatives(best: Plan, tried: Sequence[Plan]) -> tuple[Alternative, ...]:
    found = []
    for plan in sorted((p for p in tried if _what(p) != _what(best)), key=lambda p: (not _fits_memory(p), p.forecast.step_time_s))[:5]:
        slower = plan.forecast.step_time_s / best.forecast.step_time_s - 1
        reason = f"{slower:.1%} slower on these devices" if _fits_memory(plan) else "does not fit the memory of some device"
        found.append(Alternative(_what(plan), plan.forecast.step_time_s, plan.forecast.peak_memory_bytes, reason))
    return tuple(found)


def _what(plan: Plan) -> str:
    from autoplan.explain import short

    order = "" if plan.axes[0][0] != "dp" or plan.degree("pp") == 1 else ", replicas side by side"
    return short(plan) + order


def _reasons(best: Plan, tried: Sequence[Plan], num_drafts: int) -> tuple[str, ...]:
    lines = []
    if best.shares:
        even = [plan for plan in tried if not plan.shares and plan.axes == best.axes and plan.num_micro_batches == best.num_micro_batches]
        instead = f"; equal shares take {min(p.forecast.step_time_s for p in even) / best.forecast.step_time_s:.2f} times as long" if even else ""
        lines.append(f"rows {', '.join(map(str, best.shares))} to the data ranks, by the speed of their devices{instead}")
    if best.degree("pp") > 1:
        lines.append("stages of " + ", ".join(str(stage.stop - stage.start) for stage in best.stages) + " blocks, by the speed of their devices")
    if best.axes[0][0] == "dp" and best.degree("pp") > 1:
        lines.append("a replica's stages lie side by side on like devices, replicas across")
    slow = max(best.forecast.stages, key=lambda s: s.busy_s)
    lines.append(f"the slowest ranks are busy {slow.busy_s / best.forecast.step_time_s:.0%} of the step")
    lines.append(f"{num_drafts} combinations of mesh, order, shares and cuts estimated, {len(tried)} forecast from their programs")
    return tuple(lines)


def _nothing_fits(task: Task, tried: Sequence[Plan], refused: Sequence[str]) -> str:
    if not tried:
        why = refused[0] if refused else "every combination needs more memory than some device has"
        return f"no plan of {task.graph.name} can be had on {task.cluster.name}: {why}"
    least = min(tried, key=lambda p: max(s.memory.total - s.memory_limit_bytes for s in p.forecast.stages))
    stage = max(least.forecast.stages, key=lambda s: s.memory.total - s.memory_limit_bytes)
    gib = 1024**3
    return (
        f"no plan of {task.graph.name} fits on {task.cluster.name}: the nearest ({_what(least)}) needs {stage.memory.total / gib:.4g} GiB on stage "
        f"{stage.stage}, whose device has {stage.memory_limit_bytes / gib:.4g} GiB. Use devices with more memory, more of them, or fewer constraints"
    )
