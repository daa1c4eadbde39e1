"""The shard simulator: proves in one process that an operator may be divided as its loops say.

For one operator, one of its options and p ranks: random fp64 operands are cut as the option reads them, every rank runs
the local instructions that the compiler would emit for it (threads in lock-step where they communicate), and the
outputs, put together as the option writes them, are compared with the dense operator's. The same for gradients:

    layout     value on the ranks            its cotangent, and how local gradients make the dense one
    Split      parts                         cut; concatenated
    PARTIAL    add up to it                  complete on every rank
    WHOLE      equal                         complete on every rank
    VARY       equal                         sum of the ranks'

The relative L2 distance of every tensor is at most 1e-10 (a tensor that is small beside the others is measured against
1e-4 of the largest). What an operator sends inside is compared with what its loop declares.

Large tensors are made small first: the factor of a loop may have any length, and size arguments follow (`localise`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoplan.batchaxis import batch_axis
from autoplan.graph import Graph, Loop, Op, Option, Value, can_be_divided, options
from autoplan.localise import localise
from autoplan.operands import FLOATS
from autoplan.shards import Differs
from autoplan.simulation import Ranks, Simulation
from autoplan.variants import substitute
from runtime.instr import Arg, Instr, TensorSpec

_MAX_ELEMENTS = 1 << 22  # of all operands and outputs together; beyond, loops are shortened


@dataclass(frozen=True, slots=True)
class Proof:
    """Whether a division of an operator is right; `error` is the worst relative distance of a tensor."""

    ok: bool
    error: float
    reason: str  # what differs and by how much, "" where nothing does


@dataclass(frozen=True, slots=True)
class ProofRow:
    """A proof of one option of the first of all operators that are alike."""

    op: str
    target: str
    option: str
    degree: int
    proof: Proof


def prove(graph: Graph, op: Op, label: str, degree: int = 2) -> Proof:
    """Whether `op` may run as the option `label` (autoplan.graph.options) on `degree` ranks.

    A label that the operator does not have, a loop that does not divide by `degree`, and an operator whose dense form
    cannot be run are not proved; the reason says so.
    """
    small = _shortened(_alone(graph, op), degree)
    option = next((option for option in options(small, small.ops[0], degree) if option.label == label), None)
    if option is None:
        return Proof(False, math.inf, f"{op.name} ({op.instr.target}) has no option {label!r} for {degree} ranks")
    if _num_elements(small) > 8 * _MAX_ELEMENTS:
        return Proof(False, math.inf, f"{_num_elements(small)} elements are too many to simulate")
    return _proof(small, option, Ranks("tp", degree))


def _proof(graph: Graph, option: Option, ranks: Ranks) -> Proof:
    try:
        return Proof(True, Simulation(graph, option, ranks).run(), "")
    except Differs as found:
        return Proof(False, found.distance, str(found))
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError) as error:
        return Proof(False, math.inf, f"{type(error).__name__}: {error}")


def prove_graph(graph: Graph, degree: int = 2) -> tuple[ProofRow, ...]:
    """Proofs of every option but "whole" of every operator that is unlike the ones before it.

    A loop that `degree` ranks do not divide evenly is proved for them where they can divide it unevenly, else for the smallest degree that does.
    """
    seen: dict[str, None] = {}
    rows: list[ProofRow] = []
    for op in graph.ops:
        key = alike(graph, op)
        if key not in seen:
            seen[key] = None
            rows += [ProofRow(op.name, op.instr.target, label, p, prove(graph, op, label, p)) for label, p in _labels(graph, op, degree)]
    return tuple(rows)


def prove_batch_axis(graph: Graph, rows: tuple[int, ...]) -> tuple[ProofRow, ...]:
    """Proofs of how every operator of the step runs on the data axis, where rank r holds `rows[r]` rows of the batch."""
    assert sum(rows) == graph.batch_size
    axis = batch_axis(graph)
    seen: dict[str, None] = {}
    found: list[ProofRow] = []
    for index in axis.body:
        op, option = graph.ops[index], axis.options[index]
        key = f"{alike(graph, op)} {option}"
        if key not in seen and option.label != "whole":
            seen[key] = None
            found.append(ProofRow(op.name, op.instr.target, option.label, len(rows), _proof(_alone(graph, op), option, Ranks("dp", len(rows), rows))))
    return tuple(found)


def proved_loops(graph: Graph, op: Op, degree: int = 2) -> tuple[Op, tuple[str, ...]]:
    """`op` with those loops and linear groups alone that prove, and a warning for each claim that does not."""
    warnings: list[str] = []
    kept: dict[str, None] = {}
    for label, p in _labels(graph, op, degree):
        proof = prove(graph, op, label, p)
        if proof.ok:
            kept[label] = None
        else:
            warnings.append(f"the rule of {op.instr.target} is wrong about {label!r}, which stays whole (at {op.name}, {p} ranks): {proof.reason}")
    loops = tuple(loop for loop in op.loops if loop.label in kept)
    linear = tuple(group for group in op.linear_in if _group_label(group) in kept)
    return replace(op, loops=loops, linear_in=linear, proved=True), tuple(warnings)


def with_proved_rules(graph: Graph, degree: int = 2) -> Graph:
    """The graph without those claims of users' rules that do not prove; `Graph.warnings` tells of each once."""
    done: dict[str, tuple[tuple[Loop, ...], tuple[tuple[int, ...], ...]]] = {}
    warnings: dict[str, None] = dict.fromkeys(graph.warnings)
    ops = []
    for op in graph.ops:
        if op.proved:
            ops.append(op)
            continue
        key = alike(graph, op)
        if key not in done:
            checked, found = proved_loops(graph, op, degree)
            warnings |= dict.fromkeys(found)
            labels = {loop.label for loop in checked.loops}
            done[key] = tuple(loop for loop in op.loops if loop.label in labels), checked.linear_in
        labels = {loop.label for loop in done[key][0]}
        ops.append(replace(op, loops=tuple(loop for loop in op.loops if loop.label in labels), linear_in=done[key][1], proved=True))
    return replace(graph, ops=tuple(ops), warnings=tuple(warnings))


