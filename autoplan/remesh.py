"""A mesh for every stage, given to a plan that was found with one mesh for all.

Splits, micro-batches, ZeRO and schedule are kept. Stages are cut again: blocks move one at a time between neighbours as long as the forecast, which
is read off the lowered programs, gets better and no device is fuller than it may be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from autoplan.api import load_cluster
from autoplan.clusterprices import prices_of
from autoplan.errors import InfeasibleError
from autoplan.explain import own_meshes
from autoplan.graph import Graph
from autoplan.lower import lower
from autoplan.plan import Plan, StagePlan, recomputed
from autoplan.schemes import Axes
from autoplan.simulate import forecast
from autoplan.stagemeshes import with_stage_meshes
from costmodel.cluster import Cluster
from costmodel.prices import Prices

_NUM_MOVES = 12


def give_meshes(plan: Plan, graph: Graph, meshes: tuple[Axes, ...], cluster: str | Path | Cluster, *, prices: Prices | None = None) -> Plan:
    """`plan` with `meshes`, one for each "pp" coordinate: ((("dp", 1), ("tp", 4)), (("dp", 2), ("tp", 2))). Priced on `cluster`, whose devices
    they fill; as `plan.gap` stands what all devices at their peak could do better.

    Raises UsageError for meshes that cannot be had with this plan, InfeasibleError where they do not fill the cluster or its memory.
    """
    found = load_cluster(cluster)
    asked = with_stage_meshes(plan, meshes)
    if asked.num_ranks != found.num_devices:
        raise InfeasibleError(f"the meshes {own_meshes(asked)} have {asked.num_ranks} ranks, {found.name} has {found.num_devices} devices: give as many")
    prices = prices or prices_of(found)

    def priced(candidate: Plan) -> Plan:
        told = forecast(lower(candidate, graph), candidate, graph, prices, overlap=found.overlaps)
        return replace(candidate, forecast=told)

    best = priced(replace(asked, cluster=found.name, cluster_fingerprint=found.fingerprint()))
    for _ in range(_NUM_MOVES if not plan.placement and plan.num_chunks == 1 else 0):
        better = min((priced(candidate) for candidate in _other_cuts(graph, best)), key=_cost, default=best)
        if _cost(better) >= _cost(best):
            break
        best = better
    short = _short(best)
    if short > 0:
        raise InfeasibleError(f"{own_meshes(best)}: a device lacks {short / 1024**3:.4g} GiB at best. Give that stage more ranks, or recompute")
    stages = ", ".join(str(stage.stop - stage.start) for stage in best.stages)
    why = f"meshes {own_meshes(best)} were given; stages of {stages} blocks are as even as moving single blocks makes them"
    return replace(best, gap=max(0.0, 1 - best.forecast.mfu), alternatives=(), reasons=(why,))


def _short(plan: Plan) -> int:
    """Bytes by which the fullest stage is too large for its device."""
    return max(0, *(stage.memory.total - stage.memory_limit_bytes for stage in plan.forecast.stages))


def _cost(plan: Plan) -> tuple[int, float]:
    return _short(plan), plan.forecast.step_time_s


def _other_cuts(graph: Graph, plan: Plan) -> Iterator[Plan]:
    """The plan with one block moved over one boundary, every way."""
    ways = recomputed(plan) if any(stage.recompute for stage in plan.stages) else ()
    starts = [*(stage.start for stage in plan.stages), len(graph.blocks)]
    for j in range(1, len(starts) - 1):
        for step in (-1, 1):
            moved = [*starts[:j], starts[j] + step, *starts[j + 1 :]]
            if moved[j - 1] < moved[j] < moved[j + 1]:
                spans = zip(pairwise(moved), plan.stages, strict=True)
                names = graph.blocks
                stages = (StagePlan(a, b, names[a].name, names[b - 1].name, old.rank, recompute=ways[a:b]) for (a, b), old in spans)
                yield replace(plan, stages=tuple(stages))
