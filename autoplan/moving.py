"""Going on under another plan in the same job: what has to hold, and what stays where it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autoplan.errors import StalePlanError, UsageError
from autoplan.graph import Graph
from autoplan.plan import Plan
from runtime.executor import Executor
from runtime.mesh import Mesh, build_mesh
from runtime.program import Program
from runtime.traffic import is_split_backward


def check_move(old: Plan, new: Plan, executor: Executor, optimizer: torch.optim.Optimizer | None) -> None:
    """Raises StalePlanError or UsageError where a running model cannot go on under `new`."""
    if (new.global_batch, new.precision, new.placement) != (old.global_batch, old.precision, old.placement):
        raise StalePlanError("the plan is for another global batch, precision or placement than the one that runs: plan with the same ones.")
    if (new.sync, old.sync) != ("allreduce", "allreduce"):
        raise UsageError("plans with parameter servers cannot be changed on the way, since the servers hold the state: save, and load under the new plan.")
    if any(plan.compression or plan.delay for plan in (old, new)) or executor.carried:
        raise UsageError("residuals and pending sums of compressed or late gradients do not move in place: save, and load under the new plan.")
    if any(parameter.grad is not None for parameter in executor.parameters()):
        raise UsageError("move_to moves weights and optimizer state, not gradients: call zero_grad() before it.")
    if getattr(optimizer, "dense", None):
        raise UsageError(
            f"{type(optimizer).__name__} works on dense copies of divided parameters and cannot move: use an elementwise optimizer, or save and load."
        )


def rests_alike(before: tuple[Program, ...], after: tuple[Program, ...]) -> bool:
    """Whether every rank keeps the same tensors under both programs, so that nothing has to move."""

    def kept(programs: tuple[Program, ...]) -> list[Any]:
        first, stages = programs[0], []
        for stage in (stage for program in programs for stage in program.stages):
            tensors = tuple(stored for stored in stage.stored if stored.kind != "constant")
            stages.append((stage.index, tensors, tuple(block.name for block in stage.bodies[0].blocks)))
        return [[program.axes for program in programs], first.stage_ranks, first.zero, first.zero_group, is_split_backward(first), stages]

    return kept(before) == kept(after)


def shapes_source(model: torch.nn.Module, graph: Graph) -> Callable[[str], torch.Tensor]:
    """A function from a tensor's own name to one of its shape, whose values are written later; constants as they are."""
    dense = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return lambda fqn: graph.constants[fqn] if fqn in graph.constants else torch.empty(dense[fqn].shape, dtype=dense[fqn].dtype)


class Meshes:
    """The meshes of the plans that ran; each form is made once, since process groups are kept."""

    def __init__(self, plan: Plan, mesh: Mesh) -> None:
        self._known = {(plan.axes, plan.stage_meshes, plan.zero_group): mesh}

    def of(self, plan: Plan, running: Mesh) -> Mesh:
        """The mesh of a plan, as patient as the one that is running. Every rank calls it."""
        form = (plan.axes, plan.stage_meshes, plan.zero_group)
        if form not in self._known:
            self._known[form] = build_mesh(
                plan.axes, stage_meshes=plan.stage_meshes, zero_group=plan.zero_group, device=running.device, patience_s=running.guard.patience_s
            )
        return self._known[form]
