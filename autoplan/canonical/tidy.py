"""No-ops removed; the many spellings of a view, a cast or a slice -> one each, with every size written out.

After this pass a view is `aten.reshape.default(x, shape)`, a cast `aten.to.dtype(x, dtype)`, a cut `aten.slice.Tensor(x, dim, start,
end, step)` or `aten.split_with_sizes.default(x, sizes, dim)`; dims are not negative, and sizes hold no -1. Copies of layout only
(`contiguous`, `clone`) disappear: `reshape` copies where a view cannot be had.
"""

from __future__ import annotations

from collections.abc import Callable

from autoplan.canonical.trace import Rewriter, Step, Trace
from autoplan.errors import CaptureError
from runtime.call import dtype_of
from runtime.instr import Dtype, Ref, TensorSpec

# fmt: off
_CASTS = frozenset((
    "aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten.to.other", "aten._to_copy.default", "aten.type_as.default",
    "aten.to.prim_Device",
))
_COPIES = frozenset((
    "aten.alias.default", "aten.contiguous.default", "aten.clone.default", "aten.lift_fresh.default", "aten.lift_fresh_copy.default",
))
_RESHAPES = frozenset((
    "aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten.flatten.using_ints", "aten.unflatten.int", "aten.view_as.default",
    "aten.reshape_as.default", "aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims",
))
# fmt: on


def tidy(trace: Trace) -> Trace:
    rewriter = Rewriter(trace)
    for step in trace.steps:
        (_RULES.get(step.instr.target) or _default)(rewriter, step)
    return rewriter.finish()


def _default(rewriter: Rewriter, step: Step) -> None:
    rewriter.keep(step)


def _operand(rewriter: Rewriter, step: Step, index: int = 0) -> tuple[str, TensorSpec]:
    arg = rewriter.args(step)[index]
    assert isinstance(arg, Ref), step
    return arg.name, rewriter.specs[arg.name]


def _result(step: Step) -> TensorSpec:
    spec = step.instr.outputs[0].spec
    assert spec is not None
    return spec


def _copy(rewriter: Rewriter, step: Step) -> None:
    rewriter.rename(step.instr.name, _operand(rewriter, step)[0])


def _cast(rewriter: Rewriter, step: Step) -> None:
    name, spec = _operand(rewriter, step)
    if spec.dtype == _result(step).dtype:
        rewriter.rename(step.instr.name, name)
    else:
        rewriter.keep(step, "aten.to.dtype", (Ref(name), Dtype(_result(step).dtype)), ())


def _reshape(rewriter: Rewriter, step: Step) -> None:
    name, spec = _operand(rewriter, step)
    if len(step.instr.args) > 1 and isinstance(step.instr.args[1], Dtype):
        rewriter.keep(step)
    elif spec.shape == _result(step).shape:
        rewriter.rename(step.instr.name, name)
    else:
        rewriter.keep(step, "aten.reshape.default", (Ref(name), _result(step).shape), ())


def _expand(rewriter: Rewriter, step: Step) -> None:
    name, spec = _operand(rewriter, step)
    if spec.shape == _result(step).shape:
        rewriter.rename(step.instr.name, name)
    else:
        rewriter.keep(step, "aten.expand.default", (Ref(name), _result(step).shape), ())


def _unsqueeze(rewriter: Rewriter, step: Step) -> None:
    name, spec = _operand(rewriter, step)
    rewriter.keep(step, args=(Ref(name), int(step.instr.args[1]) % (len(spec.shape) + 1)))  # type: ignore[arg-type]


def _transpose(rewriter: Rewriter, step: Step) -> None:
    name, spec = _operand(rewriter, step)
    rank = len(spec.shape)
    first, second = (int(a) % rank for a in (step.instr.args[1:] or (0, 1))) if rank > 1 else (0, 0)  # type: ignore[arg-type]
    if first == second:
        rewriter.rename(step.instr.name, name)
    else:
        rewriter.keep(step, "aten.transpose.int", (Ref(name), min(first, second), max(first, second)), ())


def _permute(rewriter: Rewriter, step: Step) -> None:
    name, spec = _operand(rewriter, step)
    order = tuple(int(d) % len(spec.shape) for d in step.instr.args[1])  # type: ignore[union-attr,arg-type]
    if order == tuple(range(len(order))):
        rewriter.rename(step.instr.name, name)
    else:
        rewriter.keep(step, "aten.permute.default", (Ref(name), order), ())


