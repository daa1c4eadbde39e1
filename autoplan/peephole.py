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
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")


def fuse_bias(code: BlockCode) -> BlockCode:
    """`code` with `linear`/`mm` followed by `add(y, stored bias)` written as one call, and convolutions likewise, whose bias [c] is added as
    a view [c, 1, ...]. Exact: same sums."""
    counts = Counter(name for instr in code.instrs for name in uses(instr))
    counts.update(code.outputs)
    made = {instr.name: instr for instr in code.instrs}
    fused: dict[str, Instr] = {}  # name of the product -> the whole call
    gone: set[str] = set()
    for instr in code.instrs:
        left, right = _summands(instr)
        product = made.get(left)
        if product is None or counts[left] != 1 or not product.outputs[0].spec or product.outputs[0].spec != instr.outputs[0].spec:
            continue
        if product.target in _FUSED and len(product.args) == 2 and right in code.stored:
            args = (*product.args, Ref(right)) if product.target == "aten.linear.default" else (Ref(right), *product.args)
            fused[left] = replace(product, outputs=instr.outputs, target=_FUSED[product.target], args=args)
            gone.add(instr.name)
        elif _is_bare_convolution(product) and (bias := _viewed(made.get(right), code.stored)) is not None:
            fused[left] = replace(product, outputs=instr.outputs, args=(*product.args[:2], Ref(bias), *product.args[3:]))
            gone |= {instr.name, right} if counts[right] == 1 else {instr.name}
    instrs = [fused.get(instr.name, instr) for instr in code.instrs if instr.name not in gone]
    return replace(code, instrs=tuple(instrs))


def _summands(instr: Instr) -> tuple[str, str]:
    """The names of what an unscaled sum of two tensors adds; empty for any other call."""
    if instr.target == "aten.add.Tensor" and not instr.kwargs and len(instr.args) == 2:
        left, right = instr.args
        if isinstance(left, Ref) and isinstance(right, Ref):
            return left.name, right.name
    return "", ""


def _is_bare_convolution(instr: Instr) -> bool:
    kind = instr.target.split(".")
    return kind[0] == "aten" and kind[1] in _CONVOLUTIONS and len(instr.args) > 2 and instr.args[2] is None


def _viewed(instr: Instr | None, stored: tuple[str, ...]) -> str | None:
    """The stored vector [c] of which an instruction makes a view [c, 1, ...]."""
    if instr is None or instr.target != "aten.reshape.default" or not isinstance(instr.args[0], Ref) or instr.args[0].name not in stored:
        return None
    spec = instr.outputs[0].spec
    return instr.args[0].name if spec is not None and all(size == 1 for size in spec.shape[1:]) else None
