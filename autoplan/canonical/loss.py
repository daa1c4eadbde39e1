"""Means over the batch -> sum over count.

    cross_entropy(x, t)            sum of the losses / number of labels that are not ignored, or / sum of their class weights
    mse, l1, ... of mean           their sum / number of elements
    mean over dims with the batch  sum over those dims / number of elements

A count that comes from the labels is computed from them; a count of elements is a number in `runtime.scale_by_count(x, count)`, which stands for
the whole batch. With no valid label the result is 0 / 0, NaN, as in eager mode. Losses in half precision are summed in float32, since a sum
may exceed what a mean does not.
"""

from __future__ import annotations

import math

from autoplan.canonical.trace import Rewriter, Step, Trace
from runtime.call import dtype_of
from runtime.instr import Arg, Dtype, Ref, TensorSpec

SCALE = "runtime.scale_by_count"
_MEAN, _SUM = 1, 2  # at::Reduction
_HALF = ("float16", "bfloat16")
# Elementwise losses and the place of `reduction` in their arguments.
_ELEMENTWISE = {
    "aten.mse_loss.default": 2,
    "aten.l1_loss.default": 2,
    "aten.smooth_l1_loss.default": 2,
    "aten.huber_loss.default": 2,
    "aten.soft_margin_loss.default": 2,
    "aten.kl_div.default": 2,
    "aten.binary_cross_entropy.default": 3,
    "aten.binary_cross_entropy_with_logits.default": 4,
    "aten.poisson_nll_loss.default": 5,
}
_NLL = ("aten.nll_loss.default", "aten.nll_loss_nd.default", "aten.nll_loss2d.default")


def sum_over_count(trace: Trace, means: frozenset[str]) -> Trace:
    """`trace` with mean losses, and the means called `means`, as sum over count."""
    rewriter = Rewriter(trace)
    for step in trace.steps:
        target, args = step.instr.target, rewriter.args(step)
        if target == "aten.cross_entropy_loss.default":
            full = (*args, *(None, _MEAN, -100, 0.0)[len(args) - 2 :])
            done = full[3] == _MEAN and _cross_entropy(rewriter, step, full)
        elif target in _NLL:
            full = (*args, *(None, _MEAN, -100)[len(args) - 2 :])
            done = full[3] == _MEAN and _nll(rewriter, step, full)
        elif target in _ELEMENTWISE:
            place = _ELEMENTWISE[target]
            full = (*args, *(None,) * (place - len(args)))
            reduction = full[place] if len(full) > place else dict(step.instr.kwargs).get("reduction", _MEAN)
            done = reduction == _MEAN and _elementwise(rewriter, step, full[:place], full[place + 1 :])
        elif step.instr.name in means:
            done = _mean(rewriter, step, args)
        else:
            done = False
        if not done:
            rewriter.keep(step)
    return rewriter.finish()


def _shape(rewriter: Rewriter, arg: Arg) -> tuple[int, ...]:
    assert isinstance(arg, Ref)
    return rewriter.specs[arg.name].shape


def _widened(rewriter: Rewriter, step: Step, arg: Arg) -> Arg:
    """`arg` in float32 if it is in half precision."""
    if not isinstance(arg, Ref) or rewriter.specs[arg.name].dtype not in _HALF:
        return arg
    return Ref(rewriter.emit(step, "aten.to.dtype", (arg, Dtype("float32")), spec=TensorSpec(rewriter.specs[arg.name].shape, "float32")))


def _divide(rewriter: Rewriter, step: Step, total: str, count: Arg) -> bool:
    """The step's result is total / count, in its own dtype."""
    spec = step.instr.outputs[0].spec
    assert spec is not None
    target = SCALE if isinstance(count, int) else "aten.div.Tensor"
    if rewriter.specs[total].dtype == spec.dtype:
        rewriter.keep(step, target, (Ref(total), count), ())
    else:
        quotient = rewriter.emit(step, target, (Ref(total), count), spec=TensorSpec(spec.shape, rewriter.specs[total].dtype))
        rewriter.keep(step, "aten.to.dtype", (Ref(quotient), Dtype(spec.dtype)), ())
    return True


