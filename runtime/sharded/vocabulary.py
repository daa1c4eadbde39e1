"""The two operators that index a divided vocabulary.

Rank i of p holds classes [i V/p, (i+1) V/p) of V (Megatron-LM, Shoeybi et al. 2019, section 3). Logits are never
gathered. With row statistics over all ranks,

    m = max x,  t = x[label],  s = sum exp(x - m),  lse = m + log s
    loss = (1 - eps) (lse - t) + eps (lse - sum x / V)                 eps: label smoothing
    dx   = (exp(x - lse) - (1 - eps) [class is label] - eps / V) dloss

three all-reduces of a row's size forward, a fourth (sum x) only with label smoothing, none backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from runtime.mesh import Axis
from runtime.sharded.reduction import all_reduce_

_NONE, _MEAN, _SUM = 0, 1, 2  # at::Reduction


def vocab_embedding(
    weight: torch.Tensor, ids: torch.Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False, *, axis: Axis
) -> torch.Tensor:
    """This rank's share of `aten.embedding`: rows of its own part of the table, zero for other ids.

    weight (V/p, H), ids any shape -> ids.shape + (H,), a partial sum over `axis`. No communication.
    """
    if scale_grad_by_freq or sparse:
        raise ValueError("an embedding with scale_grad_by_freq or sparse gradients cannot be divided by vocabulary: keep it whole")
    num_local = weight.shape[0]
    _check_range(ids, num_local * axis.size, "embedding id")
    local = ids - axis.index * num_local
    elsewhere = (local < 0) | (local >= num_local)
    local_padding = padding_idx - axis.index * num_local if padding_idx >= 0 else -1
    if not 0 <= local_padding < num_local:
        local_padding = -1
    # F.embedding reads a negative padding index as counted from the end: None is "no padding".
    rows = F.embedding(local.masked_fill(elsewhere, 0), weight, padding_idx=None if local_padding < 0 else local_padding)
    return rows.masked_fill(elsewhere.unsqueeze(-1), 0)


def vocab_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    *,
    axis: Axis,
) -> torch.Tensor:
    """`aten.cross_entropy_loss` of logits whose class dimension is divided; the same result on every rank.

    logits (N, V/p) or (N, V/p, d1, ...) or (V/p,); labels hold global class indices: (N,), (N, d1, ...) or ().
    reduction 0 (none) or 2 (sum), as ATen counts them. Raises ValueError for a mean (its divisor is a matter of the
    whole batch: divide the sum by the count), for class weights and for class probabilities.
    """
    if reduction not in (_NONE, _SUM):
        raise ValueError(
            f"cross entropy over a divided vocabulary reduces by 0 (none) or 2 (sum), asked {reduction}: divide the sum by the count of valid labels"
        )
    if weight is not None:
        raise ValueError("cross entropy with class weights cannot be divided by vocabulary: keep it whole")
    if labels.is_floating_point():
        raise ValueError("cross entropy with class probabilities as labels cannot be divided by vocabulary: keep it whole")
    losses = _VocabCrossEntropy.apply(logits, labels, ignore_index, float(label_smoothing), axis)
    return losses.sum() if reduction == _SUM else losses


def _check_range(indices: torch.Tensor, size: int, what: str) -> None:
    """The dense operator fails on an index outside of the vocabulary; a sum over shards would silently be zero."""
    torch.ops.aten._assert_async.msg(((indices >= 0) & (indices < size)).all(), f"an {what} lies outside of the {size} that the ranks hold together")


class _VocabCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, ignore_index: int, smoothing: float, axis: Axis) -> torch.Tensor:
        dim = 1 if logits.dim() > 1 else 0
        num_local = logits.shape[dim]
        num_classes = num_local * axis.size
        wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        ignored = labels == ignore_index
        valid_labels = labels.masked_fill(ignored, 0)
        _check_range(valid_labels, num_classes, "label")
        local, elsewhere = _localise(valid_labels, num_local, axis)

        top = wide.amax(dim)
        all_reduce_(top, axis, op="max")
        target = wide.gather(dim, local.unsqueeze(dim)).squeeze(dim).masked_fill(elsewhere, 0)
        all_reduce_(target, axis)
        total = (wide - top.unsqueeze(dim)).exp_().sum(dim)
        all_reduce_(total, axis)
        log_sum = top + total.log()
        losses = (1 - smoothing) * (log_sum - target)
        if smoothing > 0:
            sums = wide.sum(dim)
            all_reduce_(sums, axis)
            losses = losses + smoothing * (log_sum - sums / num_classes)

        ctx.save_for_backward(logits, labels, log_sum)
        ctx.ignore_index, ctx.smoothing, ctx.axis, ctx.dim = ignore_index, smoothing, axis, dim
        return losses.masked_fill(ignored, 0).to(logits.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        logits, labels, log_sum = ctx.saved_tensors
        dim, num_local = ctx.dim, logits.shape[ctx.dim]
        ignored = labels == ctx.ignore_index
        local, elsewhere = _localise(labels.masked_fill(ignored, 0), num_local, ctx.axis)
        dx = (logits.to(log_sum.dtype) - log_sum.unsqueeze(dim)).exp_()
        if ctx.smoothing > 0:
            dx.sub_(ctx.smoothing / (num_local * ctx.axis.size))
        here = (~elsewhere).to(dx.dtype).mul_(1 - ctx.smoothing)
        dx.scatter_add_(dim, local.unsqueeze(dim), -here.unsqueeze(dim))
        dx.mul_(grads[0].to(dx.dtype).masked_fill(ignored, 0).unsqueeze(dim))
        # A row without a valid label has no gradient, even where its logits are not finite.
        return dx.masked_fill_(ignored.unsqueeze(dim), 0).to(logits.dtype), None, None, None, None


def _localise(labels: torch.Tensor, num_local: int, axis: Axis) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels as indices into this rank's part (0 where they lie elsewhere), and where that is."""
    local = labels - axis.index * num_local
    elsewhere = (local < 0) | (local >= num_local)
    return local.masked_fill(elsewhere, 0), elsewhere
