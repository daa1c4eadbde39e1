"""What depends on no input, parameter, buffer or random number -> constants, computed on the CPU.

A constant is held as a tensor whose stride is 0 along every dim where it does not vary, and elementwise operators are computed
on what varies only: a causal mask built for a batch of 512 costs one mask. `simplify` uses what is known of constants: masks of
nothing but True, selections that choose one side, an `index` that reads whole dims in order. `materialise` writes what is left as constant
leaves of their compact shape, equal ones once, expanded where a reader needs the full shape.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import torch

from autoplan.canonical.trace import Rewriter, Step, Trace
from runtime.call import decode, dtype_name, dtype_of, resolve, spec_of
from runtime.instr import Arg, Instr, Ref, TensorSpec, uses

MAX_ELEMENTS = 1 << 28  # a larger constant is left to be computed in the step

_CPU = torch.device("cpu")
_SHAPE_ONLY = {  # results that depend on the operand's shape alone, and the value they are filled with
    "aten.zeros_like.default": 0,
    "aten.ones_like.default": 1,
    "aten.empty_like.default": 0,
    "aten.new_zeros.default": 0,
    "aten.new_ones.default": 1,
    "aten.new_empty.default": 0,
    "aten.full_like.default": None,
    "aten.new_full.default": None,
}
# Elementwise operators that give a result when their operands are broadcast late, beyond those that torch tags as such.
_POINTWISE = frozenset(["aten.__and__.Tensor", "aten.__or__.Tensor", "aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar", "aten.to.dtype"])


def is_pointwise(target: str) -> bool:
    """Whether an operator computes each element from the operands' elements at the same place, broadcast."""
    if target in _POINTWISE:
        return True
    op = resolve(target)
    return isinstance(op, torch._ops.OpOverload) and torch.Tag.pointwise in op.tags