def _label_count(rewriter: Rewriter, step: Step, labels: Arg, weight: Arg, ignore_index: Arg) -> Arg:
    """Number of labels that are not ignored, or the sum of their class weights."""
    assert isinstance(labels, Ref)
    valid = Ref(rewriter.emit(step, "aten.ne.Scalar", (labels, ignore_index), stem="valid"))
    if weight is None:
        return Ref(rewriter.emit(step, "aten.sum.default", (valid,), stem="count"))
    known = Ref(rewriter.emit(step, "aten.where.ScalarOther", (valid, labels, 0), spec=rewriter.specs[labels.name]))
    assert isinstance(weight, Ref)
    each = Ref(rewriter.emit(step, "aten.index.Tensor", (weight, (known,)), spec=TensorSpec(_shape(rewriter, labels), rewriter.specs[weight.name].dtype)))
    counted = Ref(rewriter.emit(step, "aten.mul.Tensor", (each, valid)))
    return Ref(rewriter.emit(step, "aten.sum.default", (counted,), stem="count"))


def _cross_entropy(rewriter: Rewriter, step: Step, args: tuple[Arg, ...]) -> bool:
    x, labels, weight, _, ignore_index, smoothing = args
    assert isinstance(labels, Ref)
    call = (_widened(rewriter, step, x), labels, _widened(rewriter, step, weight), _SUM, ignore_index, smoothing)
    if dtype_of(rewriter.specs[labels.name].dtype).is_floating_point:  # labels are probabilities: a mean over rows and places
        shape = _shape(rewriter, x)
        count: Arg = math.prod(shape) // shape[1 if len(shape) > 1 else 0]
        call = (call[0], _widened(rewriter, step, labels), *call[2:])
    else:
        count = _label_count(rewriter, step, labels, call[2], ignore_index)
    return _divide(rewriter, step, rewriter.emit(step, step.instr.target, call), count)


def _nll(rewriter: Rewriter, step: Step, args: tuple[Arg, ...]) -> bool:
    x, labels, weight, _, ignore_index = args
    call = (_widened(rewriter, step, x), labels, _widened(rewriter, step, weight), _SUM, ignore_index)
    return _divide(rewriter, step, rewriter.emit(step, step.instr.target, call), _label_count(rewriter, step, labels, call[2], ignore_index))


def _elementwise(rewriter: Rewriter, step: Step, before: tuple[Arg, ...], after: tuple[Arg, ...]) -> bool:
    wide = tuple(_widened(rewriter, step, a) for a in before)
    kwargs = tuple((k, v) for k, v in rewriter.kwargs(step) if k != "reduction")
    shapes = [_shape(rewriter, a) for a in wide[:2]]
    count = math.prod(max(pair) for pair in zip(*(((1,) * (max(map(len, shapes)) - len(s)) + s) for s in shapes), strict=True))
    return _divide(rewriter, step, rewriter.emit(step, step.instr.target, (*wide, _SUM, *after), kwargs), count)


def _mean(rewriter: Rewriter, step: Step, args: tuple[Arg, ...]) -> bool:
    """mean(x, dims, keepdim, dtype) -> sum(x, dims, keepdim) / count."""
    x = args[0]
    dtype = dict(rewriter.kwargs(step)).get("dtype")
    if isinstance(dtype, Dtype) and isinstance(x, Ref) and rewriter.specs[x.name].dtype != dtype.name:
        x = Ref(rewriter.emit(step, "aten.to.dtype", (x, dtype), spec=TensorSpec(_shape(rewriter, x), dtype.name)))
    shape = _shape(rewriter, x)
    x = _widened(rewriter, step, x)
    dims = args[1] if len(args) > 1 and args[1] not in (None, ()) else tuple(range(len(shape)))
    dims = tuple(int(d) % max(1, len(shape)) for d in (dims if isinstance(dims, tuple) else (dims,)))  # type: ignore[arg-type]
    count = math.prod(shape[d] for d in dims if shape)
    if len(args) < 2:
        total = rewriter.emit(step, "aten.sum.default", (x,))
    else:
        total = rewriter.emit(step, "aten.sum.dim_IntList", (x, dims, bool(args[2]) if len(args) > 2 else False))
    return _divide(rewriter, step, total, count)
