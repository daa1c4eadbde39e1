"""Operators that only rearrange elements: the loops are the common factors of both shapes."""

from __future__ import annotations

from itertools import pairwise
from math import prod

from autoplan.rules.signature import OPAQUE, Call, Dim, Dims, Signature, integer, integers, labels


def regroup(source: tuple[int, ...], target: tuple[int, ...]) -> tuple[Dims, Dims, dict[str, int]]:
    """Labels for a view from shape `source` to shape `target` in row-major order, with their lengths.

    The boundaries of both shapes, as numbers of elements to their right, are taken together. Between two that the
    shapes share, neighbours that divide each other delimit a common factor; if one pair there does not, as in
    (4, 6) -> (6, 4), the dimensions between stay opaque.
    """
    if 0 in source:
        return (OPAQUE,) * len(source), (OPAQUE,) * len(target), {}
    first, second = _strides(source), _strides(target)
    shared = sorted(set(first) & set(second), reverse=True)
    sizes = {}
    names: dict[int, tuple[str, int]] = {}  # stride -> label of the factor that begins there and its upper end
    for top, bottom in pairwise(shared):
        chain = list(pairwise(sorted({n for n in (*first, *second) if bottom <= n <= top}, reverse=True)))
        if all(high % low == 0 for high, low in chain):
            for high, low in chain:
                names[low] = (f"d{len(sizes)}", high)
                sizes[f"d{len(sizes)}"] = high // low
    return _labelled(source, first, names), _labelled(target, second, names), sizes


def _strides(shape: tuple[int, ...]) -> list[int]:
    """Elements to the right of each boundary, outermost first: (2, 3, 4) -> [24, 12, 4, 1]."""
    return [prod(shape[k:]) for k in range(len(shape) + 1)]


def _labelled(shape: tuple[int, ...], strides: list[int], names: dict[int, tuple[str, int]]) -> Dims:
    dims: list[Dim] = []
    for k in range(len(shape)):
        found, low = [], strides[k + 1]
        while low < strides[k] and low in names:
            label, low = names[low]
            found.insert(0, label)
        dims.append(tuple(found) if low == strides[k] else OPAQUE)
    return tuple(dims)


def view(call: Call) -> Signature | None:
    if "dtype" in call.args:
        return None  # bits seen as another type
    source, target, sizes = regroup(call.inputs[0].shape, call.out())
    rest = tuple((OPAQUE,) * len(spec.shape) for spec in call.inputs[1:])
    return Signature((source, *rest), (target,), linear=((0,),), sizes=sizes)


def permutation(call: Call) -> Signature | None:
    """transpose, permute, t, movedim and the like, by the order in which dimensions arrive."""
    rank, name = call.rank("self"), call.target.split(".")[1]
    order = list(range(rank))
    if name in ("transpose", "swapaxes", "swapdims"):
        a, b = (integer(call.args[key]) % rank for key in (("dim0", "dim1") if "dim0" in call.args else ("axis0", "axis1"))) if rank else (0, 0)
        if rank:
            order[a], order[b] = order[b], order[a]
    elif name == "permute":
        order = [d % rank for d in integers(call.args["dims"])]
    elif name == "movedim":
        source, to = (integers(call.args[key]) for key in ("source", "destination"))
        moved = {t % rank: s % rank for s, t in zip(source, to, strict=True)}
        others = iter(d for d in range(rank) if d not in moved.values())
        order = [moved[d] if d in moved else next(others) for d in range(rank)]
    elif name in ("t", "numpy_T"):
        order.reverse()
    else:
        order[-1], order[-2] = order[-2], order[-1]
    dims = labels(rank)
    return Signature((dims,), (tuple(dims[d] for d in order),), linear=((0,),))


def expand(call: Call) -> Signature:
    """A dimension of 1 that grows is a loop of the output alone."""
    source, out = call.shape("self"), call.out()
    shift = len(out) - len(source)
    read = tuple((f"d{k + shift}",) if n == out[k + shift] else () for k, n in enumerate(source))
    rest = tuple((OPAQUE,) * len(spec.shape) for spec in call.inputs[1:])
    return Signature((read, *rest), (labels(len(out)),), linear=((0,),))