def _slice(rewriter: Rewriter, step: Step) -> None:
    name, spec = _operand(rewriter, step)
    _, dim, start, end, stride = (*rewriter.args(step), *(0, None, None, 1)[len(step.instr.args) - 1 :])
    dim = int(dim) % len(spec.shape)  # type: ignore[arg-type]
    begin, stop, by = slice(start, end, stride).indices(spec.shape[dim])  # type: ignore[arg-type]
    stop = max(begin, stop)
    if (begin, stop, by) == (0, spec.shape[dim], 1):
        rewriter.rename(step.instr.name, name)
    else:
        rewriter.keep(step, "aten.slice.Tensor", (Ref(name), dim, begin, stop, by), ())


def _narrow(rewriter: Rewriter, step: Step) -> None:
    name, spec = _operand(rewriter, step)
    dim = int(step.instr.args[1]) % len(spec.shape)  # type: ignore[arg-type]
    start = int(step.instr.args[2]) % max(1, spec.shape[dim])  # type: ignore[arg-type]
    rewriter.keep(step, "aten.slice.Tensor", (Ref(name), dim, start, start + int(step.instr.args[3]), 1), ())  # type: ignore[arg-type]


def _select(rewriter: Rewriter, step: Step) -> None:
    name, spec = _operand(rewriter, step)
    dim = int(step.instr.args[1]) % len(spec.shape)  # type: ignore[arg-type]
    rewriter.keep(step, args=(Ref(name), dim, int(step.instr.args[2]) % spec.shape[dim]))  # type: ignore[arg-type]


def _split(rewriter: Rewriter, step: Step) -> None:
    name, spec = _operand(rewriter, step)
    args = step.instr.args
    dim = int(args[2]) % len(spec.shape) if len(args) > 2 else 0  # type: ignore[arg-type]
    sizes = tuple(out.spec.shape[dim] for out in step.instr.outputs if out.spec is not None)
    rewriter.keep(step, "aten.split_with_sizes.default", (Ref(name), sizes, dim), ())


def _slice_scatter(rewriter: Rewriter, step: Step) -> None:
    """`x` with a part overwritten by `src` is a concatenation of what is left of `x` and `src`."""
    (name, spec), (src, _) = _operand(rewriter, step), _operand(rewriter, step, 1)
    _, _, dim, start, end, stride = (*rewriter.args(step), *(0, None, None, 1)[len(step.instr.args) - 2 :])
    dim = int(dim) % len(spec.shape)  # type: ignore[arg-type]
    begin, stop, by = slice(start, end, stride).indices(spec.shape[dim])  # type: ignore[arg-type]
    if by != 1:
        rewriter.keep(step)
        return
    _concatenate(rewriter, step, name, src, dim, begin, max(begin, stop))


def _select_scatter(rewriter: Rewriter, step: Step) -> None:
    (name, spec), (src, _) = _operand(rewriter, step), _operand(rewriter, step, 1)
    dim = int(step.instr.args[2]) % len(spec.shape)  # type: ignore[arg-type]
    index = int(step.instr.args[3]) % spec.shape[dim]  # type: ignore[arg-type]
    shape = tuple(1 if d == dim else n for d, n in enumerate(spec.shape))
    part = rewriter.emit(step, "aten.unsqueeze.default", (Ref(src), dim), spec=TensorSpec(shape, rewriter.specs[src].dtype))
    _concatenate(rewriter, step, name, part, dim, index, index + 1)


def _concatenate(rewriter: Rewriter, step: Step, name: str, src: str, dim: int, begin: int, stop: int) -> None:
    spec = rewriter.specs[name]
    if rewriter.specs[src].dtype != spec.dtype:
        src = rewriter.emit(step, "aten.to.dtype", (Ref(src), Dtype(spec.dtype)), spec=TensorSpec(rewriter.specs[src].shape, spec.dtype))

    def cut(first: int, last: int) -> list[str]:
        if first == last:
            return []
        shape = tuple(last - first if d == dim else n for d, n in enumerate(spec.shape))
        return [rewriter.emit(step, "aten.slice.Tensor", (Ref(name), dim, first, last, 1), spec=TensorSpec(shape, spec.dtype))]

    parts = [*cut(0, begin), *([src] if stop > begin else []), *cut(stop, spec.shape[dim])]
    if len(parts) == 1:
        rewriter.rename(step.instr.name, parts[0])
    else:
        rewriter.keep(step, "aten.cat.default", (tuple(Ref(p) for p in parts), dim), ())


