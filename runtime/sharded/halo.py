"""Domain parallelism: windowed operators over positions that ranks divide, with rows exchanged between neighbours.

Rank r of p holds rows [r n, (r + 1) n) of a dimension of p n (Gholami et al. 2018, section 4; Dryden et al. 2019). An output row o of a
window of k taps at distance d, stride s and padding q reads input rows o s - q ... o s - q + d (k - 1), so a rank whose output is its
share of p n / s rows needs, beside its own,

    before = q              after = d (k - 1) - q - (s - 1)            none where that is negative

rows of its neighbours, and a transposed one, whose output is p n s rows, before = (d (k - 1) - q) // s, after = (s - 1 + q) // s. Beyond the
ends lies what the plain operator pads with: zeros, -inf for a maximum, the last row for interpolation. The gradient of rows
that were received goes back and is added to their owner's.

Where ranks do not hold equally many rows, or outputs are no share of the inputs (windows without padding, odd lengths under a stride), a
`Span` says how both are divided (runtime/pieces.py), and `reach` which rows of the input each rank's outputs read. All ranks send what the one
that needs most needs, so messages are of one size:

    before = max_r (first row of rank r - first that it reads)        after = max_r (last that it reads - last row of rank r)        not below 0

Bytes a rank sends, e = elements of one row of its part: before e to the next rank, after e to the one before it; the same backwards.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from runtime.collective import complete
from runtime.mesh import Axis
from runtime.pieces import count, start

Fill = Literal["zero", "lowest", "edge"]


def window_halo(kernel: int, stride: int, padding: int, dilation: int) -> tuple[int, int]:
    """Rows that a rank needs of the ranks before and after it, for a window that slides over its part."""
    return padding, max(0, dilation * (kernel - 1) - padding - (stride - 1))


def transposed_halo(kernel: int, stride: int, padding: int, dilation: int) -> tuple[int, int]:
    """The same for a transposed convolution, by the rows of its input."""
    return max(0, (dilation * (kernel - 1) - padding) // stride), (stride - 1 + padding) // stride


class Span(NamedTuple):
    """Ranks divide the first number of [size, inner] input rows, and of [out_size, out_inner] output rows."""

    size: int
    inner: int
    out_size: int
    out_inner: int

    def rows(self, num_ranks: int, index: int) -> tuple[int, int]:
        """Rows [from, to) of the input that a rank holds."""
        return self.inner * start(self.size, num_ranks, index), self.inner * start(self.size, num_ranks, index + 1)

    def outputs(self, num_ranks: int, index: int) -> tuple[int, int]:
        """Rows [from, to) of the output that it makes."""
        return self.out_inner * start(self.out_size, num_ranks, index), self.out_inner * start(self.out_size, num_ranks, index + 1)


class Window(NamedTuple):
    """A window along one dimension."""

    kernel: int
    stride: int
    padding: int
    dilation: int
    is_transposed: bool = False

    def reads(self, first: int, end: int) -> tuple[int, int]:
        """Rows [from, to) of the input that outputs [first, end) read, beyond the ends too."""
        extent = self.dilation * (self.kernel - 1)
        if self.is_transposed:
            return -((extent - first - self.padding) // self.stride), (end - 1 + self.padding) // self.stride + 1
        return first * self.stride - self.padding, (end - 1) * self.stride - self.padding + extent + 1


class Reach(NamedTuple):
    """Rows that every rank receives from the one before and the one after it, and [from, to) that each reads, counted from its first row."""

    before: int
    after: int
    reads: tuple[tuple[int, int], ...]


@lru_cache(maxsize=4096)
def reach(span: Span, window: Window, num_ranks: int) -> Reach:
    """What ranks exchange for a window; `reads` are by rank."""
    reads, before, after = [], 0, 0
    for index in range(num_ranks):
        first, end = span.rows(num_ranks, index)
        low, high = window.reads(*span.outputs(num_ranks, index))
        reads.append((low - first, high - first))
        before = max(before, first - low) if index else before
        after = max(after, high - end) if index < num_ranks - 1 else after
    return Reach(before, after, tuple(reads))


def spanned_halo(x: torch.Tensor, dim: int, span: Span, window: Window, axis: Axis, fill: Fill = "zero") -> torch.Tensor:
    """The rows that this rank's outputs read, from its own real ones along `dim` and its neighbours'; beyond the ends, what `fill` says."""
    found = reach(span, window, axis.size)
    low, high = found.reads[axis.index]
    above = found.before if axis.index else max(0, -low)
    below = found.after if axis.index < axis.size - 1 else max(0, high - x.shape[dim])
    least = min(count(span.size, axis.size, index) for index in range(axis.size)) * span.inner
    assert least >= max(found.before, found.after), f"a halo of {found.before} and {found.after} rows does not fit into the {least} rows of a rank"
    if above or below or found.before or found.after:
        x = _Halo.apply(x, dim, found.before, found.after, axis, fill, (above, below))  # type: ignore[assignment]
    return x.narrow(dim, above + low, high - low)


def halo(x: torch.Tensor, dim: int, before: int, after: int, axis: Axis, fill: Fill = "zero") -> torch.Tensor:
    """x with `before` rows of the rank before and `after` rows of the rank after it along `dim`; beyond the ends, what `fill` says.

    Every rank holds at least max(before, after) rows. Differentiable.
    """
    if before == after == 0:
        return x
    assert x.shape[dim] >= max(before, after), f"a halo of {before} and {after} rows does not fit into the {x.shape[dim]} rows of a rank"
    return _Halo.apply(x, dim, before, after, axis, fill, (before, after))  # type: ignore[return-value]


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
    """`ends`: rows that this rank takes above and below its own, where they come from beyond the ends."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, before: int, after: int, axis: Axis, fill: Fill, ends: tuple[int, int]) -> torch.Tensor:
        ctx.dim, ctx.before, ctx.after, ctx.axis, ctx.fill = dim, before, after, axis, fill
        num_rows = x.shape[dim]
        ctx.above, ctx.below = before if axis.index else ends[0], after if axis.index < axis.size - 1 else ends[1]
        above, below = _beyond(x, dim, ctx.above, 0, fill), _beyond(x, dim, ctx.below, -1, fill)
        _exchange(x.narrow(dim, 0, after), x.narrow(dim, num_rows - before, before), above, below, axis)
        return torch.cat([above, x, below], dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        dim, before, after, axis = ctx.dim, ctx.before, ctx.after, ctx.axis
        above, own, below = grads[0].split([ctx.above, grads[0].shape[dim] - ctx.above - ctx.below, ctx.below], dim)
        num_rows = own.shape[dim]
        first, last = torch.zeros_like(own.narrow(dim, 0, after)), torch.zeros_like(own.narrow(dim, num_rows - before, before))
        _exchange(above, below, first, last, axis)
        dx = own.clone()
        dx.narrow(dim, 0, after).add_(first)
        dx.narrow(dim, num_rows - before, before).add_(last)
        if ctx.fill == "edge":
            if axis.index == 0 and ctx.above:
                dx.narrow(dim, 0, 1).add_(above.sum(dim, keepdim=True))
            if axis.index == axis.size - 1 and ctx.below:
                dx.narrow(dim, num_rows - 1, 1).add_(below.sum(dim, keepdim=True))
        return dx, None, None, None, None, None, None
