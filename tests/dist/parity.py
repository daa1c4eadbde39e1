"""The oracle of every plan: the plain model in one process. Loss, every gradient, weights after SGD steps, and what a rank holds and sends."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

import autoplan
from autoplan.capture import capture
from autoplan.plan import Plan
from tests.plans import manual_plan, random_splits
from tests.zoo import ZOO

TINY = 1e-4  # a gradient this small beside the global norm counts as zero and is measured against the global norm


@dataclass(frozen=True)
class Case:
    """One plan to try on one model: `plan` are keyword arguments of `manual_plan`; `splits_seed` draws random splits;
    `constraints` searches instead."""

    model: str
    plan: Mapping[str, Any] = field(default_factory=dict)
    splits_seed: int | None = None
    constraints: Mapping[str, Any] | None = None
    dtype: str = "float64"
    steps: int = 2


@dataclass(frozen=True)
class Outcome:
    """How far a case was from the plain model, as relative L2 norms: the worst tensor of each kind and its name."""

    case: Case
    loss_error: float
    grad_error: float
    grad_name: str
    weight_error: float
    weight_name: str
    missing: tuple[str, ...]  # tensors that one side has and the other has not

    def ok(self, tolerance: float) -> bool:
        return not self.missing and max(self.loss_error, self.grad_error, self.weight_error) <= tolerance


def relative_errors(found: Mapping[str, torch.Tensor], true: Mapping[str, torch.Tensor]) -> tuple[float, str]:
    """The worst relative L2 error over equally named tensors, and its name."""
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(t.double()) for t in true.values()])).item() if true else 0.0
    worst, name = 0.0, ""
    for key in true.keys() & found.keys():
        reference = max(torch.linalg.vector_norm(true[key].double()).item(), TINY * norm, 1e-300)
        error = torch.linalg.vector_norm(found[key].double() - true[key].double()).item() / reference
        if not error <= worst:
            worst, name = error, key
    return worst, name


def cast(module: torch.nn.Module, batch: Mapping[str, Any], dtype: torch.dtype) -> tuple[torch.nn.Module, dict[str, Any]]:
    return module.to(dtype), {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}


def loss_of(model: torch.nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    out = model(**batch)
    return out if isinstance(out, torch.Tensor) else out["loss"]


def run_cases(cases: list[Case], build: Mapping[str, Callable[[], Any]] | None = None) -> list[Outcome] | None:
    """Run every case on this job's ranks; the outcomes on rank 0."""
    torch.set_num_threads(1)
    outcomes = [_run(case, (build or ZOO)[case.model]) for case in cases]
    return outcomes if not dist.is_initialized() or dist.get_rank() == 0 else None


def plan_of(case: Case, model: torch.nn.Module, batch: Any, world_size: int) -> Plan:
    graph = capture(model, batch)
    if case.constraints is not None:
        return autoplan.find_plan(graph, None, f"cpu:1x{world_size}", autoplan.Constraints(**case.constraints))
    tp = case.plan.get("tp", 1)
    splits = random_splits(graph, tp, case.splits_seed) if case.splits_seed is not None else None
    return manual_plan(graph, splits=splits, **case.plan)


def _run(case: Case, build: Callable[[], Any]) -> Outcome:
    model, batch = build()
    model, batch = cast(model, batch, getattr(torch, case.dtype))
    plain = copy.deepcopy(model)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    pm = autoplan.parallelize(model, batch, plan=plan_of(case, model, batch, world_size))
    loss = pm.forward_backward(batch)
    true_loss = loss_of(plain, batch)
    true_loss.backward()
    grads = pm.full_grads()
    true_grads = {name: p.grad.clone() for name, p in plain.named_parameters(remove_duplicate=False) if p.grad is not None}
    optimizer, true_optimizer = torch.optim.SGD(pm.parameters(), lr=0.05), torch.optim.SGD(plain.parameters(), lr=0.05)
    for step in range(case.steps):
        if step:
            pm.forward_backward(batch)
            loss_of(plain, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        true_optimizer.step()
        true_optimizer.zero_grad()
    weights, true_weights = pm.full_state_dict(), plain.state_dict()
    if dist.is_initialized() and dist.get_rank() != 0:
        return Outcome(case, 0.0, 0.0, "", 0.0, "", ())
    missing = tuple(sorted((grads.keys() ^ true_grads.keys()) | (weights.keys() ^ true_weights.keys())))
    loss_error = abs(loss.item() - true_loss.item()) / max(abs(true_loss.item()), 1e-300)
    return Outcome(case, loss_error, *relative_errors(grads, true_grads), *relative_errors(weights, true_weights), missing)
