"""From the frozen instructions of a block to a callable: an FX graph of direct operator calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from runtime.call import decode, resolve
from runtime.instr import Instr, Ref
from runtime.mesh import Axis, Mesh
from runtime.program import BlockCode
from runtime.random import seeded
from runtime.split import WeightGrads

Compiled = Callable[..., tuple[torch.Tensor, ...]]


def compile_block(code: BlockCode, mesh: Mesh, later: WeightGrads | None = None) -> Compiled:
    """`f(*inputs, *stored) -> outputs` in the orders of `code`. Axis names become this rank's axes, devices its device.

    Gradients of weights go to `later`, where one is given.

    Raises ValueError for a target that is not known, or a value that is read before it is defined.
    """
    graph = fx.Graph()
    env: dict[str, Any] = {name: graph.placeholder(f"v_{i}") for i, name in enumerate(code.inputs + code.stored)}
    for instr in code.instrs:
        try:
            _emit(graph, instr, env, mesh, later if _has_stored_weight(instr, code) else None)
        except KeyError as error:
            raise ValueError(f"block {code.name}: {instr.name} = {instr.target} reads {error}, which nothing before it defines") from None
    missing = [name for name in code.outputs if name not in env]
    if missing:
        raise ValueError(f"block {code.name} defines no value called {missing[0]!r} to put out")
    graph.output(tuple(env[name] for name in code.outputs))
    return fx.GraphModule(torch.nn.Module(), graph).forward


def _emit(graph: fx.Graph, instr: Instr, env: dict[str, Any], mesh: Mesh, later: WeightGrads | None) -> None:
    args = tuple(decode(arg, env, mesh.device) for arg in instr.args)
    kwargs = {key: decode(arg, env, mesh.device) for key, arg in instr.kwargs}
    target = resolve(instr.target) if later is None else _named(later.linear, "linear")
    if instr.target.startswith("runtime."):
        target = _bind(target, {key: _axes(kwargs.pop(key), mesh) for key in ("axis", "axes") if key in kwargs})
    elif _is_random(target, instr):
        target = _named(seeded(target, instr.name), "seeded")
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


def _has_stored_weight(instr: Instr, code: BlockCode) -> bool:
    return instr.target == "aten.linear.default" and len(instr.args) > 1 and isinstance(instr.args[1], Ref) and instr.args[1].name in code.stored


def _bind(function: Callable[..., Any], fixed: dict[str, Any]) -> Callable[..., Any]:
    """`function` with keyword arguments fixed: FX has no literal for an Axis."""
    return _named(functools.partial(function, **fixed), function.__name__)


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`function` as a plain one of this name, which FX needs for its code."""

    def called(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    called.__name__ = name
    return called
