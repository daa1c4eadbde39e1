"""The evaluation form of a captured training graph: dropout gone, BatchNorm by its running statistics, nothing updated.

The derived graph keeps every value name, operator order and block pattern, so a plan made for training also runs it
on the same tensors at rest.
"""

from __future__ import annotations

from dataclasses import replace

from autoplan.errors import UnsupportedOpError
from autoplan.graph import Graph, Op
from runtime.call import resolve
from runtime.instr import Instr


def evaluation_graph(graph: Graph) -> Graph:
    """`graph` as the model computes in eval mode. Raises UnsupportedOpError, naming the operator and its source line, for
    a random operator that has no evaluation form."""
    if not graph.training:
        return graph
    return replace(graph, ops=tuple(_evaluated(op) for op in graph.ops), buffer_updates=(), training=False)


def _evaluated(op: Op) -> Op:
    instr = op.instr
    if instr.target == "runtime.dropout":
        return replace(op, instr=Instr(instr.outputs, "aten.alias.default", instr.args[:1]), random=False)
    if instr.target == "runtime.attention":
        q, k, v, mask, _, causal, scale, grouped = instr.args[:8]
        call = Instr(instr.outputs, "aten.scaled_dot_product_attention.default", (q, k, v, mask, 0.0, causal), (("scale", scale), ("enable_gqa", grouped)))
        return replace(op, instr=call, random=False)
    if instr.target == "runtime.batch_norm" and instr.args[3] is not None:  # without running statistics it takes those of the batch
        call = Instr(instr.outputs, "runtime.batch_norm_eval", instr.args, is_sequence=True)
        loops = tuple(replace(loop, kind="map", lowering="", inner=()) if loop.kind == "inner" else loop for loop in op.loops)
        return replace(op, instr=call, loops=loops)
    if op.random and (call := _resting(instr)) is not None:
        return replace(op, instr=call, random=False)
    if op.random:
        raise UnsupportedOpError(
            f"{instr.target} in {op.module or 'the model'} ({op.source}) draws random numbers and has no evaluation form: evaluate the plain model instead."
        )
    return op


def _resting(instr: Instr) -> Instr | None:
    """The call with its argument `train` or `training` false; None where it has none."""
    names = [argument.name for argument in resolve(instr.target)._schema.arguments]  # type: ignore[attr-defined]
    place = next((i for i, name in enumerate(names) if name in ("train", "training")), None)
    if place is None or place >= len(instr.args):
        return None
    return replace(instr, args=(*instr.args[:place], False, *instr.args[place + 1 :]))
