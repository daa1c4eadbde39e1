"""Graphs of one operator, for tests of rules: `single("aten.linear.default", T(4, 6), T(10, 6))`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from autoplan.canonical.trace import infer
from autoplan.factors import annotate
from autoplan.graph import Graph, Op, Value
from autoplan.rules.registry import DEFAULT, Registry
from runtime.call import decode, dtype_of, resolve, spec_of
from runtime.instr import Arg, Dtype, Instr, Output, Ref, TensorSpec


@dataclass(frozen=True)
class T:
    """A tensor argument."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    grad: bool = True


def t(*shape: int) -> T:
    return T(shape)


def ints(*shape: int) -> T:
    return T(shape, "int64", False)


def bools(*shape: int) -> T:
    return T(shape, "bool", False)


def single(target: str, *args: Any, registry: Registry = DEFAULT, sequence: bool = False, random: bool = False, batch: bool = False, **kwargs: Any) -> Graph:
    """A graph whose only operator is this call. `batch`: dimension 0 of the first operand is the batch."""
    specs: dict[str, TensorSpec] = {}
    grads: dict[str, bool] = {}

    def freeze(arg: Any) -> Arg:
        if isinstance(arg, T):
            name = f"x{len(specs)}"
            specs[name] = TensorSpec(arg.shape, arg.dtype)
            grads[name] = arg.grad and arg.dtype.startswith("float")
            return Ref(name)
        if isinstance(arg, (tuple, list)):
            return tuple(freeze(item) for item in arg)
        return arg

    frozen = tuple(freeze(arg) for arg in args)
    named = tuple((key, freeze(arg)) for key, arg in kwargs.items())
    found = _results(target, frozen, named, specs)
    outputs = tuple(Output(f"y{i}", spec) for i, spec in enumerate(found))
    op = Op(Instr(outputs, target, frozen, named, sequence or len(outputs) > 1), (), (), "", "", 0, (), random=random)
    reaches = any(grads.values()) and target != "aten.detach.default"
    values = {name: Value(name, spec, "input", (), grads[name], name) for name, spec in specs.items()}
    values |= {o.name: Value(o.name, o.spec, "activation", (), reaches and o.spec.dtype.startswith("float")) for o in outputs if o.spec is not None}
    values, ops, sizes, factor = annotate(values, (op,), ("x0",) if batch else (), registry)
    return Graph("single", values, ops, (), sizes, factor, None, tuple(o.name for o in outputs), (), "")


def _results(target: str, args: Any, kwargs: Any, specs: dict[str, TensorSpec]) -> tuple[TensorSpec | None, ...]:
    try:
        return infer(target, args, kwargs, specs)
    except NotImplementedError:  # data-dependent inside: run it
        env = {name: torch.zeros(spec.shape, dtype=dtype_of(spec.dtype)) for name, spec in specs.items()}
        cpu = torch.device("cpu")
        return (spec_of(resolve(target)(*(decode(a, env, cpu) for a in args), **{k: decode(a, env, cpu) for k, a in kwargs})),)


__all__ = ["Dtype", "T", "bools", "ints", "single", "t"]
