"""Tensor axes that divide the rows of the batch: the rows of a 2D, 2.5D or 3D grid, and the depth of a 2.5D one.

On such an axis every operator runs as on the data axis (autoplan/batchaxis.py), inside the pass: what needs all rows is
gathered and summed there. Two kinds (autoplan/schemes.py):

    rows       parameters are copies, read "vary"; their gradients stay partial sums until the end of the step
    gathered   parameters rest divided along a dimension of their own. A product that can gathers its weight inside
               (autoplan/gathered.py); any other reader gets it whole, and its gradient is reduced and scattered
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoplan.batchaxis import BatchAxis
from autoplan.gathered import gathered_loops, loop_of
from autoplan.graph import Graph, Option, Value
from autoplan.layout import Layout, Split


def row_options(graph: Graph, batch: BatchAxis, rest: Mapping[str, Layout], chosen: Sequence[Sequence[Option]]) -> tuple[Option, ...]:
    """How every operator runs on an axis of rows where parameters lie as `rest` says. An operand that a feature axis, whose options
    are `chosen`, gathers inside the product is whole on this axis before."""
    found = []
    for index, (op, option) in enumerate(zip(graph.ops, batch.options, strict=True)):
        gathered = {i for options in chosen if (inside := loop_of(graph, op, options[index].label)) for i, _ in inside.gathers}
        divides = any(loop.label == option.label and loop.factor == graph.batch_factor for loop in op.loops)
        for loop in gathered_loops(graph, op) if divides else ():
            fits = loop.label.partition("~")[0] == option.label and loop.gathers
            if fits and not any(i in gathered for i, _ in loop.gathers) and all(rest.get(op.operands[i]) == loop.reads[i] for i, _ in loop.gathers):
                reads = tuple(have if where is None else where for have, where in zip(option.reads, loop.reads, strict=True))
                option = Option(loop.label, reads, option.writes)
                break
        found.append(option)
    return tuple(found)


def resting(graph: Graph, value: Value, others: Sequence[tuple[Layout, int]], degree: int, wanted: Sequence[Split] = ()) -> Split | None:
    """Where `degree` ranks divide a parameter that is gathered from them; None where nothing divides.

    `others` are its layouts on the other tensor axes with their degrees. Dimensions that no other axis divides come first, those of
    `wanted` before the rest; of a matrix the columns (the contraction of a product) before the rows.
    """
    places = [Split(d, k) for d in reversed(range(len(value.dims))) for k in range(len(value.dims[d]))]
    places = [*(place for place in wanted if place in places), *places]

    def left(place: Split) -> int:
        size = graph.factor_sizes[value.dims[place.dim][place.factor]]
        for layout, ranks in others:
            size = (size // ranks if size % ranks == 0 else 0) if layout == place else size
        return size

    fitting = [place for place in places if left(place) and left(place) % degree == 0]
    taken = {layout for layout, ranks in others if ranks > 1}
    return next((place for place in fitting if place not in taken), fitting[0] if fitting else None)


def wanted_rest(graph: Graph, chosen: Sequence[Sequence[Option]], users: Mapping[str, Sequence[int]]) -> Mapping[str, tuple[Split, ...]]:
    """Weight -> where it should rest so that both operands of its product are gathered in the same panels: the columns that
    its product's other operand is divided along. `chosen` are the options of the feature axes, `users` the ops that read each parameter."""
    found: dict[str, tuple[Split, ...]] = {}
    for name, ops in users.items():
        places: dict[Split, None] = {}
        for index in ops:
            op = graph.ops[index]
            for options in chosen:
                loop = loop_of(graph, op, options[index].label)
                if loop is None or not loop.gathers or op.operands[loop.gathers[0][0]] == name:
                    continue
                other = next((inner for inner in op.loops if inner.factor == loop.gathers[0][1] and inner.kind == "sum"), None)
                where = None if other is None else other.reads[op.operands.index(name)]
                if where is not None:
                    places[where] = None
        found[name] = tuple(places)
    return found
