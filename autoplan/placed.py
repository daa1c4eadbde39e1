"""Plans with modules placed by hand: one search for each way to place the rest, the best forecast wins."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from autoplan.arrange import arrange, first_blocks, stages_of
from autoplan.batchaxis import batch_axis
from autoplan.errors import InfeasibleError
from autoplan.explain import short
from autoplan.placement import Placed, candidates, pins_of
from autoplan.plan import Alternative, Plan
from autoplan.price import Pricer, precision_left
from autoplan.space import divisors
from autoplan.task import Stages, Task
from autoplan.units import seconds

_NUM_CANDIDATES = 3  # of one number of stages, that get a search
_TURNS = "gpipe"  # the schedule in which ranks may take turns in any order of stages


def placed_search(task: Task, placement: Mapping[str, int], search: Callable[[Task], Plan]) -> Plan:
    """The best plan whose modules lie as `placement` says. Raises InfeasibleError where there is none, with the reason of the first try."""
    pins = pins_of(task.graph, placement)
    least = max(placement.values()) + 1
    free = replace(task.constraints, placement=None)
    found: list[tuple[Plan, Placed]] = []
    refused: list[InfeasibleError] = []
    end_s = math.inf if task.time_limit_s is None else time.monotonic() + task.time_limit_s  # counts once there is a plan
    for pp in _numbers_of_stages(task, least):
        try:
            tried = _candidates(task, pins, pp)
        except InfeasibleError as error:
            refused.append(error)
            continue
        for placed in tried[:_NUM_CANDIDATES]:
            left_s = max(0.0, end_s - time.monotonic())
            if found and left_s == 0.0:
                break
            graph, constraints = arrange(task.graph, placed.runs), replace(free, pp=pp)
            if not placed.is_chain:
                if free.schedule not in (None, _TURNS):
                    refused.append(
                        InfeasibleError(f"schedule={free.schedule!r} needs one stage a rank, but this placement makes ranks take turns: use {_TURNS!r}")
                    )
                    continue
                constraints = replace(constraints, schedule=_TURNS)
            stages = Stages(first_blocks(graph, graph.runs), placed.stage_ranks)
            limit_s = None if task.time_limit_s is None else left_s
            try:
                found.append((search(replace(task, graph=graph, constraints=constraints, stages=stages, time_limit_s=limit_s)), placed))
            except InfeasibleError as error:
                refused.append(error)
    if not found:
        raise refused[0]
    best, placed = min(found, key=lambda pair: pair[0].forecast.step_time_s)
    others = tuple(_as_alternative(plan, best) for plan, _ in found if plan is not best)
    ranked = sorted((*best.alternatives, *others), key=lambda a: a.step_time_s)
    return replace(best, alternatives=tuple(ranked[: max(len(best.alternatives), 5)]), reasons=(*best.reasons, *_reasons(task, pins, placed)))


def _numbers_of_stages(task: Task, least: int) -> tuple[int, ...]:
    world = task.cluster.num_devices
    if task.constraints.pp is not None:
        return (task.constraints.pp,)
    found = tuple(d for d in divisors(world) if d >= least)
    if not found:
        raise InfeasibleError(f"the placement names stage {least - 1}, but the cluster has {world} devices: use stages 0 to {world - 1}")
    return found


def _candidates(task: Task, pins: tuple[int | None, ...], pp: int) -> tuple[Placed, ...]:
    batch = task.graph.batch_size or 1
    stride = max(1, task.cluster.num_devices // pp)
    share = max(1, batch // ((task.constraints.dp or 1) - task.constraints.num_serving))
    sizes = (task.constraints.micro_batch_size,) if task.constraints.micro_batch_size else (share, max(1, share // (4 * pp)))
    rows = sizes if batch_axis(task.graph).blocker is None else (share,)
    return candidates(task.graph, pins, pp, tuple(dict.fromkeys(rows)), stride, Pricer(task.prices, precision_left(task.graph, task.precision)))


def _as_alternative(plan: Plan, best: Plan) -> Alternative:
    slower = plan.forecast.step_time_s / best.forecast.step_time_s - 1
    reason = f"{slower:.1%} slower: modules that are not pinned lie elsewhere"
    return Alternative(short(plan), plan.forecast.step_time_s, plan.forecast.peak_memory_bytes, reason)


def _reasons(task: Task, pins: tuple[int | None, ...], placed: Placed) -> tuple[str, ...]:
    """Where what was not pinned went."""
    stages = stages_of(placed.runs, len(pins))
    free: dict[int, dict[str, None]] = {}
    for op, pin, stage in zip(task.graph.ops, pins, stages, strict=True):
        if pin is None and (op.flops or any(task.graph.values[n].kind == "parameter" for n in op.operands)):
            free.setdefault(placed.stage_ranks[stage], {})[op.module or "the model's own operators"] = None
    told = "; ".join(f"{_some(list(free[rank]))} on rank {rank}" for rank in sorted(free))
    turns = "" if placed.is_chain else f"; ranks take turns in {len(placed.stage_ranks)} stages, since values go back and forth"
    return (f"placement: {told or 'every module is pinned'}{turns}; its program counts {seconds(placed.cost_s)} for transfers and the slowest rank",)


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
