"""One plan of one model on this job's ranks beside the plain model in one process: loss, gradients, state after some steps, and what a rank holds,
computes and sends beside what its plan says."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import autoplan
from autoplan.plan import Plan
from tests.dist.parity import Held, count_flops, held_by, loss_of, relative_errors

STEPS = 2
Tensors = dict[str, torch.Tensor]
Make = Callable[..., torch.optim.Optimizer]


@dataclass(frozen=True)
class Recipe:
    """Which optimizer has which parameters, `matrices` by Muon; and how far apart states may be (Muon computes in bf16)."""

    name: str
    tolerance: float

    def made(self, named: Mapping[str, Any], matrices: frozenset[str], make: Make) -> list[torch.optim.Optimizer]:
        if self.name == "SGD":
            return [make(torch.optim.SGD, list(named.values()), lr=0.05, momentum=0.9)]
        if self.name == "Adafactor":
            return [make(torch.optim.Adafactor, list(named.values()), lr=0.01)]
        assert self.name == "Muon and AdamW", self.name
        by_muon, rest = ([p for name, p in named.items() if (name in matrices) == wanted] for wanted in (True, False))
        scales, others = ([p for name, p in named.items() if name not in matrices and ("norm" in name) == wanted] for wanted in (True, False))
        assert len(scales) + len(others) == len(rest)
        groups = [{"params": own, **more} for own, more in ((scales, {"weight_decay": 0.0}), (others, {"lr": 0.02})) if own]
        return [*([make(torch.optim.Muon, by_muon, lr=0.02)] if by_muon else []), *([make(torch.optim.AdamW, groups, lr=0.01)] if groups else [])]


SGD = Recipe("SGD", 1e-5)
RECIPES = (Recipe("Adafactor", 1e-5), Recipe("Muon and AdamW", 2e-2))


@dataclass(frozen=True)
class Plain:
    """The first loss and gradients of the plain model, and its state after the steps. `matrices`: names of the parameters of hidden layers."""

    loss: float
    grads: Tensors
    state: Tensors
    matrices: frozenset[str]


def plain(model: torch.nn.Module, batch: Any, recipe: Recipe = SGD) -> Plain:
    model = copy.deepcopy(model)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices = frozenset(name for name, p in named.items() if p.ndim == 2 and "layers" in name)
    optimizers = recipe.made(named, matrices, lambda cls, params, **options: cls(params, **options))
    loss = loss_of(model, batch)
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}
    _go_on(optimizers, lambda: loss_of(model, batch).backward())
    return Plain(loss.item(), grads, {name: tensor.clone() for name, tensor in model.state_dict().items()}, matrices)


def tried(model: torch.nn.Module, batch: Any, plan: Plan, true: Plain, recipe: Recipe = SGD) -> str:
    """The worst relative error, and what is wrong if anything is; on rank 0, elsewhere of no meaning. Raises AutoplanError for what is refused."""
    pm = autoplan.parallelize(model, batch, plan=plan)
    with count_flops() as counter:
        loss = pm.forward_backward(batch).item()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, held_by(pm, counter.get_total_flops()))
    grads = pm.full_grads()
    _go_on(recipe.made(dict(pm.named_parameters()), true.matrices, pm.optimizer), lambda: pm.forward_backward(batch))
    worst = max(_worst(grads, true.grads), (abs(loss - true.loss) / max(abs(true.loss), 1e-30), "loss"))
    last = _worst(pm.full_state_dict(), true.state)
    error = max(worst[0], last[0]) if recipe is SGD else last[0]
    wrong = [name for (one, name), limit in ((worst, SGD.tolerance), (last, recipe.tolerance)) if not one <= limit] + [*_unlike(everyone)][:1]
    return f"{error:.0e}" + (f" WRONG ({'; '.join(wrong)})" if wrong else "")


def _go_on(optimizers: list[torch.optim.Optimizer], backward: Callable[[], Any]) -> None:
    """Steps, of whose first the gradients are there."""
    for step in range(STEPS):
        if step:
            backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _worst(found: Tensors, true: Tensors) -> tuple[float, str]:
    """The worst error of equally named tensors; infinite where one side alone has one."""
    if dist.get_rank() == 0 and found.keys() != true.keys():
        return float("inf"), f"one side alone has {sorted(found.keys() ^ true.keys())[:3]}"
    return relative_errors(found, true)


def _unlike(everyone: list[Held]) -> list[str]:
    """Where ranks send something else than their programs say, or hold or compute something else than a forecast, which plans by hand lack."""
    found = []
    has_forecast = any(held.planned_flops for held in everyone)
    for rank, held in enumerate(everyone):
        if held.sent != held.planned_sent:
            found.append(f"rank {rank} sent {held.sent}, its program says {held.planned_sent}")
        if has_forecast and abs(held.flops - held.planned_flops) > 0.02 * held.planned_flops:
            found.append(f"rank {rank} computed {held.flops} FLOPs, planned {held.planned_flops}")
        if has_forecast and abs(held.parameter_bytes - held.planned_parameter_bytes) > 0.02 * held.planned_parameter_bytes:
            found.append(f"rank {rank} holds {held.parameter_bytes} bytes of parameters, planned {held.planned_parameter_bytes}")
    return found
