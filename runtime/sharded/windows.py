"""Windowed operators whose positions are divided: the plain operator on rows that runtime/sharded/halo.py completes.

Arguments are those of the ATen operators. `axis` and `dims` go together: dims[i] of the input is divided over axis i. So do `spans`, where
they are given: how the rows of dims[i] and of the output are divided, () where each rank has an equal share (`halo.Span`). The window is
then over a rank's real rows (runtime/pieces.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from runtime.mesh import Axis
from runtime.sharded.halo import Fill, Span, Window, halo, spanned_halo, transposed_halo, window_halo
from runtime.sharded.uneven import real_rows, with_copies

Sizes = int | Sequence[int]
Axes = Axis | Sequence[Axis]
Spans = Sequence[Sequence[int]]


def spread(value: Sizes, rank: int, default: Sequence[int] = ()) -> list[int]:
    """An argument of one number or of one a dimension, as the latter; an empty one is `default`."""
    if isinstance(value, int):
        return [value] * rank
    values = list(value) or list(default)
    return values * rank if len(values) == 1 else values


def same_padding(padding: Sizes | str, kernel: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """Padding as numbers. "same" needs an odd extent, so that both sides are padded alike."""
    if not isinstance(padding, str):
        return spread(padding, len(kernel))
    extents = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    if padding == "same" and any(extent % 2 for extent in extents):
        raise ValueError(f"padding='same' of kernels {list(kernel)} pads one side more: positions cannot be divided")
    return [extent // 2 if padding == "same" else 0 for extent in extents]


def _pairs(axis: Axes, dims: Sequence[int], spans: Spans) -> list[tuple[Axis, int, Span | None]]:
    axes = (axis,) if isinstance(axis, Axis) else tuple(axis)
    if len(set(dims)) != len(dims):
        raise ValueError(f"axes {[owner.name for owner in axes]} divide dimensions {list(dims)}: rows are exchanged along one axis a dimension")
    return list(zip(axes, dims, [Span(*span) if span else None for span in spans] or [None] * len(axes), strict=True))


def _completed(x: torch.Tensor, dim: int, window: Window, span: Span | None, axis: Axis, fill: Fill) -> torch.Tensor:
    """x with the rows beside its own that a window reads."""
    if span is not None:
        own = real_rows(x, dim, 1, (span.size,), span.inner, axis=axis)
        return spanned_halo(own, dim, span, window, axis, fill)
    before, after = window_halo(window.kernel, window.stride, window.padding, window.dilation)
    return halo(x, dim, before, after, axis, fill)


def _with_room(y: torch.Tensor, pairs: Sequence[tuple[Axis, int, Span | None]]) -> torch.Tensor:
    """A result for real rows with room for as many as any rank has."""
    for owner, dim, span in pairs:
        if span is not None:
            y = with_copies(y, dim, 1, (span.out_size,), span.out_inner, axis=owner)
    return y


def halo_conv(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    *,
    axis: Axes,
    dims: Sequence[int],
    spans: Spans = (),
) -> torch.Tensor:
    """`aten.conv1d/2d/3d` of this rank's rows. Gradients of weight and bias are this rank's partial sums."""
    kernel = list(weight.shape[2:])
    rank = len(kernel)
    strides, dilations = spread(stride, rank), spread(dilation, rank)
    paddings = same_padding(padding, kernel, dilations)
    pairs = _pairs(axis, dims, spans)
    for owner, dim, span in pairs:
        i = dim - 2
        input, paddings[i] = _completed(input, dim, Window(kernel[i], strides[i], paddings[i], dilations[i]), span, owner, "zero"), 0
    return _with_room((F.conv1d, F.conv2d, F.conv3d)[rank - 1](input, weight, bias, strides, paddings, dilations, groups), pairs)


def _part(bias: torch.Tensor | None, axis: Axes) -> torch.Tensor | None:
    """An equal part of a bias for each rank of some axes."""
    return None if bias is None else bias / math.prod(owner.size for owner in ((axis,) if isinstance(axis, Axis) else axis))


def conv_part(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    *,
    axis: Axes,
) -> torch.Tensor:
    """This rank's share of `aten.conv1d/2d/3d` over input channels that are divided: it adds its part of the bias."""
    operator = (F.conv1d, F.conv2d, F.conv3d)[weight.dim() - 3]
    return operator(input, weight, _part(bias, axis), stride, padding, dilation, groups)  # type: ignore[arg-type]


def conv_transpose_part(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
    *,
    axis: Axes,
) -> torch.Tensor:
    """This rank's share of `aten.conv_transpose1d/2d/3d` over input channels that are divided: it adds its part of the bias."""
    operator = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[weight.dim() - 3]
    return operator(input, weight, _part(bias, axis), stride, padding, output_padding, groups, dilation)  # type: ignore[arg-type]