def _index_put(rewriter: Rewriter, step: Step) -> None:
    """One number written where a mask says is a choice."""
    (name, spec), args = _operand(rewriter, step), rewriter.args(step)
    given, value = args[1], args[2]
    mask = given[0] if isinstance(given, tuple) and len(given) == 1 else None
    if not isinstance(mask, Ref) or rewriter.specs[mask.name].dtype != "bool" or (len(args) > 3 and args[3]) or not isinstance(value, Ref):
        rewriter.keep(step)
        return
    held, number = rewriter.specs[mask.name], rewriter.specs[value.name]
    if number.shape not in ((), (1,)) or number.dtype != spec.dtype or held.shape != spec.shape[: len(held.shape)]:
        rewriter.keep(step)
        return
    if len(held.shape) < len(spec.shape):
        shape = (*held.shape, *(1,) * (len(spec.shape) - len(held.shape)))
        mask = Ref(rewriter.emit(step, "aten.reshape.default", (mask, shape), spec=TensorSpec(shape, "bool")))
    rewriter.keep(step, "aten.where.self", (mask, value, Ref(name)), ())


def _embedding(rewriter: Rewriter, step: Step) -> None:
    place = 4 if step.instr.target == "aten.embedding.default" else 5
    if len(step.instr.args) > place and step.instr.args[place]:
        raise CaptureError(f"{step.source or step.module}: an embedding with sparse=True has sparse gradients, which a plan cannot sum: use sparse=False")
    rewriter.keep(step)


def _broadcast(rewriter: Rewriter, step: Step) -> None:
    """Each result is its operand, expanded."""
    for out, arg in zip(step.instr.outputs, rewriter.args(step)[0], strict=True):  # type: ignore[arg-type]
        assert isinstance(arg, Ref) and out.spec is not None
        same = rewriter.specs[arg.name].shape == out.spec.shape
        rewriter.rename(out.name, arg.name if same else rewriter.emit(step, "aten.expand.default", (arg, out.spec.shape), spec=out.spec))


def _multiply(rewriter: Rewriter, step: Step) -> None:
    """A product with 1 is its operand, where the type stays."""
    args = rewriter.args(step)
    spec = rewriter.specs[args[0].name] if isinstance(args[0], Ref) else None
    if len(args) == 2 and not isinstance(args[1], (Ref, bool)) and args[1] == 1 and spec == _result(step):
        rewriter.rename(step.instr.name, args[0].name)  # type: ignore[union-attr]
    else:
        rewriter.keep(step)


def _dropout(rewriter: Rewriter, step: Step) -> None:
    """Dropout of nothing, or outside training, is its operand."""
    name, p, training = rewriter.args(step)
    assert isinstance(name, Ref)
    if p == 0 or not training:
        rewriter.rename(step.instr.name, name.name)
    else:
        rewriter.keep(step)


def _detach(rewriter: Rewriter, step: Step) -> None:
    """An integer carries no gradient to stop."""
    name, spec = _operand(rewriter, step)
    if dtype_of(spec.dtype).is_floating_point or dtype_of(spec.dtype).is_complex:
        rewriter.keep(step)
    else:
        rewriter.rename(step.instr.name, name)


_RULES: dict[str, Callable[[Rewriter, Step], None]] = {
    **dict.fromkeys(_CASTS, _cast),
    **dict.fromkeys(_COPIES, _copy),
    **dict.fromkeys(_RESHAPES, _reshape),
    "aten.expand.default": _expand,
    "aten.expand_as.default": _expand,
    "aten.unsqueeze.default": _unsqueeze,
    "aten.transpose.int": _transpose,
    "aten.t.default": _transpose,
    "aten.numpy_T.default": lambda rewriter, step: _transpose(rewriter, step) if len(_result(step).shape) == 2 else rewriter.keep(step),
    "aten.permute.default": _permute,
    "aten.slice.Tensor": _slice,
    "aten.narrow.default": _narrow,
    "aten.select.int": _select,
    "aten.split.Tensor": _split,
    "aten.chunk.default": _split,
    "aten.split_with_sizes.default": _split,
    "aten.slice_scatter.default": _slice_scatter,
    "aten.select_scatter.default": _select_scatter,
    "aten.broadcast_tensors.default": _broadcast,
    "aten.index_put.default": _index_put,
    "aten.embedding.default": _embedding,
    "aten.embedding_bag.default": _embedding,
    "aten.embedding_bag.padding_idx": _embedding,
    "aten.mul.Tensor": _multiply,
    "aten.div.Tensor": _multiply,
    "aten.dropout.default": _dropout,
    "aten.feature_dropout.default": _dropout,
    "aten.alpha_dropout.default": _dropout,
    "aten.detach.default": _detach,
}
