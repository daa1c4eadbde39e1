"""Stages with meshes of their own: what such a plan may say, how its rows are dealt, and how values lie where they cross.

`Plan.stage_meshes` gives the "dp" and "tp" degrees inside of each "pp" coordinate, of as many ranks as it likes; the ranks of one coordinate are
consecutive. Operators are divided as the plan's splits say in every stage, by as many ranks as the stage has, so a value has one layout
on both sides of a boundary and other degrees. All stages take the rows of a micro-batch at once: the global batch is dealt to micro-batches, and each
of them to the data ranks of a stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoplan.errors import UsageError
from autoplan.graph import Graph
from autoplan.layout import PARTIAL, VARY, Split
from autoplan.plan import Plan
from autoplan.schemes import Axes
from autoplan.shares import row_shares
from autoplan.variants import Layouts
from runtime.mesh import first_ranks
from runtime.program import MicroBatch, Spread, StageMesh

_AXES = ("dp", "tp")


def check_stage_meshes(plan: Plan) -> None:
    """Raises UsageError, naming it, for what cannot be had together with `plan.stage_meshes`."""
    coordinates = plan.degree("pp")
    if plan.axes != (("pp", coordinates),) or len(plan.stage_meshes) != coordinates or coordinates == 1:
        raise UsageError(
            f"stage_meshes gives {len(plan.stage_meshes)} meshes, and axes is {plan.axes}: give axes=(('pp', N),), N > 1, and a mesh for each of N."
        )
    for number, mesh in enumerate(plan.stage_meshes):
        wrong = [f"{name} {size}" for name, size in mesh if name not in _AXES or size < 1]
        if wrong or len({name for name, _ in mesh}) != len(mesh):
            raise UsageError(f"stage_meshes[{number}] is {mesh}: a stage's own mesh has the axes 'dp' and 'tp', each at most once, and no {', '.join(wrong)}.")
    others = {
        "zero_group": plan.zero_group is not None,
        f"sync={plan.sync!r}": plan.sync != "allreduce",
        f"compression={plan.compression!r}": plan.compression is not None,
        f"delay={plan.delay}": plan.delay != 0,
        f"shares={plan.shares}": plan.shares != (),
    }
    found = [what for what, is_there in others.items() if is_there]
    if found:
        raise UsageError(f"{', '.join(found)} with stage_meshes cannot be had: it needs one data axis for all stages. Leave it out, or use one mesh.")


def with_stage_meshes(plan: Plan, meshes: tuple[Axes, ...]) -> Plan:
    """A plan of one mesh with a mesh for each of its "pp" coordinates instead: same stages, splits and micro-batches. Its forecast is that of the
    plan before: `autoplan.simulate.forecast` tells what the new one takes."""
    rows = plan.micro_batch_size * plan.degree("dp")
    stages = tuple(replace(stage, gathers=False) for stage in plan.stages)
    asked = replace(plan, axes=(("pp", plan.degree("pp")),), stage_meshes=meshes, micro_batch_size=rows, stages=stages)
    check_stage_meshes(asked)
    return asked


def meshes_of(plan: Plan, micro_batches: Sequence[MicroBatch]) -> tuple[StageMesh, ...]:
    """The mesh of every "pp" coordinate with the rows of its data ranks. Raises UsageError where a data rank would get none."""
    return tuple(
        StageMesh(first, axes, _dealt(micro_batches, dict(axes).get("dp", 1)))
        for first, axes in zip(first_ranks(plan.stage_meshes), plan.stage_meshes, strict=True)
    )


def _dealt(micro_batches: Sequence[MicroBatch], dp: int) -> tuple[tuple[MicroBatch, ...], ...]:
    own: list[list[MicroBatch]] = [[] for _ in range(dp)]
    for batch in micro_batches:
        rows = batch.stop - batch.start
        if rows < dp:
            raise UsageError(f"a micro-batch of {rows} rows does not reach the {dp} data ranks of a stage: use fewer micro-batches, or a smaller dp there.")
        start = batch.start
        for rank, share in enumerate(row_shares(rows, dp)):
            own[rank].append(MicroBatch(start, start + share))
            start += share
    return tuple(map(tuple, own))


def spread_of(graph: Graph, name: str, axes: Sequence[str], layouts: Layouts, meshes: Sequence[Axes]) -> Spread:
    """How a value lies on the axes of each of `meshes`. Raises UsageError where the ranks of one would hold unequal parts."""
    value = graph.values[name]
    factors = [factor for dim in value.dims for factor in dim]
    before = [sum(map(len, value.dims[:d])) for d in range(len(value.dims))]
    divided = tuple((axis, before[at.dim] + at.factor) for axis, at in zip(axes, layouts, strict=True) if isinstance(at, Split))
    if len({place for _, place in divided}) != len(divided):
        raise UsageError(f"{name} is divided by the data and tensor axes along the same rows where stages of different meshes meet: leave it whole there.")
    for axis, place in divided:
        size, degrees = graph.factor_sizes[factors[place]], [dict(mesh).get(axis, 1) for mesh in meshes]
        if factors[place] != graph.batch_factor and any(size % degree for degree in degrees):
            raise UsageError(
                f"{name} crosses between stages of different meshes with {size} positions, which {degrees} ranks do not divide: leave it whole there."
            )
    sizes = tuple(0 if factor == graph.batch_factor else graph.factor_sizes[factor] for factor in factors)
    partial, vary = (tuple(axis for axis, at in zip(axes, layouts, strict=True) if at == mode) for mode in (PARTIAL, VARY))
    return Spread(sizes, divided, partial, vary)
