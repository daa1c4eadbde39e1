"""What a scheme of tensor parallelism asks of a model and a cluster, said before anything is planned."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt

from autoplan.constraints import Constraints
from autoplan.errors import InfeasibleError
from autoplan.gathered import gathered_loops
from autoplan.graph import Graph, Op, options
from autoplan.schemes import SEARCHED, Axes, degree_of, feature_axes, grids, row_unit

_HEAVY_SHARE = 0.01  # of the model's FLOPs
_FORMS = {"2d": "q x q", "2.5d": "d x q x q with d >= 2", "3d": "q x q x q"}


def undivided(graph: Graph, body: Sequence[int], grid: Axes, among: Sequence[int] | None = None) -> Op | None:
    """A heavy operator that has nothing for the feature axes of a grid to divide. `among`: the operators that stand for all of `body`."""
    total = sum(graph.ops[i].flops for i in body)
    ((_, degree),) = feature_axes(grid)
    for index in body if among is None else among:
        op = graph.ops[index]
        if op.flops < _HEAVY_SHARE * total:
            continue
        more = gathered_loops(graph, op)
        rows = {loop.label for loop in (*op.loops, *more) if graph.batch_factor in (loop.factor, *(factor for _, factor in loop.gathers))}
        found = [option.label for option in options(graph, op, degree, more) if option.label != "whole" and not option.label.startswith("partial:")]
        if not any(label not in rows for label in found):
            return op
    return None


def check_scheme(constraints: Constraints, world_size: int, batch: int, graph: Graph, body: Sequence[int]) -> None:
    """Raises InfeasibleError, with the nearest fix, where the ranks, the batch or the model do not divide as `constraints.tensor` asks."""
    scheme = constraints.tensor
    if scheme not in SEARCHED:
        return
    form = _FORMS[scheme]
    degrees = [d for d in range(2, world_size + 1) if world_size % d == 0 and grids(scheme, d)]
    tp = constraints.tp
    if tp is not None and not grids(scheme, tp):
        near = min(degrees, key=lambda d: (abs(d - tp), d), default=None)
        fix = f"tp={near} is" if near is not None else f"no divisor of the cluster's {world_size} devices is: use tensor='1d'"
        asked = f"constraint tensor={scheme!r} with tp={tp}"
        raise InfeasibleError(f"{asked} cannot be had: the ranks form a grid of {form}, and {tp} is no such product. Nearest: {fix}")
    if not degrees:
        raise InfeasibleError(
            f"constraint tensor={scheme!r} cannot be had on {world_size} devices: no divisor of {world_size} is a grid of {form}. "
            "Use tensor='1d', or 4 or 8 devices"
        )
    asked = [grid for d in ([tp] if tp is not None else degrees) for grid in grids(scheme, d)]
    share = batch // (constraints.dp or 1)
    fitting = [grid for grid in asked if share % row_unit(grid) == 0]
    if not fitting:
        units = sorted({row_unit(grid) for grid in asked})
        raise InfeasibleError(
            f"constraint tensor={scheme!r} cannot be had: the grid divides the rows of the batch by {' or '.join(map(str, units))}, and a replica has {share}. "
            f"Use a batch that is a multiple of {units[0] * (constraints.dp or 1)}"
        )
    blocked = [(grid, undivided(graph, body, grid)) for grid in fitting]
    if all(op is not None for _, op in blocked):
        grid, op = blocked[0]
        assert op is not None
        q = isqrt(degree_of(grid, "tpx") * degree_of(grid, "tpy"))
        sizes = sorted({graph.factor_sizes[loop.factor] for loop in op.loops if loop.factor != graph.batch_factor})
        raise InfeasibleError(
            f"constraint tensor={scheme!r} cannot be had: q={q} divides nothing of {op.instr.target} in {op.module or 'the model'} "
            f"(sizes: {', '.join(map(str, sizes)) or 'none'}). Use a q that divides one of them, or tensor='1d'"
        )
