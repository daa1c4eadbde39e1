"""Products apart from the sums that exported operators fuse with them, and dropout by the runtime's own random numbers.

A product whose contraction is divided is a partial sum, to which a bias must be added once: so the bias is an operator of its own.
"""

from __future__ import annotations

from dataclasses import replace

from autoplan.canonical.trace import Rewriter, Step, Trace
from runtime.instr import Instr, Output, Ref, TensorSpec


def unfuse(trace: Trace) -> Trace:
    """`linear` with bias -> linear, add; `addmm` -> mm, add; `dropout`, and `batch_norm` without statistics, in training -> the runtime's own."""
    rewriter = Rewriter(trace)
    for step in trace.steps:
        target, args = step.instr.target, rewriter.args(step)
        if target == "aten.linear.default" and len(args) == 3 and args[2] is not None:
            _with_bias(rewriter, step, "aten.linear.default", args[2], *args[:2])
        elif target == "aten.linear.default":
            rewriter.keep(step, args=args[:2])
        elif target == "aten.addmm.default" and not step.instr.kwargs and len(args) == 3:
            _with_bias(rewriter, step, "aten.mm.default", *args)
        elif target == "aten.dropout.default":
            rewriter.keep(step, "runtime.dropout", (args[0], args[1], step.instr.name), ())
        elif target == "aten.batch_norm.default" and step.instr.args[5] and step.instr.args[3] is None:
            _batch_norm(rewriter, step)
        else:
            rewriter.keep(step)
    return rewriter.finish()


def _batch_norm(rewriter: Rewriter, step: Step) -> None:
    """Batch norm in training without running statistics."""
    x, weight, bias, _, _, _, momentum, eps, *_ = rewriter.args(step)
    none = tuple(Output(rewriter.fresh(f"{step.instr.name}__{which}"), None) for which in ("mean", "var"))
    instr = Instr((*step.instr.outputs, *none), "runtime.batch_norm", (x, weight, bias, None, None, momentum, eps), (), True)
    rewriter.steps.append(replace(step, instr=instr))


def _with_bias(rewriter: Rewriter, step: Step, target: str, bias: object, x: object, w: object) -> None:
    assert isinstance(bias, Ref) and isinstance(x, Ref) and isinstance(w, Ref)
    spec = step.instr.outputs[0].spec
    assert isinstance(spec, TensorSpec)
    product = rewriter.emit(step, target, (x, w), spec=spec, stem=f"{step.instr.name}_product")
    rewriter.keep(step, "aten.add.Tensor", (Ref(product), bias), ())
