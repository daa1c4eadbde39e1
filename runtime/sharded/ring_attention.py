"""Attention whose queries, keys and values are divided along the sequence: blocks of keys and values travel a ring.

Rank i of P holds part i of the sequence. After t hops it holds block (i - t) mod P; blocks are put together by online softmax
(runtime/sharded/block.py), so no rank ever holds the scores or the keys of more than one block. Saved for the backward pass: q, k, v, the output
and its statistics, all local. Backward, keys and values travel again, and their gradients behind them: what rank i adds to block j goes to rank
i + 1 with it, from the block's second rank on, so that the last hop brings it home.

    elements that a rank sends, b s h those of all keys (of all values alike):
    forward 2 (P-1)/P b s h     backward 4 (P-1)/P b s h

Under a causal mask a block from behind the queries is skipped, and the rank's own block is causal inside. A length that P does not divide
(runtime/pieces.py): blocks travel with the room that all ranks have, and only their real keys are seen.
Source: Liu, Zaharia, Abbeel 2023 (Ring Attention); Li et al. 2021 (Sequence Parallelism).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from runtime import pieces
from runtime.mesh import Axis
from runtime.random import RandomState, Window, current_state
from runtime.ring import Hop, pass_on
from runtime.sharded.block import Block, attend, attend_backward, merged, wide
from runtime.sharded.stochastic import Rows, Where, kept_elements


@dataclass(frozen=True)
class Drawing:
    """Where the attention weights of this rank lie in the whole, and the run's random state; None: nothing is dropped."""

    state: RandomState
    dropout_p: float
    op_id: str | int
    axes: Sequence[Axis]
    windows: Where
    rows: Rows

    def kept(self, shape: tuple[int, ...], start: int, num_keys: int, device: torch.device) -> torch.Tensor:
        """The mask of the weights over the keys from number `start` of `num_keys`, of the local `shape`."""
        block = Window(len(shape) - 1, 1, num_keys, 1, start, shape[-1])
        return kept_elements(self.state, self.dropout_p, self.op_id, self.axes, self.windows, self.rows, shape, device, (block,))


