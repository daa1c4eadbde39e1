"""Positions that ranks do not hold equally many of: where emitted instructions read the real ones alone.

Every rank has room for ceil(n / p) positions of a factor of n that p ranks divide (runtime/pieces.py). An operator whose divided loop leaves its iterations
independent runs on all of them as it is. One that joins them (`Loop.joins`) reads the real ones, so that what it computes is what it would be on
parts of these unequal lengths: a sum after `runtime.real_rows`; functions of the runtime that make positions again, inside. Shapes
in the program are those with room, the most that any rank has.

Arguments that the functions of the runtime take besides, in the order of the axes that divide them:

    halo_*                                     spans    rows of the input and of the output over all ranks (runtime/sharded/halo.py)
    sync_batch_norm, sync_group_norm           spans    where the positions are (runtime/sharded/uneven.py)
    mean_part, adaptive_average_part           count    elements of one mean over all ranks; sync_group_norm: those of one group
    ring_attention, self_attention_ring        length   positions over all ranks
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

from autoplan.errors import UsageError
from autoplan.gathered import loop_of
from autoplan.graph import Loop, Op, Option, Value
from autoplan.layout import WHOLE, Layout, Split
from runtime.instr import Arg, Instr, Output, Ref, TensorSpec

if TYPE_CHECKING:
    from autoplan.variants import Emitter

Layouts = tuple[Layout, ...]
_RINGS = ("runtime.ring_attention", "runtime.self_attention_ring")
_MEANS = ("runtime.mean_part", "runtime.adaptive_average_part")
_NORMS = ("runtime.sync_batch_norm", "runtime.sync_group_norm")


class RealRows:
    """What the open piece of an emitter has taken of its values."""

    def __init__(self, emitter: Emitter) -> None:
        self._emitter = emitter
        self._taken: dict[tuple[str, int], str] = {}  # (local name, dimension) -> the real rows of it

    def operands(self, op: Op, chosen: Sequence[Option], local: Sequence[str], needs: Sequence[Layouts]) -> list[str]:
        """Local names of an operator's operands: of their real rows where it sums over them."""
        found = list(local)
        joining = [loop for loop in self._loops(op, chosen) if loop.joins and (not loop.lowering or loop.lowering in _MEANS)]
        for i, (name, need) in enumerate(zip(op.operands, needs, strict=True)):
            value = self._emitter.graph.values[name]
            for where in dict.fromkeys(loop.reads[i] for loop in joining):
                if where is not None and self._is_uneven(value, where, need):
                    key = (found[i], where.dim)
                    if key not in self._taken:
                        self._taken[key] = self._take(value, found[i], where, need)
                    found[i] = self._taken[key]
        return found

    def arguments(self, op: Op, target: str, chosen: Sequence[Option], needs: Sequence[Layouts], writes: Mapping[str, Layouts]) -> list[tuple[str, Arg]]:
        """What the function `target` of the runtime has to be told."""
        loops = [loop for loop in self._loops(op, chosen) if loop.lowering == target]
        sides = [self._sides(op, loop, needs, writes) for loop in loops]
        is_uneven = any(self._is_uneven(*side) for pair in sides for side in pair)
        if target.startswith("runtime.halo_"):
            spans = tuple(self._span(op, loop, pair) for loop, pair in zip(loops, sides, strict=True))
            return [("spans", spans)] if any(spans) else []
        if target in _RINGS:
            keys, where = self._emitter.graph.values[op.operands[1]], loops[0].reads[1]
            assert where is not None
            return [("length", self._divided_once(op, keys, where, needs[1]))] if self._is_uneven(keys, where, needs[1]) else []
        if not target or not is_uneven:
            return []
        found: list[tuple[str, Arg]] = []
        if target in _NORMS:
            source, need = self._emitter.graph.values[op.operands[0]], needs[0]
            found.append(("spans", tuple(self._place(source, n, need) for n, loop in self._numbered(op, chosen) if loop.lowering == target)))
        return found if target == "runtime.sync_batch_norm" else [*found, ("count", self._count(op))]

    def _numbered(self, op: Op, chosen: Sequence[Option]) -> list[tuple[int, Loop]]:
        """The loops of an operator that ranks divide, with the numbers of the axes."""
        axes = self._emitter.axes
        found = ((n, loop_of(self._emitter.graph, op, option.label)) for n, option in enumerate(chosen) if axes[n].degree > 1)
        return [(n, loop) for n, loop in found if loop is not None]

    def _loops(self, op: Op, chosen: Sequence[Option]) -> list[Loop]:
        return [loop for _, loop in self._numbered(op, chosen)]

    def _sides(self, op: Op, loop: Loop, needs: Sequence[Layouts], writes: Mapping[str, Layouts]) -> list[tuple[Value, Split, Layouts]]:
        """The first operand, if there is one, and output, with where they carry the loop and how they lie."""
        values = self._emitter.graph.values
        sides = [*zip(op.operands[:1], loop.reads, needs, strict=False), (op.outputs[0], loop.writes[0], writes[op.outputs[0]])]
        return [(values[name], where, layouts) for name, where, layouts in sides if where is not None]

    def _nested(self, value: Value, where: Split, layouts: Layouts) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The axes that divide one factor of a value, outermost first, and the lengths that each of them divides."""
        emitter = self._emitter
        axes = tuple(n for n in emitter.nest(value, layouts) if layouts[n] == where and emitter.axes[n].degree > 1)
        sizes = []
        for place in range(len(axes)):
            outside: Layouts = tuple(WHOLE if layout == where and n not in axes[:place] else layout for n, layout in enumerate(layouts))
            sizes.append(emitter.size(value, where.dim, where.factor, outside))
        return axes, tuple(sizes)

    def _is_uneven(self, value: Value, where: Split, layouts: Layouts) -> bool:
        """Whether ranks hold unequal parts of a factor; of rows of the batch they hold what they were dealt."""
        emitter = self._emitter
        if value.dims[where.dim][where.factor] == emitter.graph.batch_factor:
            return False
        axes, sizes = self._nested(value, where, layouts)
        return any(size % emitter.axes[n].degree for n, size in zip(axes, sizes, strict=True))

    def _place(self, value: Value, number: int, layouts: Layouts) -> tuple[int, ...]:
        """(dim, outer, size, inner) of the positions that an axis divides; () for the rows of the batch."""
        where = layouts[number]
        assert isinstance(where, Split)
        factors = value.dims[where.dim]
        if factors[where.factor] == self._emitter.graph.batch_factor:
            return ()
        axes, sizes = self._nested(value, where, layouts)
        outer = self._emitter.product(value, where.dim, layouts, 0, where.factor)
        return where.dim, outer, sizes[axes.index(number)], self._emitter.product(value, where.dim, layouts, where.factor + 1, len(factors))

    def _take(self, value: Value, local: str, where: Split, layouts: Layouts) -> str:
        emitter, factors = self._emitter, value.dims[where.dim]
        if any(self._is_uneven(value, Split(where.dim, k), layouts) for k in range(len(factors)) if k != where.factor):
            raise UsageError(f"{value.name}: axes divide two factors of dimension {where.dim}, neither evenly: leave one of them whole.")
        axes, sizes = self._nested(value, where, layouts)
        outer = emitter.product(value, where.dim, layouts, 0, where.factor)
        inner = emitter.product(value, where.dim, layouts, where.factor + 1, len(factors))
        out = (Output(f"{local}__real{where.dim}", TensorSpec(emitter.shape(value, layouts), value.spec.dtype)),)
        on = (("axis", tuple(emitter.axes[n].name for n in axes)),)
        emitter.append(Instr(out, "runtime.real_rows", (Ref(local), where.dim, outer, sizes, inner), on))
        return out[0].name

    def _divided_once(self, op: Op, value: Value, where: Split, layouts: Layouts) -> int:
        """The length of a factor that one axis divides."""
        axes, sizes = self._nested(value, where, layouts)
        if len(axes) > 1:
            names = [self._emitter.axes[n].name for n in axes]
            raise UsageError(
                f"{op.name} ({op.instr.target}) divides {sizes[0]} positions over the axes {names}, not evenly: leave it whole on all but one of them."
            )
        return sizes[0]

    def _span(self, op: Op, loop: Loop, sides: Sequence[tuple[Value, Split, Layouts]]) -> tuple[int, ...]:
        """How ranks divide the rows of the input and of the output; () where each has an equal share of both."""
        if loop.window is None and not any(self._is_uneven(*side) for side in sides):
            return ()
        span: list[int] = []
        for value, where, layouts in sides:
            inner = self._emitter.product(value, where.dim, layouts, where.factor + 1, len(value.dims[where.dim]))
            span += [self._divided_once(op, value, where, layouts), inner]
        return tuple(span)

    def _count(self, op: Op) -> int:
        """Elements that one mean, or the statistics of one group of channels, are of: those of all ranks."""
        values = self._emitter.graph.values
        source, made = values[op.operands[0]], values[op.outputs[0]]
        if op.instr.target == "aten.group_norm.default":
            groups = op.instr.args[1]
            assert isinstance(groups, int)
            return prod(source.spec.shape[1:]) // groups
        count = prod(source.spec.shape) // prod(made.spec.shape)
        has_rows = any(self._emitter.graph.batch_factor in dim for dim in made.dims)
        return count if has_rows else self._emitter.rescaled(op, count)