def repeat(call: Call) -> Signature:
    """repeat(x, r): a dimension of n becomes (repetition, n)."""
    source, out = call.shape("self"), call.out()
    shift = len(out) - len(source)
    write = tuple((f"r{k}", f"d{k - shift}") if k >= shift else (f"r{k}",) for k in range(len(out)))
    lengths = {f"d{k}": n for k, n in enumerate(source)}
    lengths |= {f"r{k}": n // (source[k - shift] if k >= shift else 1) for k, n in enumerate(out)} if 0 not in source else {}
    return Signature((labels(len(source)),), (write,), linear=((0,),), sizes=lengths)


def repeat_interleave(call: Call) -> Signature | None:
    """repeat_interleave(x, r, dim): a dimension of n becomes (n, repetition)."""
    repeats, dim = call.get("repeats"), call.get("dim")
    if not isinstance(repeats, int) or dim is None:
        return None
    rank = call.rank("self")
    write = tuple((*d, "r") if k == dim % rank else d for k, d in enumerate(labels(rank)))
    return Signature((labels(rank),), (write,), linear=((0,),), sizes={"r": repeats, f"d{dim % rank}": call.shape("self")[dim % rank]})


def cat(call: Call) -> Signature | None:
    """Dimensions beside the joined one."""
    out = call.out()
    if any(len(spec.shape) != len(out) for spec in call.inputs):
        return None
    dim = int(call.get("dim", 0)) % len(out)
    dims = tuple(OPAQUE if k == dim else d for k, d in enumerate(labels(len(out))))
    return Signature((dims,) * len(call.inputs), (dims,), linear=(tuple(range(len(call.inputs))),))


def stack(call: Call) -> Signature:
    out = call.out()
    dim = int(call.get("dim", 0)) % len(out)
    dims = labels(len(out))
    return Signature((dims[:dim] + dims[dim + 1 :],) * len(call.inputs), ((*dims[:dim], OPAQUE, *dims[dim + 1 :]),), linear=(tuple(range(len(call.inputs))),))


def pieces(call: Call) -> Signature | None:
    """split, chunk: a dimension cut into parts of one size r, or of multiples of it, is (part, r)."""
    source = call.shape("self")
    dim = int(call.get("dim", 0)) % len(source)
    sizes = [spec.shape[dim] for spec in call.outputs if spec is not None]
    inner = sizes[0] if len(set(sizes)) == 1 else 0
    read: Dim = ("part", "r") if inner else OPAQUE
    write: Dim = ("r",) if inner else OPAQUE
    dims = labels(len(source))
    outs = (*dims[:dim], write, *dims[dim + 1 :])
    lengths = {"part": len(sizes), "r": inner} if inner else {}
    return Signature(((*dims[:dim], read, *dims[dim + 1 :]),), (outs,) * len(sizes), whole=frozenset({"part"}), linear=((0,),), sizes=lengths)


def pick(call: Call) -> Signature:
    """select and unbind: one dimension goes away."""
    rank = call.rank("self")
    dim = int(call.get("dim", 0)) % rank
    dims = labels(rank)
    rest = dims[:dim] + dims[dim + 1 :]
    return Signature(((*dims[:dim], OPAQUE, *dims[dim + 1 :]),), (rest,) * len(call.outputs), linear=((0,),))


def same_length(call: Call) -> Signature:
    """slice, narrow, pad: dimensions that keep their whole length."""
    source, out = call.shape("self"), call.out()
    touched = _touched(call, len(source))
    dims = tuple(OPAQUE if k in touched else d for k, d in enumerate(labels(len(source))))
    assert all(a == b for k, (a, b) in enumerate(zip(source, out, strict=True)) if k not in touched)
    return Signature((dims,), (dims,), linear=((0,),) if not call.get("value") and call.get("mode", "constant") == "constant" else ())


def _touched(call: Call, rank: int) -> set[int]:
    if "pad" in call.args:
        pad = call.args["pad"]
        assert isinstance(pad, tuple)
        return {rank - 1 - k // 2 for k, n in enumerate(pad) if n}
    dim = int(call.get("dim", 0)) % rank
    size, start, step = call.shape("self")[dim], call.get("start", 0), call.get("step", 1)
    whole = call.out()[dim] == size and start in (0, -size) and step == 1
    return set() if whole else {dim}


def tiled_half(call: Call) -> Signature:
    """glu(x, dim): the dimension is (2, r), the output carries r."""
    rank = call.rank("self")
    dim = int(call.get("dim", -1)) % rank
    dims = labels(rank)
    read = (*dims[:dim], ("half", *dims[dim]), *dims[dim + 1 :])
    return Signature((read,), (dims,), whole=frozenset({"half"}), sizes={"half": 2})


_VIEWS = ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as")
_TURNS = ("transpose", "permute", "t", "movedim", "swapaxes", "swapdims", "numpy_T", "mT", "matrix_H", "mH", "adjoint")

RULES = {
    **{f"aten.{name}": view for name in _VIEWS},
    **{f"aten.{name}": permutation for name in _TURNS if name not in ("matrix_H", "mH", "adjoint")},
    **{f"aten.{name}": expand for name in ("expand", "expand_as", "broadcast_to")},
    "aten.repeat": repeat,
    "aten.repeat_interleave": repeat_interleave,
    "aten.cat": cat,
    "aten.concat": cat,
    "aten.stack": stack,
    **{f"aten.{name}": pieces for name in ("split", "split_with_sizes", "chunk", "tensor_split.sections", "unsafe_split", "unsafe_chunk")},
    "aten.select": pick,
    "aten.unbind": pick,
    **{f"aten.{name}": same_length for name in ("slice", "narrow", "pad", "constant_pad_nd")},
    "aten.glu": tiled_half,
}
