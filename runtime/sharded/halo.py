"""Domain parallelism: windowed operators over positions that ranks divide, with rows exchanged between neighbours.

Rank r of p holds rows [r n, (r + 1) n) of a dimension of p n (Gholami et al. 2018, section 4; Dryden et al. 2019). An output row o of a
window of k taps at distance d, stride s and padding q reads input rows o s - q ... o s - q + d (k - 1), so a rank whose output is its
share of p n / s rows needs, beside its own,

    before = q              after = d (k - 1) - q - (s - 1)            none where that is negative

rows of its neighbours, and a transposed one, whose output is p n s rows, before = (d (k - 1) - q) // s, after = (s - 1 + q) // s. Beyond the
ends lies what the plain operator pads with: zeros, -inf for a maximum, the last row for interpolation. The gradient of rows
that were received goes back and is added to their owner's.

Bytes a rank sends, e = elements of one row of its part: before e to the next rank, after e to the one before it; the same backwards.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from runtime.collective import complete
from runtime.mesh import Axis

Fill = Literal["zero", "lowest", "edge"]


def window_halo(kernel: int, stride: int, padding: int, dilation: int) -> tuple[int, int]:
    """Rows that a rank needs of the ranks before and after it, for a window that slides over its part."""
    return padding, max(0, dilation * (kernel - 1) - padding - (stride - 1))


def transposed_halo(kernel: int, stride: int, padding: int, dilation: int) -> tuple[int, int]:
    """The same for a transposed convolution, by the rows of its input."""
    return max(0, (dilation * (kernel - 1) - padding) // stride), (stride - 1 + padding) // stride


def halo(x: torch.Tensor, dim: int, before: int, after: int, axis: Axis, fill: Fill = "zero") -> torch.Tensor:
    """x with `before` rows of the rank before and `after` rows of the rank after it along `dim`; beyond the ends, what `fill` says.

    Every rank holds at least max(before, after) rows. Differentiable.
    """
    if before == after == 0:
        return x
    assert x.shape[dim] >= max(before, after), f"a halo of {before} and {after} rows does not fit into the {x.shape[dim]} rows of a rank"
    return _Halo.apply(x, dim, before, after, axis, fill)  # type: ignore[return-value]


def _exchange(to_before: torch.Tensor, to_after: torch.Tensor, from_before: torch.Tensor, from_after: torch.Tensor, axis: Axis) -> None:
    """Send to both neighbours and receive from both, into the last two. An empty tensor is no message; ends have one neighbour."""
    peers = {-1: (to_before, from_before), 1: (to_after, from_after)}
    pairs = {axis.index + side: pair for side, pair in peers.items() if 0 <= axis.index + side < axis.size}
    sends = [pairs[peer][0].numel() if peer in pairs else 0 for peer in range(axis.size)]
    receives = [pairs[peer][1].numel() if peer in pairs else 0 for peer in range(axis.size)]
    flat = torch.cat([sent.reshape(-1) for sent, _ in pairs.values()])
    found = flat.new_empty(sum(receives))
    start = complete(axis, "halo exchange", flat.nbytes, lambda: dist.all_to_all_single(found, flat, receives, sends, group=axis.group, async_op=True))
    place = 0
    for sent, received in pairs.values():
        received.copy_(found[place : place + received.numel()].view_as(received))
        place += received.numel()
        if sent.numel():
            axis.recorder.add("send", axis.name, sent.nbytes, start)


def _beyond(x: torch.Tensor, dim: int, num_rows: int, edge: int, fill: Fill) -> torch.Tensor:
    """What lies beyond an end of the whole: `edge` is the row there."""
    shape = (*x.shape[:dim], num_rows, *x.shape[dim + 1 :])
    if fill == "edge":
        return x.narrow(dim, edge % x.shape[dim], 1).expand(shape).contiguous()
    return x.new_full(shape, 0.0 if fill == "zero" else -torch.inf)


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, before: int, after: int, axis: Axis, fill: Fill) -> torch.Tensor:
        ctx.dim, ctx.before, ctx.after, ctx.axis, ctx.fill = dim, before, after, axis, fill
        num_rows = x.shape[dim]
        above, below = _beyond(x, dim, before, 0, fill), _beyond(x, dim, after, -1, fill)
        _exchange(x.narrow(dim, 0, after), x.narrow(dim, num_rows - before, before), above, below, axis)
        return torch.cat([above, x, below], dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        dim, before, after, axis = ctx.dim, ctx.before, ctx.after, ctx.axis
        above, own, below = grads[0].split([before, grads[0].shape[dim] - before - after, after], dim)
        num_rows = own.shape[dim]
        first, last = torch.zeros_like(own.narrow(dim, 0, after)), torch.zeros_like(own.narrow(dim, num_rows - before, before))
        _exchange(above, below, first, last, axis)
        dx = own.clone()
        dx.narrow(dim, 0, after).add_(first)
        dx.narrow(dim, num_rows - before, before).add_(last)
        if ctx.fill == "edge":
            if axis.index == 0 and before:
                dx.narrow(dim, 0, 1).add_(above.sum(dim, keepdim=True))
            if axis.index == axis.size - 1 and after:
                dx.narrow(dim, num_rows - 1, 1).add_(below.sum(dim, keepdim=True))
        return dx, None, None, None, None, None
