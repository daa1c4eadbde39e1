"""Ring self-attention: keys travel a ring, then values; the weights of a rank's queries over all keys are kept.

    forward    ring of K: S = c Q K' + M (L/P, S), A = softmax(S) under dropout, ring of V: O = sum_j A_j V_j
    backward   ring of V: dA_j = dO V_j', dV_j = A_j' dO of all blocks, summed over the ranks;  dS from A
               ring of K: dQ = c sum_j dS_j K_j,  dK_j = c dS_j' Q of all blocks, summed over the ranks

    elements that a rank sends, b s h those of all keys:   forward 2 (P-1)/P b s h     backward 6 (P-1)/P b s h
    kept: heads s^2 / P weights of each row of the batch, beside local q, k, v

The gradients of keys and values are all-reduced whole, each counted once whatever P. Ring attention (runtime/sharded/ring_attention.py) sends and keeps
less; this is the older algorithm that it is compared with. Source: Li et al. 2021 (Sequence Parallelism), section 3.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from runtime.collective import raw_all_reduce
from runtime.mesh import Axis
from runtime.ring import pass_on
from runtime.sharded.block import wide
from runtime.sharded.ring_attention import Around, around
from runtime.sharded.stochastic import Rows, Where


def self_attention_ring(
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
    """`ring_attention` by ring self-attention: the same arguments, result and errors."""
    how = around(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa, op_id, axis, axes, windows, rows, length)
    return _RingSelfAttention.apply(q, k, v, mask, how)  # type: ignore[return-value]


def _blocks(x: torch.Tensor, how: Around) -> Iterator[tuple[int, torch.Tensor]]:
    """(source, real rows of its block) of every rank in the order in which they come."""
    axis = how.axis
    for step in range(axis.size):
        hop = pass_on((x,), axis) if step < axis.size - 1 else None
        source = (axis.index - step) % axis.size
        yield source, how.real(x, source)
        if hop is not None:
            (x,) = hop.wait()


class _RingSelfAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, how: Around) -> torch.Tensor:
        block, dtype, queries = how.block, wide(q.dtype), how.queries(q)
        scores = queries.new_empty((*queries.shape[:-1], how.num_keys), dtype=dtype)
        for source, keys in _blocks(k, how):
            part = queries.to(dtype) * block.scale @ block.spread(keys).to(dtype).transpose(-2, -1)
            if how.causal(source):
                part = part.masked_fill(torch.ones(part.shape[-2:], dtype=torch.bool, device=q.device).triu(1), float("-inf"))
            elif not how.sees(source):
                part = part.fill_(float("-inf"))
            scores.narrow(-1, *how.part(source)).copy_(part)
        if mask is not None:
            seen = mask if mask.shape[-2] == 1 else how.queries(mask)
            scores = scores.masked_fill(~seen, float("-inf")) if seen.dtype == torch.bool else scores + seen.to(dtype)
        weights = torch.ops.aten._safe_softmax.default(scores, -1)
        out = queries.new_zeros((*queries.shape[:-1], v.shape[-1]), dtype=dtype)
        for source, values in _blocks(v, how):
            keep = block.keep(how.kept(queries, source), slice(None))
            out += keep(weights.narrow(-1, *how.part(source))) @ block.spread(values).to(dtype)
        ctx.save_for_backward(q, k, v, weights)
        ctx.how = how
        return how.filled(out.to(q.dtype), q)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        q, k, v, weights = ctx.saved_tensors
        how: Around = ctx.how
        block, dtype = how.block, wide(q.dtype)
        queries, grad = how.queries(q), how.queries(grads[0]).to(dtype)
        dweights = torch.empty_like(weights)
        dvs: dict[int, torch.Tensor] = {}
        for source, values in _blocks(v, how):
            keep = block.keep(how.kept(queries, source), slice(None))
            dweights.narrow(-1, *how.part(source)).copy_(keep(grad @ block.spread(values).to(dtype).transpose(-2, -1)))
            dvs[source] = block.gathered(keep(weights.narrow(-1, *how.part(source))).transpose(-2, -1) @ grad)
        dscores = weights * (dweights - (weights * dweights).sum(-1, keepdim=True)) * block.scale
        dq = torch.zeros_like(queries, dtype=dtype)
        dks: dict[int, torch.Tensor] = {}
        for source, keys in _blocks(k, how):
            part = dscores.narrow(-1, *how.part(source))
            dq += part @ block.spread(keys).to(dtype)
            dks[source] = block.gathered(part.transpose(-2, -1) @ queries.to(dtype))
        dk, dv = (_summed(parts, k, how) for parts in (dks, dvs))
        return how.filled(dq.to(q.dtype), q), dk.to(k.dtype), dv.to(v.dtype), None, None


def _summed(parts: dict[int, torch.Tensor], like: torch.Tensor, how: Around) -> torch.Tensor:
    """This rank's part of what all ranks add to every block."""
    axis = how.axis
    whole = raw_all_reduce(torch.cat([how.filled(parts[source], like) for source in range(axis.size)], -2), axis)
    return whole.narrow(-2, axis.index * like.shape[-2], like.shape[-2]).contiguous()
