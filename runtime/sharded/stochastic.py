"""Dropout whose masks are keyed (runtime/random.py), so that they are repeated in a recomputation, equal on ranks that
hold the same values and distinct on ranks that hold different ones.

Where the tensor lies in the global one is told per axis: `windows[i]` = (dim, outer, size, inner) says that the ranks
of `axes[i]` divide the middle of dimension `dim`, which is [outer, size, inner] before that cut; () is an axis that
divides the rows of the batch. `rows` = (dim, outer, inner) says where those are in the dense tensor; which ones they
are is the micro-batch's to say. Only masks by element read `windows` and `rows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from runtime.mesh import Axis
from runtime.pieces import most, start
from runtime.random import RandomState, Window, coordinate_mask, current_state, element_mask

Where = Sequence[Sequence[int]]

Rows = Sequence[int] | None


def dropout(x: torch.Tensor, p: float, op_id: str | int, *, axes: Sequence[Axis] = (), windows: Where = (), rows: Rows = None) -> torch.Tensor:
    """x with each element zeroed with probability p, the others divided by 1 - p.

    `axes` are those that divide x. Outside of a `RandomState` the mask comes from torch's own generator.
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"a dropout probability lies in [0, 1], asked {p}")
    state = current_state()
    if state is None or p == 0.0:
        return F.dropout(x, p, training=True)
    return _Masked.apply(x, kept_elements(state, p, op_id, axes, windows, rows, tuple(x.shape), x.device), p)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    op_id: str | int,
    *,
    axes: Sequence[Axis] = (),
    windows: Where = (),
    rows: Rows = None,
) -> torch.Tensor:
    """`scaled_dot_product_attention` with keyed dropout of the attention weights.

    q (..., H, L, E), k (..., H', S, E), v (..., H', S, E') -> (..., H, L, E'). `axes` and `windows` speak of the
    weights (..., H, L, S).
    """
    state = current_state()
    if state is None or dropout_p == 0.0:
        return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    shape = (*q.shape[:-1], k.shape[-2])
    kept = kept_elements(state, dropout_p, op_id, axes, windows, rows, shape, q.device)
    wide = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
    queries, keys, values = q.to(wide), k.to(wide), v.to(wide)
    if enable_gqa:
        keys, values = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (keys, values))
    scores = queries * (q.shape[-1] ** -0.5 if scale is None else scale) @ keys.transpose(-2, -1)
    if is_causal:
        scores = scores.masked_fill(torch.ones(shape[-2:], dtype=torch.bool, device=q.device).triu(1), float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    # A row that is masked everywhere attends to nothing: zero, as in the operator itself.
    weights = torch.ops.aten._safe_softmax.default(scores, -1)
    return (_Masked.apply(weights, kept, dropout_p) @ values).to(q.dtype)


def kept_elements(
    state: RandomState,
    p: float,
    op_id: str | int,
    axes: Sequence[Axis],
    windows: Where,
    rows: Rows,
    shape: tuple[int, ...],
    device: torch.device,
    inside: tuple[Window, ...] = (),
) -> torch.Tensor:
    """The mask (true: kept) of a tensor of the local `shape`; `inside` are cuts after those of `axes`."""
    if not state.exact:
        return coordinate_mask(state, op_id, (*(axis.index for axis in axes), *(window.start for window in inside)), shape, 1.0 - p, device)
    if len(windows) != len(axes) or (rows is None and not all(windows)):
        raise ValueError(f"a mask by element needs the place of its part on each of {len(axes)} axes, found windows {list(windows)} and rows {rows}")
    cuts = []
    for axis, window in zip(axes, windows, strict=True):
        if window:
            dim, outer, size, inner = window
            cuts.append(Window(dim, outer, size, inner, start(size, axis.size, axis.index), most(size, axis.size)))
    cuts += inside
    if rows is not None:
        cuts.insert(0, _row_window(rows, cuts, state.row_start, shape))
    return element_mask(state, op_id, tuple(cuts), 0 if rows is None else rows[0], shape, 1.0 - p, device)


def _row_window(rows: Sequence[int], cuts: list[Window], start: int, shape: tuple[int, ...]) -> Window:
    """The rows of a micro-batch, cut from a batch of any size: rows are outermost in their dimension."""
    dim, outer, inner = rows
    if outer != 1:
        raise ValueError(f"a mask by element needs the batch outermost in its dimension, found {outer} copies of it in dimension {dim}")
    entries = shape[dim]
    for cut in cuts:
        if cut.dim == dim:
            entries = entries // cut.length * cut.size
    num_rows = entries // inner
    return Window(dim, 1, start + num_rows, inner, start, num_rows)


class _Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
        ctx.save_for_backward(mask)
        ctx.p = p
        return _apply(x, mask, p)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (mask,) = ctx.saved_tensors
        return _apply(grads[0], mask, ctx.p), None, None


def _apply(x: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
    return torch.zeros_like(x) if p == 1.0 else torch.where(mask, x / (1.0 - p), torch.zeros((), dtype=x.dtype, device=x.device))
