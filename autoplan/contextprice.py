"""Prices of the functions that exchange over a context or expert axis of P ranks (runtime/context_traffic.py lists what they send).

    operator    the plain one at the size that a rank works on: its queries over all keys; the rows of all ranks at its own experts
    ring        hops of blocks beside the work on them: t seconds of hops beside (P-1)/P of w seconds of work (costmodel/overlap.py) add what
                these do not hide and what they slow; on CPUs, which do both, t. Hops of n bytes round a ring are those of an all_gather of P n bytes
    others      all_reduce and all_to_all in turn

Causal attention is priced at its full work: the last rank sees all blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autoplan.price import Pricer
from costmodel.opkey import RankGroup, Shape
from costmodel.overlap import beside_s
from runtime.call import dtype_of
from runtime.context_traffic import NAMES, Exchange, exchanges
from runtime.instr import TensorSpec

EXCHANGING = frozenset(f"runtime.{name}" for name in NAMES)
_DISPATCH = "runtime.dispatch_experts"


def _longer(shape: Shape, dim: int, times: int) -> Shape:
    return tuple(size * times if d == dim % len(shape) else size for d, size in enumerate(shape))


def dense_operands(target: str, operands: Sequence[Shape], num_ranks: int) -> tuple[Shape, ...]:
    """Operands of the plain operator that works as much as a rank does for `target` on these local ones."""
    if target == _DISPATCH:
        return (*(_longer(shape, 0, num_ranks) for shape in operands[:3]), *operands[3:])
    return tuple(_longer(shape, -2, num_ranks) if i in (1, 2) else shape for i, shape in enumerate(operands))


def dense_output(target: str, output: Shape, num_ranks: int) -> Shape:
    return _longer(output, 0, num_ranks) if target == _DISPATCH else output


def kept(target: str, operands: Sequence[TensorSpec], num_ranks: int) -> tuple[tuple[int, ...], bool, int]:
    """What `target` keeps for its backward pass: indices of operands, whether its output, and bytes besides."""
    size = dtype_of(operands[0].dtype).itemsize
    if target == _DISPATCH:
        x, ids, _, gate_up, _ = operands
        double = gate_up.shape[1]
        return (2, 3, 4), False, math.prod(ids.shape) * (2 * x.shape[1] + double + 3 * (double // 2)) * size
    rows = math.prod(operands[0].shape[:-1])
    if target == "runtime.ring_attention":
        return tuple(range(len(operands))), True, rows * max(4, size)
    return (0, 1, 2), False, rows * operands[1].shape[-2] * num_ranks * max(4, size)


def exchange_s(sent: Sequence[Exchange], compute_s: float, group: RankGroup, pricer: Pricer) -> float:
    """Seconds that the exchange adds to an operator that computes for `compute_s`: the module's formulas."""
    hops = sum(size for kind, size in sent if kind == "send")
    ring_s = pricer.collective("all_gather", hops * group.size // max(1, group.size - 1), group)
    if pricer.overlap:
        beside = compute_s * (group.size - 1) / group.size
        ring_s = beside_s(beside, ring_s, pricer.slowdown) - beside
    rest = ((kind, size // group.size if kind == "all_to_all" else size) for kind, size in sent if kind != "send")
    return ring_s + sum(pricer.collective(kind, size, group) for kind, size in rest)  # type: ignore[arg-type]


def both_passes(
    target: str, operands: Sequence[TensorSpec], compute_s: tuple[float, float], group: RankGroup, pricer: Pricer
) -> tuple[tuple[Exchange, ...], tuple[Exchange, ...], float, float]:
    """What is sent forward and backward, and the seconds that it adds to each pass."""
    forward = exchanges(target, operands, group.size, is_backward=False)
    backward = exchanges(target, operands, group.size, is_backward=True)
    return forward, backward, exchange_s(forward, compute_s[0], group, pricer), exchange_s(backward, compute_s[1], group, pricer)
