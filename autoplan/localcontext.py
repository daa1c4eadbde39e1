"""Context and expert axes as the search sees them: what of each operator and value is left on a rank, and what is exchanged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from autoplan.batchaxis import needs_exchange
from autoplan.contextaxis import ATTENTION, EXPERTS, ContextAxis, loop_of
from autoplan.contextprice import EXCHANGING, both_passes, dense_operands, dense_output
from autoplan.graph import Graph, Option
from autoplan.layout import WHOLE, Kind, Layout, Split, conversion
from autoplan.load import Traffic
from autoplan.price import LocalGraph, bytes_of
from costmodel.opkey import RankGroup, Shape
from runtime.instr import TensorSpec
from runtime.pieces import most


@dataclass(frozen=True)
class LocalContext:
    """One such axis with `group.size` ranks."""

    graph: Graph
    axis: ContextAxis
    group: RankGroup

    @property
    def name(self) -> str:
        return self.axis.name

    @property
    def degree(self) -> int:
        return self.group.size

    def option(self, index: int) -> Option:
        return self.axis.options[index]

    def layout(self, name: str) -> Layout:
        return self.axis.layouts[name]

    def lowering(self, index: int) -> str:
        """The exchanging function that an operator becomes here, "" where it stays itself."""
        loop = loop_of(self.graph.ops[index], self.option(index).label)
        return loop.lowering if loop is not None and loop.lowering in EXCHANGING else ""

    def dense(self, index: int, shapes: tuple[Shape, ...], results: tuple[Shape, ...]) -> tuple[tuple[Shape, ...], tuple[Shape, ...]]:
        """Operands and outputs of the plain operator that works as much as a rank does."""
        target = self.lowering(index)
        if not target:
            return shapes, results
        return dense_operands(target, shapes, self.degree), tuple(dense_output(target, shape, self.degree) for shape in results)

    @property
    def at_rest(self) -> frozenset[str]:
        """Parameters that rest divided on this axis."""
        return self._at_rest

    @cached_property
    def _at_rest(self) -> frozenset[str]:
        reads: dict[str, set[bool]] = {}
        for op, option in zip(self.graph.ops, self.axis.options, strict=True):
            for name, read in zip(op.operands, option.reads, strict=True):
                if self.graph.values[name].kind == "parameter":
                    reads.setdefault(name, set()).add(isinstance(read, Split))
        return frozenset(name for name, found in reads.items() if found == {True})

    def factor_sizes(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """What is left of every factor that this axis divides somewhere, for tensor axes that divide it too."""
        divided = set(self.axis.factors)
        for op, option in zip(self.graph.ops, self.axis.options, strict=True):
            loop = loop_of(op, option.label)
            if loop is not None and op.instr.target in (*ATTENTION, EXPERTS):
                divided.add(loop.factor)
        return tuple(most(size, self.degree) if f in divided and self.graph.divides(f, self.degree) else size for f, size in enumerate(sizes))


@dataclass(frozen=True)
class Exchanges:
    """What one run of operators moves over an axis in one micro-batch, and the seconds of both passes."""

    traffic: tuple[Traffic, ...]
    forward_s: float
    backward_s: float

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


def context_exchanges(local: LocalGraph, context: LocalContext, indices: tuple[int, ...], given: tuple[str, ...]) -> Exchanges:
    """Changes of layout on the axis, each once, and what attention and experts exchange inside. Around attention values are
    taken to be divided over the tensor axis too, as they are wherever it can."""
    graph, pricer, group = local.graph, local.pricer, context.group
    traffic: list[Traffic] = []
    seconds: Mapping[str, list[float]] = {"forward": [], "backward": []}
    seen: set[tuple[str, str]] = set()
    for index in indices:
        op, option = graph.ops[index], context.option(index)
        attends = op.instr.target in ATTENTION
        target = context.lowering(index)
        if target:
            operands = [_spec(local, index, i, local.degree if attends else 1) for i in range(len(op.operands))]
            time = local.op_time(index, Option("whole", (WHOLE,) * len(op.operands), (WHOLE,) * len(op.outputs)))
            forward, backward, forward_s, backward_s = both_passes(
                target, operands, (time.forward_s / local.degree, time.backward_s / local.degree), group, pricer
            )
            traffic += [Traffic(kind, context.name, "forward", size) for kind, size in forward]
            traffic += [Traffic(kind, context.name, "backward", size) for kind, size in backward]
            seconds["forward"].append(forward_s)
            seconds["backward"].append(backward_s)
        moved = [(name, context.axis.layouts[name], read) for name, read in zip(op.operands, option.reads, strict=True) if name not in given]
        for name, src, dst in moved:
            change = conversion(src, dst) if needs_exchange(src, dst) else None
            if change is None or (name, str(dst)) in seen or graph.values[name].kind == "parameter":
                continue
            seen.add((name, str(dst)))
            whole = local.num_bytes(name) * (context.degree if isinstance(src, Split) else 1) // (local.degree if attends else 1)
            passes: tuple[tuple[str, Kind | None], ...] = (
                ("forward", change.forward),
                ("backward", change.backward if graph.values[name].requires_grad else None),
            )
            for phase, kind in passes:
                if kind is not None and kind != "slice":
                    traffic.append(Traffic(kind, context.name, phase, whole))
                    size = whole // group.size if kind == "all_to_all" else whole
                    seconds[phase].append(pricer.collective(kind, size, group))
    return Exchanges(tuple(traffic), sum(seconds["forward"]), sum(seconds["backward"]))


def _spec(local: LocalGraph, index: int, position: int, parts: int) -> TensorSpec:
    """A local operand of an exchanging operator; of the heads `parts` have one part each."""
    shape = list(local.read_shape(index, position))
    if parts > 1 and len(shape) > 2 and shape[-3] % parts == 0:
        shape[-3] //= parts
    return TensorSpec(tuple(shape), local.dtype(local.graph.ops[index].operands[position]))


def resting_bytes(context: LocalContext, local: LocalGraph, rests: Mapping[str, object]) -> int:
    """Bytes of the gradients that are summed over the axis once a step, of parameters that rest as `rests` on the tensor axis."""
    graph = local.graph
    total = 0
    for name, rest in rests.items():
        value = graph.values[name]
        if value.requires_grad and name not in context.at_rest:
            total += bytes_of(value.spec.shape, graph.at_rest(name)) // local.parameter_parts(name) // (local.degree if isinstance(rest, Split) else 1)
    return total