def is_random(target: str) -> bool:
    """Whether an operator draws random numbers."""
    if target.startswith("runtime."):
        return target in ("runtime.dropout", "runtime.attention")
    if target == "aten.scaled_dot_product_attention.default":
        return False  # with dropout it is runtime.attention
    op = resolve(target)
    return isinstance(op, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in op.tags


def draws(instr: Instr) -> bool:
    """Whether a call draws random numbers: a recurrent layer only with dropout between its layers, `rrelu` only in training."""
    if not is_random(instr.target) or instr.target.startswith("runtime."):
        return is_random(instr.target)
    schema = resolve(instr.target)._schema  # type: ignore[attr-defined]
    given = {**{a.name: a.default_value for a in schema.arguments if a.has_default_value()}}
    given |= {**dict(zip((a.name for a in schema.arguments), instr.args, strict=False)), **dict(instr.kwargs)}
    if given.get("train", given.get("training", True)) is False:
        return False
    return "num_layers" not in given or (given["num_layers"] > 1 and given["dropout"] > 0)


def evaluate(trace: Trace) -> dict[str, torch.Tensor]:
    """The constants of `trace` that something not constant reads (or that it returns), by value name."""
    known: dict[str, torch.Tensor] = {name: _compact(data) for name, data in trace.constants.items()}
    readers: dict[str, int] = {}
    for step in trace.steps:
        for name in dict.fromkeys(uses(step.instr)):
            readers[name] = readers.get(name, 0) + 1
    kept = set(trace.outputs) | {value for _, value in trace.buffer_updates}
    for step in trace.steps:
        operands = tuple(dict.fromkeys(uses(step.instr)))
        if step.instr.target in _SHAPE_ONLY:
            known[step.instr.name] = _filled(step)
            results = True
        else:
            results = all(name in known for name in operands) and _foldable(step)
            if results:
                for out, value in zip(step.instr.outputs, _compute(step, known), strict=True):
                    known[out.name] = _compact(value)
        for name in operands:
            if results:
                readers[name] -= 1
                if not readers[name] and name not in kept:
                    known.pop(name, None)
            else:
                kept.add(name)
    return known


def _foldable(step: Step) -> bool:
    instr = step.instr
    if instr.target.startswith("runtime.") or any(out.spec is None for out in instr.outputs) or is_random(instr.target):
        return False
    if max(math.prod(out.spec.shape) for out in instr.outputs if out.spec is not None) <= MAX_ELEMENTS:
        return True
    return is_pointwise(instr.target) or instr.target in ("aten.expand.default", "aten.reshape.default", "aten.unsqueeze.default")


def _filled(step: Step) -> torch.Tensor:
    spec = step.instr.outputs[0].spec
    assert spec is not None
    fill = _SHAPE_ONLY[step.instr.target]
    value = fill if fill is not None else step.instr.args[1 if step.instr.target == "aten.full_like.default" else 2]
    return torch.full((1,) * len(spec.shape), value, dtype=dtype_of(spec.dtype)).expand(spec.shape)  # type: ignore[arg-type]


def _compute(step: Step, known: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    instr = step.instr
    env = dict.fromkeys(uses(instr), torch.empty(0))
    env.update((name, known[name]) for name in env)
    shape = instr.outputs[0].spec.shape if instr.outputs[0].spec is not None else ()
    pointwise = bool(env) and is_pointwise(instr.target)
    if pointwise:
        for d in range(1, len(shape) + 1):
            if all(t.dim() < d or t.shape[-d] == 1 or t.stride(-d) == 0 for t in env.values()):
                env = {n: t.narrow(-d, 0, 1) if t.dim() >= d and t.shape[-d] > 1 else t for n, t in env.items()}
    with torch.no_grad():
        result = resolve(instr.target)(*(decode(a, env, _CPU) for a in instr.args), **{k: decode(a, env, _CPU) for k, a in instr.kwargs})
    if pointwise:
        return [result.expand(shape)]
    return list(result) if instr.is_sequence else [result]


def _compact(value: torch.Tensor) -> torch.Tensor:
    """The same tensor with stride 0 along dims where it does not vary."""
    shape = value.shape
    if value.numel() == 0:
        return value
    core = value
    for d, n in enumerate(shape):
        if n > 1 and value.stride(d) == 0:
            core = core.narrow(d, 0, 1)
    for d in range(core.dim()):
        if core.shape[d] > 1 and torch.equal(core.narrow(d, 0, 1), core.narrow(d, 1, 1)):
            first = core.narrow(d, 0, 1)
            if bool((core == first).all()):
                core = first
    return core.expand(shape)


def core(value: torch.Tensor) -> torch.Tensor:
    """What varies of a compact constant: size 1 where its stride is 0."""
    for d, n in enumerate(value.shape):
        if n > 1 and value.stride(d) == 0:
            value = value.narrow(d, 0, 1)
    return value


def uniform(value: torch.Tensor | None) -> bool | float | int | None:
    """The one number that a constant holds everywhere; None if there is no such number (or nothing is known)."""
    if value is None or value.numel() == 0 or core(value).numel() != 1:
        return None
    return core(value).item()


def simplify(trace: Trace, known: Mapping[str, torch.Tensor]) -> Trace:
    """`trace` without operators that a known operand makes the identity; calls on constants stay for `materialise`."""
    rewriter = Rewriter(trace)
    for step in trace.steps:
        if all(out.name in known for out in step.instr.outputs) or not _simplified(rewriter, step, known):
            rewriter.keep(step)
    return rewriter.finish()


def _simplified(rewriter: Rewriter, step: Step, known: Mapping[str, torch.Tensor]) -> bool:
    target, args = step.instr.target, rewriter.args(step)
    spec = step.instr.outputs[0].spec
    assert spec is not None or step.instr.is_sequence

    def value(arg: Arg) -> bool | float | int | None:
        return uniform(known.get(arg.name)) if isinstance(arg, Ref) else arg if isinstance(arg, (int, float)) else None

    def become(arg: Arg) -> bool:
        """The step's result is `arg`, expanded; only where the type stays."""
        if not isinstance(arg, Ref) or spec is None or rewriter.specs[arg.name].dtype != spec.dtype:
            return False
        if rewriter.specs[arg.name].shape == spec.shape:
            rewriter.rename(step.instr.name, arg.name)
        else:
            rewriter.keep(step, "aten.expand.default", (arg, spec.shape), ())
        return True

    if target in ("aten.__and__.Tensor", "aten.logical_and.default", "aten.bitwise_and.Tensor") and spec is not None and spec.dtype == "bool":
        return (value(args[0]) is True and become(args[1])) or (value(args[1]) is True and become(args[0]))
    if target in ("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf"):
        chosen = value(args[0])
        return chosen is not None and become(args[1] if chosen else args[2])
    if target == "aten.add.Tensor" and len(args) == 2 and not step.instr.kwargs:
        return any(value(args[i]) == 0 and become(args[1 - i]) for i in (0, 1))  # -0.0 + 0.0 is 0.0: equal, though not the same bits
    if target == "aten.index.Tensor":
        return _index(rewriter, step, known)
    return False


def _index(rewriter: Rewriter, step: Step, known: Mapping[str, torch.Tensor]) -> bool:
    """x[i0, i1, ...] where every index runs over its whole dim in order, along a result dim of its own: a view of x."""
    source, indices = rewriter.args(step)[:2]
    spec = step.instr.outputs[0].spec
    if not isinstance(source, Ref) or not isinstance(indices, tuple) or spec is None:
        return False
    shape = rewriter.specs[source.name].shape
    if any(not isinstance(i, Ref) or i.name not in known or dtype_of(rewriter.specs[i.name].dtype) == torch.bool for i in indices):
        return False
    places: list[int | None] = []
    rank = max(known[i.name].dim() for i in indices if isinstance(i, Ref))
    for index, n in zip(indices, shape, strict=False):
        assert isinstance(index, Ref)
        varying = core(known[index.name])
        if varying.numel() != n or (n > 1 and not torch.equal(varying.flatten(), torch.arange(n, dtype=varying.dtype))) or (n == 1 and varying.item() != 0):
            return False
        places.append(next((d - varying.dim() for d, size in enumerate(varying.shape) if size == n), None) if n > 1 else None)
    order = [p for p in places if p is not None]
    if order != sorted(set(order)):
        return False
    view = [1] * rank
    for place, n in zip(places, shape, strict=False):
        if place is not None:
            view[place] = n
    result: tuple[int, ...] = (*view, *shape[len(indices) :])
    if result == shape:
        rewriter.rename(step.instr.name, source.name)
    elif result == spec.shape:
        rewriter.keep(step, "aten.reshape.default", (source, result), ())
    else:
        name = rewriter.emit(step, "aten.reshape.default", (source, result), spec=TensorSpec(result, spec.dtype))
        rewriter.keep(step, "aten.expand.default", (Ref(name), spec.shape), ())
    return True


def materialise(trace: Trace, known: Mapping[str, torch.Tensor]) -> Trace:
    """`trace` with known values as constant leaves."""
    rewriter = Rewriter(trace)
    made: dict[tuple[str, tuple[int, ...], str], str] = {}
    compact: dict[str, str] = {}
    for name, leaf in trace.leaves.items():
        if leaf.kind == "constant":
            rewriter.leaves.pop(name)
            rewriter.constants.pop(name)

    def leaf_of(name: str) -> str:
        if name not in compact:
            data = core(known[name])
            data = data[: period(data)].clone(memory_format=torch.contiguous_format) if data.dim() else data.clone()
            digest = hashlib.sha256(data.reshape(-1).view(torch.uint8).numpy().data).hexdigest()
            key = (dtype_name(data.dtype), tuple(data.shape), digest)
            if key not in made:
                made[key] = rewriter.constant(data)
            compact[name] = made[key]
        return compact[name]

    def narrow(name: str, step: Step) -> str:
        """The value without its expanded dimensions."""
        leaf, shape = leaf_of(name), tuple(core(known[name]).shape)
        spec = rewriter.specs[leaf]
        if spec.shape == shape:
            return leaf
        one, repeats = (1, *spec.shape), (shape[0] // spec.shape[0], *spec.shape)
        leaf = rewriter.emit(step, "aten.unsqueeze.default", (Ref(leaf), 0), spec=TensorSpec(one, spec.dtype))
        leaf = rewriter.emit(step, "aten.expand.default", (Ref(leaf), repeats), spec=TensorSpec(repeats, spec.dtype))
        return rewriter.emit(step, "aten.reshape.default", (Ref(leaf), shape), spec=TensorSpec(shape, spec.dtype))

    def full(name: str, step: Step) -> str:
        leaf = narrow(name, step)
        spec = spec_of(known[name])
        if rewriter.specs[leaf].shape == spec.shape:
            return leaf
        return rewriter.emit(step, "aten.expand.default", (Ref(leaf), spec.shape), spec=spec)

    for step in trace.steps:
        if all(out.name in known for out in step.instr.outputs):
            continue
        constants = [name for name in dict.fromkeys(uses(step.instr)) if name in known]
        out = step.instr.outputs[0].spec
        if constants:
            shapes = [tuple(core(known[n]).shape) if n in known else rewriter.specs[rewriter.now(n)].shape for n in uses(step.instr)]
            free = is_pointwise(step.instr.target) and out is not None and torch.broadcast_shapes(*shapes) == out.shape
            mask = step.instr.target.startswith("aten.scaled_dot_product_attention") or step.instr.target == "runtime.attention"
            for name in constants:
                as_mask = mask and uses(step.instr).index(name) == 3
                rewriter.rename(name, narrow(name, step) if free or (as_mask and _keeps_rows(known[name])) else full(name, step))
        rewriter.keep(step)
    if trace.steps:
        for name in trace.outputs:
            if name in known:
                rewriter.rename(name, full(name, trace.steps[-1]))
        for _, name in trace.buffer_updates:
            if name in known:
                rewriter.rename(name, full(name, trace.steps[-1]))
    return rewriter.finish()


def _keeps_rows(value: torch.Tensor) -> bool:
    """A mask may be narrow in batch and heads, but attention kernels want its last two dims whole."""
    return core(value).shape[-2:] == value.shape[-2:]


def period(data: torch.Tensor) -> int:
    """The least number of entries of dim 0 that are repeated throughout: a mask of windows is the same for every image."""
    length = data.shape[0]
    if data.dim() < 3:
        return length
    pieces = (p for p in range(2, length // 2 + 1) if length % p == 0)
    return next((p for p in pieces if torch.equal(data[p:], data[:-p])), length)
