"""What a grid of tensor axes (autoplan/schemes.py) adds to the prices of one operator: parameters gathered from the ranks of its
rows, operands gathered inside products. And which options of an operator a scheme leaves.

    2d, 2.5d   a product divides its output features and gathers the other operand, where it can; everything else is free
    domain     windows and what lies between them divide positions (`Graph.windowed`); all else is whole
    1.5d       a product divides its output features, and these are gathered after it: other operators are whole, unless they weigh

Of a parameter of n bytes (in what the feature axes leave) each reader moves all_gather n forward and reduce_scatter n backward, and
all_gather n again where the product gathers it inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoplan.gathered import gathered_loops, loop_of
from autoplan.graph import Graph, Loop, Op, Option, insides
from autoplan.layout import Split
from autoplan.price import LocalGraph, axis_group
from autoplan.schemes import ROLES
from costmodel.opkey import CollectiveKind, RankGroup
from runtime.collective import Part
from runtime.sharded.gathered import columns


@dataclass(frozen=True, slots=True)
class Sent:
    """A collective inside an operator: `num_bytes` together, in `count` equal ones, over the ranks of `axis` ("": the feature axis)."""

    kind: CollectiveKind
    phase: str
    num_bytes: int
    count: int = 1
    axis: str = ""


def scheme_options(graph: Graph, op: Op, found: Sequence[Option], scheme: str) -> tuple[Option, ...]:
    """Those of an operator's options that a scheme leaves; all where it would leave none that divides."""
    dividing = [option for option in found if option.label != "whole" and not option.label.startswith("partial:")]
    if scheme == "domain":
        return tuple(o for o in found if o not in dividing or ((loop := loop_of(graph, op, o.label)) and loop.factor in graph.windowed))
    if scheme == "1.5d":
        outputs = [o for o in dividing if op.flops and len(op.operands) == 2 and (loop := loop_of(graph, op, o.label)) and _is_output(graph, op, loop)]
        free = op.flops or op.instr.target.startswith("aten.embedding.")  # a table may be the weight of a product too
        return tuple(outputs or (found if free else [option for option in found if option.label == "whole"]))
    gathering = {loop.label for loop in (*op.loops, *op.paired, *gathered_loops(graph, op)) if loop.gathers}
    inside = [option for option in dividing if option.label in gathering]
    return tuple(inside or found)


def _is_output(graph: Graph, op: Op, loop: Loop) -> bool:
    """Whether a loop runs over output features of a product with a parameter."""
    return loop.kind == "map" and loop.reads[0] is None and loop.reads[1] is not None and graph.values[op.operands[1]].kind == "parameter"


def weight_parts(local: LocalGraph, name: str) -> int:
    """Into how many parts the grid's rows divide a parameter at rest."""
    value, parts = local.graph.values[name], 1
    if local.divided is not None:
        return local.divided.get(name, 1)
    for axis, degree in local.grid if value.kind == "parameter" else ():
        if ROLES[axis] == "gathered" and any(local.graph.factor_sizes[f] % degree == 0 for dim in value.dims for f in dim):
            parts *= degree
    return parts


def sent_inside(local: LocalGraph, index: int, option: Option) -> tuple[Sent, ...]:
    """Every collective that operator number `index` brings with it as `option`, but changes of layout on the feature axis."""
    graph, op = local.graph, local.graph.ops[index]
    operands, loop = local.operands(index), local.loop(index, option)
    found: list[Sent] = []
    panels = _panels(graph, op, loop, local.degree)
    for kind, (side, position), phase, part in insides(graph, op, loop):
        num_bytes = int(local.num_bytes((operands if side == "in" else op.outputs)[position]) * part)
        found.append(Sent(kind, phase, num_bytes, panels if loop is not None and loop.gathers else 1))  # type: ignore[arg-type]
    gathered = [(axis, degree) for axis, degree in local.grid if ROLES[axis] == "gathered"]
    inside = bool(gathered) and len(operands) == 2 and any(loop.gathers for loop in gathered_loops(graph, op))
    for axis, degree in gathered:
        for position, name in enumerate(operands):
            value = graph.values[name]
            if weight_parts(local, name) == 1:
                continue
            num_bytes = local.num_bytes(name) // (local.degree if isinstance(option.reads[position], Split) else 1)
            count = max(panels, degree if inside else 1)
            found.append(Sent("all_gather", "forward", num_bytes, count, axis))
            if inside and graph.values[operands[1 - position]].requires_grad:
                found.append(Sent("all_gather", "backward", num_bytes, count, axis))
            if value.requires_grad:
                found.append(Sent("reduce_scatter", "backward", num_bytes, count, axis))
    return tuple(found)


def _panels(graph: Graph, op: Op, loop: Loop | None, degree: int) -> int:
    """How many collectives an operand's gather inside a product is."""
    if loop is None or not loop.gathers:
        return 1
    ((_, factor),) = loop.gathers
    is_contracted = any(other.kind == "sum" and other.factor == factor for other in op.loops)
    return columns(Part(0, 1, graph.factor_sizes[factor], 1), degree).count if is_contracted else 1


def sent_s(local: LocalGraph, sent: Sent, group: RankGroup) -> float:
    """Seconds of it; `group` are the ranks of the feature axis."""
    ranks = axis_group(local.grid, sent.axis) if sent.axis else group
    return sent.count * local.pricer.collective(sent.kind, sent.num_bytes // sent.count, ranks)
