"""The graph: a captured training step as frozen data.

`Graph` is what `autoplan.capture` returns and everything later reads. It is one forward pass over
the *global* batch with the loss at its end, in canonical form (docs/concepts.md): functional, masks that
depend on no input folded to constants, mean losses written as sum over count.

Factors. Every tensor dimension is a product of factors, outermost first, each an integer id into
`Graph.factor_sizes`. Two dimensions that share an id are the same index set. The factor of the batch
is `Graph.batch_factor`.

Loops. An operator's `loops` are those of its loop indices that a mesh axis may divide; what is not
listed stays whole. A loop says where it lies in each operand and output.

Uneven. A factor whose length the ranks do not divide is divided all the same where it is one of `Graph.positions`: neither the batch, whose
rows the data axis deals, nor a factor of a tensor at rest. Ranks have room for equally many positions then, not all of them real
(runtime/pieces.py), and a loop that joins positions reads the real ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

from autoplan.layout import PARTIAL, VARY, WHOLE, Layout, Split
from runtime.instr import Instr, TensorSpec, uses
from runtime.sharded.halo import Span, Window, reach

T = TypeVar("T")
_MOST_KNOWN = 8
ValueKind = Literal["parameter", "buffer", "input", "constant", "activation"]
Runs = tuple[tuple[int, int], ...]  # (first operator in the captured order, its stage): autoplan/arrange.py


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor of the graph. `dims[d]` lists the factor ids of dimension d; () is a dimension of 1."""

    name: str
    spec: TensorSpec
    kind: ValueKind
    dims: tuple[tuple[int, ...], ...]
    requires_grad: bool  # a gradient reaches it in training
    fqn: str = ""  # the model's own name: first of `aliases` (parameter, buffer), path in the batch (input: "labels", "0")
    aliases: tuple[str, ...] = ()  # every name of a tied parameter or buffer


class Inside(NamedTuple):
    """A collective that a runtime function issues itself: of `share` of the elements of the operand or output `where`
    (("in"|"out", i)), in the pass `phase`. A "send" goes to a neighbour: ranks at the ends have one less."""

    kind: str
    where: tuple[str, int]
    phase: str
    share: Fraction = Fraction(1)


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop index of an operator that may be divided among the ranks of an axis.

    `reads[i]` is where it lies in operand i (None: operand i does not carry it and is read VARY);
    `writes[j]` where it lies in output j (None: output j does not carry it).
    kind "map": independent iterations. "sum": outputs that do not carry it become PARTIAL.
    "inner": the op itself communicates over it; outputs that do not carry it are WHOLE.
    `lowering` names the runtime function that replaces the op when this loop is divided ("": the op itself
    on local operands, sizes in its arguments localised). `inner` lists that function's own collectives.
    `minimum` is the number of iterations that a rank needs at least. `even`: ranks need equally many (the data axis, whose
    rows may be dealt unevenly, does not take it).
    `whole` operands are read WHOLE, not VARY, although they do not carry the loop (integer operands; no gradient).
    """

    label: str
    factor: int
    kind: Literal["map", "sum", "inner"]
    reads: tuple[Split | None, ...]
    writes: tuple[Split | None, ...]
    lowering: str = ""
    inner: tuple[Inside, ...] = ()
    minimum: int = 1
    even: bool = False
    gathers: tuple[tuple[int, int], ...] = ()  # (operand, factor) that lie divided although they do not carry the loop, and are gathered inside
    window: Window | None = None  # it slides from the factor in operand 0 to another one in output 0: halos follow from how both are divided

    @property
    def joins(self) -> bool:
        """Whether iterations are read together, so that only real ones may be."""
        return self.kind == "sum" or self.lowering != ""


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run an op on one mesh axis: how it reads its operands, how its outputs lie.

    `label` is "whole", the label of the divided loop, or "partial:i,j" (the op is linear in operands i, j
    jointly and passes their partial sums on).
    """

    label: str
    reads: tuple[Layout, ...]
    writes: tuple[Layout, ...]


@dataclass(frozen=True)
class Op:
    """One operator. `operands` are the tensor arguments in the order of `runtime.instr.uses`."""

    instr: Instr
    loops: tuple[Loop, ...]
    linear_in: tuple[tuple[int, ...], ...]  # sets of operands in which the op is jointly linear
    module: str  # path of the module that it came from ("model.layers.0.mlp.up_proj"), "" at the root
    source: str  # "file.py:123, in forward" of the user's line
    flops: int  # of the forward pass, whole
    saved: tuple[str, ...]  # names of values that autograd keeps for the backward pass
    saved_extra_bytes: int = 0  # kept besides (softmax statistics, dropout masks), whole
    random: bool = False
    proved: bool = True  # its loops were checked by the shard simulator (or the rule is a built-in, proved in tests)
    paired: tuple[Loop, ...] = ()  # loops over two index sets at once, for axes that divide one factor everywhere (autoplan/contextaxis.py)

    @property
    def name(self) -> str:
        return self.instr.name

    @cached_property
    def operands(self) -> tuple[str, ...]:
        return uses(self.instr)

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        return tuple(o.name for o in self.instr.outputs if o.spec is not None)


