"""Which values of a stage carry gradients: read from the program's text alone.

A value *needs* a gradient if a trainable parameter or a received value with a gradient leads to it through differentiable
operators; a gradient *arrives* at it if, besides, the loss or a value that is sent with its gradient is reached from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from runtime.instr import Instr, uses
from runtime.program import BlockCode, Body, Program, StageCode, Stored

_DIFFERENTIABLE = ("float", "bfloat", "complex")
_CUT = ("detach", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "new_zeros", "new_ones", "new_full", "new_empty")


@dataclass(frozen=True, slots=True)
class Flow:
    """`needs`: values that require a gradient; `arrives`: those that get one in the backward pass."""

    needs: frozenset[str]
    arrives: frozenset[str]


def passes_gradient(instr: Instr) -> bool:
    """Whether a gradient of the instruction's outputs reaches its operands."""
    name = instr.target.split(".")[1]
    return name not in _CUT


def _floats(instr: Instr) -> tuple[str, ...]:
    return tuple(o.name for o in instr.outputs if o.spec is None or o.spec.dtype.startswith(_DIFFERENTIABLE))


def flow(stage: StageCode, body: Body) -> Flow:
    """The gradients of one micro-batch."""
    needs = {s.name for s in stage.stored if s.kind == "parameter" and s.requires_grad} | {t.value for t in body.receives if t.grad}
    instrs = [instr for block in body.blocks for instr in block.instrs]
    for instr in instrs:
        if passes_gradient(instr) and any(name in needs for name in uses(instr)):
            needs.update(_floats(instr))
    arrives = {t.value for t in body.sends if t.grad} | ({stage.loss} if stage.loss else set())
    arrives &= needs
    for instr in reversed(instrs):
        if passes_gradient(instr) and any(name in arrives for name in _floats(instr)):
            arrives.update(name for name in uses(instr) if name in needs)
    return Flow(frozenset(needs), frozenset(arrives))


def trained(program: Program) -> tuple[tuple[int, Stored], ...]:
    """(stage, parameter) of every trainable parameter that a gradient arrives at, in the order of the program; tied ones on every stage."""
    found = []
    for stage in program.stages:
        arrives = flow(stage, stage.bodies[0]).arrives
        found += [(stage.index, s) for s in stage.stored if s.kind == "parameter" and s.requires_grad and s.name in arrives]
    return tuple(found)


def has_backward(block: BlockCode, found: Flow) -> bool:
    """Whether the backward pass goes through the block."""
    return any(name in found.arrives for name in block.outputs if name in found.needs)


def users(stage: StageCode) -> Mapping[str, tuple[str, ...]]:
    """The blocks that read each stored value."""
    out: dict[str, list[str]] = {stored.name: [] for stored in stage.stored}
    for block in stage.bodies[0].blocks:
        for name in block.stored:
            out[name].append(block.name)
    return {name: tuple(blocks) for name, blocks in out.items()}


def groups(stage: StageCode, *, is_split_backward: bool) -> tuple[tuple[str | None, tuple[str, ...]], ...]:
    """Which parameters FSDP2 gathers together: (block, names), the stage's own (None) last. Trainable dtypes are kept apart.

    A value that one block reads belongs to it, others to the stage; with a split backward pass all belong to the stage, since
    nested groups give wrong gradients there.
    """
    out: dict[tuple[str | None, int], list[str]] = {}
    read_by = users(stage)
    order = [block.name for block in stage.bodies[0].blocks]
    layers: dict[str | None, list[str]] = {}
    for stored in stage.stored:
        if stored.kind != "parameter":
            continue
        blocks = read_by[stored.name]
        owner = blocks[0] if len(blocks) == 1 and not is_split_backward else None
        dtypes = layers.setdefault(owner, [])
        if stored.requires_grad and stored.spec.dtype not in dtypes:
            dtypes.append(stored.spec.dtype)
        layer = dtypes.index(stored.spec.dtype) if stored.requires_grad else 0
        out.setdefault((owner, layer), []).append(stored.name)
    place = {name: i for i, name in enumerate([*order, None])}
    return tuple((owner, tuple(names)) for (owner, _), names in sorted(out.items(), key=lambda item: (place[item[0][0]], item[0][1])))
