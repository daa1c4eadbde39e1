"""From the frozen instructions of a block to a callable: an FX graph of direct operator calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from runtime.call import decode, resolve
from runtime.instr import Arg, Instr, Ref
from runtime.mesh import Axis, Mesh
from runtime.program import BlockCode
from runtime.random import seeded
from runtime.selective import keeping, keeping_sum, keeps, unread
from runtime.split import WeightGrads, puts_off

Compiled = Callable[..., tuple[torch.Tensor, ...]]


def nameless(code: BlockCode) -> BlockCode:
    """`code` with values numbered in the order in which they appear: equal for blocks that compute the same. Operators that draw random
    numbers keep their names, which their numbers depend on."""
    numbers = {name: f"{i}" for i, name in enumerate(dict.fromkeys(code.inputs + code.stored))}
    instrs = []
    for instr in code.instrs:
        is_random = _is_random(resolve(instr.target), instr)
        args = _renamed(instr.args, numbers)
        kwargs = tuple((key, _renamed(arg, numbers)) for key, arg in instr.kwargs)
        for output in instr.outputs:
            numbers[output.name] = output.name if is_random else f"{len(numbers)}"
        outputs = tuple(replace(output, name=numbers[output.name]) for output in instr.outputs)
        instrs.append(replace(instr, outputs=outputs, args=args, kwargs=kwargs))  # type: ignore[arg-type]
    inputs, stored, outputs = (tuple(numbers[name] for name in names) for names in (code.inputs, code.stored, code.outputs))
    return BlockCode("", inputs, stored, tuple(instrs), outputs, code.recompute)


def _renamed(arg: Arg, numbers: Mapping[str, str]) -> Arg:
    if isinstance(arg, Ref):
        return Ref(numbers[arg.name])
    return tuple(_renamed(item, numbers) for item in arg) if isinstance(arg, tuple) else arg


def compile_block(code: BlockCode, mesh: Mesh, later: WeightGrads | None = None, backend: str | None = None) -> Compiled:
    """`f(*inputs, *stored) -> outputs` in the orders of `code`. Axis names become this rank's axes, devices its device.

    Gradients of weights go to `later`, where one is given. With `backend` the operators between two functions of this package are
    compiled by torch.compile.

    Raises ValueError for a target that is not known, or a value that is read before it is defined.
    """
    graph = fx.Graph()
    env: dict[str, Any] = {name: graph.placeholder(f"v_{i}") for i, name in enumerate(code.inputs + code.stored)}
    wraps: dict[str, Callable[[Any], Any]] = {}
    if code.recompute == "selective":
        found = keeps(code)
        wraps = {**dict.fromkeys(found.kept, keeping), **dict.fromkeys(found.summed, unread), **dict.fromkeys(found.sums, keeping_sum)}
    for instr in code.instrs:
        try:
            puts = later if puts_off(instr, code.stored) else None
            _emit(graph, instr, env, mesh, puts, wrap=wraps.get(instr.name, _as_it_is), is_compiled=backend is not None)
        except KeyError as error:
            raise ValueError(f"block {code.name}: {instr.name} = {instr.target} reads {error}, which nothing before it defines") from None
    missing = [name for name in code.outputs if name not in env]
    if missing:
        raise ValueError(f"block {code.name} defines no value called {missing[0]!r} to put out")
    graph.output(tuple(env[name] for name in code.outputs))
    forward = fx.GraphModule(torch.nn.Module(), graph).forward
    return forward if backend is None else torch.compile(forward, backend=backend, dynamic=False)


def _emit(graph: fx.Graph, instr: Instr, env: dict[str, Any], mesh: Mesh, later: WeightGrads | None, wrap: Callable[[Any], Any], *, is_compiled: bool) -> None:
    args = tuple(decode(arg, env, mesh.device) for arg in instr.args)
    kwargs = {key: decode(arg, env, mesh.device) for key, arg in instr.kwargs}
    target = resolve(instr.target) if later is None else _named(later.linear, "linear")
    if instr.target.startswith("runtime."):
        target = _bind(target, {key: _axes(kwargs.pop(key), mesh) for key in ("axis", "axes") if key in kwargs})
    elif _is_random(target, instr):
        target = _named(seeded(target, instr.name), "seeded")
    if is_compiled and not isinstance(target, torch._ops.OpOverload):
        target = torch.compiler.disable(target)  # they talk to other ranks, and look at what no graph holds
    if wrap is not _as_it_is:
        target = _named(wrap(target), "kept")
    node = graph.call_function(target, args, kwargs)
    if instr.is_sequence:
        for i, output in enumerate(instr.outputs):
            env[output.name] = graph.call_function(_item, (node, i))
    else:
        env[instr.name] = node


def _is_random(target: Any, instr: Instr) -> bool:
    """An operator of torch that draws random numbers. Attention is tagged so too, but its dropout is an operator of ours."""
    tagged = isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags
    return tagged and instr.target != "aten.scaled_dot_product_attention.default"


def _axes(names: Any, mesh: Mesh) -> Axis | tuple[Axis, ...]:
    return mesh.axis(names) if isinstance(names, str) else tuple(mesh.axis(name) for name in names)


def _item(values: Any, index: int) -> Any:
    return values[index]


def _as_it_is(function: Any) -> Any:
    return function


def _bind(function: Callable[..., Any], fixed: dict[str, Any]) -> Callable[..., Any]:
    """`function` with keyword arguments fixed: FX has no literal for an Axis."""
    return _named(functools.partial(function, **fixed), function.__name__)


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`function` as a plain one of this name, which FX needs for its code."""

    def called(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    called.__name__ = name
    return called
