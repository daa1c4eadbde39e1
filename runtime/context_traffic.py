"""What the functions that exchange over a context or expert axis send, from their local shapes: uses as in runtime/instr_traffic.py.

ring_attention        forward P-1 hops of local keys and values; backward as many, and P-1 hops of their gradients in the dtype of sums
self_attention_ring   forward P-1 hops of keys, P-1 of values; backward the same and 2 all_reduces of the whole gradients
dispatch_experts      forward all_to_all of the counts and 2 of the rows of all slots; backward 2 of the rows
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from runtime.call import dtype_of, num_bytes
from runtime.instr import TensorSpec

Exchange = tuple[str, int]  # kind, bytes
NAMES = ("ring_attention", "self_attention_ring", "dispatch_experts")


def exchanges(target: str, operands: Sequence[TensorSpec], num_ranks: int, *, is_backward: bool) -> tuple[Exchange, ...]:
    """(kind, bytes) of every collective of one pass of `target`, one of NAMES, on local `operands` and an axis of `num_ranks`."""
    if target == "runtime.dispatch_experts":
        return _dispatched(operands, num_ranks, is_backward)
    keys, values = operands[1], operands[2]
    wide = max(4, dtype_of(keys.dtype).itemsize)
    hops = num_ranks - 1
    elements = [math.prod(spec.shape) for spec in (keys, values)]
    if target == "runtime.ring_attention":
        found: list[Exchange] = [("send", num_bytes(keys) + num_bytes(values))] * hops
        return tuple(found + [("send", wide * sum(elements))] * hops) if is_backward else tuple(found)
    found = [("send", num_bytes(spec)) for spec in (keys, values) for _ in range(hops)]
    return tuple(found + [("all_reduce", wide * size * num_ranks) for size in elements]) if is_backward else tuple(found)


def _dispatched(operands: Sequence[TensorSpec], num_ranks: int, is_backward: bool) -> tuple[Exchange, ...]:
    x, ids, _, gate_up, down = operands
    slots, size = math.prod(ids.shape), dtype_of(x.dtype).itemsize
    there, back = (("all_to_all", num_ranks * slots * width * size) for width in (x.shape[1], down.shape[1]))
    if is_backward:
        return back, there
    return ("all_to_all", 8 * gate_up.shape[0] * num_ranks**2), there, back
