"""What the instructions of a program cost, one after the other: seconds, FLOPs, bytes moved and kept.

Every instruction is one of

    collective   runtime/collective.py: both passes at the bytes of its tensors
    exchange     attention over a divided sequence, experts on several ranks: autoplan/contextprice.py
    operator     priced on its local shapes (autoplan/price.py); an operator whose divided loop swapped in a function of the
                 runtime is priced as itself, with the collectives that the loop lists

What an operator saves for its backward pass is known by operand and output (Op.saved); views share the storage of what they look
at, and every storage counts once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from autoplan.blockprices import VIEWS
from autoplan.contextprice import EXCHANGING, both_passes, dense_operands, dense_output, kept
from autoplan.flops import backward_flops, flops
from autoplan.gathered import gathered_loops
from autoplan.graph import Graph, Op, insides
from autoplan.load import Traffic
from autoplan.price import CHAINS, Pricer, arguments, axis_group, bytes_of, cast_instr, compute_dtype, local_spec
from costmodel.opkey import CollectiveKind, OpKey, OpTime
from runtime.call import num_bytes as spec_bytes
from runtime.instr import Instr, TensorSpec, uses
from runtime.instr_traffic import GATHERED, backward_uses, forward_uses, with_room
from runtime.program import BlockCode, Body, Feed, Program, StageCode, Stored
from runtime.selective import Keeps, keeps
from runtime.split import puts_off

# Collectives of the passes: instruction -> (forward, backward).
COLLECTIVES: Mapping[str, tuple[CollectiveKind | None, CollectiveKind | None]] = {
    "runtime.vary": (None, "all_reduce"),
    "runtime.all_reduce": ("all_reduce", None),
    "runtime.all_gather": ("all_gather", None),
    "runtime.all_gather_vary": ("all_gather", "reduce_scatter"),
    "runtime.slice": (None, "all_gather"),
    "runtime.reduce_scatter": ("reduce_scatter", "all_gather"),
    "runtime.all_to_all": ("all_to_all", "all_to_all"),
    "runtime.share": (None, None),
}


@dataclass
class Tally:
    """Sums over the instructions of a block."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    forward_moved_s: float = 0.0
    backward_moved_s: float = 0.0
    forward_flops: int = 0
    backward_flops: int = 0
    extra_bytes: int = 0
    saved: dict[str, int] = field(default_factory=dict)  # storage -> bytes
    kept: dict[str, int] = field(default_factory=dict)  # what selective recomputation keeps: storage -> bytes
    kept_s: float = 0.0  # forward seconds that it does not repeat
    kept_moved_s: float = 0.0
    kept_flops: int = 0
    kept_traffic: list[Traffic] = field(default_factory=list)
    weights_s: float = 0.0  # of the backward pass, what a split one puts off
    put_off: dict[str, int] = field(default_factory=dict)  # what stays until then: tensor -> bytes
    traffic: list[Traffic] = field(default_factory=list)


