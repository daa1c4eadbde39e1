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
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autoplan.graph import Graph, Loop, Op, Option, Value, options
from autoplan.layout import PARTIAL, Split
from autoplan.localise import localise
from autoplan.lockstep import run_lockstep
from autoplan.operands import DOMAINS, FLOATS, random_operands
from autoplan.shards import Differs, Dims, addends, cut, distance, joined, joined_grad, window
from autoplan.variants import AxisAssignment, Emitter, Rows, substitute
from runtime.call import decode, resolve
from runtime.instr import Arg, Dtype, Instr, TensorSpec
from runtime.mesh import Axis
from runtime.random import RandomState, use_state

_MAX_ELEMENTS = 1 << 22  # of all operands and outputs together; beyond, loops are shortened
_CPU = torch.device("cpu")
_AXIS = "tp"


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
    graph, op = _alone(graph, op)
    graph, op = _shortened(graph, op, degree)
    option = next((option for option in options(graph, op, degree) if option.label == label), None)
    if option is None:
        return Proof(False, math.inf, f"{op.name} ({op.instr.target}) has no option {label!r} for {degree} ranks")
    if _num_elements(graph) > 8 * _MAX_ELEMENTS:
        return Proof(False, math.inf, f"{_num_elements(graph)} elements are too many to simulate")
    loop = next((loop for loop in op.loops if loop.label == label), None)
    try:
        return Proof(True, _Simulation(graph, op, option, loop, degree).run(), "")
    except Differs as found:
        return Proof(False, found.distance, str(found))
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError) as error:
        return Proof(False, math.inf, f"{type(error).__name__}: {error}")


def prove_graph(graph: Graph, degree: int = 2) -> tuple[ProofRow, ...]:
    """Proofs of every option but "whole" of every operator that is unlike the ones before it.

    A loop that `degree` does not divide is proved for the smallest degree that does.
    """
    seen: dict[str, None] = {}
    rows: list[ProofRow] = []
    for op in graph.ops:
        key = alike(graph, op)
        if key not in seen:
            seen[key] = None
            rows += [ProofRow(op.name, op.instr.target, label, p, prove(graph, op, label, p)) for label, p in _labels(graph, op, degree)]
    return tuple(rows)


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
        size = graph.factor_sizes[loop.factor]
        p = degree if size % degree == 0 else next((p for p in range(2, min(size, 8) + 1) if size % p == 0), 0)
        if p:
            found.append((loop.label, p))
    return found + [(_group_label(group), degree) for group in op.linear_in]


def _alone(graph: Graph, op: Op) -> tuple[Graph, Op]:
    """A graph of this operator only, whose operands are inputs with names of their own."""
    names = [f"operand{i}" for i in range(len(op.operands))]
    values: dict[str, Value] = {}
    for name, old in zip(names, op.operands, strict=True):
        value = graph.values[old]
        values[name] = replace(value, name=name, kind="input", fqn=name, requires_grad=value.requires_grad and value.spec.dtype in FLOATS)
    values |= {name: graph.values[name] for name in op.outputs}
    op = replace(op, instr=substitute(op.instr, names))
    return replace(graph, values=values, ops=(op,), blocks=(), loss=None, outputs=op.outputs, buffer_updates=(), constants={}), op


def _num_elements(graph: Graph) -> int:
    return sum(math.prod(value.spec.shape) for value in graph.values.values())


def _shortened(graph: Graph, op: Op, degree: int) -> tuple[Graph, Op]:
    """The same operator on shorter loops, where it has very many elements."""
    if _num_elements(graph) <= _MAX_ELEMENTS:
        return graph, op
    sizes = list(graph.factor_sizes)
    for i, factor in enumerate(dict.fromkeys(loop.factor for loop in op.loops)):
        unit = next((p for p in (degree, *range(2, 9)) if sizes[factor] % p == 0), 1)
        sizes[factor] = min(sizes[factor], unit * (2 + i % 3))
    values = {}
    for name, value in graph.values.items():
        shape = tuple(math.prod(sizes[f] for f in dim) for dim in value.dims)
        values[name] = replace(value, spec=TensorSpec(shape, value.spec.dtype))
    op = replace(op, instr=localise(op, lambda name: values[name].spec.shape))
    return replace(graph, values=values, ops=(op,), factor_sizes=tuple(sizes)), op


