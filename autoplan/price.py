"""From graph and program to price keys: local shapes, operator keys, collective keys.

On a device mesh with rank = row-major index, an axis is a strided group of ranks; in the order (pp, dp, tp)
tp: stride 1; dp: stride tp; pp: stride dp * tp. Groups of one axis whose ranks interleave talk at the same
time over the same links; there are `stride` of them.

Conversions of a value of n elements on the tensor axis (autoplan/layout.py) move n elements: the full tensor for
all_reduce, all_gather (its output) and reduce_scatter (its input); n / p, the local tensor, for all_to_all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Protocol

from autoplan.errors import AutoplanError
from autoplan.gathered import loop_of
from autoplan.graph import Graph, Loop, Option
from autoplan.layout import WHOLE, Layout, Split
from costmodel import argtext
from costmodel.opkey import Collective, CollectiveKind, OpKey, OpTime, RankGroup, Shape
from costmodel.prices import Prices, slowdown
from runtime.call import dtype_of
from runtime.instr import Arg, Dtype, Instr, Other, TensorSpec

CHAINS = frozenset({"runtime.sync_batch_norm"})  # forms of an operator that run as a chain of others, and are priced as such
_LOW_PRECISION: Mapping[str, str] = {"bf16": "bfloat16", "fp16": "float16"}


def compute_dtype(dtype: str, precision: str | None) -> str:
    """The dtype in which a tensor captured as `dtype` is computed under `precision`."""
    low = _LOW_PRECISION.get(precision or "")
    if low is not None and dtype in ("float32", "float64"):
        return low
    return "float32" if precision == "fp32" and dtype in ("bfloat16", "float16", "float64") else dtype


def precision_left(graph: Graph, precision: str | None) -> str | None:
    """The precision that is still to be applied to the dtypes of `graph`; None for a graph that was captured in it."""
    return None if graph.precision == precision else precision


def itemsize(dtype: str) -> int:
    """Bytes of one element."""
    return dtype_of(dtype).itemsize


def bytes_of(shape: Shape, dtype: str) -> int:
    """Bytes of a dense tensor."""
    return math.prod(shape) * itemsize(dtype)


def cut(shape: Shape, layout: Layout, parts: int) -> Shape:
    """Local shape of a tensor that lies as `layout` on an axis of `parts` ranks."""
    if not isinstance(layout, Split) or parts == 1:
        return shape
    size = shape[layout.dim]
    return (*shape[: layout.dim], max(1, -(-size // parts)), *shape[layout.dim + 1 :])


def arguments(instr: Instr) -> str:
    """The other arguments of a call as text (costmodel/argtext.py)."""

    def special(value: object) -> Mapping[str, str] | None:
        if isinstance(value, Dtype):
            return {"dtype": value.name}
        return {value.kind: value.text} if isinstance(value, Other) else None

    return argtext.encode(instr.args, dict(instr.kwargs), special)


def cast(arg: Arg, precision: str | None) -> Arg:
    """An argument with its dtypes replaced by those of `precision`."""
    if isinstance(arg, Dtype):
        return Dtype(compute_dtype(arg.name, precision))
    return tuple(cast(item, precision) for item in arg) if isinstance(arg, tuple) else arg


def axis_group(axes: tuple[tuple[str, int], ...], axis: str, rank: int = 0) -> RankGroup:
    """The ranks of one axis, as `rank` sees them."""
    stride = 1
    for name, size in reversed(axes):
        if name == axis:
            return RankGroup(size, stride, rank - rank // stride % size * stride, stride)
        stride *= size
    return RankGroup(1, 1, rank)


class Pricer:
    """Asks `prices` each question once, for the device of global rank `device`."""

    def __init__(self, prices: Prices, precision: str | None, device: int = 0, *, overlap: bool = False) -> None:
        self.prices = prices
        self.precision = precision
        self.device = device
        self.overlap = overlap  # transfers run beside compute
        self.slowdown = slowdown(prices, device)  # factor on compute meanwhile
        self._ops: dict[OpKey, OpTime] = {}
        self._collectives: dict[Collective, float] = {}

    def op(self, key: OpKey) -> OpTime:
        """Seconds of one operator call. Raises AutoplanError for a price that is no time."""
        found = self._ops.get(key)
        if found is None:
            found = self.prices.op(key, self.device)
            if not (0 <= found.forward_s < math.inf and 0 <= found.backward_s < math.inf):
                raise AutoplanError(f"the price of {key.target} on {key.operands} is {found}: prices must be finite and not negative")
            self._ops[key] = found
        return found

    def collective(self, kind: CollectiveKind, num_bytes: int, group: RankGroup, servers: tuple[int, ...] = (), workers: tuple[int, ...] = ()) -> float:
        """Seconds of one collective, or of what `workers` of the group exchange with its `servers` ((): all); 0 where there is nobody to talk to."""
        if group.size == 1 or num_bytes == 0:
            return 0.0
        asked = Collective(kind, num_bytes, group, servers, workers)
        found = self._collectives.get(asked)
        if found is None:
            found = self._collectives[asked] = self.prices.collective(asked)
        return found


class Context(Protocol):
    """A context or expert axis (autoplan/localcontext.py)."""

    @property
    def degree(self) -> int: ...
    @property
    def at_rest(self) -> frozenset[str]: ...
    def option(self, index: int) -> Option: ...
    def layout(self, name: str) -> Layout: ...
    def lowering(self, index: int) -> str: ...
    def dense(self, index: int, shapes: tuple[Shape, ...], results: tuple[Shape, ...]) -> tuple[tuple[Shape, ...], tuple[Shape, ...]]: ...
    def factor_sizes(self, sizes: tuple[int, ...]) -> tuple[int, ...]: ...


class LocalGraph:
    """A graph seen by one rank: `rows` of the global batch on the data axis, `degree` ranks on the tensor axis. `grid`: all tensor axes, where
    others divide rows too (`rows` are those of one rank). `contexts`: what they leave of the rest. `divided`: into how many parts the tensor axes
    divide every parameter at rest, where that is settled."""

    def __init__(
        self,
        graph: Graph,
        batch_options: tuple[Option, ...],
        batch_layouts: Mapping[str, Layout],
        rows: int,
        degree: int,
        pricer: Pricer,
        grid: tuple[tuple[str, int], ...] = (),
        contexts: tuple[Context, ...] = (),
        divided: Callable[[], Mapping[str, int]] | None = None,
    ) -> None:
        self.graph = graph
        self._divided = divided
        self.contexts = contexts
        self.batch_options = batch_options
        self.batch_layouts = batch_layouts
        self.rows = rows
        self.degree = degree
        self.pricer = pricer
        self.grid = grid
        self._known: dict[int, tuple] = {}
        self._loops: dict[tuple[int, str], Loop | None] = {}

    @cached_property
    def divided(self) -> Mapping[str, int] | None:
        return None if self._divided is None else self._divided()

    @cached_property
    def parts(self) -> int:
        """Into how many pieces the batch is cut, over ranks and micro-batches together."""
        return max(1, (self.graph.batch_size or 1) // self.rows)

    def dtype(self, name: str) -> str:
        return compute_dtype(self.graph.values[name].spec.dtype, self.pricer.precision)

    def num_bytes(self, name: str) -> int:
        """Bytes of a value on all ranks of the tensor axis together, in its layout on the data axis."""
        return bytes_of(self.shape(name), self.dtype(name))

    def shape(self, name: str) -> Shape:
        """Shape of a value on all ranks of the tensor axis together."""
        shape = cut(self.graph.values[name].spec.shape, self.batch_layouts[name], self.parts)
        for context in self.contexts:
            shape = cut(shape, context.layout(name), context.degree)
        return shape

    @cached_property
    def divisible(self) -> Graph:
        """The graph with the lengths of factors that are left for the tensor axis to divide."""
        sizes = self.graph.factor_sizes
        for context in self.contexts:
            sizes = context.factor_sizes(sizes)
        return self.graph if not self.contexts else replace(self.graph, factor_sizes=sizes)

    def parameter_parts(self, name: str) -> int:
        """Into how many parts contexts divide a parameter at rest."""
        return math.prod(context.degree for context in self.contexts if name in context.at_rest)

    def read_shape(self, index: int, position: int) -> Shape:
        """Shape of one operand as op number `index` reads it on the data axis and the contexts."""
        shape = cut(self.graph.values[self.graph.ops[index].operands[position]].spec.shape, self.batch_options[index].reads[position], self.parts)
        for context in self.contexts:
            shape = cut(shape, context.option(index).reads[position], context.degree)
        return shape

    def whole_bytes(self, name: str) -> int:
        """Bytes of a value on all ranks together, all rows of the batch."""
        return bytes_of(self.graph.values[name].spec.shape, self.dtype(name))

    def operands(self, index: int) -> tuple[str, ...]:
        """Operands of op number `index` of the graph."""
        return self.facts(index)[0]

    def loop(self, index: int, option: Option) -> Loop | None:
        """The loop of op number `index` that an option divides."""
        key = (index, option.label)
        if key not in self._loops:
            self._loops[key] = loop_of(self.graph, self.graph.ops[index], option.label)
        return self._loops[key]

    def share(self, index: int, option: Option) -> int:
        """Into how many equal parts the work of an op is divided, on both axes together."""
        batch = self.batch_options[index]
        parts = self.parts if any(isinstance(layout, Split) for layout in (*batch.reads, *batch.writes)) else 1
        for context in self.contexts:
            chosen = context.option(index)
            parts *= context.degree if any(isinstance(layout, Split) for layout in (*chosen.reads, *chosen.writes)) else 1
        return parts * self.degree if any(isinstance(layout, Split) for layout in (*option.reads, *option.writes)) else parts

    def op_time(self, index: int, option: Option) -> OpTime:
        """Seconds of op number `index` of the graph, run as `option` on the tensor axis."""
        op, batch = self.graph.ops[index], self.batch_options[index]
        names, grads, text, inputs, results = self.facts(index)
        gathered = {i for i, _ in loop.gathers} if "~" in option.label and (loop := self.loop(index, option)) else ()
        reads = tuple(WHOLE if i in gathered else layout for i, layout in enumerate(option.reads))
        operands = tuple((cut(shape, t, self.degree), dtype) for (shape, dtype), t in zip(inputs, reads, strict=True))
        outputs = tuple((cut(shape, t, self.degree), dtype) for (shape, dtype), t in zip(results, option.writes, strict=True))
        assert len(names) == len(batch.reads)
        return self.pricer.op(OpKey(self.runs_as(index, option), operands, outputs, text, grads, op.flops // self.share(index, option)))

    def runs_as(self, index: int, option: Option) -> str:
        """The target by which op number `index` is priced: another one where it is divided so that a chain of operators takes its place."""
        op, chosen = self.graph.ops[index], [option] if self.degree > 1 else []
        chosen += [self.batch_options[index]] if self.parts > 1 else []
        chosen += [context.option(index) for context in self.contexts]
        for divided in chosen if op.instr.target == "runtime.batch_norm" else ():
            loop = self.loop(index, divided)
            if loop is not None and loop.lowering in CHAINS:
                return loop.lowering
        return op.instr.target

    def facts(self, index: int) -> tuple:
        """Of one op: operands, which need a gradient, other arguments as text, (shape, dtype) of operands and outputs on the data axis."""
        if index not in self._known:
            op, batch = self.graph.ops[index], self.batch_options[index]
            names = op.operands
            instr = cast_instr(op.instr, self.pricer.precision) if self.pricer.precision else op.instr
            reads = tuple(self.read_shape(index, i) for i in range(len(names)))
            writes = tuple(cut(self.graph.values[n].spec.shape, b, self.parts) for n, b in zip(op.outputs, batch.writes, strict=True))
            for context in self.contexts:
                writes = tuple(cut(shape, at, context.degree) for shape, at in zip(writes, context.option(index).writes, strict=True))
                reads, writes = context.dense(index, reads, writes)
            self._known[index] = (
                names,
                tuple(self.graph.values[n].requires_grad for n in names),
                arguments(instr),
                tuple((shape, self.dtype(n)) for n, shape in zip(names, reads, strict=True)),
                tuple((shape, self.dtype(n)) for n, shape in zip(op.outputs, writes, strict=True)),
            )
        return self._known[index]


def cast_instr(instr: Instr, precision: str | None) -> Instr:
    kwargs = tuple((name, cast(value, precision)) for name, value in instr.kwargs)
    return Instr(instr.outputs, instr.target, tuple(cast(a, precision) for a in instr.args), kwargs, instr.is_sequence)


def local_spec(spec: TensorSpec, precision: str | None) -> TensorSpec:
    """A spec as computed under `precision`."""
    return TensorSpec(spec.shape, compute_dtype(spec.dtype, precision))
