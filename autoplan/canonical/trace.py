"""The trace: what the passes of the canonical form work on, and the rewriter that they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autoplan.graph import ValueKind
from runtime.call import decode, dtype_of, resolve, spec_of
from runtime.instr import Arg, Instr, Output, Ref, TensorSpec, uses


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor that no step defines."""

    kind: ValueKind
    spec: TensorSpec
    requires_grad: bool = False
    fqn: str = ""
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """One operator call and where it came from."""

    instr: Instr
    module: str = ""
    source: str = ""


@dataclass(frozen=True)
class Trace:
    """Straight-line code: `steps` in order, `leaves` by name, the data of constant leaves, and what must stay alive."""

    leaves: Mapping[str, Leaf]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    buffer_updates: tuple[tuple[str, str], ...] = ()
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    storages: Mapping[str, int] = field(default_factory=dict)  # value -> identity of its memory in the exported program
    warnings: tuple[str, ...] = ()

    def specs(self) -> dict[str, TensorSpec]:
        found = {name: leaf.spec for name, leaf in self.leaves.items()}
        found.update((out.name, out.spec) for step in self.steps for out in step.instr.outputs if out.spec is not None)
        return found


def substitute(arg: Any, names: Mapping[str, str]) -> Any:
    """`arg` with every reference renamed by `names`."""
    if isinstance(arg, Ref):
        return Ref(names[arg.name]) if arg.name in names else arg
    if isinstance(arg, tuple):
        return tuple(substitute(item, names) for item in arg)
    return arg


def infer(target: str, args: Sequence[Arg], kwargs: Sequence[tuple[str, Arg]], specs: Mapping[str, TensorSpec]) -> tuple[TensorSpec | None, ...]:
    """Specs of the results of one call, found by running it on the meta device. An entry is None for no tensor."""
    meta = torch.device("meta")

    class Env(dict[str, Any]):
        def __missing__(self, name: str) -> torch.Tensor:
            return torch.empty(specs[name].shape, dtype=dtype_of(specs[name].dtype), device=meta)

    env = Env()
    with torch.no_grad():
        result = resolve(target)(*(decode(a, env, meta) for a in args), **{k: decode(a, env, meta) for k, a in kwargs})
    results = result if isinstance(result, (tuple, list)) else (result,)
    return tuple(spec_of(r) if isinstance(r, torch.Tensor) else None for r in results)


class Rewriter:
    """Builds a trace from another one, step by step: keep, change, emit new steps, rename values.

    A value that is renamed by `rename` disappears: later uses read the new name.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.specs = trace.specs()
        self.steps: list[Step] = []
        self.names: dict[str, str] = {}
        self.leaves = dict(trace.leaves)
        self.constants = dict(trace.constants)
        self.warnings = list(trace.warnings)
        self.buffer_updates = list(trace.buffer_updates)

    def fresh(self, stem: str) -> str:
        """An unused value name that begins with `stem`."""
        name, i = stem, 0
        while name in self.specs:
            i += 1
            name = f"{stem}_{i}"
        return name

    def now(self, name: str) -> str:
        """What stands for the old value `name` at present."""
        return self.names.get(name, name)

    def args(self, step: Step) -> tuple[Arg, ...]:
        return substitute(step.instr.args, self.names)

    def kwargs(self, step: Step) -> tuple[tuple[str, Arg], ...]:
        return tuple((k, substitute(a, self.names)) for k, a in step.instr.kwargs)

    def keep(self, step: Step, target: str | None = None, args: tuple[Arg, ...] | None = None, kwargs: tuple[tuple[str, Arg], ...] | None = None) -> None:
        """The step with its outputs as they are, and target or arguments changed where given."""
        instr = replace(
            step.instr,
            target=step.instr.target if target is None else target,
            args=self.args(step) if args is None else args,
            kwargs=self.kwargs(step) if kwargs is None else kwargs,
        )
        self.steps.append(replace(step, instr=instr))

    def rename(self, old: str, new: str) -> None:
        self.names[old] = new

    def emit(
        self,
        like: Step,
        target: str,
        args: tuple[Arg, ...],
        kwargs: tuple[tuple[str, Arg], ...] = (),
        spec: TensorSpec | None = None,
        stem: str | None = None,
    ) -> str:
        """A new step with one output, placed where `like` was. `args` name present values. Returns the output's name."""
        if spec is None:
            (spec,) = infer(target, args, kwargs, self.specs)
        assert spec is not None, target
        name = self.fresh(stem or target.split(".")[1])
        self.specs[name] = spec
        self.steps.append(Step(Instr((Output(name, spec),), target, args, kwargs), like.module, like.source))
        return name

    def constant(self, data: torch.Tensor, stem: str = "constant") -> str:
        """A new constant leaf."""
        name = self.fresh(stem)
        self.specs[name] = spec_of(data)
        self.leaves[name] = Leaf("constant", self.specs[name])
        self.constants[name] = data
        return name

    def finish(self) -> Trace:
        """The new trace, without the steps and constants that nothing needs."""
        outputs = tuple(self.now(name) for name in self.trace.outputs)
        updates = tuple((buffer, self.now(value)) for buffer, value in self.buffer_updates)
        needed = set(outputs) | {value for _, value in updates}
        kept: list[Step] = []
        for step in reversed(self.steps):
            if any(out.name in needed for out in step.instr.outputs):
                kept.append(step)
                needed.update(uses(step.instr))
        leaves = {name: leaf for name, leaf in self.leaves.items() if leaf.kind != "constant" or name in needed}
        constants = {name: data for name, data in self.constants.items() if name in leaves}
        return Trace(leaves, tuple(reversed(kept)), outputs, updates, constants, self.trace.storages, tuple(self.warnings))
