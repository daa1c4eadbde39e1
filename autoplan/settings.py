"""What `parallelize` was given, and the plan that follows from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from autoplan.agreement import from_first_rank
from autoplan.api import LossFn, find_plan, is_own, load_cluster
from autoplan.constraints import Constraints
from autoplan.graph import Graph
from autoplan.ownprices import own_prices
from autoplan.plan import Plan
from autoplan.planfile import dumps, loads
from autoplan.retarget import retarget
from costmodel.cluster import Cluster
from costmodel.detect import detect
from runtime.schedule import splits_backward


def world_size() -> int:
    """Ranks of this job."""
    return dist.get_world_size() if dist.is_initialized() else 1


@dataclass(frozen=True)
class Settings:
    """What `parallelize` was given."""

    plan: Plan | None
    cluster: str | Path | Cluster | None
    constraints: Constraints
    loss_fn: LossFn | None
    optimizer: str
    precision: str | None
    seed: int
    device: torch.device
    timeout_s: float | None
    check_data: bool
    compile_backend: str | None


def plan_for(graph: Graph, settings: Settings, capture_plain: Callable[[], Graph]) -> Plan:
    """The given plan, or one that rank 0 searches and every rank takes. Every rank calls it.

    For a graph captured in a precision it may have been made from the same model's graph without one, which `capture_plain` gives.
    """
    plan = settings.plan if settings.plan is not None else _searched(graph, settings)
    if graph.precision is None or plan.model_fingerprint == graph.fingerprint:
        return plan
    plain = from_first_rank(capture_plain)
    return retarget(plan, plain, graph) if plan.model_fingerprint == plain.fingerprint else plan


def _searched(graph: Graph, settings: Settings) -> Plan:
    def text() -> str:
        cluster = load_cluster(settings.cluster) if settings.cluster is not None else detect(world_size())
        prices = own_prices(graph, cluster) if is_own(settings.cluster) else None

        def found(constraints: Constraints) -> Plan:
            return find_plan(graph, None, cluster, constraints, settings.optimizer, settings.precision, prices=prices)

        plan = found(settings.constraints)
        if settings.compile_backend is not None and settings.constraints.schedule is None and splits_backward(plan.schedule):
            plan = found(replace(settings.constraints, schedule="1f1b"))  # torch.compile makes one backward pass
        return dumps(plan)

    return loads(from_first_rank(text))
