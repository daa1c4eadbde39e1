"""The oracle of every plan: the plain model in one process.

Loss, every gradient and the weights after some optimizer steps are compared; and what a rank holds, computes and sends is
compared with what its plan says.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode, conv_backward_flop, sdpa_backward_flop_count, sdpa_flop_count

import autoplan
from autoplan.frontend import capture
from autoplan.schemes import feature_axes
from runtime.traffic import traffic
from tests.plans import domain_splits, manual_plan, random_splits, splits_by_name
from tests.zoo import ZOO

TINY = 1e-4  # a gradient this small beside the global norm counts as zero and is measured against the global norm


@dataclass(frozen=True)
class Case:
    """One plan to try on one model.

    `constraints`: search; else `plan` are keyword arguments of `manual_plan`, `splits_seed` draws random splits, `labels` names the
    option of operators by their names, and `domain` divides that dimension of the input's positions wherever an operator can.
    """

    model: str
    plan: Mapping[str, Any] = field(default_factory=dict)
    splits_seed: int | None = None
    constraints: Mapping[str, Any] | None = None
    dtype: str = "float32"
    optimizer: str = "SGD"
    steps: int = 2
    domain: int | None = None
    labels: Mapping[str, str] | None = None

    def __str__(self) -> str:
        how = self.constraints if self.constraints is not None else {**self.plan, "splits": self.splits_seed, "domain": self.domain}
        return f"{self.model} {' '.join(f'{k}={v}' for k, v in how.items())} {self.dtype} {self.optimizer}"


@dataclass(frozen=True)
class Held:
    """What one rank holds, computes and sends in a step, and what its plan or program says."""

    parameter_bytes: int
    planned_parameter_bytes: int
    flops: int
    planned_flops: int
    sent: tuple
    planned_sent: tuple


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
    held: tuple[Held, ...]  # by rank
    dense_bytes: int
    dense_flops: int
    collectives: tuple = ()  # of the plan
    refused: str = ""

    def errors(self) -> tuple[float, float, float]:
        return self.loss_error, self.grad_error, self.weight_error


def count_flops() -> FlopCounterMode:
    """torch's counter, told of the CPU's attention kernels, which it knows on GPUs alone, and that a filter's gradient has a part of each group of channels."""

    def forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return sdpa_flop_count(query, key, value)

    def backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return sdpa_backward_flop_count(grad, query, key, value)

    def convolution(*args: Any, **out: Any) -> int:
        *these, groups, (inputs, weights, bias) = args
        count: Callable[..., int] = conv_backward_flop
        return count(*these, groups, (inputs, False, bias), **out) + count(*these, groups, (False, weights, bias), **out) // groups

    convolution._get_raw = True  # type: ignore[attr-defined]  # tensors, not shapes
    aten = torch.ops.aten
    own = {aten.convolution_backward: convolution}
    cpu = {aten._scaled_dot_product_flash_attention_for_cpu: forward, aten._scaled_dot_product_flash_attention_for_cpu_backward: backward}
    return FlopCounterMode(display=False, custom_mapping=cpu | own)


def relative_errors(found: Mapping[str, torch.Tensor], true: Mapping[str, torch.Tensor]) -> tuple[float, str]:
    """The worst relative L2 error over equally named tensors, and its name."""
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(t.double()) for t in true.values()])).item() if true else 0.0
    worst, name = 0.0, ""
    for key in sorted(true.keys() & found.keys()):
        reference = max(torch.linalg.vector_norm(true[key].double()).item(), TINY * norm, 1e-300)
        error = torch.linalg.vector_norm(found[key].double() - true[key].double()).item() / reference
        if not error <= worst:
            worst, name = error, key
    return worst, name


