"""What every stage of a lowering shares: the option of every operator on every axis, and how tensors lie at rest.

- **At rest.** A parameter rests split on a tensor axis if every use reads it so; otherwise whole. Where every use of a whole parameter
  is "vary", no collective is placed: its gradient stays a partial sum until the step's reduction (`Stored.partial`). On tensor axes
  that divide rows see autoplan/rowaxes.py.
- **Data axis.** Parameters lie "vary" there: gradients are partial sums, reduced once a step. The same on context and expert axes
  (autoplan/contextaxis.py), whose ranks all read the data rank's rows and take their part of them.
- **Edges.** What leaves a block is brought into the layout of the plan's boundary at its end (autoplan/edges.py), and travels so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autoplan.batchaxis import BatchAxis, batch_axis, step_ops, training_results
from autoplan.contextaxis import DEFAULT_WAY, check_context, context_axis
from autoplan.edges import edge_layouts
from autoplan.errors import UsageError
from autoplan.gathered import gathered_loops
from autoplan.graph import Graph, Option, labelled_options, options
from autoplan.layout import VARY, WHOLE, Layout, Split
from autoplan.plan import Plan
from autoplan.rowaxes import resting, row_options, wanted_rest
from autoplan.schemes import ROLES, Axes, degree_of, feature_axes, parted, row_axes
from autoplan.variants import AxisAssignment, Layouts


@dataclass(frozen=True)
class Lowering:
    """What every stage of one lowering shares."""

    graph: Graph
    plan: Plan
    batch: BatchAxis
    axes: tuple[AxisAssignment, ...]
    ops: tuple[int, ...]  # of the step, in order
    results: tuple[str, ...]
    stage_of_op: Mapping[int, int]
    given: Mapping[str, str]  # value made by the preamble -> its local name
    edges: Mapping[str, Layouts]  # value that other blocks read -> its layouts outside of its block, where the plan says so

    def edge_name(self, name: str) -> str:
        """The local name of a value outside of its block: another one where it was converted."""
        index = self.graph.producer[name]
        position = self.graph.ops[index].outputs.index(name)
        made = [axis.options[index].writes[position] for axis in self.axes]
        is_named = bool(self.plan.stage_meshes)  # alike in every stage, also where an axis has one rank
        moved = any((axis.degree > 1 or is_named) and src != dst for axis, src, dst in zip(self.axes, made, self.edges[name], strict=True))
        return f"{name}__edge" if moved else name

    @cached_property
    def step(self) -> frozenset[int]:
        """The ops of the step."""
        return frozenset(self.ops)

    @cached_property
    def ops_of_stage(self) -> Mapping[int, tuple[int, ...]]:
        """Stage -> its ops of the step, in order."""
        found: dict[int, list[int]] = {}
        for index in self.ops:
            found.setdefault(self.stage_of_op[index], []).append(index)
        return {stage: tuple(indices) for stage, indices in found.items()}


def tensor_options(graph: Graph, plan: Plan, number: int, mesh: Axes) -> tuple[Option, ...]:
    """The option of every op on the feature axis of this number of `mesh`, by block pattern; where stages have meshes of their own, as
    many ranks divide an op as its stage has."""
    axes = feature_axes(mesh) or (("tp", 1),)
    name, degree = axes[number]
    by_pattern = {block.pattern: block for block in plan.blocks}
    first = {block.pattern: block for block in reversed(graph.blocks)}
    rank_of = {i: stage.rank for stage in plan.stages for i in range(stage.start, stage.stop)} if plan.stage_meshes else {}
    chosen: list[Option] = []
    for place, block in enumerate(graph.blocks):
        degree = degree_of(plan.stage_meshes[rank_of[place]], name) if rank_of else degree
        splits = by_pattern[block.pattern].splits if block.pattern in by_pattern else {}
        model = first[block.pattern]
        for offset in range(block.stop - block.start):
            op = graph.ops[block.start + offset]
            labels = parted(splits.get(graph.ops[model.start + offset].name, ""), len(axes))
            label = labels[number] if len(labels) == len(axes) else str(labels)
            more = gathered_loops(graph, op) if "~" in label else ()
            offered = labelled_options(graph, op, degree, more) if rank_of else options(graph, op, degree, more)
            found = next((option for option in offered if option.label == label), None)
            if found is None:
                raise UsageError(
                    f"the plan splits {op.name} ({op.instr.target} in {op.module}) as {label!r} on the axis {name!r}, which {degree} ranks cannot: "
                    "plan again for this model."
                )
            chosen.append(found)
    return tuple(chosen)


def lowering(plan: Plan, graph: Graph, outputs: bool, mesh: Axes) -> Lowering:
    """The options of every axis of `mesh`, and the ops of the step with their stages. `outputs`: the model's outputs are wanted besides the loss."""
    batch = batch_axis(graph)
    inputs = {name: WHOLE for name in graph.values if graph.values[name].kind != "activation"} | dict.fromkeys(batch.preamble_outputs, WHOLE)
    data_rest = {name: batch.layouts[name] for name in inputs}
    axes = [AxisAssignment("dp", degree_of(mesh, "dp"), batch.options, data_rest)]
    for name in ("cp", "ep"):
        degree = degree_of(mesh, name)
        if degree > 1:
            divided = context_axis(graph, name, batch.preamble_outputs, plan.context or DEFAULT_WAY)
            check_context(graph, name, degree, divided, plan.context or None)
            axes.append(AxisAssignment(name, degree, divided.options, inputs, divided.factors))
    row_rest = {name: batch.layouts[name] if graph.values[name].kind == "parameter" else WHOLE for name in inputs}
    axes += [AxisAssignment(name, degree, batch.options, row_rest) for name, degree in row_axes(mesh)]
    features = feature_axes(mesh) or (("tp", 1),)
    axes += [AxisAssignment(name, degree, tensor_options(graph, plan, number, mesh), inputs) for number, (name, degree) in enumerate(features)]
    results = training_results(graph) + (graph.outputs if outputs and graph.loss is not None else ())
    ops = step_ops(graph, results, frozenset(batch.preamble_outputs))
    stage_of_block = {block: number for number, stage in enumerate(plan.stages) for block in range(stage.start, stage.stop)}
    stage_of_op = {i: stage_of_block[number] for number, block in enumerate(graph.blocks) for i in range(block.start, block.stop)}
    running = frozenset(ops)
    edges = {  # boundaries speak of one tensor axis
        name: (batch.layouts[name], layout)
        for name, layout in (edge_layouts(graph, plan).items() if len(axes) == 2 else ())
        if graph.producer[name] in running and name not in batch.preamble_outputs
    }
    return Lowering(graph, plan, batch, tuple(axes), ops, results, stage_of_op, {}, edges)