def halo_conv_transpose(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
    *,
    axis: Axes,
    dims: Sequence[int],
    spans: Spans = (),
) -> torch.Tensor:
    """`aten.conv_transpose1d/2d/3d` of this rank's rows: more output than its share is made, and cut."""
    kernel = list(weight.shape[2:])
    rank = len(kernel)
    strides, paddings, extras, dilations = (spread(value, rank) for value in (stride, padding, output_padding, dilation))
    wanted: list[tuple[int, int, int]] = []  # dimension, first row and number of rows of the output to keep
    pairs = _pairs(axis, dims, spans)
    for owner, dim, span in pairs:
        i = dim - 2
        if span is not None:
            window = Window(kernel[i], strides[i], paddings[i], dilations[i], True)
            first, end = span.outputs(owner.size, owner.index)
            wanted.append((dim, first + paddings[i] - window.reads(first, end)[0] * strides[i], end - first))
            input, paddings[i] = _completed(input, dim, window, span, owner, "zero"), 0
        else:
            before, after = transposed_halo(kernel[i], strides[i], paddings[i], dilations[i])
            wanted.append((dim, before * strides[i] + paddings[i], input.shape[dim] * strides[i]))
            input, paddings[i] = halo(input, dim, before, after, owner), 0
        made = (input.shape[dim] - 1) * strides[i] + dilations[i] * (kernel[i] - 1) + 1
        extras[i] = max(0, wanted[-1][1] + wanted[-1][2] - made)
    operator = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[rank - 1]
    y = operator(input, weight, bias, strides, paddings, extras, groups, dilations)
    for dim, start, length in wanted:
        y = y.narrow(dim, start, length)
    return _with_room(y.contiguous(), pairs)


def _pooled(x: torch.Tensor, kernel: list[int], strides: list[int], paddings: list[int], dilations: list[int], pairs: Any, fill: Fill) -> torch.Tensor:
    """x with its halos; `paddings` becomes 0 where they are in it."""
    first = x.dim() - len(kernel)
    for owner, dim, span in pairs:
        i = dim - first
        x, paddings[i] = _completed(x, dim, Window(kernel[i], strides[i], paddings[i], dilations[i]), span, owner, fill), 0
    return x


def halo_max_pool(
    input: torch.Tensor,
    kernel_size: Sizes,
    stride: Sizes = (),
    padding: Sizes = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
    *,
    axis: Axes,
    dims: Sequence[int],
    spans: Spans = (),
) -> torch.Tensor:
    """`aten.max_pool1d/2d/3d` of this rank's rows."""
    return _pool(_max_pools, "lowest", input, kernel_size, stride, padding, dilation, axis, dims, spans)


def halo_avg_pool(
    input: torch.Tensor,
    kernel_size: Sizes,
    stride: Sizes = (),
    padding: Sizes = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    axis: Axes,
    dims: Sequence[int],
    spans: Spans = (),
) -> torch.Tensor:
    """`aten.avg_pool1d/2d/3d` of this rank's rows; padding counts."""
    pools = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)

    def pool(rank: int, x: torch.Tensor, kernel: list[int], strides: list[int], paddings: list[int], dilations: list[int]) -> torch.Tensor:
        extra = () if rank == 1 else (divisor_override,)
        return pools[rank - 1](x, kernel, strides, paddings, False, True, *extra)

    return _pool(pool, "zero", input, kernel_size, stride, padding, 1, axis, dims, spans)


def _max_pools(rank: int, x: torch.Tensor, kernel: list[int], strides: list[int], paddings: list[int], dilations: list[int]) -> torch.Tensor:
    return (F.max_pool1d, F.max_pool2d, F.max_pool3d)[rank - 1](x, kernel, strides, paddings, dilations)


def _pool(
    pool: Callable[..., torch.Tensor],
    fill: Fill,
    x: torch.Tensor,
    kernel_size: Sizes,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    axis: Axes,
    dims: Sequence[int],
    spans: Spans,
) -> torch.Tensor:
    pairs = _pairs(axis, dims, spans)
    rank = len(kernel_size) if not isinstance(kernel_size, int) else x.dim() - 2
    kernel = spread(kernel_size, rank)
    strides, paddings, dilations = spread(stride, rank, kernel), spread(padding, rank), spread(dilation, rank)
    x = _pooled(x, kernel, strides, paddings, dilations, pairs, fill)
    return _with_room(pool(rank, x, kernel, strides, paddings, dilations), pairs)


def adaptive_average_part(x: torch.Tensor, output_size: Sizes, *, axis: Axes, count: int | None = None) -> torch.Tensor:
    """This rank's share of `aten.adaptive_avg_pool1d/2d/3d` to one position, of positions that are divided."""
    positions = tuple(range(x.dim() - len(spread(output_size, 1)), x.dim()))
    return mean_part(x, positions, True, axis=axis, count=count)


def mean_part(
    x: torch.Tensor, dim: Sizes | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, axis: Axes, count: int | None = None
) -> torch.Tensor:
    """This rank's share of `aten.mean` over dimensions that are divided: evenly, or `count` are the elements of one mean over all ranks."""
    if count is not None:
        return x.sum(dim=dim, keepdim=keepdim, dtype=dtype) / count  # type: ignore[arg-type]
    num_parts = math.prod(owner.size for owner in ((axis,) if isinstance(axis, Axis) else axis))
    return x.mean(dim=dim, keepdim=keepdim, dtype=dtype) / num_parts  # type: ignore[arg-type]
