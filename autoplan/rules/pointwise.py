"""Elementwise operators: every output dimension is a free loop, operands are aligned from the right."""

from __future__ import annotations

from autoplan.rules.signature import OPAQUE, Call, Signature, aligned, labels

_JOINT = {"add", "sub", "subtract"}  # linear in both tensors together; with a number they are affine, hence not linear
_EACH = {"mul", "multiply"}  # linear in each factor
_FIRST = {"div", "divide", "true_divide", "scale_by_count"}
_SELF = {"neg", "negative", "clone", "contiguous", "alias", "detach", "lift_fresh_copy", "positive"}


def elementwise(call: Call) -> Signature:
    """Operands broadcast against the output."""
    out = call.out()
    reads = tuple(aligned(spec.shape, out) for spec in call.inputs)
    return Signature(reads, tuple(labels(len(out)) for spec in call.outputs if spec is not None), linear=_linear(call))


def like(call: Call) -> Signature:
    """`zeros_like` and its kin: the operand gives its shape alone."""
    rank = len(call.out())
    return Signature((labels(rank),), (labels(rank),))


def cast(call: Call) -> Signature:
    """type_as, to(other): the other tensor gives its dtype alone."""
    rank = len(call.out())
    return Signature((labels(rank), (OPAQUE,) * len(call.inputs[1].shape)), (labels(rank),))


def pairs(call: Call) -> Signature:
    """view_as_complex(x[..., 2]) and view_as_real: the pair of real and imaginary part stays together."""
    source, out = len(call.inputs[0].shape), len(call.out())
    dims = labels(min(source, out))
    real = (*dims, OPAQUE)
    return Signature((real if source > out else dims,), (dims if source > out else real,))


def inert_dropout(call: Call) -> Signature | None:
    """A dropout that drops nothing is the identity; one that draws is split only in its counter-based form."""
    return elementwise(call) if not call.get("train", True) or not call.get("p") else None


def per_channel_slope(call: Call) -> Signature:
    """prelu(x[n, c, ...], weight[c] or weight[1])."""
    rank = call.rank("self")
    slope = ("d1",) if rank > 1 and call.shape("weight") == (call.shape("self")[1],) else ()
    if rank == 1 and call.shape("weight") != (1,):
        slope = ("d0",)
    return Signature((labels(rank), (slope,) * call.rank("weight")), (labels(rank),))


def _linear(call: Call) -> tuple[tuple[int, ...], ...]:
    name = call.target.split(".")[1]
    count = len(call.inputs)
    if count == 1 and (name in _SELF or (name in _COPIES and call.inputs[0].dtype == getattr(call.outputs[0], "dtype", None))):
        return ((0,),)
    if name in _JOINT and count == 2:
        return ((0, 1),)
    if name in _EACH:
        return tuple((i,) for i in range(count))
    if name in _FIRST and call.get("rounding_mode") is None and (call.at.get("self") or call.at.get("x")) == (0,):
        return ((0,),)
    return ()


# Compositions of elementwise operators that torch does not tag as such.
_UNTAGGED = """
    __and__ __or__ __xor__ where.self where.ScalarOther where.ScalarSelf where.Scalar floor_divide true_divide multiply subtract divide greater
    greater_equal less less_equal not_equal square absolute negative clip isfinite isnan isinf isreal float_power relu6 selu celu hardtanh
    hardswish hardsigmoid log_sigmoid softplus mish threshold max.other min.other rsub fix broadcast_tensors logical_and logical_or logical_not
    logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor masked_fill softshrink hardshrink nan_to_num fill complex polar
""".split()  # noqa: SIM905
_COPIES = ("to", "_to_copy", "detach", "alias", "contiguous", "lift_fresh_copy", "lift_fresh", "clone")

RULES = {
    **{f"aten.{name}": elementwise for name in (*_COPIES, *_UNTAGGED)},
    **{f"aten.{name}": like for name in ("zeros_like", "ones_like", "full_like")},
    "aten.dropout": inert_dropout,
    "aten.prelu": per_channel_slope,
    "aten.type_as": cast,
    "aten.to.other": cast,
    "aten.view_as_complex": pairs,
    "aten.view_as_real": pairs,
    **dict.fromkeys(("aten.real", "aten.imag"), like),
    "runtime.dropout": elementwise,
    "runtime.scale_by_count": elementwise,
}
