"""Paced devices: the real executor, schedule, process groups, ZeRO, transfers and sums of gradients, with sleeping in the place of computing.

Where many ranks share few cores they fight for them, and nothing about a plan can be measured. A paced block takes as long as its operators are said to
take, one after the other, and gives tensors of the right shape that hold zeros; so do its gradients. Its collectives are met by all ranks and take
their time, but carry a moment instead of their bytes (runtime/paceclock.py); everything outside blocks moves what it always moves, and takes its time too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from runtime.call import dtype_of
from runtime.code import Code
from runtime.collective import everyone, meet, wait
from runtime.flow import Flow, flow
from runtime.instr import Ref, TensorSpec
from runtime.instr_traffic import Use, backward_uses, forward_uses, gradient_passes
from runtime.master import master_of
from runtime.maxplus import Span, Together, together
from runtime.mesh import Mesh, plane_axis
from runtime.paceclock import Links, PacedClock
from runtime.preamble import Preamble, make_preamble
from runtime.program import BlockCode, Program
from runtime.selective import keeps
from runtime.split import WeightGrads
from runtime.traffic import body_specs


@dataclass(frozen=True, slots=True)
class InstrPace:
    """Seconds of one instruction without its collectives. `weights_s`: what a split backward pass puts off, not part of `backward_s`;
    `again_s`: of the forward pass, what recomputation repeats."""

    forward_s: float
    backward_s: float
    weights_s: float
    again_s: float


BlockPace = tuple[InstrPace, ...]  # of the instructions of a block, in order


@dataclass(frozen=True)
class Pace:
    """How long everything takes on one rank. `blocks` by (stage, rows, block name), the preamble's as (-1, 0, its name)."""

    blocks: Mapping[tuple[int, int, str], BlockPace]
    links: Links
    optimizer_s: float = 0.0  # of an optimizer's step; whoever makes it sleeps (`clock_of`)
    slack_s: float = 0.0


Pacer = Callable[[Program], Pace]


def clock_of(mesh: Mesh) -> PacedClock:
    """The clock of a paced rank."""
    clock = mesh.recorder.clock
    assert isinstance(clock, PacedClock), "the device is not paced"
    return clock


def paced(code: Code, pace: Pace, mesh: Mesh) -> Code:
    """`code` with paced blocks, on a mesh whose clock becomes a paced one. Raises ValueError for what cannot be paced."""
    _check(code.program)
    if not isinstance(mesh.recorder.clock, PacedClock):
        plane = plane_axis(mesh, [name for name in mesh.axes if name not in ("pp", "dp")])
        mesh.recorder.clock = PacedClock(pace.links, pace.slack_s, plane=plane if plane.size > 1 else None)
    blocks: dict[tuple[int, int], list[_PacedBlock]] = {}
    for (index, rows), body in code.bodies.items():
        stage = code.stages[index]
        at = next(found for found in stage.bodies if found.rows == rows)
        specs, carries = body_specs(stage, at, dict(code.program.axes)), flow(stage, at)
        later = code.storages[index].later
        blocks[index, rows] = [_block(s.code, _pace_of(pace, stage.index, rows, s.code), specs, carries, mesh, later) for s in body.steps]
    met = iter(_met([block for own in blocks.values() for block in own], mesh))
    bodies = {}
    for key, body in code.bodies.items():
        bodies[key] = replace(body, steps=tuple(replace(step, compiled=next(met)) for step in body.steps))
    preamble = _preamble(code.program, pace, mesh)
    at_once = None if preamble is None else replace(preamble[0], head=_met([preamble[1]], mesh)[0])
    return replace(code, bodies=bodies, preamble=at_once, has_all_sums=False)  # what ranks tell each other meets their clocks at the end


def _check(program: Program) -> None:
    if program.meshes:
        raise ValueError("stages with meshes of their own cannot be paced: its links are those of one mesh's axes. Give all stages one mesh")
    if program.sync != "allreduce" or program.delay:
        what = f"sync={program.sync!r}" if program.sync != "allreduce" else f"delay={program.delay}"
        raise ValueError(f"{what} works beside the step, which paced devices do not: plan with sync='allreduce' and delay=0")
    if program.meshes:
        raise ValueError("stages with meshes of their own send pieces, whose times paced devices do not know: plan with one mesh")
    for axis in ("cp", "ep"):
        if dict(program.axes).get(axis, 1) > 1:
            raise ValueError(f"paced devices do not know the messages of axis {axis!r}: plan with {axis}=1")