@dataclass(frozen=True)
class _Result:
    """Outputs of a run by name, and gradients of the operands that have one."""

    outputs: Mapping[str, torch.Tensor]
    grads: Mapping[str, torch.Tensor]


class _Simulation:
    """One option of one operator on `degree` ranks. `run` returns the worst relative distance."""

    def __init__(self, graph: Graph, op: Op, option: Option, loop: Loop | None, degree: int) -> None:
        self.graph, self.op, self.option, self.loop, self.degree = graph, op, option, loop, degree
        self.reads = dict(zip(op.operands, option.reads, strict=True))
        self.writes = dict(zip(op.outputs, option.writes, strict=True))
        self.state = RandomState(seed=5, step=0, micro_batch=0, exact=True)
        self.instrs = self._instructions()

    def run(self) -> float:
        dense, operands, cotangents = self._dense()
        degree = self.degree
        shares = {
            name: addends(x, degree) if self.reads[name] == PARTIAL else cut(x, self._dims(name), self.reads[name], degree) for name, x in operands.items()
        }
        parts = {name: cut(dy, self._dims(name), self.writes[name], degree) for name, dy in cotangents.items()}

        def rank(axis: Axis) -> tuple[_Result, list[tuple[str, str, int]]]:
            r = axis.index
            found = self._evaluate(
                lambda env: [self._call(instr, env, axis) for instr in self.instrs],
                {name: share[r] for name, share in shares.items()},
                {name: part[r] for name, part in parts.items()},
                axis,
            )
            return found, [(sent.kind, sent.phase, sent.num_bytes) for sent in axis.recorder.sent]

        ranks = run_lockstep(rank, self.degree)
        results = [result for result, _ in ranks]
        outputs = {name: joined(f"output {name}", [r.outputs[name] for r in results], self._dims(name), self.writes[name]) for name in self.op.outputs}
        missing = [name for name in dense.grads if any(name not in r.grads for r in results)]
        if missing:
            raise Differs(f"no gradient reaches operand {missing[0]} on some rank")
        grads = {name: joined_grad(f"gradient of {name}", [r.grads[name] for r in results], self._dims(name), self.reads[name]) for name in dense.grads}
        worst = max(distance(outputs, dense.outputs, "output"), distance(grads, dense.grads, "gradient of"))
        self._check_traffic([traffic for _, traffic in ranks], dense)
        return worst

    def _instructions(self) -> tuple[Instr, ...]:
        """The local instructions that the compiler emits where operands lie as the option reads them."""
        rows = Rows(self.graph.batch_size or 1, self.graph.batch_size or 1, 1.0, True)
        emitter = Emitter(self.graph, [AxisAssignment(_AXIS, self.degree, (self.option,), self.reads)], rows, {})
        emitter.begin()
        emitter.emit(0)
        return tuple(_in_fp64(instr) for instr in emitter.pieces[0])

    def _dense(self) -> tuple[_Result, Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]:
        """The dense operator's result, its operands and cotangents; operands come from a domain where it gives numbers."""
        instr = _in_fp64(self.op.instr)
        specs = tuple(self.graph.values[name].spec for name in self.op.operands)
        seed = zlib.crc32(instr.target.encode())
        for domain in DOMAINS:
            operands = dict(zip(self.op.operands, random_operands(self.op.instr, specs, seed, domain), strict=True))
            try:
                plain = self._evaluate(lambda env: [self._call(instr, env, None)], operands, {}, None)
            except RuntimeError:  # outside of its domain some operators refuse
                if domain == DOMAINS[-1]:
                    raise
                continue
            if all(bool(y.isfinite().all()) for y in plain.outputs.values() if y.is_floating_point()):
                break
        generator = torch.Generator().manual_seed(seed + 1)
        cotangents = {
            name: torch.randn(y.shape, generator=generator, dtype=y.dtype)
            for name, y in plain.outputs.items()
            if y.is_floating_point() and self.graph.values[name].requires_grad
        }
        return self._evaluate(lambda env: [self._call(instr, env, None)], operands, cotangents, None), operands, cotangents

    def _evaluate(
        self, run: Callable[[dict[str, Any]], Any], operands: Mapping[str, torch.Tensor], cotangents: Mapping[str, torch.Tensor], axis: Axis | None
    ) -> _Result:
        wanted = [name for name in operands if self.graph.values[name].requires_grad]
        env: dict[str, Any] = {name: x.detach().clone().requires_grad_(name in wanted) for name, x in operands.items()}
        leaves = {name: env[name] for name in wanted}
        with use_state(self.state):
            run(env)
        outputs = {name: env[name] for name in self.op.outputs}
        reached = [name for name in cotangents if outputs[name].requires_grad]
        for name in reached:
            if outputs[name].shape != cotangents[name].shape:
                raise Differs(f"output {name} has the shape {tuple(outputs[name].shape)}, expected {tuple(cotangents[name].shape)}")
        grads: dict[str, torch.Tensor] = {}
        if reached and leaves:
            if axis is not None:
                axis.recorder.phase = "backward"
            found = torch.autograd.grad([outputs[n] for n in reached], list(leaves.values()), [cotangents[n] for n in reached], allow_unused=True)
            grads = {name: grad for name, grad in zip(leaves, found, strict=True) if grad is not None}
        return _Result({name: y.detach() for name, y in outputs.items()}, grads)

    def _call(self, instr: Instr, env: dict[str, Any], axis: Axis | None) -> None:
        kwargs = {key: decode(arg, env, _CPU) for key, arg in instr.kwargs}
        for key in ("axis", "axes"):
            if key in kwargs:
                names = kwargs[key]
                assert axis is not None
                kwargs[key] = axis if isinstance(names, str) else tuple(axis for _ in names)
        if kwargs.get("axes") and "windows" not in kwargs:
            layout = self.option.writes[0]
            assert isinstance(layout, Split)
            kwargs["windows"] = (window(self._dims(self.op.outputs[0]), layout),)
        result = resolve(instr.target)(*(decode(arg, env, _CPU) for arg in instr.args), **kwargs)
        for output, value in zip(instr.outputs, result if instr.is_sequence else (result,), strict=True):
            env[output.name] = value

    def _dims(self, name: str) -> Dims:
        return [[self.graph.factor_sizes[f] for f in dim] for dim in self.graph.values[name].dims]

    def _check_traffic(self, ranks: list[list[tuple[str, str, int]]], dense: _Result) -> None:
        """What the ranks sent inside the operator is what its loop declares, in elements."""
        declared = []
        for kind, (side, i), phase in self.loop.inner if self.loop else ():
            names = self.op.operands if side == "in" else self.op.outputs
            if phase == "forward" or dense.grads:
                declared.append((kind, phase, math.prod(self.graph.values[names[i]].spec.shape)))
        for sent in ranks:
            found = [(kind, phase, num_bytes // 8) for kind, phase, num_bytes in sent]
            if sorted(found) != sorted(declared):
                raise Differs(f"it sends {sorted(found)} (kind, pass, elements), its loop declares {sorted(declared)}")


def _in_fp64(instr: Instr) -> Instr:
    """The instruction with every floating dtype argument made float64."""

    def walk(arg: Arg) -> Arg:
        if isinstance(arg, Dtype):
            return Dtype("float64") if arg.name in FLOATS else arg
        return tuple(walk(item) for item in arg) if isinstance(arg, tuple) else arg

    return replace(instr, args=tuple(walk(arg) for arg in instr.args), kwargs=tuple((key, walk(arg)) for key, arg in instr.kwargs))
