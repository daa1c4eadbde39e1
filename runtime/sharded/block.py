"""Attention of some queries over one block of the keys, and how blocks are put together.

For queries Q and block j of keys and values, with scale c, additive mask M and kept weights D / (1 - p) under dropout:

    S = c Q K_j' + M,   L_j = log sum exp S,   O_j = (exp(S - L_j) * D) V_j
    all blocks:  L = log sum_j exp L_j,   O = sum_j exp(L_j - L) O_j                          (online softmax)
    backward:    P = exp(S - L),  dV_j = (P * D)' dO,  dS = P * (dO V_j' * D - rowsum(dO * O)),  dQ += c dS K_j,  dK_j = c dS' Q

A query that sees no key has L = -inf and O = 0, as in torch's operator. Statistics of 16-bit tensors are float32. Queries are taken some rows
at a time, so that scores of a block never fill the memory; without mask and dropout the CPU's fused kernel does the same.
Source: Dao et al. 2022 (FlashAttention), Milakov and Gimelshein 2018.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

_MAX_SCORES = 1 << 24  # elements of scores that are made at once


@dataclass(frozen=True)
class Block:
    """What is the same for every pair of queries and keys: `scale` c, `dropout_p`, and how many query heads read one key head."""

    scale: float
    dropout_p: float
    repeats: int

    def keep(self, kept: torch.Tensor | None, rows: slice) -> Callable[[torch.Tensor], torch.Tensor]:
        """Dropout of weights as a function of them; `kept` is the mask of all rows."""
        if kept is None:
            return lambda x: x
        mask = kept[..., rows, :]
        factor = 0.0 if self.dropout_p == 1.0 else 1.0 / (1.0 - self.dropout_p)
        return lambda x: torch.where(mask, x * factor, torch.zeros((), dtype=x.dtype, device=x.device))

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """Keys or values once for each query head."""
        return x if self.repeats == 1 else x.repeat_interleave(self.repeats, -3)

    def gathered(self, grad: torch.Tensor) -> torch.Tensor:
        """The transpose of `spread`."""
        return grad if self.repeats == 1 else grad.unflatten(-3, (grad.shape[-3] // self.repeats, self.repeats)).sum(-3)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics and sums."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def fused(q: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, kept: torch.Tensor | None) -> bool:
    """Whether the CPU's fused kernel can do it."""
    return q.device.type == "cpu" and mask is None and kept is None and q.dim() == 4 and q.shape[-1] == v.shape[-1]


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, kept: torch.Tensor | None, is_causal: bool, block: Block
) -> tuple[torch.Tensor, torch.Tensor]:
    """(O_j, L_j) in wide dtypes. q (..., H, L, E), k (..., H', S, E), v (..., H', S, E') -> (..., H, L, E'), (..., H, L).

    `mask` is broadcast to (..., H, L, S), `kept` has that shape. `is_causal`: query i sees keys j <= i of the block.
    """
    keys, values = block.spread(k), block.spread(v)
    if fused(q, v, mask, kept):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(q, keys, values, 0.0, is_causal, scale=block.scale)
        return out.to(wide(q.dtype)), lse.to(wide(q.dtype))
    outs, lses = [], []
    for rows, scores in _scores(q, keys, mask, is_causal, block):
        lse = scores.logsumexp(-1)
        weights = block.keep(kept, rows)(_weights(scores, lse))
        outs.append(weights @ values.to(weights.dtype))
        lses.append(lse)
    return torch.cat(outs, -2), torch.cat(lses, -1)


def attend_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    kept: torch.Tensor | None,
    is_causal: bool,
    block: Block,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The block's share of dQ, and its dK and dV, in wide dtypes; `out` and `lse` are those of all blocks together."""
    keys, values = block.spread(k), block.spread(v)
    dtype = wide(q.dtype)
    if fused(q, v, mask, kept):
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            grad, q, keys, values, out, lse, 0.0, is_causal, scale=block.scale
        )
        return dq.to(dtype), block.gathered(dk.to(dtype)), block.gathered(dv.to(dtype))
    dqs, dk, dv = [], torch.zeros_like(keys, dtype=dtype), torch.zeros_like(values, dtype=dtype)
    for rows, scores in _scores(q, keys, mask, is_causal, block):
        keep = block.keep(kept, rows)
        above, weights = grad[..., rows, :].to(dtype), _weights(scores, lse[..., rows])
        dv += keep(weights).transpose(-2, -1) @ above
        delta = (above * out[..., rows, :].to(dtype)).sum(-1, keepdim=True)
        dscores = weights * (keep(above @ values.to(dtype).transpose(-2, -1)) - delta) * block.scale
        dqs.append(dscores @ keys.to(dtype))
        dk += dscores.transpose(-2, -1) @ q[..., rows, :].to(dtype)
    return torch.cat(dqs, -2), block.gathered(dk), block.gathered(dv)


def _scores(q: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor | None, is_causal: bool, block: Block) -> Iterator[tuple[slice, torch.Tensor]]:
    """Scores of some rows of queries at a time; what is hidden is -inf."""
    dtype, num_rows, num_keys = wide(q.dtype), q.shape[-2], keys.shape[-2]
    across = q.shape[:-2].numel() * max(1, num_keys)
    step = max(1, _MAX_SCORES // max(1, across))
    columns = torch.arange(num_keys, device=q.device)
    for start in range(0, num_rows, step):
        rows = slice(start, min(start + step, num_rows))
        scores = q[..., rows, :].to(dtype) * block.scale @ keys.to(dtype).transpose(-2, -1)
        if is_causal:
            scores = scores.masked_fill(columns > torch.arange(rows.start, rows.stop, device=q.device).unsqueeze(1), float("-inf"))
        if mask is not None:
            part = mask if mask.shape[-2] == 1 else mask[..., rows, :]
            scores = scores.masked_fill(~part, float("-inf")) if mask.dtype == torch.bool else scores + part.to(dtype)
        yield rows, scores


def _weights(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """exp(S - L), 0 in rows that see nothing."""
    nothing = lse == float("-inf")
    return (scores - lse.masked_fill(nothing, 0.0).unsqueeze(-1)).exp()


def merged(out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(O, L) of two sets of keys together."""
    total = torch.logaddexp(lse, more_lse)
    base = total.masked_fill(total == float("-inf"), 0.0)
    return out * (lse - base).exp().unsqueeze(-1) + more * (more_lse - base).exp().unsqueeze(-1), total
