"""Peephole: a bias added right after its product is given back to the product, where nothing lies between.

The canonical graph keeps `y = x @ w` and `y + b` apart, because a product whose contraction is divided must be completed
before the bias is added, once. Where no collective came between them the fused operator is exact and faster.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from runtime.instr import Instr, Ref, uses
from runtime.program import BlockCode

_FUSED = {"aten.linear.default": "aten.linear.default", "aten.mm.default": "aten.addmm.default"}


def fuse_bias(code: BlockCode) -> BlockCode:
    """`code` with `linear`/`mm` followed by `add(y, stored bias)` written as one call. Exact: same sums."""
    counts = Counter(name for instr in code.instrs for name in uses(instr))
    counts.update(code.outputs)
    products = {instr.name: i for i, instr in enumerate(code.instrs) if instr.target in _FUSED and len(instr.args) == 2}
    fused: dict[int, Instr] = {}
    for instr in code.instrs:
        match = _bias_of(instr, code.stored)
        if match is None or match[0] not in products or counts[match[0]] != 1:
            continue
        product = code.instrs[products[match[0]]]
        assert product.outputs[0].spec and instr.outputs[0].spec
        if product.outputs[0].spec != instr.outputs[0].spec:
            continue
        args = (*product.args, match[1]) if product.target == "aten.linear.default" else (match[1], *product.args)
        fused[products[match[0]]] = replace(product, outputs=instr.outputs, target=_FUSED[product.target], args=args)
    gone = {instr.name for instr in fused.values()}
    instrs = [fused.get(i, instr) for i, instr in enumerate(code.instrs) if i in fused or instr.name not in gone]
    return replace(code, instrs=tuple(instrs))


def _bias_of(instr: Instr, stored: tuple[str, ...]) -> tuple[str, Ref] | None:
    """(name of the product, bias) if `instr` adds a stored tensor to another value, unscaled."""
    if instr.target != "aten.add.Tensor" or instr.kwargs or len(instr.args) != 2:
        return None
    left, right = instr.args
    if isinstance(left, Ref) and isinstance(right, Ref) and right.name in stored and left.name not in stored:
        return left.name, right
    return None
