"""One hard input under one plan against the plain model: loss, gradients, norm, weights, buffers and names, or the refusal."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

import autoplan
from autoplan.frontend import capture
from autoplan.graph import Graph
from autoplan.plan import Plan, StagePlan
from tests.dist.parity import loss_of, relative_errors
from tests.hard import HARD
from tests.harder import HARDER
from tests.hardest import HARDEST
from tests.odd import ODD
from tests.plans import manual_plan, random_splits


@dataclass(frozen=True)
class Try:
    """`plan`: arguments of `manual_plan`; `splits_seed` draws tensor splits; `cut`: the first block of the second of two stages;
    `calls`: passes before each optimizer step; `norm_type`: gradients are clipped by this norm."""

    model: str
    plan: Mapping[str, Any] = field(default_factory=dict)
    splits_seed: int | None = None
    cut: int | None = None
    optimizer: str = "SGD"
    steps: int = 2
    calls: int = 1
    norm_type: float | None = None


@dataclass(frozen=True)
class Found:
    """Relative errors of the first loss and norm, of the first gradients, and of what the state holds at the end; names that one side alone has."""

    loss_error: float
    norm_error: float
    grad_error: float
    grad_name: str
    state_error: float
    state_name: str
    missing: tuple[str, ...]
    warnings: tuple[str, ...]
    refused: str = ""

    def worst(self) -> float:
        return max(self.loss_error, self.norm_error, self.grad_error, self.state_error)


def attempts(tries: list[Try]) -> list[Found]:
    """Every try, in order, on this job's ranks; compared on rank 0."""
    torch.set_num_threads(1)
    graphs: dict[str, Graph] = {}
    return [_attempt(item, graphs) for item in tries]


def _plan(item: Try, graph: Graph) -> Plan:
    splits = random_splits(graph, item.plan.get("tp", 1), item.splits_seed) if item.splits_seed is not None else None
    plan = manual_plan(graph, splits=splits, **item.plan)
    if item.cut is None:
        return plan
    ends = (0, item.cut, len(graph.blocks))
    return replace(plan, stages=tuple(StagePlan(a, b, graph.blocks[a].name, graph.blocks[b - 1].name, i) for i, (a, b) in enumerate(pairwise(ends))))


def _attempt(item: Try, graphs: dict[str, Graph]) -> Found:
    model, batch = (HARD | HARDER | HARDEST | ODD)[item.model]()
    true = copy.deepcopy(model)
    if item.model not in graphs:
        graphs[item.model] = capture(model, batch)
    graph = graphs[item.model]
    try:
        pm = autoplan.parallelize(model, batch, plan=_plan(item, graph))
    except autoplan.UsageError as error:
        return Found(0.0, 0.0, 0.0, "", 0.0, "", (), graph.warnings, refused=str(error))
    make = getattr(torch.optim, item.optimizer)
    ours, theirs = make(pm.parameters(), lr=0.05), make([p for p in true.parameters() if p.requires_grad], lr=0.05)
    first: tuple[float, float, float, str] = (0.0, 0.0, 0.0, "")
    missing: set[str] = set()
    for step in range(item.steps):
        for _ in range(item.calls):
            loss, true_loss = pm.forward_backward(batch), loss_of(true, batch)
            true_loss.backward()
        norm_error = 0.0
        if item.norm_type is not None:
            norm = pm.clip_grad_norm_(0.01, item.norm_type).item()
            true_norm = torch.nn.utils.clip_grad_norm_(true.parameters(), 0.01, item.norm_type).item()
            norm_error = abs(norm - true_norm) / true_norm
        if step == 0:
            grads = pm.full_grads()
            wanted = {name: p.grad for name, p in true.named_parameters(remove_duplicate=False) if p.grad is not None}
            missing |= grads.keys() ^ wanted.keys()
            first = (abs(loss.item() - true_loss.item()) / abs(true_loss.item()), norm_error, *relative_errors(grads, wanted))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    state, wanted = pm.full_state_dict(), true.state_dict()
    missing |= state.keys() ^ wanted.keys()
    dtypes = {name for name in state.keys() & wanted.keys() if state[name].dtype != wanted[name].dtype or state[name].shape != wanted[name].shape}
    alone = dist.is_initialized() and dist.get_rank() > 0
    return Found(*first, *relative_errors(state, wanted), () if alone else tuple(sorted(missing | dtypes)), graph.warnings)
