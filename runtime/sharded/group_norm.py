"""Group normalisation over positions that ranks divide.

With sums over a group's channels and all positions, L of them over all ranks (Wu and He 2018, section 3),

    mean = sum x / L        var = sum (x - mean)^2 / L        y = (x - mean) / sqrt(var + eps) w + b
    dx   = (w dy - (sum w dy) / L - n (sum w dy n) / L) / sqrt(var + eps)             n: the normal value

two all-reduces of one number a row and group forward, two backward. The variance is taken about the mean: E[x^2] - E[x]^2 would cancel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from runtime.mesh import Axis
from runtime.sharded.reduction import all_reduce_
from runtime.sharded.uneven import Spans, filled, real_of


def sync_group_norm(
    x: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
    *,
    axis: Axis | Sequence[Axis],
    count: int | None = None,
    spans: Spans = (),
) -> torch.Tensor:
    """`aten.group_norm` of x (n, c, positions...), whose positions are divided over `axis`: evenly, or as `spans` say (runtime/sharded/uneven.py)
    with `count` elements of a group on all ranks together. Gradients of weight and bias are this rank's partial sums."""
    axes = (axis,) if isinstance(axis, Axis) else tuple(axis)
    x = real_of(x, axes, spans)
    length = x.numel() // (x.shape[0] * num_groups) * math.prod(owner.size for owner in axes) if count is None else count
    return filled(_SyncGroupNorm.apply(x, weight, bias, num_groups, eps, axes, length), axes, spans)  # type: ignore[arg-type]


class _SyncGroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, num_groups: int, eps: float, axes: tuple[Axis, ...], length: int
    ) -> Any:
        dtype = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
        wide = x.to(dtype).reshape(x.shape[0], num_groups, -1)
        mean = wide.sum(2, keepdim=True)
        for owner in axes:
            all_reduce_(mean, owner)
        mean /= length
        centred = wide - mean
        second = centred.square().sum(2, keepdim=True)
        for owner in axes:
            all_reduce_(second, owner)
        inv_std = torch.rsqrt(second / length + eps)
        y = (centred * inv_std).view(x.shape)
        view = (1, -1) + (1,) * (x.dim() - 2)
        if weight is not None:
            y = y * weight.to(dtype).view(view)
        if bias is not None:
            y = y + bias.to(dtype).view(view)
        ctx.save_for_backward(x, weight, mean, inv_std)
        ctx.axes, ctx.length, ctx.view, ctx.bias_dtype = axes, length, view, None if bias is None else bias.dtype
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight, mean, inv_std = ctx.saved_tensors
        dy, grouped = grads[0].to(mean.dtype), (x.shape[0], mean.shape[1], -1)
        normal = (x.to(mean.dtype).reshape(grouped) - mean) * inv_std
        others = [d for d in range(x.dim()) if d != 1]
        dweight = (dy * normal.view(x.shape)).sum(others).to(weight.dtype) if ctx.needs_input_grad[1] else None
        dbias = dy.sum(others).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        dx = None
        if ctx.needs_input_grad[0]:
            scaled = (dy if weight is None else dy * weight.to(mean.dtype).view(ctx.view)).reshape(grouped)
            first, second = scaled.sum(2, keepdim=True), (scaled * normal).sum(2, keepdim=True)
            for owner in ctx.axes:
                all_reduce_(first, owner)
                all_reduce_(second, owner)
            dx = (inv_std * (scaled - first / ctx.length - normal * (second / ctx.length))).view(x.shape).to(x.dtype)
        return dx, dweight, dbias, None, None, None, None
