"""Loops that are offered only where several axes divide the tensors (2D, 2.5D and 3D): more ways to divide a product or a norm.

*Gathered products.* Where an axis divides loop f of y = x A^T, the operand that does not carry f would be a copy on every rank. It may lie divided
along a dimension of its own instead, and be gathered inside the product (runtime/sharded/gathered.py), which is what SUMMA (2D), its replicas over
depth (2.5D) and the 3D algorithm do:

    label   divides          x lies               A lies                   y lies
    b~i     rows             split on its rows    split on its columns     split on its rows
    o~i     output features  split on features    split on its rows        split on features
    o~b     output features  split on its rows    split on its rows        split on features

The two axes of a 2D grid take "b~i" and "o~i"; then y lies as the x of the next product. In 3D one axis takes "b~i", one "o~b" and one the contraction.

*Statistics over divided features.* A norm over features that an axis divides sums its statistics over the ranks (runtime/sharded/split_norm.py).
"""

from __future__ import annotations

from fractions import Fraction

from autoplan.graph import Graph, Inside, Loop, Op
from autoplan.layout import Split

_PRODUCTS = {"aten.linear.default": "runtime.gathered_linear", "aten.mm.default": "runtime.gathered_mm"}
_NORMS = {"aten.layer_norm.default": ("runtime.split_layer_norm", 2), "aten.rms_norm.default": ("runtime.split_rms_norm", 1)}


def gathered_loops(graph: Graph, op: Op) -> tuple[Loop, ...]:
    """The loops of `op` beside `Op.loops` that schemes of several tensor axes may divide."""
    target = op.instr.target
    is_product = target in _PRODUCTS and len(op.operands) == 2
    if not is_product and target not in _NORMS:
        return ()
    return graph.answered(op, ("gathered",), lambda: _products(op) if is_product else _norms(graph, op))


def loop_of(graph: Graph, op: Op, label: str) -> Loop | None:
    """The loop of `op` that an option's label names; None for "whole" and for partial sums."""
    found = next((loop for loop in (*op.loops, *op.paired) if loop.label == label), None)
    if found is None and label != "whole" and not label.startswith("partial:"):
        found = next((loop for loop in gathered_loops(graph, op) if loop.label == label), None)
    return found


def _products(op: Op) -> tuple[Loop, ...]:
    found = []
    for loop in op.loops:
        lacking = [i for i, where in enumerate(loop.reads) if where is None]
        if loop.kind != "map" or len(lacking) != 1 or loop.lowering:
            continue
        (i,) = lacking
        for own in op.loops:
            where = own.reads[i]
            if where is None or own.lowering:
                continue
            reads = tuple(where if k == i else read for k, read in enumerate(loop.reads))
            sent = (Inside("all_gather", ("in", i), "forward"), Inside("all_gather", ("in", i), "backward"), Inside("reduce_scatter", ("in", i), "backward"))
            label = f"{loop.label}~{own.label}"
            found.append(Loop(label, loop.factor, "map", reads, loop.writes, _PRODUCTS[op.instr.target], sent, even=True, gathers=((i, own.factor),)))
    return tuple(found)


def _norms(graph: Graph, op: Op) -> tuple[Loop, ...]:
    lowering, statistics = _NORMS[op.instr.target]
    x = graph.values[op.operands[0]]
    shape = op.instr.args[1]
    if not isinstance(shape, tuple) or len(shape) != 1 or len(op.outputs) != 1:
        return ()
    last, length = len(x.dims) - 1, Fraction(1, x.spec.shape[-1])
    sent = (Inside("all_reduce", ("in", 0), "forward", length),) * statistics + (Inside("all_reduce", ("in", 0), "backward", length * statistics),)
    return tuple(
        Loop(f"n~{k}", factor, "inner", (Split(last, k), *(Split(0, k),) * (len(op.operands) - 1)), (Split(last, k),), lowering, sent, even=True)
        for k, factor in enumerate(x.dims[-1])
    )
