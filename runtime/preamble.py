"""The preamble made ready: its sums over ranks run beside the passes, until a block reads what follows from them.

    head     everything that no sum leads to: at once
    sums     all_reduces of what the head gives: begun at once, in the order of the program
    tail     what is made of the sums, when the first of the preamble's values is read (in a step the loss, at its end)

Where the tail would communicate itself, all is done at once: its place among the collectives of other blocks would not be the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from runtime.collective import Begun
from runtime.compile import Compiled, compile_block
from runtime.instr import Instr, uses
from runtime.mesh import Axis, Mesh
from runtime.program import BlockCode

_SUM = "runtime.all_reduce"


@dataclass(frozen=True, eq=False)
class Preamble:
    """`head(*inputs, *stored) -> given`, then `sums` (given value, axis, name of the sum), then `tail(*given, *sums) -> outputs`."""

    code: BlockCode
    head: Compiled
    given: tuple[str, ...]
    sums: tuple[tuple[str, Axis, str], ...]
    tail: Compiled | None  # None: the head makes all outputs

    def begin(self, *args: torch.Tensor) -> Mapping[str, Coming]:
        """The outputs by name, on their way. All ranks call it at the same place."""
        made = dict(zip(self.given if self.tail is not None else self.code.outputs, self.head(*args), strict=True))
        begun = []
        for operand, axis, name in self.sums:
            total = made[operand].clone(memory_format=torch.contiguous_format)
            if axis.size > 1:
                begun.append(_begin(axis, total))
            made[name] = total
        left = _Left(self, made, begun)
        return {name: Coming(left, name) for name in self.code.outputs}


def _begin(axis: Axis, total: torch.Tensor) -> Begun:
    return Begun(axis, "all_reduce", total.nbytes, lambda: dist.all_reduce(total, group=axis.group, async_op=True), is_hidden=True)


class _Left:
    """What is still to do of a preamble."""

    def __init__(self, preamble: Preamble, made: dict[str, torch.Tensor], begun: list[Begun]) -> None:
        self._preamble, self._made, self._begun = preamble, made, begun
        self._is_over = preamble.tail is None

    def finish(self) -> Mapping[str, torch.Tensor]:
        """The outputs, waited for."""
        if not self._is_over:
            for begun in self._begun:
                begun.wait()
            tail, names = self._preamble.tail, (*self._preamble.given, *(name for _, _, name in self._preamble.sums))
            assert tail is not None
            with torch.no_grad():
                self._made = dict(zip(self._preamble.code.outputs, tail(*(self._made[name] for name in names)), strict=True))
            self._begun, self._is_over = [], True
        return self._made


class Coming:
    """A value of the preamble, on its way."""

    def __init__(self, left: _Left, name: str) -> None:
        self._left, self._name = left, name

    def arrived(self) -> torch.Tensor:
        """The value, waited for."""
        return self._left.finish()[self._name]


def make_preamble(code: BlockCode, mesh: Mesh, *, is_paced: bool = False) -> Preamble:
    """A preamble ready to run. `is_paced`: the time of its sums is told, not hidden."""
    sums = [instr for instr in code.instrs if instr.target == _SUM]
    late = {instr.name for instr in sums}
    tail: list[Instr] = []
    for instr in code.instrs:
        if instr.target != _SUM and late & set(uses(instr)):
            tail.append(instr)
            late.update(output.name for output in instr.outputs)
    talks = any(key in ("axis", "axes") for instr in tail for key, _ in instr.kwargs)
    nested = any(late & set(uses(instr)) for instr in sums)
    if is_paced or not sums or talks or nested:
        return Preamble(code, compile_block(code, mesh), (), (), None)
    first = tuple(instr for instr in code.instrs if instr.target != _SUM and instr not in tail)
    operands = {instr.name: uses(instr)[0] for instr in sums}
    known = (*code.inputs, *code.stored, *(output.name for instr in first for output in instr.outputs))
    wanted = {*operands.values(), *(name for instr in tail for name in uses(instr)), *code.outputs}
    given = tuple(name for name in dict.fromkeys(known) if name in wanted)
    head = replace(code, instrs=first, outputs=given)
    after = replace(code, inputs=(*given, *operands), stored=(), instrs=tuple(tail))
    axes = {instr.name: mesh.axis(str(dict(instr.kwargs)["axis"])) for instr in sums}
    return Preamble(
        code, compile_block(head, mesh), given, tuple((operand, axes[name], name) for name, operand in operands.items()), compile_block(after, mesh)
    )
