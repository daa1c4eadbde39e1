"""Normalisations: the dimensions whose statistics are taken stay whole, or are divided with communication inside."""

from __future__ import annotations

import math
from fractions import Fraction

from autoplan.graph import Inside
from autoplan.rules.signature import Call, Inner, Signature, aligned, integer, labels, sign

_STATISTICS = (Inside("all_reduce", ("out", 1), "forward"),) * 2 + (Inside("all_reduce", ("out", 1), "backward"),) * 2


def over_last(call: Call) -> Signature:
    """layer_norm and rms_norm over the last len(normalized_shape) dimensions."""
    shape = call.args["normalized_shape"]
    assert isinstance(shape, tuple)
    rank = len(call.inputs[0].shape)
    split = rank - len(shape)
    dims = tuple((f"b{k}",) if k < split else (f"n{k - split}",) for k in range(rank))
    stats = tuple(d if k < split else () for k, d in enumerate(dims))
    writes = (dims, *((stats,) * (sum(spec is not None for spec in call.outputs) - 1)))
    return Signature((dims, *((dims[split:],) * (len(call.inputs) - 1))), writes, whole=frozenset(f"n{k}" for k in range(len(shape))))


def over_groups(call: Call) -> Signature:
    """group_norm(x[n, (g c), ...], groups, weight[(g c)], bias[(g c)]): positions are divided with the statistics summed over the ranks."""
    groups = integer(call.args["num_groups"])
    shape = call.inputs[0].shape
    length = math.prod(shape[2:]) * shape[1] // groups
    wide = 2 if call.inputs[0].dtype in ("bfloat16", "float16") else 1  # statistics are summed in 32 bits
    parts = tuple(Inside("all_reduce", ("in", 0), phase, Fraction(wide, length)) for phase in ("forward", "backward") for _ in range(2))
    inner = {f"s{k}": Inner("map", "runtime.sync_group_norm", parts, even=True) for k in range(len(shape) - 2)}
    fields = {"whole": "c", "sizes": {"g": groups, "c": shape[1] // groups}, "inner": inner}
    return sign(call, "n (g c) s*" + ", (g c)" * (len(call.inputs) - 1) + " -> n (g c) s*", **fields)


def per_channel(call: Call) -> Signature | None:
    """batch_norm in evaluation: a fixed scale and shift. In training it has the form `runtime.batch_norm`."""
    if call.get("training", False):
        return None
    return sign(call, "n c s*" + ", c" * (len(call.inputs) - 1) + " -> n c s*")


def over_batch(call: Call) -> Signature:
    """runtime.batch_norm(x[n, c, ...], weight[c], bias[c], mean[c], var[c]) -> y, new mean, new var.

    Rows and positions are divided with the statistics summed over the ranks (Ioffe and Szegedy 2015, section 3).
    """
    inner = Inner("inner", "runtime.sync_batch_norm", _STATISTICS)
    rank = len(call.inputs[0].shape)
    divided = ("n", *(f"s{k}" for k in range(rank - 2)))
    return sign(call, "n c s*" + ", c" * (len(call.inputs) - 1) + " -> n c s*, c, c", inner=dict.fromkeys(divided, inner))


def per_instance(call: Call) -> Signature | None:
    if len(call.inputs) > 3 or not call.get("use_input_stats", True):
        return None
    return sign(call, "n c s*" + ", c" * (len(call.inputs) - 1) + " -> n c s*", whole="s*")


def unit(call: Call) -> Signature | None:
    """cosine_similarity(x, y, dim) over operands of one shape."""
    if call.inputs[0].shape != call.inputs[1].shape:
        return None
    rank = len(call.inputs[0].shape)
    dim = int(call.get("dim", 1)) % rank
    dims = labels(rank)
    return Signature((dims, dims), (dims[:dim] + dims[dim + 1 :],), whole=frozenset({f"d{dim}"}))


def weight(call: Call) -> Signature:
    """_weight_norm(v, g, dim): the norm of each slice along `dim`."""
    shape = call.shape("v")
    dim = integer(call.get("dim", 0)) % len(shape)
    dims = labels(len(shape))
    return Signature((dims, aligned(call.shape("g"), shape)), (dims,), whole=frozenset(f"d{k}" for k in range(len(shape)) if k != dim))


RULES = {
    **{f"aten.{name}": over_last for name in ("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm")},
    "aten.group_norm": over_groups,
    "aten.batch_norm": per_channel,
    "runtime.batch_norm": over_batch,
    "aten.instance_norm": per_instance,
    "aten.cosine_similarity": unit,
    "aten._weight_norm": weight,
}
