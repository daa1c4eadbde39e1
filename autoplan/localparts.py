"""Elementwise optimizers on divided parameters, without what DTensor costs.

Under ZeRO a parameter, its gradient and its state are DTensors, and every operator on them passes through DTensor's dispatch: some
thirty microseconds each, which an elementwise update does not need, since it never looks beyond this rank's part. Here a step
works on stand-ins, plain parameters over the same memory; outside of a step nothing is different: groups, gradients and state are those of
the parameters themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from runtime.storage import Resident


def on_local_parts(cls: Any, divided: Sequence[Resident]) -> Any:
    """`cls`, an elementwise optimizer of torch, that updates those of its parameters that are among `divided` as plain tensors."""
    residents = {resident.tensor: resident for resident in divided}
    update = cls.step.__wrapped__ if hasattr(cls.step, "hooked") else cls.step  # hooks run once, around the step below

    class Local(cls):
        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            with torch.no_grad(), _replaced(self, residents):
                update(self)
            return loss

    Local.__name__, Local.__qualname__, Local.__module__ = cls.__name__, cls.__qualname__, cls.__module__
    return Local


@contextmanager
def _replaced(optimizer: torch.optim.Optimizer, residents: dict[torch.Tensor, Resident]) -> Iterator[None]:
    """Inside, `optimizer` has stand-ins in the place of its divided parameters, with their gradients and state."""
    groups = [(group, group["params"]) for group in optimizer.param_groups]
    twins = {p: _twin(residents[p], p) for _, params in groups for p in params if p in residents}
    before = {
        p: {key: residents[p].local(v) if isinstance(v, torch.Tensor) else v for key, v in optimizer.state[p].items()} for p in twins if p in optimizer.state
    }
    for p, state in before.items():
        optimizer.state[twins[p]] = dict(state)
    for group, params in groups:
        group["params"] = [twins.get(p, p) for p in params]
    try:
        yield
    finally:
        for group, params in groups:
            group["params"] = params
        for p, twin in twins.items():
            for key, value in optimizer.state.pop(twin, {}).items():
                if value is not before.get(p, {}).get(key):  # what is updated in place is in the parameter's state already
                    optimizer.state[p][key] = _at_rest(value, twin, residents[p])


def _locally(state: dict[str, Any], resident: Resident) -> dict[str, Any]:
    return {key: resident.local(value) if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def _twin(resident: Resident, parameter: torch.Tensor) -> nn.Parameter:
    twin = nn.Parameter(resident.local().detach(), requires_grad=parameter.requires_grad)
    twin.grad = None if parameter.grad is None else resident.local(parameter.grad)
    return twin


def _at_rest(value: Any, twin: torch.Tensor, resident: Resident) -> Any:
    """A piece of state as the parameter itself would have it: a number, or divided as it is."""
    return resident.like(value) if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == twin.shape else value