def loss_of(model: torch.nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    out = model(**batch)
    return out if isinstance(out, torch.Tensor) else out["loss"]


def run_cases(cases: list[Case], build: Mapping[str, Callable[[], Any]] | None = None) -> list[Outcome]:
    """Run every case on this job's ranks; the same outcomes on every rank, errors as rank 0 found them."""
    torch.set_num_threads(1)
    return [_run(case, (build or ZOO)[case.model]) for case in cases]


def _parallel(case: Case, model: torch.nn.Module, batch: Any, world_size: int) -> autoplan.ParallelModel:
    if case.constraints is not None:
        constraints = autoplan.Constraints(**case.constraints)
        return autoplan.parallelize(model, batch, cluster=f"cpu:1x{world_size}", constraints=constraints, optimizer=case.optimizer.lower())
    graph = capture(model, batch)
    several = case.plan.get("tensor")
    degree = feature_axes(several)[0][1] if several else case.plan.get("tp", 1)
    degree = max((dict(own)["tp"] for own in case.plan.get("stage_meshes", ())), default=degree)
    splits = random_splits(graph, degree, case.splits_seed, gathered=several is not None) if case.splits_seed is not None else None
    splits = domain_splits(graph, degree, case.domain) if case.domain is not None else splits
    splits = splits_by_name(graph, case.labels) if case.labels is not None else splits
    return autoplan.parallelize(model, batch, plan=manual_plan(graph, splits=splits, **case.plan))


def _run(case: Case, build: Callable[[], Any]) -> Outcome:
    model, batch = build()
    dtype = getattr(torch, case.dtype)
    model, batch = model.to(dtype), {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
    plain = copy.deepcopy(model)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    try:
        pm = _parallel(case, model, batch, world_size)
    except autoplan.InfeasibleError as error:
        return Outcome(case, 0.0, 0.0, "", 0.0, "", (), (), 0, 0, refused=str(error))
    with count_flops() as counter:
        loss = pm.forward_backward(batch)
    held = held_by(pm, counter.get_total_flops())
    with count_flops() as dense_counter:
        true_loss = loss_of(plain, batch)
        true_loss.backward()
    grads = pm.full_grads()
    true_grads = {name: p.grad.clone() for name, p in plain.named_parameters(remove_duplicate=False) if p.grad is not None}
    make = getattr(torch.optim, case.optimizer)
    optimizer, true_optimizer = make(pm.parameters(), lr=0.05), make(plain.parameters(), lr=0.05)
    for step in range(case.steps):
        if step:
            pm.forward_backward(batch)
            loss_of(plain, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        true_optimizer.step()
        true_optimizer.zero_grad()
    weights, true_weights = pm.full_state_dict(), plain.state_dict()
    everyone: list[Any] = [held]
    if dist.is_initialized():
        everyone = [None] * world_size
        dist.all_gather_object(everyone, held)
    first = not dist.is_initialized() or dist.get_rank() == 0
    missing = tuple(sorted((grads.keys() ^ true_grads.keys()) | (weights.keys() ^ true_weights.keys()))) if first else ()
    loss_error = abs(loss.item() - true_loss.item()) / max(abs(true_loss.item()), 1e-300)
    dense = (sum(p.numel() * p.element_size() for p in plain.parameters()), dense_counter.get_total_flops())
    return Outcome(
        case, loss_error, *relative_errors(grads, true_grads), *relative_errors(weights, true_weights), missing, tuple(everyone), *dense, pm.plan.collectives
    )


def held_by(pm: autoplan.ParallelModel, flops: int) -> Held:
    """What this rank holds, did and sent in the step that has just run."""
    plan, executor = pm.plan, pm.executor
    mesh = executor.mesh
    locals_ = [p.to_local() if hasattr(p, "to_local") else p for p in pm.parameters()]
    resident = sum(p.numel() * p.element_size() for p in locals_)
    stages = [s for s in plan.forecast.stages if plan.stages[s.stage].rank == mesh.axis("pp").index]
    coordinates = {name: mesh.axis(name).index for name, _ in executor.program.axes}
    return Held(
        resident,
        sum(s.memory.parameters for s in stages),
        flops,
        sum(s.flops for s in stages),
        mesh.recorder.traffic(),
        traffic(executor.program, coordinates),
    )