def alike(graph: Graph, op: Op) -> str:
    """Equal texts: operators that differ in names alone, so that one proof serves both."""
    ids: dict[int, int] = {}

    def factors(dims: tuple[tuple[int, ...], ...]) -> list[list[tuple[int, int]]]:
        return [[(ids.setdefault(f, len(ids)), graph.factor_sizes[f]) for f in dim] for dim in dims]

    values = [graph.values[name] for name in (*op.operands, *op.outputs)]
    shapes = [(v.spec.dtype, v.spec.shape, v.requires_grad, factors(v.dims)) for v in values]
    loops = [(loop.label, factors(((loop.factor,),)), loop.kind, loop.reads, loop.writes, loop.lowering, loop.inner) for loop in op.loops]
    instr = substitute(op.instr, [f"%{i}" for i in range(len(op.operands))])
    args = tuple(_without_op_id(instr))
    return repr((instr.target, args, instr.kwargs, shapes, loops, op.linear_in, op.random, graph.batch_factor in ids))


def _without_op_id(instr: Instr) -> Sequence[Arg]:
    """Arguments but for the name under which a random operator draws."""
    return [None if isinstance(arg, str) and arg.startswith(instr.name) else arg for arg in instr.args] if instr.target.startswith("runtime.") else instr.args


def _group_label(group: tuple[int, ...]) -> str:
    return "partial:" + ",".join(map(str, group))


def _labels(graph: Graph, op: Op, degree: int) -> list[tuple[str, int]]:
    """Every option's label with the degree to prove it for."""
    found = []
    for loop in op.loops:
        p = next((p for p in (degree, *range(2, min(graph.factor_sizes[loop.factor], 8) + 1)) if can_be_divided(graph, op, loop, p)), 0)
        if p:
            found.append((loop.label, p))
    return found + [(_group_label(group), degree) for group in op.linear_in]


def _alone(graph: Graph, op: Op) -> Graph:
    """A graph of this operator only, whose operands are inputs with names of their own."""
    names = [f"operand{i}" for i in range(len(op.operands))]
    values: dict[str, Value] = {}
    for name, old in zip(names, op.operands, strict=True):
        value = graph.values[old]
        values[name] = replace(value, name=name, kind="input", fqn=name, requires_grad=value.requires_grad and value.spec.dtype in FLOATS)
    values |= {name: graph.values[name] for name in op.outputs}
    op = replace(op, instr=substitute(op.instr, names))
    return replace(graph, values=values, ops=(op,), blocks=(), loss=None, outputs=op.outputs, buffer_updates=(), constants={})


def _num_elements(graph: Graph) -> int:
    return sum(math.prod(value.spec.shape) for value in graph.values.values())


def _shortened(graph: Graph, degree: int) -> Graph:
    """The same operator on shorter loops, where it has very many elements."""
    if _num_elements(graph) <= _MAX_ELEMENTS:
        return graph
    (op,) = graph.ops
    sizes = list(graph.factor_sizes)
    for i, factor in enumerate(dict.fromkeys(loop.factor for loop in op.loops)):
        unit = next((p for p in (degree, *range(2, 9)) if sizes[factor] % p == 0), 1)
        sizes[factor] = min(sizes[factor], unit * (2 + i % 3))
    values = {}
    for name, value in graph.values.items():
        shape = tuple(math.prod(sizes[f] for f in dim) for dim in value.dims)
        values[name] = replace(value, spec=TensorSpec(shape, value.spec.dtype))
    op = replace(op, instr=localise(op, lambda name: values[name].spec.shape))
    return replace(graph, values=values, ops=(op,), factor_sizes=tuple(sizes))