def _pace_of(pace: Pace, stage: int, rows: int, code: BlockCode) -> BlockPace:
    found = pace.blocks.get((stage, rows, code.name))
    if found is None or len(found) != len(code.instrs):
        raise ValueError(f"the pace has no times for block {code.name!r} of stage {stage} with {rows} rows: make it from this program")
    return found


def _preamble(program: Program, pace: Pace, mesh: Mesh) -> tuple[Preamble, _PacedBlock] | None:
    if program.preamble is None:
        return None
    specs = {feed.name: feed.spec for feed in program.preamble_feeds}
    specs.update((o.name, o.spec) for instr in program.preamble.instrs for o in instr.outputs if o.spec is not None)
    block = _block(program.preamble, _pace_of(pace, -1, 0, program.preamble), specs, Flow(frozenset(), frozenset()), mesh, None)
    return make_preamble(program.preamble, mesh, is_paced=True), block


# -- one block ------------------------------------------------------------------------------------------------------------

Leg = Span | Together


@dataclass(frozen=True, eq=False)
class _PacedBlock:
    """What a compiled block is to the executor: `f(*inputs, *stored) -> outputs`. Positions count the arguments, or the outputs."""

    outputs: tuple[TensorSpec, ...]
    differentiable: tuple[int, ...]
    arrives: frozenset[int]  # arguments that get a gradient
    forward: tuple[Leg, ...]
    again: tuple[Leg, ...]
    backward: tuple[Leg, ...]
    put_off: tuple[tuple[int, float], ...]  # weights whose gradients come later, with seconds
    later: WeightGrads | None
    mesh: Mesh

    def __call__(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.take(self.again if self.mesh.recorder.phase == "backward" else self.forward)
        made = tuple(torch.zeros(spec.shape, dtype=dtype_of(spec.dtype), device=self.mesh.device) for spec in self.outputs)
        if not (torch.is_grad_enabled() and self.differentiable and any(args[i].requires_grad for i in self.arrives)):
            return made
        found = _Pace.apply(self, *args)
        assert isinstance(found, tuple)
        return tuple(found[self.differentiable.index(i)] if i in self.differentiable else value for i, value in enumerate(made))

    def take(self, legs: Iterable[Leg]) -> None:
        """Let the time of a pass go by."""
        for leg in legs:
            if isinstance(leg, Together):
                self._pass(leg)
            elif isinstance(leg, Use):
                axis = self.mesh.axis(leg.axis)
                wait(axis, leg.kind, leg.num_bytes, lambda: None)
            else:
                clock_of(self.mesh).rest(leg)

    def _pass(self, leg: Together) -> None:
        clock = clock_of(self.mesh)
        assert clock.plane is not None
        *moments, end_s = leg.moments(meet(clock.plane, clock.ready_s()))
        for use, began_s, ended_s in zip(leg.uses, moments[0::2], moments[1::2], strict=True):
            self.mesh.recorder.add(use.kind, use.axis, use.num_bytes, began_s, ended_s)
        clock.reach(end_s)


class _Pace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: _PacedBlock, *args: torch.Tensor) -> Any:
        ctx.block, ctx.set_materialize_grads = block, False
        ctx.likes = [(x.shape, x.dtype, x.device) for x in args]
        ctx.later = [(master_of(args[i]), args[i].shape, args[i].dtype, seconds) for i, seconds in block.put_off if args[i].requires_grad]
        ctx.save_for_backward(torch.zeros(1))  # what a recomputed block is run again for
        return tuple(torch.zeros(block.outputs[i].shape, dtype=dtype_of(block.outputs[i].dtype), device=block.mesh.device) for i in block.differentiable)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        block: _PacedBlock = ctx.block
        assert len(ctx.saved_tensors) == 1
        block.take(block.backward)
        if block.later is not None:
            for weight, shape, dtype, seconds in ctx.later:
                block.later.pending.append((weight, lambda s=shape, d=dtype, t=seconds: _rested(block.mesh, s, d, t)))
        off = {i for i, _ in block.put_off} if block.later is not None else set()
        needed = [i in block.arrives and i not in off and ctx.needs_input_grad[i + 1] for i in range(len(ctx.likes))]
        zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.likes)
        return None, *(zero if is_needed else None for zero, is_needed in zip(zeros, needed, strict=True))


