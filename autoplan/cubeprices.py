"""The blocks of a cube (3D), priced. Its assignment leaves no choice (autoplan/cube.py), so that a block is lowered as it would run and its
instructions are priced as a forecast prices them (autoplan/reading.py). What an operator costs contains the changes of layout before it.

Where a pattern repeats, its second block is priced: it is entered as all the others are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property

from autoplan.batchaxis import BatchAxis
from autoplan.cube import cube_splits
from autoplan.forecast import Forecast
from autoplan.graph import Graph, Option
from autoplan.layout import WHOLE, Layout, Split
from autoplan.load import Traffic
from autoplan.lower import lower
from autoplan.plan import BlockPlan, Plan, StagePlan
from autoplan.price import LocalGraph, Pricer, axis_group, bytes_of
from autoplan.problem import BlockProblem, Choice, Item, Kept, Use, Weight
from autoplan.reading import Reader, Tally, local_shape
from autoplan.schemes import Axes, feature_axes, row_unit
from costmodel.opkey import CollectiveKind, OpKey
from runtime.call import dtype_of
from runtime.program import Program, StageCode
from runtime.selective import keeps

_NO_FORECAST = Forecast(0.0, 0, 0.0, 0.0, 0.0, 1.0, (), (), (), "analytic")
_Priced = tuple[tuple[Item, ...], Mapping[str, int], Mapping[str, Weight]]  # operators, bytes of what they save, parameters


class CubePricer:
    """Prices the blocks of one graph for micro-batches of `rows` rows on a cube, as BlockPricer does for one feature axis. `local`: what a rank sees."""

    def __init__(self, graph: Graph, batch: BatchAxis, rows: int, grid: Axes, pricer: Pricer) -> None:
        self.graph, self.batch, self.rows, self.grid, self.pricer = graph, batch, rows, grid, pricer
        degree = feature_axes(grid)[0][1]
        self.local = LocalGraph(graph, batch.options, batch.layouts, rows // row_unit(grid), degree, pricer, grid, (), self.parts_at_rest)
        self._step = frozenset(batch.body)
        self._known: dict[int, _Priced] = {}

    def items(self, indices: tuple[int, ...]) -> tuple[tuple[Item, ...], Mapping[str, int]]:
        """The operators `indices` of a pattern's first block with their only choice, and the bytes of every storage that they keep."""
        return self._priced(indices)[:2] if indices else ((), {})

    def least_s(self, index: int) -> float:
        """Seconds of a product of a pattern's first block, both passes, but for what it sends; without lowering anything. Other operators: 0."""
        found = self._product(index)
        if found is None:
            return 0.0
        x, _, y = found
        _, grads, text, ((x_shape, x_dtype), (w_shape, w_dtype)), ((y_shape, y_dtype),) = self.local.facts(index)
        q, op = self.local.degree, self.graph.ops[index]
        time = self.pricer.op(OpKey(
            op.instr.target, ((self._gathered(x, x_shape), x_dtype), (tuple(size // q for size in w_shape), w_dtype)), ((self._gathered(y, y_shape), y_dtype),),
            text, grads, op.flops // self.local.parts // q,
        ))  # fmt: skip
        return time.forward_s + (time.backward_s if self.graph.values[y].requires_grad else 0.0)

    def least_sent_s(self, index: int) -> float:
        """Seconds of what a product sends at least: of x, w and y of 1/q^2 each one gather or reduce-scatter forward, and backward those of their
        gradients. Other operators: 0."""
        found = self._product(index)
        if found is None:
            return 0.0
        x, w, y = found
        values = self.graph.values
        flows_back = values[y].requires_grad
        size = {x: self.local.num_bytes(x), w: self.local.num_bytes(w) // self.local.degree**2, y: self.local.num_bytes(y)}
        moved: dict[CollectiveKind, list[str]] = {
            "all_gather": [x, w, *([y] if flows_back else [])],
            "reduce_scatter": [y, *(name for name in (x, w) if flows_back and values[name].requires_grad)],
        }
        groups = [axis_group(self.grid, axis) for axis, _ in self.grid]
        return sum(min(self.pricer.collective(kind, size[name], group) for group in groups) for kind, names in moved.items() for name in names)

    def _product(self, index: int) -> tuple[str, str, str] | None:
        """x, w and y of an operator that gathers its operands inside, and divides rows, columns and contraction."""
        op = self.graph.ops[index]
        labels = self._splits.get(self.graph.blocks[self._block_of[index]].pattern, {}).get(op.name, "")
        rows = self.batch.layouts
        if "~" not in labels or len(op.operands) != 2 or not all(isinstance(rows[name], Split) for name in (op.operands[0], *op.outputs)):
            return None
        (x, w), (y,) = op.operands, op.outputs
        return x, w, y

    def _gathered(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of x or y inside a product: q times the rows that a rank has at rest, and 1/q of the features, the last dimension."""
        rows, q = self.batch.layouts[name], self.local.degree
        assert isinstance(rows, Split)
        return tuple(size * q if dim == rows.dim else size // q if dim == len(shape) - 1 else size for dim, size in enumerate(shape))

    def problem(
        self, name: str, indices: tuple[int, ...], sources: Mapping[str, Layout], wanted: tuple[tuple[str, Layout], ...], rests: Mapping[str, Layout]
    ) -> BlockProblem:
        """The problem of a pattern's first block, which has one solution; its boundary is the cube's, whatever is asked."""
        items, saved_bytes, weights = self._priced(indices) if indices else ((), {}, {})
        made = {out for item in items for out in item.outputs}
        given = {operand: WHOLE for item in items for operand in item.operands if operand not in made and operand not in weights}
        return BlockProblem(name, 1, items, given, (), weights, {}, saved_bytes)

    def parts_at_rest(self) -> Mapping[str, int]:
        """Into how many parts the cube divides every parameter at rest."""
        found = {}
        for stage in self._program.stages:
            for stored in stage.stored:
                if stored.kind == "parameter":
                    found[stored.name] = math.prod(stored.spec.shape) // max(1, math.prod(local_shape(stored, dict(self.grid))))
        repeated = {p: n for p, n in self._second.items() if n != self._first[p]}
        for pattern, number in repeated.items():
            for mine, other in zip(self._indices(self._first[pattern]), self._indices(number), strict=True):
                for name, like in zip(self.graph.ops[mine].operands, self.graph.ops[other].operands, strict=True):
                    if like in found:
                        found.setdefault(name, found[like])
        return found

    @cached_property
    def _splits(self) -> Mapping[str, Mapping[str, str]]:
        ((_, degree), _) = feature_axes(self.grid)
        return cube_splits(self.graph, self.batch.body, degree)

    @cached_property
    def _first(self) -> Mapping[str, int]:
        return {block.pattern: number for number, block in reversed(list(enumerate(self.graph.blocks)))}

    @cached_property
    def _second(self) -> Mapping[str, int]:
        """Pattern -> the block that is priced."""
        found: dict[str, list[int]] = {}
        for number, block in enumerate(self.graph.blocks):
            found.setdefault(block.pattern, []).append(number)
        return {pattern: numbers[:2][-1] for pattern, numbers in found.items()}

    @cached_property
    def _block_of(self) -> Mapping[int, int]:
        return {i: n for n in self._first.values() for i in range(self.graph.blocks[n].start, self.graph.blocks[n].stop)}

    def _indices(self, number: int) -> tuple[int, ...]:
        block = self.graph.blocks[number]
        return tuple(i for i in range(block.start, block.stop) if i in self._step)

    @cached_property
    def _program(self) -> Program:
        """One rank's program, every block a stage; of the blocks that are priced."""
        graph = self.graph
        stages = tuple(StagePlan(n, n + 1, block.name, block.name, 0) for n, block in enumerate(graph.blocks))
        first = {block.pattern: block.name for block in reversed(graph.blocks)}
        blocks = tuple(BlockPlan(pattern, name, self._splits.get(pattern, {}), {}) for pattern, name in first.items())
        plan = Plan(
            model=graph.name, model_fingerprint=graph.fingerprint, cluster="", cluster_fingerprint="", global_batch=self.rows, micro_batch_size=self.rows,
            num_micro_batches=1, axes=(("pp", 1), ("dp", 1), *self.grid), zero=0, zero_group=None, schedule="1f1b", num_chunks=len(stages),
            precision=self.pricer.precision, optimizer="sgd", stages=stages, blocks=blocks, forecast=_NO_FORECAST, gap=0.0, space={},
        )  # fmt: skip
        wanted = [n for n in sorted(self._second.values()) if self._indices(n)]
        (program,) = lower(plan, graph, only=tuple(wanted))
        return program

    @cached_property
    def _stages(self) -> Mapping[int, StageCode]:
        return {stage.index: stage for stage in self._program.stages}

    def _priced(self, indices: tuple[int, ...]) -> _Priced:
        number = self._block_of[indices[0]]
        if number not in self._known:
            self._known[number] = self._read(number)
        return self._known[number]

    def _read(self, number: int) -> _Priced:
        graph = self.graph
        other = self._second[graph.blocks[number].pattern]
        stage, mine, theirs = self._stages[other], self._indices(number), self._indices(other)
        (body,) = stage.bodies
        reader = Reader(self._program, stage, body, graph, self.pricer)
        tallies = {index: Tally() for index in theirs}
        order = {out: index for index in theirs for out in graph.ops[index].outputs}
        for code in body.blocks:
            found, waiting = keeps(code), []
            for instr in code.instrs:
                waiting.append(instr)
                index = next((order[out.name] for out in instr.outputs if out.name in order), None)
                if index is not None:
                    reader.into(tallies[index], replace(code, instrs=tuple(waiting)), found)
                    waiting = []
            reader.into(tallies[theirs[-1]], replace(code, instrs=tuple(waiting)), found)
        labels = self._splits.get(graph.blocks[number].pattern, {})
        items, saved_bytes = [], {}
        deferred = self._deferred(stage)
        for index, their in zip(mine, theirs, strict=True):
            op, tally = graph.ops[index], tallies[their]
            saved_bytes |= tally.saved
            uses = [*_uses(tally.traffic), *(deferred if index == mine[0] else ())]
            kept = Kept(tuple(tally.kept.items()), tally.kept_s + tally.kept_moved_s, tally.kept_flops, tuple(_uses(tally.kept_traffic)))
            whole = Option(labels.get(op.name, "whole"), (WHOLE,) * len(op.operands), (WHOLE,) * len(op.outputs))
            choice = Choice(
                whole, tally.forward_s + tally.forward_moved_s, tally.backward_s + tally.backward_moved_s, tuple((root, False) for root in tally.saved),
                tally.extra_bytes, tally.forward_flops, tuple(uses), tally.weights_s, tuple(tally.put_off.items()), kept,
            )  # fmt: skip
            items.append(Item(op.name, op.operands, op.outputs, (choice,)))
        return tuple(items), saved_bytes, self._weights(mine, theirs, stage)

    def _deferred(self, stage: StageCode) -> list[Use]:
        """Sums of gradients once a step: of parameters that are copies on an axis."""
        degrees = dict(self.grid)
        trained = (s for s in stage.stored if s.kind == "parameter" and s.requires_grad)
        size = lambda s: math.prod(local_shape(s, degrees)) * dtype_of(s.at_rest).itemsize  # noqa: E731
        return [Use("all_reduce", "reduce", size(s), axis) for s in trained for axis in s.partial if axis in degrees]

    def _weights(self, mine: tuple[int, ...], theirs: tuple[int, ...], stage: StageCode) -> Mapping[str, Weight]:
        graph, degrees = self.graph, dict(self.grid)
        stored = {s.name: s for s in stage.stored}
        found: dict[str, Weight] = {}
        for index, their in zip(mine, theirs, strict=True):
            for name, like in zip(graph.ops[index].operands, graph.ops[their].operands, strict=True):
                if graph.values[name].kind == "parameter":
                    shape, value = local_shape(stored[like], degrees), graph.values[name]
                    found[name] = Weight(name, bytes_of(shape, value.spec.dtype), math.prod(shape), None, value.requires_grad, 0.0)
        return found


def _uses(traffic: Iterable[Traffic]) -> list[Use]:
    return [Use(t.kind, t.phase, t.num_bytes, t.axis) for t in traffic]  # type: ignore[arg-type]
