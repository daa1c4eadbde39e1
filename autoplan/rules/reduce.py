"""Reductions and scans: what they reduce is summed or stays whole, everything else maps."""

from __future__ import annotations

from autoplan.rules.signature import OPAQUE, Call, Dims, Inner, Signature, integers, labels


def reduced(call: Call) -> tuple[frozenset[int], bool]:
    """Dimensions that a reduction removes, and whether it keeps them with length 1."""
    rank = len(call.inputs[0].shape)
    dim = call.args.get("dim")
    chosen = range(rank) if dim in (None, ()) else [d % max(rank, 1) for d in integers(dim)]
    return frozenset(chosen), bool(call.get("keepdim", False))


def _shrunk(call: Call) -> tuple[Dims, Dims, frozenset[str]]:
    rank = len(call.inputs[0].shape)
    gone, keep = reduced(call)
    dims = labels(rank)
    write = tuple(() if k in gone else d for k, d in enumerate(dims) if keep or k not in gone)
    return dims, write, frozenset(f"d{k}" for k in gone)


def total(call: Call) -> Signature:
    """sum: a divided dimension leaves a partial sum."""
    read, write, gone = _shrunk(call)
    return Signature((read,), (write,), sums=gone, linear=_unless_cast(call))


def average(call: Call) -> Signature:
    """mean: pooling over several dimensions leaves a partial sum where ranks hold equally many elements.

    What a mean over one dimension averages stays whole: norms that are written out would have one choice more at every operator.
    """
    read, write, gone = _shrunk(call)
    if len(gone) > 1:
        inner = dict.fromkeys(sorted(gone), Inner("sum", "runtime.mean_part", even=True))
        return Signature((read,), (write,), inner=inner, linear=_unless_cast(call))
    return Signature((read,), (write,), whole=gone, linear=_unless_cast(call))


def coupled(call: Call) -> Signature:
    """Reductions that are no sums: max, variance, norm, any, logsumexp."""
    read, write, gone = _shrunk(call)
    return Signature((read,), (write,) * sum(spec is not None for spec in call.outputs), whole=gone)


def along(call: Call) -> Signature:
    """softmax, cumsum, sort, flip: same shape, one or more dimensions whole."""
    rank = len(call.inputs[0].shape)
    dim = call.args.get("dim", call.args.get("dims"))
    whole = frozenset(f"d{d % max(rank, 1)}" for d in (() if dim is None else integers(dim)))
    return Signature((labels(rank),), (labels(rank),) * sum(spec is not None for spec in call.outputs), whole=whole, linear=_linear(call))


def _linear(call: Call) -> tuple[tuple[int, ...], ...]:
    return _unless_cast(call) if call.target.split(".")[1] in ("cumsum", "flip", "roll") else ()


def _unless_cast(call: Call) -> tuple[tuple[int, ...], ...]:
    """Linear in its operand, unless it rounds that to another type first."""
    return ((0,),) if call.get("dtype") is None else ()


def roll(call: Call) -> Signature | None:
    return along(call) if call.get("dims") else None


def selected(call: Call) -> Signature:
    """topk: like a sort whose dimension changes its length."""
    rank = len(call.inputs[0].shape)
    dim = int(call.get("dim", -1)) % max(rank, 1)
    dims = tuple(OPAQUE if k == dim else d for k, d in enumerate(labels(rank)))
    return Signature((dims,), (dims,) * len(call.outputs))


def histogram(call: Call) -> Signature | None:
    """histc with given bounds: each element adds one to its bin."""
    lower, upper = call.get("min", 0), call.get("max", 0)
    read = labels(len(call.inputs[0].shape))
    return Signature((read,), ((OPAQUE,),), sums=frozenset(d[0] for d in read)) if lower != upper else None


def triangle(call: Call) -> Signature:
    """tril, triu: positions in the last two dimensions matter."""
    rank = len(call.inputs[0].shape)
    dims = (*labels(rank)[:-2], OPAQUE, OPAQUE)
    return Signature((dims,), (dims,), linear=((0,),))


def differences(call: Call) -> Signature:
    """diff: dimensions beside the differenced one."""
    rank = call.rank("self")
    dim = int(call.get("dim", -1)) % rank
    dims = tuple(OPAQUE if k == dim else d for k, d in enumerate(labels(rank)))
    return Signature((dims,) * len(call.inputs), (dims,))


_COUPLED = ("amax", "amin", "aminmax", "argmax", "argmin", "var", "std", "var_mean", "std_mean", "norm", "linalg_vector_norm", "logsumexp", "prod")

_ALONG = ("softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "cumprod", "sort", "argsort", "flip", "logcumsumexp", "cummax", "cummin")

RULES = {
    "aten.sum": total,
    "aten.mean": average,
    **{f"aten.{name}": coupled for name in (*_COUPLED, "any", "all", "median", "max.default", "max.dim", "min.default", "min.dim", "count_nonzero")},
    **{f"aten.{name}": along for name in _ALONG},
    "aten.roll": roll,
    "aten.topk": selected,
    "aten.tril": triangle,
    "aten.triu": triangle,
    "aten.diff": differences,
    "aten.histc": histogram,
}
