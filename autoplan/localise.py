"""Localising: the size arguments of an operator, rewritten for the local shapes of its operands and outputs.

A rule (autoplan/rules) offers a loop only where this is possible, so nothing here refuses: an operator that is
not listed has no argument that speaks of a divided dimension. The row count of the batch may differ as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from autoplan.graph import Op, Value
from autoplan.layout import Split
from autoplan.rules.conv import CONVOLUTIONS
from autoplan.rules.registry import parameters
from runtime.instr import Arg, Instr, Output, TensorSpec, uses

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Local:
    """An operator's arguments by name with the local shapes of its operands and outputs."""

    name: str  # "aten.conv2d"
    args: Mapping[str, Arg]
    dense: Shape  # of the first output, undivided
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]

    def dim(self, default: int = 0) -> int:
        value = self.args.get("dim", default)
        assert isinstance(value, int)
        return value % max(len(self.inputs[0]), 1)


Changes = Mapping[str, Arg]


def local_shape(value: Value, sizes: Mapping[int, int] | Sequence[int], splits: Sequence[tuple[Split, int]]) -> tuple[int, ...]:
    """Shape of the part of `value` that a rank holds: each (where, degree) of `splits` divides that factor.

    `sizes` are the factors' lengths; the batch factor may have another one than the graph's.
    """
    degrees: dict[tuple[int, int], int] = {}
    for where, degree in splits:
        key = (where.dim, where.factor)
        degrees[key] = degrees.get(key, 1) * degree
    shape = []
    for d, dim in enumerate(value.dims):
        length = 1
        for k, factor in enumerate(dim):
            degree = degrees.pop((d, k), 1)
            assert sizes[factor] % degree == 0, f"factor {factor} of {value.name} has length {sizes[factor]}, not divisible by {degree}"
            length *= sizes[factor] // degree
        shape.append(length)
    assert not degrees, f"{value.name} has no factor at {sorted(degrees)}"
    return tuple(shape)


def localise(op: Op, local_shape_of: Callable[[str], Shape]) -> Instr:
    """`op.instr` for local tensors: `local_shape_of(name)` is the local shape of each operand and output.

    Sizes of views, expansions, repetitions, fills, splits and full slices, and counts of groups, follow the local
    shapes; -1 in a view becomes the size itself. The specs of the outputs are the local ones.
    """
    instr = op.instr
    inputs = tuple(local_shape_of(name) for name in uses(instr))
    outputs = tuple(
        output if output.spec is None else Output(output.name, TensorSpec(local_shape_of(output.name), output.spec.dtype)) for output in instr.outputs
    )
    local = replace(instr, outputs=outputs)
    packet = instr.target.rpartition(".")[0]
    rewrite = _REWRITES.get(packet)
    if rewrite is None:
        return local
    names = parameters(instr.target)
    assert names is not None
    args = dict(zip((name for name, _ in names), instr.args, strict=False)) | dict(instr.kwargs)
    shapes = tuple(output.spec.shape for output in outputs if output.spec is not None)
    if packet in _RESHAPES:
        assert prod(inputs[0]) == prod(shapes[0]), f"{op.name}: {inputs[0]} cannot be viewed as {shapes[0]}"
    if packet in _AS_RESHAPE:
        return replace(local, target="aten.reshape.default", args=(instr.args[0], shapes[0]), kwargs=())
    dense = instr.outputs[0].spec
    assert dense is not None
    if packet == "aten.expand_as":
        return replace(local, target="aten.expand.default", args=(instr.args[0], shapes[0]), kwargs=())
    changes = rewrite(_Local(packet, args, dense.shape, inputs, shapes))
    given = tuple(changes.get(name, arg) for (name, _), arg in zip(names, instr.args, strict=False))
    missing = [name for name in changes if name not in args]
    assert not missing, f"{op.name}: {instr.target} is not given {missing}"
    return replace(local, args=given, kwargs=tuple((name, changes.get(name, arg)) for name, arg in instr.kwargs))


