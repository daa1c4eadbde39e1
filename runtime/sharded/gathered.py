"""A matrix product whose operands lie divided along dimensions that the product does not divide: each is gathered inside the
product, panel by panel, in the forward pass and again in the backward pass, so that nothing gathered outlives the call.

y = x A^T with x (..., K) and A (N, K). An operand of n elements on the p ranks of its axis moves

    forward    all_gather n
    backward   all_gather n where the other operand needs a gradient,  reduce_scatter n where it needs one itself

Where an operand is divided along the contraction, the product is summed over c panels; panel t holds the t-th part of what every
rank has, so c panels are c collectives of n/c elements, and n/c are alive at once. With x gathered over the columns and A over the
rows of a q x q grid this is SUMMA (van de Geijn and Watts 1997; Xu et al. 2021, "Optimus", arXiv 2104.05343) with rings in place of
broadcasts: 3(q-1)(MK+KN) elements on the wire. Operands that are divided along rows or columns instead are gathered at once (Bian et
al. 2021, arXiv 2105.14450).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from runtime.collective import Part, raw_all_gather, raw_reduce_scatter
from runtime.mesh import Axis


@dataclass(frozen=True, slots=True)
class Columns:
    """How the contraction is cut into panels: the dimension is [outer, ranks, count, width, inner], panel t is [:, :, t]."""

    outer: int
    num_ranks: int
    count: int
    width: int
    inner: int

    def of_whole(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """A view [..., outer, ranks, count, width, inner, ...] of a tensor that has the whole dimension."""
        return x.unflatten(dim, (self.outer, self.num_ranks, self.count, self.width, self.inner))

    def of_part(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """A view [..., outer, count, width, inner, ...] of a tensor that has a rank's part."""
        return x.unflatten(dim, (self.outer, self.count, self.width, self.inner))

    def part(self, dim: int) -> Part:
        """What the ranks divide of one panel."""
        return Part(dim, self.outer, self.num_ranks * self.width, self.inner)


