"""What a scheme of tensor parallelism asks of a model and a cluster, said before anything is planned."""

from __future__ import annotations

from collections.abc import Sequence

from autoplan.constraints import Constraints
from autoplan.cube import cube_splits, undivided_by
from autoplan.errors import InfeasibleError
from autoplan.gathered import gathered_loops
from autoplan.graph import Graph, Op, options
from autoplan.schemes import SEARCHED, Axes, degree_of, feature_axes, grids, row_unit, scheme_of

_HEAVY_SHARE = 0.01  # of the model's FLOPs
_FORMS = {"2d": "q x q", "2.5d": "d x q x q with d >= 2", "3d": "q x q x q"}


def undivided(graph: Graph, body: Sequence[int], grid: Axes, among: Sequence[int] | None = None) -> Op | None:
    """A heavy operator that has nothing for the feature axes of a grid to divide. `among`: the operators that stand for all of `body`."""
    total = sum(graph.ops[i].flops for i in body)
    degree = feature_axes(grid)[0][1]
    heavy = [i for i in (body if among is None else among) if graph.ops[i].flops >= _HEAVY_SHARE * total]
    if scheme_of(grid) == "3d":
        first = {graph.blocks[n].start for n in {block.pattern: n for n, block in reversed(list(enumerate(graph.blocks)))}.values()}
        models = [i for block in graph.blocks if block.start in first for i in range(block.start, block.stop)]
        return undivided_by(graph, cube_splits(graph, body, degree), [i for i in models if i in set(heavy)])
    for index in heavy:
        op = graph.ops[index]
        more = gathered_loops(graph, op)
        rows = {loop.label for loop in (*op.loops, *more) if graph.batch_factor in (loop.factor, *(factor for _, factor in loop.gathers))}
        found = [option.label for option in options(graph, op, degree, more) if option.label != "whole" and not option.label.startswith("partial:")]
        if not any(label not in rows for label in found):
            return op
    return None


def check_scheme(constraints: Constraints, world_size: int, batch: int, graph: Graph, body: Sequence[int]) -> None:
    """Raises InfeasibleError, with the nearest fix, where the ranks, the batch or the model do not divide as `constraints.tensor` asks."""
    scheme = constraints.tensor
    if scheme == "domain" and not graph.windowed:
        raise InfeasibleError(
            "constraint tensor='domain' cannot be had: the model has no convolution or pooling over positions to divide. Use tensor='1d', or cp"
        )
    if scheme not in SEARCHED:
        return
    form = _FORMS[scheme]
    for name, degree in (("cp", constraints.cp), ("ep", constraints.ep)):
        if degree is not None and degree > 1:
            raise InfeasibleError(
                f"constraint tensor={scheme!r} cannot be had with {name}={degree}: a grid stands beside dp and pp alone. Use tensor='1d' or {name}=1"
            )
    if constraints.sequence_parallel:
        raise InfeasibleError(
            f"constraint tensor={scheme!r} cannot be had with sequence_parallel=True: a grid divides rows and features between products already. "
            "Use tensor='1d', or leave sequence_parallel out"
        )
    if scheme == "3d" and not constraints.sums_plainly:
        raise InfeasibleError("constraint tensor='3d' cannot be had with sync, delay or compression, which were not tried on a cube. Use tensor='2d'")
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
        q = degree_of(grid, "tpx")
        sizes = sorted({graph.factor_sizes[loop.factor] for loop in op.loops if loop.factor != graph.batch_factor})
        raise InfeasibleError(
            f"constraint tensor={scheme!r} cannot be had: q={q} divides nothing of {op.instr.target} in {op.module or 'the model'} "
            f"(sizes: {', '.join(map(str, sizes)) or 'none'}). Use a q that divides one of them, or tensor='1d'"
        )
