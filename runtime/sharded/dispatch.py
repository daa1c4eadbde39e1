"""Expert parallelism: rank i of p holds experts [i E/p, (i+1) E/p), and tokens travel to the experts that their router chose.

Capacity-free: how many rows go from each rank to each expert is exchanged first, then exactly those rows travel, are computed where the
expert is, and travel back. Nothing is dropped and nothing is padded, so the result is that of all experts on one rank
(runtime/sharded/experts.py) for every token. With T tokens on a rank, k slots a token and h features, the rows of all ranks are p T k h elements:

    forward    all_to_all of p E counts, of p T k h elements to the experts, and as many back
    backward   the same two of elements the other way

A rank sends (p-1)/p of its T k h elements each time where its tokens are spread evenly.
Source: Lepikhin et al. 2020 (GShard), section 3.2; Jiang et al. 2024 (Mixtral).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from runtime.collective import wait
from runtime.mesh import Axis
from runtime.sharded.experts import expert


def dispatch_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, act: str, num_experts: int, *, axis: Axis
) -> torch.Tensor:
    """y (T, h') of this rank's own tokens.

    x (T, h), ids and weights (T, k) are local, ids count all experts; gate_up (E/p, 2f, h) and down (E/p, h', f) are this rank's experts.
    """
    num_local, num_slots = gate_up.shape[0], ids.shape[1]
    assert num_local * axis.size == num_experts
    flat = ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    tokens = order // num_slots
    leaving = torch.bincount(flat, minlength=num_experts)
    arriving = _exchanged_counts(leaving, axis).view(axis.size, num_local)
    sent, received = leaving.view(axis.size, num_local).sum(1).tolist(), arriving.sum(1).tolist()
    rows = _Exchange.apply(x[tokens], sent, received, len(order), axis)
    by_expert = torch.argsort(torch.arange(num_local, device=x.device).repeat(axis.size).repeat_interleave(arriving.reshape(-1)), stable=True)
    parts = rows[by_expert].split(arriving.sum(0).tolist())
    results = torch.cat([expert(part, gate_up[e], down[e], act) for e, part in enumerate(parts)])
    back = _Exchange.apply(results[torch.argsort(by_expert)], received, sent, len(order), axis)
    return x.new_zeros(x.shape[0], down.shape[1]).index_add(0, tokens, back * weights.reshape(-1)[order].unsqueeze(1))


def _exchanged_counts(leaving: torch.Tensor, axis: Axis) -> torch.Tensor:
    """How many rows come from each rank for each expert that is held here."""
    arriving = torch.empty_like(leaving)
    if axis.size == 1:
        return leaving
    wait(axis, "all_to_all", leaving.nbytes * axis.size, lambda: dist.all_to_all_single(arriving, leaving, group=axis.group, async_op=True))
    return arriving


class _Exchange(torch.autograd.Function):
    """Rows to other ranks: `sent[i]` of them to rank i, `received[i]` from it. Recorded as the rows of all ranks together,
    `num_rows` of each, which the routing does not change."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sent: list[int], received: list[int], num_rows: int, axis: Axis) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.num_rows, ctx.axis = sent, received, num_rows, axis
        return _exchanged(x, sent, received, num_rows, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _exchanged(grads[0], ctx.received, ctx.sent, ctx.num_rows, ctx.axis), None, None, None, None


def _exchanged(x: torch.Tensor, sent: list[int], received: list[int], num_rows: int, axis: Axis) -> torch.Tensor:
    if axis.size == 1:
        return x
    out, x = x.new_empty((sum(received), *x.shape[1:])), x.contiguous()
    num_bytes = axis.size * num_rows * x.shape[1] * x.element_size()
    wait(axis, "all_to_all", num_bytes, lambda: dist.all_to_all_single(out, x, received, sent, group=axis.group, async_op=True))
    return out