def _size(local: _Local) -> Changes:
    return {"size": local.outputs[0]}


def _shape(local: _Local) -> Changes:
    return {"shape": local.outputs[0]}


def _unflatten(local: _Local) -> Changes:
    sizes = local.args["sizes"]
    assert isinstance(sizes, tuple)
    return {"sizes": local.outputs[0][local.dim() : local.dim() + len(sizes)]}


def _repeat(local: _Local) -> Changes:
    out, source = local.outputs[0], local.inputs[0]
    padded = (1,) * (len(out) - len(source)) + source
    return {"repeats": tuple(n // m if m else 1 for n, m in zip(out, padded, strict=True))}


def _interleave(local: _Local) -> Changes:
    out, source = local.outputs[0], local.inputs[0]
    if not isinstance(local.args.get("repeats"), int) or not isinstance(local.args.get("dim"), int):
        return {}
    changes: dict[str, Arg] = {"repeats": out[local.dim()] // max(source[local.dim()], 1)}
    return changes | ({"output_size": out[local.dim()]} if local.args.get("output_size") is not None else {})


def _split(local: _Local) -> Changes:
    several = isinstance(local.args["split_size"], tuple)
    return {"split_size": tuple(shape[local.dim()] for shape in local.outputs) if several else local.outputs[0][local.dim()]}


def _split_with_sizes(local: _Local) -> Changes:
    return {"split_sizes": tuple(shape[local.dim()] for shape in local.outputs)}


def _slice(local: _Local) -> Changes:
    """Only a slice that keeps its dimension whole speaks of a size that may have changed."""
    dim = local.dim()
    if local.inputs[0][dim] != local.outputs[0][dim]:
        return {}
    return {name: value for name, value in (("start", 0), ("end", local.inputs[0][dim])) if local.args.get(name) is not None}


def _narrow(local: _Local) -> Changes:
    return {"length": local.outputs[0][local.dim()]}


def _conv(local: _Local) -> Changes:
    """Groups = channels of the whole group dimension over those of one group, which the weight's second dimension counts."""
    if "groups" not in local.args:
        return {}
    transposed = local.args.get("transposed", "transpose" in local.name)
    channels = local.outputs[0][1] if transposed else local.inputs[0][1]
    return {"groups": channels // local.inputs[1][1]}


def _group_norm(local: _Local) -> Changes:
    groups = local.args["num_groups"]
    assert isinstance(groups, int)
    return {"num_groups": groups * local.outputs[0][1] // local.dense[1]}


def _resize(local: _Local) -> Changes:
    return {"output_size": local.outputs[0][2:]} if local.args.get("output_size") is not None else {}


def _nothing(local: _Local) -> Changes:
    return {}


# A squeeze would take away a dimension that only its division made 1; the others name a tensor for its shape.
_AS_RESHAPE = frozenset({"aten.squeeze", "aten.view_as", "aten.reshape_as"})
_RESHAPES = _AS_RESHAPE | {"aten.view", "aten.reshape", "aten._unsafe_view", "aten.unflatten"}

_REWRITES: Mapping[str, Callable[[_Local], Changes]] = {
    **dict.fromkeys((*_AS_RESHAPE, "aten.expand_as"), _nothing),
    **{f"aten.{name}": _size for name in ("view", "_unsafe_view", "expand", "broadcast_to", "zeros", "ones", "full", "new_zeros", "new_ones", "new_full")},
    "aten.reshape": _shape,
    "aten.unflatten": _unflatten,
    "aten.repeat": _repeat,
    "aten.repeat_interleave": _interleave,
    **{f"aten.{name}": _split for name in ("split", "unsafe_split")},
    "aten.split_with_sizes": _split_with_sizes,
    "aten.slice": _slice,
    "aten.narrow": _narrow,
    **{f"aten.{name}": _conv for name in CONVOLUTIONS},
    "aten.group_norm": _group_norm,
    **{f"aten.{kind}{k}d": _resize for kind in ("upsample_nearest", "_upsample_nearest_exact") for k in (1, 2, 3)},
}
