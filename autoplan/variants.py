"""Variants: emitting local instructions for one run of operators, with the changes of layout between them.

An *axis assignment* says, for one mesh axis, how every operator runs (an Option) and how values that no operator makes lie.
A *variant* of a value is one local tensor: the value under one layout on each axis. The emitter walks operators in order; for every
operand it finds or makes the variant that the operator reads (autoplan/layout.py says which collective), rewrites size arguments
for local shapes, and swaps in the runtime function where the divided loop asks for one. A variant is made once and shared.

Local size of factor f in a value: on an axis that splits it, size/p, rounded up (the data axis: the rows of the micro-batch);
elsewhere its size (the batch factor: all rows of the step). Several axes may divide one factor, the first of them outermost; of a
parameter those from which it is gathered come last, so that what is gathered is what the others leave. A context axis
(autoplan/contextaxis.py) divides factors that are not its own, the heads of attention, inside of the others. Where p does not divide the
size: autoplan/realrows.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autoplan.drawing import drawing
from autoplan.errors import UsageError
from autoplan.gathered import loop_of
from autoplan.graph import Graph, Op, Option, Value
from autoplan.layout import PARTIAL, VARY, WHOLE, Layout, Mode, Split, conversion
from autoplan.localise import localise
from autoplan.realrows import RealRows
from autoplan.route import route
from autoplan.schemes import ROLES
from runtime.instr import Arg, Instr, Output, Ref, TensorSpec, uses
from runtime.pieces import most

Layouts = tuple[Layout, ...]  # one for each axis of the assignment, in order


@dataclass(frozen=True)
class AxisAssignment:
    """How every operator runs on one axis. `options[i]` belongs to op i; `rest` to parameters, inputs, buffers, constants
    and values that were made beforehand. `factors` are those that a context axis divides everywhere (None: another axis)."""

    name: str
    degree: int
    options: Sequence[Option]
    rest: Mapping[str, Layout]
    factors: frozenset[int] | None = None


@dataclass(frozen=True)
class Rows:
    """`local` rows in a piece that the batch axis divides, `total` rows in the step, `share` = the piece's part of a sum
    that every piece adds to equally (1 / (ranks x micro-batches)); `even`: all ranks have equally many rows."""

    local: int
    total: int
    share: float
    even: bool


def layout_tag(layout: Layout) -> str:
    return f"s{layout.dim}_{layout.factor}" if isinstance(layout, Split) else layout.name


def substitute(instr: Instr, names: Sequence[str]) -> Instr:
    """`instr` with its operands, in the order of `uses`, called `names`."""
    queue = iter(names)

    def walk(arg: Arg) -> Arg:
        if isinstance(arg, Ref):
            return Ref(next(queue))
        return tuple(walk(item) for item in arg) if isinstance(arg, tuple) else arg

    args = tuple(walk(arg) for arg in instr.args)
    return replace(instr, args=args, kwargs=tuple((key, walk(arg)) for key, arg in instr.kwargs))


class Emitter:
    """Emits the local instructions of a stage (or of the preamble). State is this run's alone.

    `made[(value, layouts)]` is the local name of a variant, `specs` every local name's spec, `home` the piece
    (block number) that made it. `begin()` opens a block; instructions collect in `pieces[-1]`. `given` names the local
    tensors of values that the preamble made.
    """

    def __init__(self, graph: Graph, axes: Sequence[AxisAssignment], rows: Rows, given: Mapping[str, str]) -> None:
        self.graph, self.axes, self.rows, self.given = graph, tuple(axes), rows, given
        self.made: dict[str, dict[Layouts, str]] = defaultdict(dict)  # value -> its forms and their local names
        self.specs: dict[str, TensorSpec] = {}
        self.home: dict[str, int] = {}
        self.pieces: list[list[Instr]] = []
        self.stored: dict[str, tuple[str, Layouts]] = {}  # local name -> (value, layouts): tensors at rest that were used
        self.external: dict[str, str] = {}  # local name -> value: feeds, preamble results and transfers that were used
        self.real_rows = RealRows(self)
        self.settled: dict[str, Layouts] = {}  # value -> how it lies outside of the block that makes it, where a plan says so

    def begin(self) -> int:
        self.real_rows = RealRows(self)
        self.pieces.append([])
        return len(self.pieces) - 1

    def shape(self, value: Value, layouts: Layouts) -> tuple[int, ...]:
        """Local shape of a value under one layout on each axis."""
        return tuple(self.product(value, d, layouts, 0, len(factors)) for d, factors in enumerate(value.dims))

    def product(self, value: Value, dim: int, layouts: Layouts, start: int, stop: int, *, without: int | None = None) -> int:
        total = 1
        for position in range(start, stop):
            total *= self.size(value, dim, position, layouts, without)
        return total

    def size(self, value: Value, dim: int, position: int, layouts: Layouts, without: int | None = None) -> int:
        """Local size of one factor; `without` is an axis number whose own division is left out."""
        factor = value.dims[dim][position]
        batch = factor == self.graph.batch_factor
        size = self.rows.total if batch else self.graph.factor_sizes[factor]
        for number, (axis, layout) in enumerate(zip(self.axes, layouts, strict=True)):
            if layout == Split(dim, position) and number != without:
                size = self.rows.local if axis.name == "dp" and batch else self._divided(value, factor, size, axis)
        return size

    def _divided(self, value: Value, factor: int, size: int, axis: AxisAssignment) -> int:
        if size % axis.degree and not (factor in self.graph.positions and size > axis.degree):
            raise UsageError(
                f"{value.name} has {size} entries left of a dimension that {axis.degree} ranks of the axis {axis.name!r} divide: "
                f"use a multiple of {axis.degree}, or plan with another degree or tensor scheme."
            )
        return most(size, axis.degree)

    def order(self, value: Value, where: Split) -> tuple[int, ...]:
        """The axes by how they nest where they divide one factor of a value, outermost first."""
        return tuple(sorted(range(len(self.axes)), key=lambda n: self._is_inner(n, value, where)))

    def nest(self, value: Value, layouts: Layouts) -> tuple[int, ...]:
        """All axes, so that of those that divide one factor the outermost comes first."""
        return tuple(sorted(range(len(self.axes)), key=lambda n: isinstance(at := layouts[n], Split) and self._is_inner(n, value, at)))

    def _is_inner(self, number: int, value: Value, where: Split) -> bool:
        axis = self.axes[number]
        is_guest = axis.factors is not None and value.dims[where.dim][where.factor] not in axis.factors
        return is_guest or (value.kind == "parameter" and ROLES.get(axis.name) == "gathered")

    def produced(self, name: str) -> Layouts:
        """How a value lies on each axis where it is made or kept, or where it was settled."""
        if name in self.settled:
            return self.settled[name]
        index = self.graph.producer.get(name)
        found: list[Layout] = []
        for axis in self.axes:
            if name in axis.rest or index is None:
                found.append(axis.rest[name])
            else:
                found.append(axis.options[index].writes[self.graph.ops[index].outputs.index(name)])
        return tuple(found)

    def emit(self, index: int) -> None:
        """Emit operator `index` into the open piece."""
        op = self.graph.ops[index]
        chosen = [axis.options[index] for axis in self.axes]
        needs = [tuple(option.reads[i] for option in chosen) for i in range(len(op.operands))]
        local = [self.read(name, need) for name, need in zip(op.operands, needs, strict=True)]
        writes = {name: tuple(option.writes[j] for option in chosen) for j, name in enumerate(op.outputs)}
        local = self.real_rows.operands(op, chosen, local, needs)
        instr = self._localised(op, local, writes)
        instr = self._specialised(op, instr, chosen, needs, writes)
        self.append(instr)
        for output in instr.outputs:
            if output.spec is not None:
                self.made[output.name][writes[output.name]] = output.name

    def _localised(self, op: Op, local: Sequence[str], writes: Mapping[str, Layouts]) -> Instr:
        marks = [f"%{i}" for i in range(len(local))]
        shapes = {mark: self.specs[name].shape for mark, name in zip(marks, local, strict=True)}
        shapes |= {name: self.shape(self.graph.values[name], layouts) for name, layouts in writes.items()}
        instr = localise(replace(op, instr=substitute(op.instr, marks)), shapes.__getitem__)
        return substitute(instr, local)

    def _specialised(self, op: Op, instr: Instr, chosen: Sequence[Option], needs: Sequence[Layouts], writes: Mapping[str, Layouts]) -> Instr:
        """Swap in the runtime function of divided loops, and tell random and counting operators where they are."""
        divided: list[str] = []
        dims: list[int] = []
        gathers: list[Arg] = []
        target = ""
        for number, (axis, option) in enumerate(zip(self.axes, chosen, strict=True)):
            loop = loop_of(self.graph, op, option.label)
            if axis.degree > 1 and loop is not None and loop.lowering:
                if target not in ("", loop.lowering):
                    raise UsageError(f"{op.name} ({op.instr.target}) cannot be divided by {target} and {loop.lowering} at once: leave it whole on one axis.")
                target = loop.lowering
                divided.append(axis.name)
                dims.append(loop.reads[0].dim if loop.reads[0] is not None else -1)
                for i, _ in loop.gathers:
                    where, reads = loop.reads[i], tuple(other.reads[i] for other in chosen)
                    assert where is not None
                    gathers.append((i, *self._chunk(self.graph.values[op.operands[i]], where, reads, number)))
        extra: list[tuple[str, Arg]] = []
        if gathers:
            extra = [("axes", tuple(divided)), ("gathers", tuple(gathers))]
        elif target:
            extra.append(("axis", divided[0] if len(divided) == 1 else tuple(divided)))
        if target.startswith("runtime.halo_"):
            extra.append(("dims", tuple(dims)))
        if target == "runtime.sync_batch_norm":
            extra.append(("count", self._statistics_count(op)))
        extra += self.real_rows.arguments(op, target, chosen, needs, writes)
        if op.random and instr.target.startswith("runtime."):
            layouts = writes[op.outputs[0]]
            value, axes = self.graph.values[op.outputs[0]], [(axis.name, axis.degree) for axis in self.axes]
            nest = self.nest(value, layouts)
            extra += drawing(self.graph, value, axes, layouts, lambda value, where, number: self.chunk(value, where, number, layouts), nest)
        if instr.target == "runtime.scale_by_count":
            return replace(instr, args=(instr.args[0], self.rescaled(op, instr.args[1])))
        return replace(instr, target=target or instr.target, kwargs=(*instr.kwargs, *extra))

    def _statistics_count(self, op: Op) -> int:
        """Elements of one channel over all rows and ranks."""
        value = self.graph.values[op.operands[0]]
        sizes = [
            self.rows.total if f == self.graph.batch_factor else self.graph.factor_sizes[f] for dim in (0, *range(2, len(value.dims))) for f in value.dims[dim]
        ]
        count = 1
        for size in sizes:
            count *= size
        return count

    def rescaled(self, op: Op, count: Arg) -> int:
        assert isinstance(count, int)
        if self.graph.batch_size is None:  # one row, in every piece
            return count
        scaled, rest = divmod(count * self.rows.total, self.graph.batch_size)
        assert rest == 0, f"{op.name}: a count of {count} elements does not follow the number of rows"
        return scaled

    def settle(self, name: str, layouts: Layouts, called: str) -> None:
        """Convert a value at the end of the block that makes it, under the local name `called`. Who reads it later starts from there: other
        forms of it stay in the block, so that blocks cost what they cost wherever they are put."""
        local = self.read(name, layouts)
        self.settled[name] = layouts
        self.made[name] = {form: made for form, made in self.made[name].items() if form == layouts}
        if local == called:
            return
        piece = self.pieces[-1]
        for i, instr in enumerate(piece):
            operands = uses(instr)
            outputs = tuple(replace(out, name=called) if out.name == local else out for out in instr.outputs)
            if local in operands or outputs != instr.outputs:
                piece[i] = replace(substitute(instr, [called if operand == local else operand for operand in operands]), outputs=outputs)
        self.made[name] = dict.fromkeys(self.made[name], called)
        self.specs[called], self.home[called] = self.specs.pop(local), self.home.pop(local)

    def read(self, name: str, need: Layouts) -> str:
        """Local name of `name` under the layouts `need`, made now if it is not there."""
        value = self.graph.values[name]
        if not value.requires_grad:
            need = tuple(WHOLE if layout == VARY else layout for layout in need)
        have = self.produced(name)
        if value.kind == "constant":
            return self._at_rest(value, have, need)
        return self._converted(value, self._base(value, have), have, need)

    def _converted(self, value: Value, local: str, have: Layouts, need: Layouts) -> str:
        for number, dst in route(have, need, lambda where: self.order(value, where)):
            src, have = have[number], (*have[:number], dst, *have[number + 1 :])
            forms = self.made[value.name]
            if have not in forms:
                moves = self._moves(self.axes[number], src, dst)
                forms[have] = self._convert(value, local, have, number, src, dst) if moves else local
            local = forms[have]
        return local

    def _moves(self, axis: AxisAssignment, src: Layout, dst: Layout) -> bool:
        """A change of layout needs an instruction: ranks to talk to, or (to PARTIAL) a portion to take."""
        return axis.degree > 1 or (dst == PARTIAL and self._portion(axis) != 1.0)

    def _portion(self, axis: AxisAssignment) -> float:
        """A rank's part of a sum to which all add equally."""
        return self.rows.share if axis.factors is None and (axis.name == "dp" or axis.name not in ROLES) else 1 / axis.degree

    def _base(self, value: Value, have: Layouts) -> str:
        forms = self.made[value.name]
        if have not in forms:
            local = forms[have] = self.given.get(value.name, value.name)
            self.specs[local] = TensorSpec(self.shape(value, have), value.spec.dtype)
            if value.kind in ("parameter", "buffer"):
                self.stored[local] = (value.name, have)
            else:
                self.external[local] = value.name
        return forms[have]

    def _at_rest(self, value: Value, have: Layouts, need: Layouts) -> str:
        """A constant is kept in the form in which it is read; only the rows of the batch are cut at run time."""
        batch = frozenset() if self.graph.batch_factor is None else frozenset({self.graph.batch_factor})
        cut_later = [a.name == "dp" or a.factors == batch or ROLES.get(a.name, "features") != "features" for a in self.axes]
        kept = tuple(h if later or n == PARTIAL else n for later, h, n in zip(cut_later, have, need, strict=True))
        forms = self.made[value.name]
        if kept not in forms:
            tags = [f"{a.name}_{layout_tag(k)}" for a, k in zip(self.axes, kept, strict=True) if isinstance(k, Split) and a.degree > 1]
            local = "__".join([value.name, *tags])
            forms[kept] = local
            self.specs[local] = TensorSpec(self.shape(value, kept), value.spec.dtype)
            self.stored[local] = (value.name, kept)
        return self._converted(value, forms[kept], kept, need)

    def _convert(self, value: Value, local: str, after: Layouts, number: int, src: Layout, dst: Layout) -> str:
        """Emit the change of layout of one variant on one axis; returns the new variant's local name."""
        axis = self.axes[number]
        name = f"{local}__{axis.name}_{layout_tag(dst)}"
        out = (Output(name, TensorSpec(self.shape(value, after), value.spec.dtype)),)
        on = (("axis", axis.name),)
        if src == VARY and dst in (WHOLE, VARY):
            instr = Instr(out, "runtime.share", (Ref(local),), on)
        elif dst == PARTIAL:
            assert src == VARY or not value.requires_grad, f"{value.name}: a complete value cannot become a partial sum"
            instr = Instr(out, "aten.mul.Tensor", (Ref(local), self._portion(axis)))
        elif src == VARY:
            raise AssertionError(f"{value.name} is read {dst} on axis {axis.name} but is kept for work that differs by rank")
        else:
            how = conversion(src, dst)
            assert how is not None, f"{value.name}: {src} cannot be read {dst}"
            if (src == PARTIAL and dst == VARY) or (isinstance(src, Split) and isinstance(dst, Split) and src.dim == dst.dim):
                whole = (*after[:number], WHOLE, *after[number + 1 :])
                forms = self.made[value.name]
                if whole not in forms:
                    forms[whole] = self._convert(value, local, whole, number, src, WHOLE)
                return self._convert(value, forms[whole], after, number, WHOLE, dst)
            if how.forward is None:
                instr = Instr(out, "runtime.vary", (Ref(local),), on)
            elif how.forward == "all_reduce":
                instr = Instr(out, "runtime.all_reduce", (Ref(local),), on)
            else:
                self._check_even(axis, value)
                kind = "all_gather_vary" if dst == VARY and how.forward == "all_gather" else how.forward
                where = src if isinstance(src, Split) else dst
                assert isinstance(where, Split)
                args: tuple[Arg, ...] = (Ref(local), *self._chunk(value, where, after, number))
                if isinstance(src, Split) and isinstance(dst, Split):
                    args = (*args, *self._chunk(value, dst, after, number))
                instr = Instr(out, f"runtime.{kind}", args, on)
        self.append(instr)
        return name

    def _chunk(self, value: Value, where: Split, layouts: Layouts, number: int) -> tuple[int, int, int, int]:
        """(dim, outer, size, inner) of the divided dimension as the other axes leave it."""
        others: Layouts = tuple(layout if i != number else Mode("whole") for i, layout in enumerate(layouts))
        factors = value.dims[where.dim]
        outer = self.product(value, where.dim, others, 0, where.factor)
        inner = self.product(value, where.dim, others, where.factor + 1, len(factors))
        return where.dim, outer, self.size(value, where.dim, where.factor, others, number), inner

    def chunk(self, value: Value, where: Split, number: int, layouts: Layouts) -> tuple[int, int, int, int]:
        """Like the chunk of a conversion, for a tensor at rest: axes outside of `number` have cut already."""
        nest = self.order(value, where)
        outer = nest[: nest.index(number)]
        before: Layouts = tuple(layout if i in outer else WHOLE for i, layout in enumerate(layouts))
        return self._chunk(value, where, before, number)

    def _check_even(self, axis: AxisAssignment, value: Value) -> None:
        if axis.name == "dp" and not self.rows.even:
            raise UsageError(
                f"{value.name} of all {self.rows.total} rows is needed on every data rank, so the rows must divide by {axis.degree}. "
                f"Use a batch that is a multiple of {axis.degree}, or drop the last batch."
            )

    def append(self, instr: Instr) -> None:
        piece = len(self.pieces) - 1
        self.pieces[piece].append(instr)
        for output in instr.outputs:
            if output.spec is not None:
                self.specs[output.name] = output.spec
                self.home[output.name] = piece