def parameter_needs(context: Lowering) -> dict[str, tuple[tuple[Layout, ...], ...]]:
    """For every parameter or buffer: how it is read on each axis, over all its uses (one tuple for each axis)."""
    graph = context.graph
    found: dict[str, list[dict[Layout, None]]] = {}
    for index in context.ops:
        for i, name in enumerate(graph.ops[index].operands):
            if graph.values[name].kind in ("parameter", "buffer"):
                uses = found.setdefault(name, [{} for _ in context.axes])
                for axis, seen in zip(context.axes, uses, strict=True):
                    seen[axis.options[index].reads[i]] = None
    for index in context.batch.preamble:
        for name in graph.ops[index].operands:
            if graph.values[name].kind == "buffer":
                for seen in found.setdefault(name, [{} for _ in context.axes]):
                    seen[WHOLE] = None
    return {name: tuple(tuple(seen) for seen in uses) for name, uses in found.items()}


def with_rest(context: Lowering, needs: Mapping[str, tuple[tuple[Layout, ...], ...]]) -> tuple[AxisAssignment, ...]:
    """The tensor axes with the layout at rest of every parameter and buffer; on axes that gather them, with the options that do."""
    axes = [context.axes[0]]
    for number, axis in enumerate(context.axes[1:], start=1):
        rest = dict(axis.rest)
        for name, by_axis in needs.items() if ROLES.get(axis.name, "features") == "features" else ():
            reads = by_axis[number]
            if len(reads) == 1 and isinstance(reads[0], Split):
                rest[name] = reads[0]
            elif reads == (VARY,):
                rest[name] = VARY
        axes.append(replace(axis, rest=rest))
    return tuple(_gathered(context, axes, axis) if ROLES.get(axis.name) == "gathered" else axis for axis in axes)


def _gathered(context: Lowering, axes: Sequence[AxisAssignment], axis: AxisAssignment) -> AxisAssignment:
    """`axis` with its parameters divided at rest, and the products that gather them inside."""
    graph = context.graph
    others = [other for other in axes if ROLES.get(other.name) == "features"]
    step = frozenset(context.ops)
    users = {value.name: [i for i in graph.consumers.get(value.name, ()) if i in step] for value in graph.parameters()}
    wanted = wanted_rest(graph, [other.options for other in others], users)
    rest = dict(axis.rest)
    for value in graph.parameters():
        place = resting(graph, value, [(other.rest[value.name], other.degree) for other in others], axis.degree, wanted[value.name])
        rest[value.name] = rest[value.name] if place is None else place
    return replace(axis, options=row_options(graph, context.batch, rest, [other.options for other in others]), rest=rest)
