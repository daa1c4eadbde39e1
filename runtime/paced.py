"""Paced devices: the real executor, schedule and process groups, with compute replaced by sleeping.

Where many ranks share few cores they fight for them and nothing about a schedule can be measured. A paced stage takes the time
that it is told to take, costs no core, and sends tensors of the right shape.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from runtime.bodies import kept_values
from runtime.call import dtype_of
from runtime.executor import Executor
from runtime.instr import TensorSpec
from runtime.module import Values
from runtime.split import WeightGrads
from runtime.traffic import body_specs

Durations = Mapping[tuple[str, int], float]  # (action kind, stage) -> seconds


def pace(executor: Executor, durations_s: Durations) -> None:
    """Let every action of the executor's present program take `durations_s[kind, stage]` seconds and compute nothing.

    Collectives inside a stage and those of ZeRO are left out as well; transfers, deferred sums and the loss stay.
    """
    sizes = dict(executor.program.axes)
    for stage in executor.program.stages:
        later = executor.storages[stage.index].later
        for body in stage.bodies:
            specs = body_specs(stage, body, sizes)
            outputs = {name: specs[name] for name in kept_values(stage, body)}
            halves = [durations_s.get((kind, stage.index), 0.0) for kind in ("F", "BI" if later else "B", "BW")]
            executor.code.bodies[stage.index, body.rows] = _PacedBody(outputs, *halves, later, executor.mesh.device)  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class _PacedBody:
    outputs: Mapping[str, TensorSpec]
    forward_s: float
    backward_s: float
    weights_s: float
    later: WeightGrads | None
    device: torch.device

    def __call__(self, inputs: Values) -> dict[str, torch.Tensor]:
        time.sleep(self.forward_s)
        made = {name: torch.zeros(spec.shape, dtype=dtype_of(spec.dtype), device=self.device) for name, spec in self.outputs.items()}
        floats = [name for name, value in made.items() if value.is_floating_point()]
        reads = [value for value in inputs.values() if value.requires_grad] or [torch.zeros((), requires_grad=True)]
        if floats and torch.is_grad_enabled():
            made.update(zip(floats, _Pace.apply(self, [made[name] for name in floats], *reads), strict=True))  # type: ignore[arg-type]
        return made


class _Pace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, body: _PacedBody, outputs: list[torch.Tensor], *inputs: torch.Tensor) -> Any:
        ctx.body, ctx.shapes = body, [(x.shape, x.dtype, x.device) for x in inputs]
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        time.sleep(ctx.body.backward_s)
        if ctx.body.later is not None:
            ctx.body.later.pending.append((torch.zeros(()), lambda: _slept(ctx.body.weights_s)))
        return None, None, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.shapes)


def _slept(seconds: float) -> torch.Tensor:
    time.sleep(seconds)
    return torch.zeros(())
