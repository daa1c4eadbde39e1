"""A number added to a scalar -> a constant added to it.

`1 - x.mean()` is affine, which a partial sum may not pass. As the sum of two tensors it is linear in both together: where x is a partial sum
over rows, the constant is dealt to those who hold the parts like any other term without rows.
"""

from __future__ import annotations

import torch

from autoplan.canonical.trace import Rewriter, Step, Trace
from runtime.call import dtype_of
from runtime.instr import Ref

_WIDE = ("float32", "float64")  # in half precision the number itself is not rounded


def tensors_for_numbers(trace: Trace) -> Trace:
    rewriter = Rewriter(trace)
    for step in trace.steps:
        if not _rewritten(rewriter, step):
            rewriter.keep(step)
    return rewriter.finish()


def _rewritten(rewriter: Rewriter, step: Step) -> bool:
    """Writes x + a, x - a and a - x of a scalar x and a number a, where neither is scaled besides."""
    target, args, spec = step.instr.target, rewriter.args(step), step.instr.outputs[0].spec
    if target not in ("aten.add.Tensor", "aten.sub.Tensor", "aten.rsub.Scalar") or len(args) != 2 or step.instr.kwargs or spec is None:
        return False
    x, number = args
    if spec.shape or spec.dtype not in _WIDE or not isinstance(x, Ref) or rewriter.specs[x.name] != spec or isinstance(number, bool):
        return False
    if not isinstance(number, (int, float)):
        return False
    constant = Ref(rewriter.constant(torch.tensor(number, dtype=dtype_of(spec.dtype)), "number"))
    pair = (constant, x) if target == "aten.rsub.Scalar" else (x, constant)
    rewriter.keep(step, "aten.sub.Tensor" if target != "aten.add.Tensor" else target, pair, ())
    return True