def columns(part: Part, num_ranks: int) -> Columns:
    """The panels of a contraction that is divided as `part` says: as many as ranks, or the largest number below that divides."""
    each = part.size // num_ranks
    count = next(c for c in range(min(num_ranks, each), 0, -1) if each % c == 0)
    return Columns(part.outer, num_ranks, count, each // count, part.inner)


def streamed(parts: Sequence[Part | None], num_ranks: Sequence[int], contracted: Sequence[int]) -> tuple[Columns | None, tuple[bool, ...]]:
    """The panels of the product, and which operands are gathered panel by panel.

    `parts[i]`: how operand i is divided, None where it is not; `contracted[i]`: its contracted dimension.
    """
    along = [part is not None and part.dim == dim for part, dim in zip(parts, contracted, strict=True)]
    found = [columns(part, p) if part is not None and on else None for part, p, on in zip(parts, num_ranks, along, strict=True)]
    first = next((c for c in found if c is not None), None)
    return first, tuple(c is not None and c == first for c in found)


@dataclass(frozen=True, slots=True)
class _Gather:
    part: Part
    axis: Axis


@dataclass(eq=False)
class _Operand:
    """One operand in one pass: its panels, and where their gradients go."""

    local: torch.Tensor
    dim: int  # contracted
    gather: _Gather | None
    panels: Columns | None
    is_streamed: bool
    grad: torch.Tensor | None = None
    _whole: torch.Tensor | None = None

    def panel(self, t: int) -> torch.Tensor:
        if self.is_streamed:
            assert self.gather is not None and self.panels is not None
            mine = self.panels.of_part(self.local, self.dim).select(self.dim + 1, t).flatten(self.dim, self.dim + 2)
            return raw_all_gather(mine, self.panels.part(self.dim), self.gather.axis)
        if self._whole is None:
            self._whole = self.local if self.gather is None else raw_all_gather(self.local, self.gather.part, self.gather.axis)
        if self.panels is None:
            return self._whole
        return self.panels.of_whole(self._whole, self.dim).select(self.dim + 2, t).flatten(self.dim, self.dim + 3)

    def put(self, t: int, grad: torch.Tensor) -> None:
        """Take the gradient of panel t."""
        if self.is_streamed:
            assert self.gather is not None and self.panels is not None
            mine = raw_reduce_scatter(grad, self.panels.part(self.dim), self.gather.axis)
            if self.grad is None:
                self.grad = torch.empty_like(self.local, memory_format=torch.contiguous_format)
            place = self.panels.of_part(self.grad, self.dim).select(self.dim + 1, t)
            place.copy_(mine.view(place.shape))
        elif self.panels is None:
            self.grad = grad
        else:
            if self.grad is None:
                shape = list(grad.shape)
                shape[self.dim] *= self.panels.count
                self.grad = grad.new_empty(shape)
            place = self.panels.of_whole(self.grad, self.dim).select(self.dim + 2, t)
            place.copy_(grad.reshape(place.shape))

    def result(self) -> torch.Tensor | None:
        """The gradient of the local operand."""
        if self.grad is None or self.gather is None or self.is_streamed:
            return self.grad
        return raw_reduce_scatter(self.grad, self.gather.part, self.gather.axis)


def _operands(x: torch.Tensor, weight: torch.Tensor, gathers: tuple[_Gather | None, _Gather | None]) -> tuple[_Operand, _Operand, int]:
    dims = (x.dim() - 1, 1)
    parts = [None if g is None else g.part for g in gathers]
    panels, which = streamed(parts, [1 if g is None else g.axis.size for g in gathers], dims)
    left, right = (_Operand(t, d, g, panels, s) for t, d, g, s in zip((x, weight), dims, gathers, which, strict=True))
    return left, right, 1 if panels is None else panels.count


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, gathers: tuple[_Gather | None, _Gather | None]) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.gathers = gathers
        left, right, count = _operands(x, weight, gathers)
        total = F.linear(left.panel(0), right.panel(0))
        if count > 1 and total.dtype in (torch.float16, torch.bfloat16):
            total = total.float()  # panels are added without rounding each sum
        for t in range(1, count):
            total += F.linear(left.panel(t), right.panel(t))
        return total.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        left, right, count = _operands(x, weight, ctx.gathers)
        rows = grads[0].reshape(-1, grads[0].shape[-1])
        for t in range(count):
            if ctx.needs_input_grad[0]:
                left.put(t, grads[0] @ right.panel(t))
            if ctx.needs_input_grad[1]:
                panel = left.panel(t)
                right.put(t, rows.t() @ panel.reshape(-1, panel.shape[-1]))
        return left.result(), right.result(), None


def gathered_linear(x: torch.Tensor, weight: torch.Tensor, *, axes: Sequence[Axis], gathers: Sequence[Sequence[int]]) -> torch.Tensor:
    """`aten.linear` without bias of operands that lie divided, both or one of them.

    x (..., K), weight (N, K) -> (..., N) of the gathered operands. gathers[i] = (operand, dim, outer, size, inner): `axes[i]` divides dimension
    `dim` of operand 0 (x) or 1 (weight), seen as [outer, size, inner], along the middle. The gradient of an operand is summed
    over its axis. Raises ValueError where an operand is named twice.
    """
    found: list[_Gather | None] = [None, None]
    for axis, (operand, *part) in zip(axes, gathers, strict=True):
        if found[operand] is not None:
            raise ValueError(f"operand {operand} of a product is gathered over one axis at most, asked are {[a.name for a in axes]}")
        if axis.size > 1:
            found[operand] = _Gather(Part(*part), axis)
    return _GatheredLinear.apply(x, weight, (found[0], found[1]))  # type: ignore[return-value]


def gathered_mm(x: torch.Tensor, weight: torch.Tensor, *, axes: Sequence[Axis], gathers: Sequence[Sequence[int]]) -> torch.Tensor:
    """`aten.mm` alike: x (M, K), weight (K, N) -> (M, N)."""
    turned = [(operand, 1 - dim if operand == 1 else dim, *part) for operand, dim, *part in gathers]
    return gathered_linear(x, weight.t(), axes=axes, gathers=turned)