class Reader:
    """Walks the blocks of one stage in order, knowing every local value."""

    def __init__(self, program: Program, stage: StageCode, body: Body, graph: Graph, pricer: Pricer) -> None:
        self.program, self.graph, self.pricer = program, graph, pricer
        self.degrees = dict(program.axes)
        self.specs: dict[str, TensorSpec] = {}
        self.grads: dict[str, bool] = {}
        self.roots: dict[str, str] = {}
        self.resting: set[str] = set()
        for stored in stage.stored:
            self.give(stored.name, TensorSpec(local_shape(stored, self.degrees), stored.spec.dtype), stored.requires_grad, resting=True)
        for feed in stage.feeds:
            self.give(feed.name, fed(feed, body.rows), False, resting=True)
        for transfer in body.receives:
            self.give(transfer.value, transfer.spec, transfer.grad, resting=False)
        for instr in program.preamble.instrs if program.preamble else ():
            for output in instr.outputs:
                if output.spec is not None:
                    self.give(output.name, output.spec, False, resting=True)

    def give(self, name: str, spec: TensorSpec, grad: bool, *, resting: bool) -> None:
        """Let a value be known that no instruction makes. `resting`: it is there anyway, so that saving it costs nothing."""
        self.specs[name], self.grads[name] = spec, grad
        if resting:
            self.resting.add(name)

    def block(self, code: BlockCode) -> Tally:
        """The sums over the next block."""
        tally = Tally()
        self.into(tally, code)
        return tally

    def into(self, tally: Tally, code: BlockCode, found: Keeps | None = None) -> None:
        """Add the next instructions of a block to a tally. `found`: what all of the block keeps, where these are a part of it."""
        found = found or keeps(code)
        for instr in code.instrs:
            self._instr(instr, code, found, tally)

    def instruction(self, instr: Instr, code: BlockCode, found: Keeps) -> Tally:
        """The next instruction of a block, which keeps what is `found`, alone."""
        tally = Tally()
        self.into(tally, replace(code, instrs=(instr,)), found)
        return tally

    def size(self, name: str) -> int:
        """Bytes of a local value as it is computed."""
        spec = self.specs[name]
        return bytes_of(spec.shape, compute_dtype(spec.dtype, self.pricer.precision))

    def _instr(self, instr: Instr, code: BlockCode, found: Keeps, tally: Tally) -> None:
        operands = [name for name in uses(instr) if name in self.specs]
        op = self._op(instr)
        for output in instr.outputs:
            if output.spec is None:
                continue
            self.specs[output.name] = output.spec
            value = self.graph.values.get(output.name)
            self.grads[output.name] = value.requires_grad if value is not None and op is not None else any(self.grads[n] for n in operands)
            if instr.target in VIEWS and operands:
                self.roots[output.name] = self.roots.get(operands[0], operands[0])
        if instr.target in COLLECTIVES:
            self._collective(instr, operands, tally, is_kept=instr.name in found.sums)
        elif instr.outputs[0].spec is not None or any(o.spec is not None for o in instr.outputs):
            self._compute(instr, code, found, op, operands, tally)

    def _op(self, instr: Instr) -> Op | None:
        index = next((self.graph.producer[o.name] for o in instr.outputs if o.name in self.graph.producer), None)
        return None if index is None else self.graph.ops[index]

    def _collective(self, instr: Instr, operands: list[str], tally: Tally, *, is_kept: bool) -> None:
        axis = dict(instr.kwargs)["axis"]
        assert isinstance(axis, str)
        forward, backward = COLLECTIVES[instr.target]
        source, result = operands[0], instr.outputs[0].name
        size = max(self.size(source), with_room(instr, self.size(result), self.degrees.get(axis, 1)))
        before_s, before = tally.forward_moved_s, len(tally.traffic)
        self._move(forward, axis, "forward", size, tally)
        if is_kept:
            tally.kept[result] = self.size(result)
            tally.kept_moved_s += tally.forward_moved_s - before_s
            tally.kept_traffic += tally.traffic[before:]
        if self.grads[result]:
            self._move(backward, axis, "backward", size, tally)

    def _move(self, kind: CollectiveKind | None, axis: str, phase: str, num_bytes: int, tally: Tally) -> None:
        """`num_bytes`: of the whole tensor; of the local one for all_to_all."""
        if kind is None or self.degrees.get(axis, 1) == 1:
            return
        seconds = self.pricer.collective(kind, num_bytes, axis_group(self.program.axes, axis, self.pricer.device))
        if phase == "forward":
            tally.forward_moved_s += seconds
        else:
            tally.backward_moved_s += seconds
        whole = num_bytes * self.degrees[axis] if kind == "all_to_all" else num_bytes
        tally.traffic.append(Traffic(kind, axis, phase, whole))

    def _compute(self, instr: Instr, code: BlockCode, found: Keeps, op: Op | None, operands: list[str], tally: Tally) -> None:
        specs = [self.specs[name] for name in operands]
        outputs = [o for o in instr.outputs if o.spec is not None]
        swapped = op is not None and instr.target.startswith("runtime.") and instr.target != op.instr.target
        priced = op.instr if swapped and op is not None else instr
        if instr.target in CHAINS:
            priced = replace(priced, target=instr.target)
        specs = self._gathered(instr, specs)
        out_specs = [o.spec for o in outputs if o.spec is not None]
        exchanges = instr.target in EXCHANGING
        if exchanges:
            num_ranks = self.degrees.get(_axis_of(instr), 1)
            shapes = dense_operands(instr.target, [spec.shape for spec in specs], num_ranks)
            local, specs = specs, [TensorSpec(shape, spec.dtype) for shape, spec in zip(shapes, specs, strict=True)]
            out_specs = [TensorSpec(dense_output(instr.target, spec.shape, num_ranks), spec.dtype) for spec in out_specs]
        number = flops(priced.target, specs, out_specs, priced.args)
        has_grad = any(self.grads[o.name] for o in outputs)
        time = self._time(priced, operands, specs, out_specs, number)
        if exchanges:
            self._exchange(instr, local, time, has_grad, tally)
        tally.forward_s += time.forward_s
        tally.backward_s += time.backward_s if has_grad else 0.0
        tally.forward_flops += number
        tally.backward_flops += backward_flops(priced.target, number, [self.grads[name] for name in operands]) if has_grad else 0
        if instr.name in found.kept:
            tally.kept_s += time.forward_s
            tally.kept_flops += number
            tally.kept.update((o.name, self.size(o.name)) for o in outputs if o.name not in found.summed)
        if puts_off(instr, code.stored) and self.grads[operands[0]] and self.grads[operands[1]]:
            tally.weights_s += time.backward_weight_s
            root = self.roots.get(operands[0], operands[0])
            tally.put_off.update({root: self.size(root), f"gradient of {outputs[0].name}": self.size(outputs[0].name)})
        if op is None:
            return
        if swapped:
            self._inner(instr, op, operands, tally)
        if has_grad:
            self._saved(instr, op, operands, tally)

    def _exchange(self, instr: Instr, operands: list[TensorSpec], time: OpTime, has_grad: bool, tally: Tally) -> None:
        axis, precision = _axis_of(instr), self.pricer.precision
        if self.degrees.get(axis, 1) == 1:
            return
        specs = [local_spec(spec, precision) for spec in operands]
        group = axis_group(self.program.axes, axis)
        forward, backward, forward_s, backward_s = both_passes(instr.target, specs, (time.forward_s, time.backward_s), group, self.pricer)
        tally.forward_moved_s += forward_s
        tally.traffic += [Traffic(kind, axis, "forward", size) for kind, size in forward]
        if has_grad:
            tally.backward_moved_s += backward_s
            tally.traffic += [Traffic(kind, axis, "backward", size) for kind, size in backward]

    def _gathered(self, instr: Instr, specs: list[TensorSpec]) -> list[TensorSpec]:
        """Operands as a product that gathers them inside sees them."""
        given = dict(instr.kwargs)
        axes, gathers = given.get("axes"), given.get("gathers")
        for axis, place in zip(axes, gathers, strict=True) if isinstance(axes, tuple) and isinstance(gathers, tuple) else ():
            assert isinstance(axis, str) and isinstance(place, tuple)
            operand, dim, *_ = (n for n in place if isinstance(n, int))
            shape = list(specs[operand].shape)
            shape[dim] *= self.degrees.get(axis, 1)
            specs = [TensorSpec(tuple(shape), spec.dtype) if i == operand else spec for i, spec in enumerate(specs)]
        return specs

    def _time(self, instr: Instr, operands: list[str], specs: Iterable[TensorSpec], outputs: Iterable[TensorSpec], number: int) -> OpTime:
        precision = self.pricer.precision
        key = OpKey(
            instr.target,
            tuple((s.shape, s.dtype) for s in (local_spec(s, precision) for s in specs)),
            tuple((s.shape, s.dtype) for s in (local_spec(s, precision) for s in outputs)),
            arguments(cast_instr(instr, precision) if precision else instr),
            tuple(self.grads[n] for n in operands),
            number,
        )
        return self.pricer.op(key)

    def _inner(self, instr: Instr, op: Op, operands: list[str], tally: Tally) -> None:
        if instr.target in GATHERED or "spans" in dict(instr.kwargs):
            needs = frozenset(name for name in operands if self.grads[name])
            has_grad = instr.target in GATHERED or operands[0] in needs
            sent = [("forward", use) for use in forward_uses(instr, self.specs, self.degrees)]
            sent += [("backward", use) for use in backward_uses(instr, self.specs, self.degrees, needs) if has_grad]
            for phase, use in sent:
                size = use.num_bytes * self.size(operands[0]) // spec_bytes(self.specs[operands[0]])  # as it is computed
                self._move(use.kind, use.axis, phase, size, tally)  # type: ignore[arg-type]
            return
        kwargs = dict(instr.kwargs)
        axes, dims = kwargs.get("axis"), kwargs.get("dims")
        names = axes if isinstance(axes, tuple) else (axes,)
        for number, axis in enumerate(names):
            dim = dims[number] if isinstance(dims, tuple) else None
            fitting = (
                loop
                for loop in (*op.loops, *gathered_loops(self.graph, op))
                if loop.lowering == instr.target and (dim is None or (loop.reads[0] and loop.reads[0].dim == dim))
            )
            loop = next(fitting, None)
            if loop is None:
                return
            assert isinstance(axis, str)
            for kind, (side, position), phase, part in insides(self.graph, op, loop):
                name = operands[position] if side == "in" else op.outputs[position]
                where = (loop.reads if side == "in" else loop.writes)[position]
                size = self.size(name) * (self.degrees.get(axis, 1) if where is not None else 1)
                self._move(kind, axis, phase, int(size * part), tally)  # type: ignore[arg-type]

    def _keep(self, names: Iterable[str], tally: Tally) -> None:
        for name in names:
            root = self.roots.get(name, name)
            if root not in self.resting and root in self.specs:
                tally.saved[root] = self.size(root)

    def _saved(self, instr: Instr, op: Op, operands: list[str], tally: Tally) -> None:
        if instr.target in EXCHANGING:
            specs = [local_spec(self.specs[name], self.pricer.precision) for name in operands]
            indices, keeps_output, extra = kept(instr.target, specs, self.degrees.get(_axis_of(instr), 1))
            self._keep([*(operands[i] for i in indices), *([instr.outputs[0].name] if keeps_output else [])], tally)
            tally.extra_bytes += extra
            return
        if len(operands) != len(op.operands) or (instr.target.split(".")[1] != op.instr.target.split(".")[1] and not instr.target.startswith("runtime.")):
            names = [operands[1] if instr.target.startswith("aten.addmm") else operands[0]]  # a bias was given back to its product
        else:
            local = dict(zip(op.operands, operands, strict=True))
            names = [local.get(name, name) for name in op.saved]
        self._keep(names, tally)
        if op.saved_extra_bytes:
            names = list(zip((*op.operands, *op.outputs), (*operands, *op.outputs), strict=False))
            whole, here = max((math.prod(self.graph.values[n].spec.shape), math.prod(self.specs[local].shape)) for n, local in names)
            tally.extra_bytes += op.saved_extra_bytes * here // max(1, whole)


def _axis_of(instr: Instr) -> str:
    axis = dict(instr.kwargs)["axis"]
    assert isinstance(axis, str)
    return axis


def local_shape(stored: Stored, degrees: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of a tensor at rest on one rank, before ZeRO."""
    return stored.local_shape(degrees)


def fed(feed: Feed, rows: int) -> TensorSpec:
    """What a rank reads of the batch for `rows` rows."""
    if feed.batch_dim is None:
        return feed.spec
    shape = list(feed.spec.shape)
    shape[feed.batch_dim] = rows
    return TensorSpec(tuple(shape), feed.spec.dtype)
