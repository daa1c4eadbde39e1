"""Batch normalisation in training, by one rank and over the ranks of mesh axes.

x is (N, C, *); statistics are over all dims but C. With n local and N global elements a channel,

    mean = sum_ranks(sum x) / N        second = sum_ranks(sum (x - mean)^2)      var = second / N
    y    = (x - mean) / sqrt(var + eps) * weight + bias
    running_mean' = (1 - momentum) running_mean + momentum mean
    running_var'  = (1 - momentum) running_var  + momentum second / (N - 1)

The second moment is taken about the global mean, so nothing cancels. Backward, with h = (x - mean) / sqrt(var + eps):

    dx = weight / sqrt(var + eps) (dy - sum_ranks(sum dy) / N - h sum_ranks(sum dy h) / N)
    dweight = sum dy h,  dbias = sum dy        local partial sums: the caller reduces them with all other gradients

Two all-reduces of C elements forward and two backward, on each axis; one element more where N has to be counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from runtime.mesh import Axis
from runtime.sharded.reduction import all_reduce_
from runtime.sharded.uneven import Spans, filled, real_of

Stats = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    momentum: float | None,
    eps: float,
) -> Stats:
    """Torch's batch norm in training as a function: (y, new running mean, new running variance).

    The given running statistics are not changed. Raises ValueError for `momentum` None (a cumulative average depends
    on a counter that is not among the arguments).
    """
    momentum = _checked_momentum(momentum, running_mean)
    new_mean, new_var = (None if stat is None else stat.detach().clone() for stat in (running_mean, running_var))
    y = F.batch_norm(x, new_mean, new_var, weight, bias, training=True, momentum=momentum, eps=eps)
    return y, new_mean, new_var


def batch_norm_eval(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    momentum: float | None,
    eps: float,
) -> Stats:
    """`batch_norm` in evaluation: by the running statistics, which stay."""
    return F.batch_norm(x, running_mean, running_var, weight, bias, training=False, eps=eps), running_mean, running_var


def sync_batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    momentum: float | None,
    eps: float,
    *,
    axis: Axis | Sequence[Axis],
    count: int | None = None,
    spans: Spans = (),
) -> Stats:
    """`batch_norm` of the tensor whose parts the ranks of `axis` hold; y is this rank's part of the whole tensor's.

    Ranks may hold different numbers of rows. `count` is the global number of elements a channel; None: counted with
    the first all-reduce. `spans`: where ranks divide positions unevenly (runtime/sharded/uneven.py). Gradients of weight and bias are this
    rank's partial sums.
    """
    momentum = _checked_momentum(momentum, running_mean)
    axes = (axis,) if isinstance(axis, Axis) else tuple(axis)
    y, mean, second, total = _SyncBatchNorm.apply(real_of(x, axes, spans), weight, bias, eps, axes, count)
    y = filled(y, axes, spans)
    if running_mean is None or running_var is None:
        return y, None, None
    with torch.no_grad():
        new_mean = torch.lerp(running_mean, mean.to(running_mean.dtype), momentum)
        new_var = torch.lerp(running_var, (second / (total - 1)).to(running_var.dtype), momentum)
    return y, new_mean, new_var


def _checked_momentum(momentum: float | None, running_mean: torch.Tensor | None) -> float:
    if momentum is not None:
        return momentum
    if running_mean is None:
        return 0.0
    raise ValueError("batch norm with momentum=None (cumulative average) is not supported: set a momentum, or track_running_stats=False")


class _SyncBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, axes: tuple[Axis, ...], count: int | None
    ) -> Any:
        dtype = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
        num_channels = x.shape[1]
        dims = tuple(d for d in range(x.dim()) if d != 1)
        shape = (1, num_channels) + (1,) * (x.dim() - 2)
        num_local = x.numel() // num_channels
        wide = x.to(dtype)

        sums = wide.sum(dims)
        if count is None:
            sums = torch.cat([sums, sums.new_full((1,), num_local)])
        for axis in axes:
            all_reduce_(sums, axis)
        total = sums[num_channels] if count is None else sums.new_full((), float(count))
        if all(axis.size == 1 for axis in axes) and num_local == 1:
            raise ValueError(f"batch norm needs more than one value a channel in training, found a tensor of shape {tuple(x.shape)}")
        mean = sums[:num_channels] / total
        centred = wide - mean.view(shape)
        second = centred.square().sum(dims)
        for axis in axes:
            all_reduce_(second, axis)
        inv_std = torch.rsqrt(second / total + eps)
        y = centred * inv_std.view(shape)
        if weight is not None:
            y = y * weight.to(dtype).view(shape)
        if bias is not None:
            y = y + bias.to(dtype).view(shape)

        ctx.save_for_backward(x, weight, mean, inv_std, total)
        ctx.axes, ctx.dims, ctx.view = axes, dims, shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(mean, second, total)
        return y.to(x.dtype), mean, second, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight, mean, inv_std, total = ctx.saved_tensors
        dtype, shape = mean.dtype, ctx.view
        dy = grads[0].to(dtype)
        normal = (x.to(dtype) - mean.view(shape)) * inv_std.view(shape)
        sum_dy, sum_dyh = dy.sum(ctx.dims), (dy * normal).sum(ctx.dims)
        dx = None
        dweight = sum_dyh.to(weight.dtype, copy=True) if ctx.needs_input_grad[1] else None
        dbias = sum_dy.to(ctx.bias_dtype, copy=True) if ctx.needs_input_grad[2] else None
        if ctx.needs_input_grad[0]:
            for axis in ctx.axes:
                all_reduce_(sum_dy, axis)
                all_reduce_(sum_dyh, axis)
            scale = inv_std if weight is None else inv_std * weight.to(dtype)
            centred = dy - (sum_dy / total).view(shape) - normal * (sum_dyh / total).view(shape)
            dx = (scale.view(shape) * centred).to(x.dtype)
        return dx, dweight, dbias, None, None, None