def _rested(mesh: Mesh, shape: torch.Size, dtype: torch.dtype, seconds: float) -> torch.Tensor:
    clock_of(mesh).rest(seconds)
    return torch.zeros(shape, dtype=dtype, device=mesh.device)


def _block(code: BlockCode, pace: BlockPace, specs: Mapping[str, TensorSpec], carries: Flow, mesh: Mesh, later: WeightGrads | None) -> _PacedBlock:
    names = code.inputs + code.stored
    sizes = {name: axis.size for name, axis in mesh.axes.items()}
    forward, again, backward, put_off = [], [], [], []
    once = keeps(code).sums if code.recompute == "selective" else frozenset()
    for instr, one in zip(code.instrs, pace, strict=True):
        sent = list(_reaching(forward_uses(instr, specs, sizes), mesh, code))
        forward += [one.forward_s, *sent]
        again += [one.again_s, *(() if instr.name in once else sent)]
        passes = gradient_passes(instr, carries)
        back = list(_reaching(backward_uses(instr, specs, sizes, carries.needs), mesh, code)) if passes else []
        weight = instr.args[1] if one.weights_s and len(instr.args) > 1 else None
        is_split = later is not None and isinstance(weight, Ref) and weight.name in names
        if is_split and isinstance(weight, Ref):
            put_off.append((names.index(weight.name), one.weights_s))
        backward += [*reversed(back), one.backward_s + (0.0 if is_split else one.weights_s)]
    outputs = tuple(specs[name] for name in code.outputs)
    floats = tuple(i for i, name in enumerate(code.outputs) if name in carries.needs and dtype_of(specs[name].dtype).is_floating_point)
    arrives = frozenset(i for i, name in enumerate(names) if name in carries.arrives)
    return _PacedBlock(outputs, floats, arrives, _merged(forward), _merged(again), _merged(reversed(backward)), tuple(put_off), later, mesh)


def _reaching(uses: Iterable[Use], mesh: Mesh, code: BlockCode) -> Iterator[Use]:
    for use in uses:
        if use.kind == "send":
            raise ValueError(f"block {code.name!r} exchanges borders on axis {use.axis!r}, which paced devices do not know: plan without domain parallelism")
        yield use


def _met(blocks: list[_PacedBlock], mesh: Mesh) -> list[_PacedBlock]:
    """Blocks whose ranks have told each other what they do. All ranks of the plane call it."""
    clock = clock_of(mesh)
    plane = clock.plane
    if plane is None:
        return blocks
    told: list[list[list[tuple[Span, ...]]]] = everyone(plane, [[block.forward, block.again, block.backward] for block in blocks])
    wide = [(axis.name, axis.size) for axis in mesh.axes.values() if axis.size > 1 and axis.name not in ("pp", "dp")]
    grid = torch.arange(plane.size).reshape([size for _, size in wide])
    lines = {name: grid.movedim(i, -1).reshape(-1, size).tolist() for i, (name, size) in enumerate(wide)}

    def seconds(use: Use, group: Sequence[int]) -> float:
        return clock.links.seconds(use.kind, use.axis, use.num_bytes, tuple(plane.ranks[place] for place in group))

    def legs(of_ranks: list[tuple[Span, ...]]) -> Iterator[Leg]:
        is_alone = lambda step: isinstance(step[0], Use) and step[0].axis not in lines  # noqa: E731
        for alone, steps in itertools.groupby(zip(*of_ranks, strict=True), is_alone):
            own = list(steps)
            if alone or not any(isinstance(step[0], Use) for step in own):
                yield from (step[plane.index] for step in own)
            else:
                yield together(list(zip(*own, strict=True)), plane.index, lines.__getitem__, seconds)

    found = []
    for i, block in enumerate(blocks):
        passes = (tuple(legs([rank[i][j] for rank in told])) for j in range(3))
        found.append(replace(block, **dict(zip(("forward", "again", "backward"), passes, strict=True))))
    return found


def _merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Neighbouring seconds added up."""
    found: list[Span] = []
    for is_use, group in itertools.groupby(spans, lambda span: isinstance(span, Use)):
        parts = list(group)
        found += parts if is_use else [sum(part for part in parts if not isinstance(part, Use))]
    return tuple(found)
