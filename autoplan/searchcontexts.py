"""Which context and expert axes the search looks at, and what they are at each shape.

cp is searched where a constraint asks for it, and where a sequence has at least LONG positions: below that tensor parallelism and
recomputation hold the activations. ep is searched where a constraint asks for it. Attention over a divided sequence goes by the ring, and
by heads where they divide.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from autoplan.constraints import Constraints
from autoplan.contextaxis import ATTENTION, EXPERTS, ContextAxis, check_context, context_axis, loop_of, sequence_factors, sequence_length
from autoplan.errors import InfeasibleError
from autoplan.graph import Graph
from autoplan.localcontext import LocalContext
from autoplan.price import axis_group
from autoplan.space import Contexts, Shape, divisors

LONG = 16384


def _not_beside(constraints: Constraints) -> str:
    """What is asked for that context and expert axes cannot stand beside, and why; "" for nothing."""
    if constraints.sync not in (None, "allreduce"):
        return f"sync={constraints.sync!r} cannot be had: servers know the data axis alone"
    if constraints.placement is not None:
        return "placement cannot be had: modules are pinned to whole ranks"
    return ""


class SearchedContexts:
    """Context and expert axes of one graph, each worked out once."""

    def __init__(self, graph: Graph, given: tuple[str, ...]) -> None:
        self.graph, self.given = graph, given
        self._axes: dict[tuple[str, str], ContextAxis] = {}

    def axis(self, name: str, way: str) -> ContextAxis:
        """How every operator runs on "cp" or "ep"."""
        if (name, way) not in self._axes:
            self._axes[name, way] = context_axis(self.graph, name, self.given, way) if way else context_axis(self.graph, name, self.given)
        return self._axes[name, way]

    def of(self, constraints: Constraints, world_size: int) -> Contexts:
        """What is searched. Raises InfeasibleError, with the reason, for a degree that is asked for and cannot be had."""
        beside = _not_beside(constraints)
        for name, degree in (("cp", constraints.cp), ("ep", constraints.ep)):
            if (degree or 1) > 1 and beside:
                raise InfeasibleError(f"{name}={degree} with {beside}. Leave one of them out")
        if beside:
            return Contexts()
        cps: tuple[int, ...] = (1,)
        if constraints.cp is not None:
            if constraints.cp > 1:
                check_context(self.graph, "cp", constraints.cp, self.axis("cp", "ring"))
            cps = (constraints.cp,)
        elif sequence_length(self.graph) >= LONG:
            cps = tuple(self._possible("cp", divisors(world_size)))
        if constraints.ep is not None and constraints.ep > 1:
            check_context(self.graph, "ep", constraints.ep, self.axis("ep", ""))
        eps = (constraints.ep or 1,)
        return Contexts(cps, eps, self.ways)

    def _possible(self, name: str, degrees: Iterable[int]) -> list[int]:
        found = []
        for degree in degrees:
            try:
                if degree > 1:
                    check_context(self.graph, name, degree, self.axis(name, "ring"))
            except InfeasibleError:
                continue
            found.append(degree)
        return found

    def ways(self, cp: int, tp: int) -> tuple[str, ...]:
        """The ways of attention that are searched: heads where both axes divide those of all attention, and the ring."""
        if cp == 1:
            return ("",)
        return ("heads", "ring") if self._heads and all(size % (cp * tp) == 0 for size in self._heads) else ("ring",)

    @cached_property
    def _heads(self) -> tuple[int, ...]:
        """Key heads of every attention that is divided by heads; empty where one cannot be."""
        axis = self.axis("cp", "heads")
        if axis.blocker is not None:
            return ()
        found = []
        for op, option in zip(self.graph.ops, axis.options, strict=True):
            if op.instr.target in ATTENTION:
                loop = loop_of(op, option.label)
                if loop is None or loop.factor in axis.factors:
                    return ()
                found.append(self.graph.factor_sizes[loop.factor])
        return tuple(dict.fromkeys(found))

    def local(self, shape: Shape) -> tuple[LocalContext, ...]:
        """The axes of one shape."""
        found = []
        for name, degree, way in (("cp", shape.cp, shape.context), ("ep", shape.ep, "")):
            if degree > 1:
                found.append(LocalContext(self.graph, self.axis(name, way), axis_group(shape.axes, name)))
        return tuple(found)

    def leaves(self, factor: int, shape: Shape) -> bool:
        """Whether what "cp" leaves of a factor divides by tp."""
        return shape.cp == 1 or factor not in sequence_factors(self.graph) or self.graph.divides(factor, shape.cp * shape.tp)

    @cached_property
    def expert_factors(self) -> frozenset[int]:
        """The factors that count experts: a tensor axis leaves them to the expert axis."""
        return frozenset(f for op in self.graph.ops if op.instr.target == EXPERTS for f in self.graph.values[op.operands[3]].dims[0])