@dataclass(frozen=True)
class Around:
    """One call: the ring, and how a rank's queries see each block."""

    axis: Axis
    block: Block
    is_causal: bool
    drawing: Drawing | None
    num_keys: int  # of all ranks

    def part(self, source: int) -> tuple[int, int]:
        """Where the real keys of a block start, and how many they are."""
        return pieces.start(self.num_keys, self.axis.size, source), pieces.count(self.num_keys, self.axis.size, source)

    def real(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Keys or values of block `source` without the copies that fill it."""
        return x.narrow(-2, 0, self.part(source)[1])

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """What belongs to queries, under a causal mask to real ones alone, as many as the keys of their block. The others do no harm: their
        gradient is zero."""
        return self.real(x, self.axis.index) if self.is_causal else x

    def filled(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """A result for real rows with zeros for the others that `like` has."""
        return x if x.shape[-2] == like.shape[-2] else torch.nn.functional.pad(x, (0, 0, 0, like.shape[-2] - x.shape[-2]))

    def sees(self, source: int) -> bool:
        return not self.is_causal or source <= self.axis.index

    def causal(self, source: int) -> bool:
        return self.is_causal and source == self.axis.index

    def mask_of(self, mask: torch.Tensor | None, source: int) -> torch.Tensor | None:
        """The columns of one block, for the queries of this rank."""
        if mask is None:
            return mask
        mask = mask if mask.shape[-2] == 1 else self.queries(mask)
        return mask if mask.shape[-1] == 1 else mask.narrow(-1, *self.part(source))

    def kept(self, q: torch.Tensor, source: int) -> torch.Tensor | None:
        """The mask of what dropout keeps of the weights over the real keys of a block."""
        if self.drawing is None:
            return None
        start, length = self.part(source)
        return self.drawing.kept((*q.shape[:-1], length), start, self.num_keys, q.device)


def around(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    op_id: str | int,
    axis: Axis,
    axes: Sequence[Axis],
    windows: Where,
    rows: Rows,
    length: int | None,
) -> Around:
    """The call's description. Raises ValueError for what a divided sequence cannot do."""
    if mask is not None and mask.requires_grad:
        raise ValueError("attention with a learned mask cannot be divided along its keys: keep them whole")
    num_keys = k.shape[-2] * axis.size if length is None else length
    if pieces.most(num_keys, axis.size) != k.shape[-2]:
        raise ValueError(f"{num_keys} keys in {axis.size} blocks do not fit {k.shape[-2]} keys on a rank")
    if mask is not None and mask.shape[-1] not in (1, num_keys):
        raise ValueError(f"a mask over {mask.shape[-1]} keys does not fit {axis.size} blocks of {k.shape[-2]} keys")
    if is_causal and q.shape[-2] != k.shape[-2]:
        raise ValueError(f"causal attention over a divided sequence needs as many queries as keys on a rank, found {q.shape[-2]} and {k.shape[-2]}")
    if q.shape[-3] != k.shape[-3] and not enable_gqa:
        raise ValueError(f"{q.shape[-3]} query heads over {k.shape[-3]} key heads need enable_gqa")
    drawing = None
    if dropout_p:
        state = current_state()
        if state is None:
            raise ValueError("attention with dropout over a divided sequence draws its masks from a RandomState: run it within use_state(...)")
        drawing = Drawing(state, dropout_p, op_id, axes, windows, rows)
    block = Block(q.shape[-1] ** -0.5 if scale is None else scale, dropout_p, q.shape[-3] // k.shape[-3])
    return Around(axis, block, is_causal, drawing, num_keys)


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    op_id: str | int = "",
    *,
    axis: Axis,
    axes: Sequence[Axis] = (),
    windows: Where = (),
    rows: Rows = None,
    length: int | None = None,
) -> torch.Tensor:
    """`scaled_dot_product_attention` of this rank's queries over the keys of all ranks of `axis`.

    q (..., H, L/P, E), k (..., H', S/P, E), v (..., H', S/P, E') -> (..., H, L/P, E'). `mask`, boolean or added, is
    (..., L/P or 1, S or 1) over all keys and has no gradient. Dropout as `runtime.attention`, of the whole (..., H, L, S).
    `length`: S where P does not divide it; results for rows that are not real mean nothing. Raises ValueError for a learned mask, and
    where parts are not equally long.
    """
    how = around(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa, op_id, axis, axes, windows, rows, length)
    return _Ring.apply(q, k, v, mask, how)  # type: ignore[return-value]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, how: Around) -> torch.Tensor:
        axis, queries = how.axis, how.queries(q)
        out = queries.new_zeros((*queries.shape[:-1], v.shape[-1]), dtype=wide(q.dtype))
        lse = queries.new_full(queries.shape[:-1], float("-inf"), dtype=wide(q.dtype))
        keys, values = k, v
        for step in range(axis.size):
            hop = pass_on((keys, values), axis) if step < axis.size - 1 else None
            source = (axis.index - step) % axis.size
            if how.sees(source):
                part, kept = how.mask_of(mask, source), how.kept(queries, source)
                more = attend(queries, how.real(keys, source), how.real(values, source), part, kept, how.causal(source), how.block)
                out, lse = merged(out, lse, *more) if step else more
            if hop is not None:
                keys, values = hop.wait()
        out = how.filled(out.to(q.dtype), q)
        ctx.save_for_backward(q, k, v, out, lse, *([] if mask is None else [mask]))
        ctx.how = how
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        q, k, v, out, lse, *masks = ctx.saved_tensors
        how: Around = ctx.how
        axis, mask = how.axis, masks[0] if masks else None
        queries, result, grad = (how.queries(x) for x in (q, out, grads[0].contiguous()))
        dtype = wide(q.dtype)
        dq = torch.zeros_like(queries, dtype=dtype)
        home: tuple[torch.Tensor, ...] = (torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype))
        coming: Hop | None = None
        keys, values = k, v
        for step in range(axis.size):
            hop = pass_on((keys, values), axis) if step < axis.size - 1 else None
            source = (axis.index - step) % axis.size
            own: tuple[torch.Tensor, ...] | None = None
            if how.sees(source):
                part, kept, block = how.mask_of(mask, source), how.kept(queries, source), (how.real(keys, source), how.real(values, source))
                more, *own_grads = attend_backward(grad, queries, *block, result, lse, part, kept, how.causal(source), how.block)
                dq, own = dq + more, tuple(how.filled(one, k) for one in own_grads)
            if step == 0:
                home = own or home
            else:
                told = coming.wait() if coming is not None else (torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype))
                coming = pass_on(told if own is None else tuple(a + b for a, b in zip(told, own, strict=True)), axis)
            if hop is not None:
                keys, values = hop.wait()
        if coming is not None:
            home = tuple(a + b for a, b in zip(home, coming.wait(), strict=True))
        return how.filled(dq.to(q.dtype), q), home[0].to(k.dtype), home[1].to(v.dtype), None, None
