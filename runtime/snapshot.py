"""The state of an executor in memory, to come back to: trials of a training that is not meant to happen."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.executor import Executor
from runtime.scaling import LossScale
from runtime.storage import Resident


@dataclass(frozen=True, eq=False)
class Snapshot:
    """This rank's tensors and counters. Gradients are not part of it."""

    tensors: tuple[torch.Tensor, ...]  # of the residents, in order
    residuals: tuple[torch.Tensor, ...]
    pending: tuple[tuple[Resident, torch.Tensor], ...]
    carried: tuple[tuple[Resident, torch.Tensor], ...]
    num_steps: int
    loss_scale: LossScale | None


def snapshot(executor: Executor) -> Snapshot:
    """A copy of what training changes. All ranks call it."""
    reducer = executor.reducer
    if reducer is not None:
        reducer.settle()  # a sum in the background changes residuals
    residuals = (*reducer.residuals.own, *reducer.residuals.owned) if reducer is not None and reducer.residuals is not None else ()
    with torch.no_grad():
        return Snapshot(
            tuple(r.local().clone() for r in executor.residents),
            tuple(r.clone() for r in residuals),
            tuple((r, total.clone()) for r, total in reducer.pending) if reducer is not None else (),
            tuple((r, grad.clone()) for r, grad in executor.carried),
            executor.num_steps,
            executor.loss_scale,
        )


def revert(executor: Executor, state: Snapshot) -> None:
    """Go back to a snapshot, which can be used again; gradients are gone. All ranks call it."""
    reducer = executor.reducer
    if reducer is not None:
        reducer.settle()
    with torch.no_grad():
        for resident, tensor in zip(executor.residents, state.tensors, strict=True):
            resident.local().copy_(tensor)
        if reducer is not None and reducer.residuals is not None:
            for residual, kept in zip((*reducer.residuals.own, *reducer.residuals.owned), state.residuals, strict=True):
                residual.copy_(kept)
        if reducer is not None and reducer.delay:
            reducer.restore([(r, total.clone()) for r, total in state.pending])
    executor.carried = [(r, grad.clone()) for r, grad in state.carried]
    executor.num_steps, executor.loss_scale = state.num_steps, state.loss_scale
    executor.zero_grad()