@dataclass(frozen=True, slots=True)
class Block:
    """A run of consecutive ops [start, stop) that a stage holds whole. Equal `pattern`: same structure."""

    name: str  # module path ("model.layers.3"), or "prologue" / "epilogue" / "part.2"
    start: int
    stop: int
    pattern: str
    layer: bool = False  # one of the model's repeated layers, as `Constraints.stage_layers` counts them


@dataclass(frozen=True)
class Graph:
    """A captured training step. See the module's text."""

    name: str
    values: Mapping[str, Value]
    ops: tuple[Op, ...]  # topological order
    blocks: tuple[Block, ...]  # cover `ops` without gap or overlap
    factor_sizes: tuple[int, ...]
    batch_factor: int | None
    loss: str | None  # value name of the scalar loss; None: captured without one
    outputs: tuple[str, ...]  # value names of the model's other outputs, in their order
    buffer_updates: tuple[tuple[str, str], ...]  # (buffer value, value that replaces it after a step)
    fingerprint: str
    constants: Mapping[str, Any] = field(compare=False, repr=False, default_factory=dict)  # value name -> CPU tensor
    training: bool = True
    warnings: tuple[str, ...] = ()
    precision: str | None = None  # that it was captured in; parameters and buffers rest in fp32 then
    runs: Runs = ()  # the stages that the operators were put in the order of; (): the captured order

    @cached_property
    def producer(self) -> Mapping[str, int]:
        """Value name -> index of the op that defines it."""
        return {out: i for i, op in enumerate(self.ops) for out in op.outputs}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[int, ...]]:
        """Value name -> indices of the ops that read it, ascending, each once."""
        found: dict[str, list[int]] = {}
        for i, op in enumerate(self.ops):
            for name in dict.fromkeys(op.operands):
                found.setdefault(name, []).append(i)
        return {name: tuple(where) for name, where in found.items()}

    @cached_property
    def windowed(self) -> frozenset[int]:
        """The factors of images and signals that windows run over: of all dimensions behind rows and channels of what such operators read and write. Domain
        parallelism divides them (Gholami et al. 2018, arXiv 1712.04432, section 2.3)."""
        windows = [op for op in self.ops if any(loop.lowering.startswith("runtime.halo_") for loop in op.loops)]
        return frozenset(f for op in windows for name in (op.operands[0], *op.outputs) for dim in self.values[name].dims[2:] for f in dim)

    @cached_property
    def _answers(self) -> dict[tuple, tuple[Op, tuple]]:
        return {}

    def answered(self, op: Op, question: tuple, answer: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        """`answer()` of an operator, worked out once for each question: neither it nor the graph ever changes."""
        key = (op.name, *question)
        found = self._answers.get(key)
        if found is None or found[0] is not op:
            found = self._answers[key] = op, answer()
        return found[1]

    @cached_property
    def _known(self) -> dict[Hashable, Any]:
        return {}

    def known(self, question: Hashable, answer: Callable[[], T]) -> T:
        """`answer()` about the whole graph; the answers to the last few questions are not worked out again."""
        found = self._known.pop(question) if question in self._known else answer()
        self._known[question] = found  # the latest at the end
        while len(self._known) > _MOST_KNOWN:
            del self._known[next(iter(self._known))]
        return found

    def at_rest(self, name: str) -> str:
        """The dtype in which a parameter or buffer is kept, and its gradient summed."""
        dtype = self.values[name].spec.dtype
        return "float32" if self.precision is not None and dtype in ("float32", "bfloat16", "float16") else dtype

    @cached_property
    def positions(self) -> frozenset[int]:
        """Factors that ranks may divide unevenly."""
        at_rest = {f for value in self.values.values() if value.kind in ("parameter", "buffer") for dim in value.dims for f in dim}
        return frozenset(range(len(self.factor_sizes))) - at_rest - {self.batch_factor}

    def divides(self, factor: int, degree: int) -> bool:
        """Whether values may lie divided along a factor over `degree` ranks, evenly or not."""
        size = self.factor_sizes[factor]
        return size % degree == 0 or (size > degree and factor in self.positions)

    @cached_property
    def batch_size(self) -> int | None:
        return None if self.batch_factor is None else self.factor_sizes[self.batch_factor]

    def parameters(self) -> tuple[Value, ...]:
        return tuple(v for v in self.values.values() if v.kind == "parameter")

    def inputs(self) -> tuple[Value, ...]:
        return tuple(v for v in self.values.values() if v.kind == "input")


def insides(graph: Graph, op: Op, loop: Loop | None) -> tuple[Inside, ...]:
    """The collectives that `op` issues itself where `loop` is divided: none backward for what has no gradient. What an operand is
    gathered for in the backward pass is the gradient of another one."""
    if loop is None or not loop.inner:
        return ()
    has_grad = any(graph.values[name].requires_grad for name in op.outputs)

    def occurs(inside: Inside) -> bool:
        side, position = inside.where
        needs = [graph.values[name].requires_grad for name in op.operands]
        if inside.kind == "all_gather" and loop.gathers:
            needs[position] = any(need for i, need in enumerate(needs) if i != position)
        return inside.phase == "forward" or (has_grad and (side == "out" or needs[position]))

    return tuple(inside for inside in loop.inner if occurs(inside))


_UNEVEN = frozenset(
    f"runtime.{name}"
    for name in (
        *("halo_conv", "halo_conv_transpose", "halo_max_pool", "halo_avg_pool", "adaptive_average_part", "mean_part"),
        *("sync_batch_norm", "sync_group_norm", "ring_attention", "self_attention_ring"),
    )
)


def can_be_divided(graph: Graph, op: Op, loop: Loop, degree: int) -> bool:
    """Whether `degree` ranks can divide a loop of `op`: evenly, or unevenly where it reads no copies as if they were real."""
    size = graph.factor_sizes[loop.factor]
    if loop.window is None and size % degree == 0:
        return size // degree >= loop.minimum
    found = _factors(graph, op, loop)
    if loop.gathers or (loop.lowering and loop.lowering not in _UNEVEN) or size // degree < loop.minimum:
        return False
    if not all(graph.divides(factor, degree) for factor in found):
        return False
    if loop.window is None:
        return True
    needed = reach(span_of(graph, op, loop), loop.window, degree)
    return size // degree * span_of(graph, op, loop).inner >= max(needed.before, needed.after)


def span_of(graph: Graph, op: Op, loop: Loop) -> Span:
    """How a windowed operator's input and output are divided along a loop over positions."""
    read, write = loop.reads[0], loop.writes[0]
    assert read is not None and write is not None and read.factor == write.factor == 0, "positions are divided along the outermost factor of a dimension"
    sizes = []
    for name, at in ((op.operands[0], read), (op.outputs[0], write)):
        first, *rest = (graph.factor_sizes[factor] for factor in graph.values[name].dims[at.dim])
        sizes += [first, math.prod(rest)]
    return Span(*sizes)


def _factors(graph: Graph, op: Op, loop: Loop) -> frozenset[int]:
    """The factors that ranks divide where they divide a loop."""
    values = (graph.values[name] for name in (*op.operands, *op.outputs))
    places = zip(values, (*loop.reads, *loop.writes), strict=True)
    return frozenset(value.dims[at.dim][at.factor] for value, at in places if at is not None) | {loop.factor}


def options(graph: Graph, op: Op, degree: int, more: tuple[Loop, ...] = ()) -> tuple[Option, ...]:
    """Every way to run `op` on an axis of `degree` ranks: whole first, then loops that divide, its own and `more`, then partial sums.
    One rank runs it whole."""
    found = labelled_options(graph, op, degree, more)
    return found[:1] if degree == 1 else found


def labelled_options(graph: Graph, op: Op, degree: int, more: tuple[Loop, ...] = ()) -> tuple[Option, ...]:
    """`options`, also for an axis of one rank beside stages where it has more: the layouts of its values have the same names there."""
    question = ("options", degree, tuple(loop.label for loop in more))
    return graph.answered(op, question, lambda: _labelled_options(graph, op, degree, more))


def _labelled_options(graph: Graph, op: Op, degree: int, more: tuple[Loop, ...]) -> tuple[Option, ...]:
    operands, outputs = op.operands, op.outputs
    grads = [graph.values[name].requires_grad for name in operands]
    found = [Option("whole", (WHOLE,) * len(operands), (WHOLE,) * len(outputs))]
    unused = [VARY if grad else WHOLE for grad in grads]
    for loop in (*op.loops, *more):
        if not can_be_divided(graph, op, loop, degree):
            continue
        if any(graph.factor_sizes[factor] % degree for _, factor in loop.gathers):
            continue
        reads = tuple(where if where is not None else unused[i] for i, where in enumerate(loop.reads))
        rest = PARTIAL if loop.kind == "sum" else WHOLE
        found.append(Option(loop.label, reads, tuple(where if where is not None else rest for where in loop.writes)))
    for group in op.linear_in:
        reads = tuple(PARTIAL if i in group else unused[i] for i in range(len(operands)))
        found.append(Option("partial:" + ",".join(map(str, group)), reads, (PARTIAL,) * len(outputs)))
    return tuple(found)
