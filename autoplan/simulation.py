"""Running one operator as an option says, on ranks that are threads, against its dense form: see `autoplan.shardsim`."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autoplan.gathered import loop_of
from autoplan.graph import Graph, Option, insides
from autoplan.layout import PARTIAL, VARY, Layout, Split
from autoplan.lockstep import run_lockstep
from autoplan.operands import DOMAINS, FLOATS, random_operands
from autoplan.shards import Differs, Dims, addends, cut, distance, joined, joined_grad
from autoplan.variants import AxisAssignment, Emitter, Rows
from runtime.call import decode, resolve
from runtime.instr import Arg, Dtype, Instr
from runtime.mesh import Axis
from runtime.pieces import count, most
from runtime.random import RandomState, use_state

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of one axis. On "dp", `rows` are the rows of the batch that each of them holds, not all equal perhaps."""

    axis: str
    degree: int
    rows: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Result:
    """Outputs of a run by name, and gradients of the operands that have one."""

    outputs: Mapping[str, torch.Tensor]
    grads: Mapping[str, torch.Tensor]


class Simulation:
    """One option of the only operator of `graph` on some ranks. `run` returns the worst relative distance."""

    def __init__(self, graph: Graph, option: Option, ranks: Ranks) -> None:
        (op,) = graph.ops
        self.graph, self.op, self.option, self.ranks = graph, op, option, ranks
        self.reads = dict(zip(op.operands, option.reads, strict=True))
        self.writes = dict(zip(op.outputs, option.writes, strict=True))

    def run(self) -> float:
        dense, operands, cotangents = self._dense()
        shares = {name: self._shares(name, x, self.reads[name], PARTIAL, is_grad=False) for name, x in operands.items()}
        parts = {name: self._shares(name, dy, self.writes[name], VARY, is_grad=True) for name, dy in cotangents.items()}
        instrs = [self._instructions(rank) for rank in range(self.ranks.degree)]

        def rank(axis: Axis) -> tuple[_Result, list[tuple[str, str, int]]]:
            r = axis.index
            own, cotangent = ({name: x[r] for name, x in held.items()} for held in (shares, parts))
            found = self._evaluate(instrs[r], own, cotangent, axis)
            return found, [(sent.kind, sent.phase, sent.num_bytes) for sent in axis.recorder.sent]

        ranks = run_lockstep(rank, self.ranks.degree)
        results = [result for result, _ in ranks]
        missing = [name for name in dense.grads if any(name not in r.grads for r in results)]
        if missing:
            raise Differs(f"no gradient reaches operand {missing[0]} on some rank")
        outputs, grads = {}, {}
        for name, layout in self.writes.items():
            outputs[name] = joined(f"output {name}", [r.outputs[name] for r in results], self._dims(name), layout, *self._lengths(name, layout))
        for name in dense.grads:
            layout = self.reads[name]
            grads[name] = joined_grad(f"gradient of {name}", [r.grads[name] for r in results], self._dims(name), layout, *self._lengths(name, layout))
        worst = max(distance(outputs, dense.outputs, "output"), distance(grads, dense.grads, "gradient of"))
        if not any("spans" in dict(instr.kwargs) for instr in instrs[0]):  # what those send depends on the number of ranks
            self._check_traffic([traffic for _, traffic in ranks])
        return worst

    def _dims(self, name: str) -> Dims:
        return [[self.graph.factor_sizes[f] for f in dim] for dim in self.graph.values[name].dims]

    def _lengths(self, name: str, layout: Layout) -> tuple[tuple[int, ...], int]:
        """How much of the factor that `layout` divides each rank holds, and has room for."""
        degree = self.ranks.degree
        if not isinstance(layout, Split):
            return (0,) * degree, 0
        factor = self.graph.values[name].dims[layout.dim][layout.factor]
        if self.ranks.rows and factor == self.graph.batch_factor:
            return self.ranks.rows, 0
        size = self.graph.factor_sizes[factor]
        return tuple(count(size, degree, r) for r in range(degree)), most(size, degree)

    def _shares(self, name: str, x: torch.Tensor, layout: Layout, summed: Layout, *, is_grad: bool) -> list[torch.Tensor]:
        return addends(x, self.ranks.degree) if layout == summed else cut(x, self._dims(name), layout, *self._lengths(name, layout), is_grad=is_grad)

    def _instructions(self, rank: int) -> tuple[Instr, ...]:
        """The local instructions that the compiler emits where operands lie as the option reads them."""
        total, own = self.graph.batch_size or 1, self.ranks.rows
        rows = Rows(own[rank], total, 1 / self.ranks.degree, len(set(own)) == 1) if own else Rows(total, total, 1.0, True)
        emitter = Emitter(self.graph, [AxisAssignment(self.ranks.axis, self.ranks.degree, (self.option,), self.reads)], rows, {})
        emitter.begin()
        emitter.emit(0)
        return tuple(_in_fp64(instr) for instr in emitter.pieces[0])

    def _dense(self) -> tuple[_Result, Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]:
        """The dense operator's result, its operands and cotangents; operands come from a domain where it gives numbers."""
        instrs = (_in_fp64(self.op.instr),)
        specs = tuple(self.graph.values[name].spec for name in self.op.operands)
        seed = zlib.crc32(self.op.instr.target.encode())
        for domain in DOMAINS:
            operands = dict(zip(self.op.operands, random_operands(self.op.instr, specs, seed, domain), strict=True))
            try:
                plain = self._evaluate(instrs, operands, {}, None)
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
        return self._evaluate(instrs, operands, cotangents, None), operands, cotangents

    def _evaluate(self, instrs: Sequence[Instr], operands: Mapping[str, torch.Tensor], cotangents: Mapping[str, torch.Tensor], axis: Axis | None) -> _Result:
        wanted = [name for name in operands if self.graph.values[name].requires_grad]
        env: dict[str, Any] = {name: x.detach().clone().requires_grad_(name in wanted) for name, x in operands.items()}
        leaves = {name: env[name] for name in wanted}
        row_start = sum(self.ranks.rows[: axis.index]) if axis is not None else 0
        with use_state(RandomState(seed=5, step=0, micro_batch=0, row_start=row_start, exact=True)):
            for instr in instrs:
                _call(instr, env, axis)
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

    def _check_traffic(self, ranks: list[list[tuple[str, str, int]]]) -> None:
        """What the ranks sent inside the operator is what its loop declares, in elements."""
        declared = []
        for kind, (side, i), phase, part in insides(self.graph, self.op, loop_of(self.graph, self.op, self.option.label)):
            names = self.op.operands if side == "in" else self.op.outputs
            declared.append((kind, phase, math.prod(self.graph.values[names[i]].spec.shape) * part))
        together: Counter[tuple[str, str, int]] = Counter()
        for index, sent in enumerate(ranks):
            found = Counter((kind, phase, num_bytes // 8) for kind, phase, num_bytes in sent)
            together += Counter({item: n for item, n in found.items() if item[0] == "send"})
            missing, extra = Counter(declared) - found, found - Counter(declared)
            is_end = index in (0, len(ranks) - 1)  # with a neighbour less to send to
            if extra or any(kind != "send" or not is_end for kind, _, _ in missing):
                raise Differs(f"it sends {sorted(found.elements())} (kind, pass, elements), its loop declares {sorted(declared)}")
        sends = [item for item in declared if item[0] == "send"]
        if len(together) and together != Counter(sends * (len(ranks) - 1)):
            raise Differs(f"all ranks together send {dict(together)}, the loop declares {sends} between neighbours")


def _in_fp64(instr: Instr) -> Instr:
    """The instruction with every floating dtype argument made float64."""

    def walk(arg: Arg) -> Arg:
        if isinstance(arg, Dtype):
            return Dtype("float64") if arg.name in FLOATS else arg
        return tuple(walk(item) for item in arg) if isinstance(arg, tuple) else arg

    return replace(instr, args=tuple(walk(arg) for arg in instr.args), kwargs=tuple((key, walk(arg)) for key, arg in instr.kwargs))


def _call(instr: Instr, env: dict[str, Any], axis: Axis | None) -> None:
    """Run one instruction; axis names become this rank's axis."""
    kwargs = {key: decode(arg, env, _CPU) for key, arg in instr.kwargs}
    for key in ("axis", "axes"):
        if key in kwargs:
            names = kwargs[key]
            assert axis is not None
            kwargs[key] = axis if isinstance(names, str) else tuple(axis for _ in names)
    result = resolve(instr.target)(*(decode(arg, env, _CPU) for arg in instr.args), **kwargs)
    for output, value in zip(instr.outputs, result if instr.is_sequence else (result,), strict=True):
        env[output.name] = value
