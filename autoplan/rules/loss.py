"""Losses: under reduction "sum" rows leave partial sums, under "none" they map; a mean is never divided."""

from __future__ import annotations

from autoplan.graph import Inside
from autoplan.rules.signature import Call, Inner, Signature, aligned, labels, sign

_NONE, _MEAN, _SUM = 0, 1, 2  # aten's codes of `reduction`


def _vocabulary(call: Call) -> Inner:
    """Maximum, target's logit and sum of exponentials of each row; the sum of logits too where labels are smoothed."""
    sums = 4 if call.get("label_smoothing") else 3
    return Inner("inner", "runtime.vocab_cross_entropy", (Inside("all_reduce", ("in", 1), "forward"),) * sums)


def cross_entropy(call: Call) -> Signature | None:
    """cross_entropy(logits[n, v, ...], labels[n, ...]). Divided classes: Megatron-LM, section 3."""
    logits, target = call.inputs[0].shape, call.inputs[1].shape
    reduction = call.get("reduction", _MEAN)
    if reduction == _MEAN or len(logits) < 2:
        return None
    rows = "n s*"
    if target == logits:  # labels are probabilities
        text = "n v s*, n v s*" + (", v" if len(call.inputs) > 2 else "") + " -> " + (rows if reduction == _NONE else "")
        return sign(call, text, sums=rows if reduction == _SUM else "", whole="v")
    text = f"n v s*, {rows}" + (", v" if len(call.inputs) > 2 else "") + " -> " + (rows if reduction == _NONE else "")
    plain = len(target) == len(logits) - 1 and len(call.inputs) == 2
    return sign(call, text, sums="n s*" if reduction == _SUM else "", whole="" if plain else "v", inner={"v": _vocabulary(call)} if plain else {})


def negative_log_likelihood(call: Call) -> Signature | None:
    """nll_loss(log_probabilities[n, v, ...], labels[n, ...]), the one output or the sum of weights as a second."""
    reduction = call.get("reduction", _MEAN)
    if reduction == _MEAN or len(call.inputs[0].shape) < 2 or sum(spec is not None for spec in call.outputs) != 1:
        return None
    text = "n v s*, n s*" + (", v" if len(call.inputs) > 2 else "") + " -> " + ("n s*" if reduction == _NONE else "")
    return sign(call, text, sums="n s*" if reduction == _SUM else "", whole="v")


def elementwise_loss(call: Call) -> Signature | None:
    """mse_loss and its kin over operands that are broadcast together."""
    reduction = call.get("reduction", _MEAN)
    if reduction == _MEAN:
        return None
    rank = max(len(spec.shape) for spec in call.inputs)
    full = tuple(max(spec.shape[k - rank + len(spec.shape)] for spec in call.inputs if len(spec.shape) >= rank - k) for k in range(rank))
    reads = tuple(aligned(spec.shape, full) for spec in call.inputs)
    if reduction == _NONE:
        return Signature(reads, (labels(rank),))
    return Signature(reads, ((),), sums=frozenset(f"d{k}" for k in range(rank)))


_LOSSES = (
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "soft_margin_loss", "poisson_nll_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
)

RULES = {
    "aten.cross_entropy_loss": cross_entropy,
    **dict.fromkeys(("aten.nll_loss", "aten.nll_loss_nd", "aten.nll_loss2d"), negative_log_likelihood),
    **{f"aten.{name}": elementwise_loss for name in _LOSSES},
}
