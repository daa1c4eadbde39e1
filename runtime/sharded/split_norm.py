"""Layer and root-mean-square norm over a last dimension that the ranks of an axis divide.

With H entries over all ranks, w and b the rank's own parts of weight and bias,

    layer norm   mean = sum x / H,  var = sum (x - mean)^2 / H,  h = (x - mean) / sqrt(var + eps),  y = w h + b
                 dx = (g - sum g / H - h sum(g h) / H) / sqrt(var + eps),  g = w dy
    rms norm     the same with mean 0:  dx = (g - h sum(g h) / H) / sqrt(sum x^2 / H + eps)

The second moment is taken about the mean, so nothing cancels. Collectives of R rows: layer norm two all-reduces of R forward and one of 2 R
backward, rms norm one of R in each pass. Gradients of weight and bias are local: the rank has all rows of its part.
Source: Xu et al. 2021 (Optimus, arXiv 2104.05343), section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from runtime.mesh import Axis
from runtime.sharded.reduction import all_reduce_


def split_layer_norm(
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
    *,
    axis: Axis,
) -> torch.Tensor:
    """`aten.layer_norm` of (..., H) from its parts x (..., H/p); weight and bias (H/p,). `normalized_shape` is (H,)."""
    return _SplitNorm.apply(x, weight, bias, eps, True, axis)  # type: ignore[return-value]


def split_rms_norm(
    x: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None, *, axis: Axis
) -> torch.Tensor:
    """`aten.rms_norm` of (..., H) from its parts x (..., H/p); weight (H/p,). `eps` None: that of x's dtype."""
    return _SplitNorm.apply(x, weight, None, torch.finfo(x.dtype).eps if eps is None else eps, False, axis)  # type: ignore[return-value]


class _SplitNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, is_centred: bool, axis: Axis) -> torch.Tensor:
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        length = x.shape[-1] * axis.size
        mean = None
        if is_centred:
            mean = wide.sum(-1, keepdim=True)
            all_reduce_(mean, axis)
            mean /= length
        centred = wide if mean is None else wide - mean
        second = centred.square().sum(-1, keepdim=True)
        all_reduce_(second, axis)
        scale = torch.rsqrt(second / length + eps)
        y = centred * scale
        if weight is not None:
            y = y * weight
        if bias is not None:
            y = y + bias
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.axis, ctx.bias_dtype = axis, None if bias is None else bias.dtype
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight, mean, scale = ctx.saved_tensors
        axis, dy = ctx.axis, grads[0].to(scale.dtype)
        length = x.shape[-1] * axis.size
        normal = (x.to(scale.dtype) if mean is None else x.to(scale.dtype) - mean) * scale
        rows = tuple(range(x.dim() - 1))
        dweight = (dy * normal).sum(rows).to(weight.dtype) if ctx.needs_input_grad[1] else None
        dbias = dy.sum(rows).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        dx = None
        if ctx.needs_input_grad[0]:
            g = dy if weight is None else dy * weight.to(dy.dtype)
            sums = [(g * normal).sum(-1, keepdim=True)] + ([] if mean is None else [g.sum(-1, keepdim=True)])
            both = torch.stack(sums)
            all_reduce_(both, axis)
            both /= length
            dx = g - normal * both[0]
            dx = ((dx if mean is None else dx - both[1]) * scale).to(x.dtype)
        return dx, dweight, dbias, None, None, None
