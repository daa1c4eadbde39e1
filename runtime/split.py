"""A backward pass in two halves: the gradients of inputs now, those of weights later (Qi et al. 2023, section 2).

Where a stage's backward is split, matrix products with a weight at rest keep what the weight's gradient needs instead of
computing it. The inputs' half (BI) is an ordinary backward pass that leaves these products out; the weights' half (BW)
computes and adds them. Everything else (biases, norms, embeddings, collectives) stays in the first half.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from runtime.instr import Instr, Ref
from runtime.master import master_of

Later = tuple[torch.Tensor, Callable[[], torch.Tensor]]  # weight, its gradient


@dataclass(eq=False)
class WeightGrads:
    """The weight gradients that the backward passes of a stage have put off."""

    pending: list[Later] = field(default_factory=list)

    def take(self) -> list[Later]:
        """What has been put off since the last call."""
        taken, self.pending = self.pending, []
        return taken

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`aten.linear` that puts off its weight's gradient. x (..., K), weight (N, K) -> (..., N)."""
        resting = master_of(weight)
        if not (resting.is_leaf and weight.requires_grad and x.requires_grad and weight.dim() == 2):
            return F.linear(x, weight, bias)
        return _Linear.apply(x, weight, bias, self, resting)  # type: ignore[return-value]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, later: WeightGrads, resting: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.later, ctx.weight, ctx.has_bias = later, resting, bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        dy = grads[0]
        dy_rows, x_rows = dy.reshape(-1, dy.shape[-1]), x.detach().reshape(-1, x.shape[-1])
        ctx.later.pending.append((ctx.weight, lambda: dy_rows.t() @ x_rows))
        bias = dy_rows.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return dy @ weight, None, bias, None, None


def puts_off(instr: Instr, stored: Collection[str]) -> bool:
    """Whether a split backward pass puts off the gradient of the instruction's weight. `stored`: names of tensors at rest."""
    return instr.target == "aten.linear.default" and len(instr.args) > 1 and isinstance(instr.args[1], Ref) and instr.args[1].name in stored


def add(later: list[Later]) -> None:
    """Compute what was put off and add it to the weights' gradients."""
    with torch.no_grad():
        for weight, gradient in later:
            found = gradient().to(weight.dtype)
            weight.grad = found if weight.grad is None else weight.grad.add_(found)
