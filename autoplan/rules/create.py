"""Operators that make a tensor from numbers: filled ones divide freely, positions do not."""

from __future__ import annotations

from autoplan.rules.signature import OPAQUE, Call, Signature, labels


def filled(call: Call) -> Signature:
    """zeros, ones, full and their `new_` forms: every element is the same; an operand only gives its dtype."""
    rank = len(call.out())
    reads = tuple((OPAQUE,) * len(spec.shape) for spec in call.inputs)
    return Signature(reads, (labels(rank),))


RULES = {f"aten.{name}": filled for name in ("zeros", "ones", "full", "new_zeros", "new_ones", "new_full")}
