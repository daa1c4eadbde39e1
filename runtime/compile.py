"""From the frozen instructions of a block to a callable: an FX graph of direct operator calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from runtime.call import decode, resolve
from runtime.instr import Instr
from runtime.mesh import Axis, Mesh
from runtime.program import BlockCode

Compiled = Callable[..., tuple[torch.Tensor, ...]]


def compile_block(code: BlockCode, mesh: Mesh) -> Compiled:
    """`f(*inputs, *stored) -> outputs` in the orders of `code`. Axis names become this rank's axes, devices its device.

    Raises ValueError for a target that is not known, or a value that is read before it is defined.
    """
    graph = fx.Graph()
    env: dict[str, Any] = {name: graph.placeholder(f"v_{i}") for i, name in enumerate(code.inputs + code.stored)}
    for instr in code.instrs:
        try:
            _emit(graph, instr, env, mesh)
        except KeyError as error:
            raise ValueError(f"block {code.name}: {instr.name} = {instr.target} reads {error}, which nothing before it defines") from None
    missing = [name for name in code.outputs if name not in env]
    if missing:
        raise ValueError(f"block {code.name} defines no value called {missing[0]!r} to put out")
    graph.output(tuple(env[name] for name in code.outputs))
    return fx.GraphModule(torch.nn.Module(), graph).forward


def _emit(graph: fx.Graph, instr: Instr, env: dict[str, Any], mesh: Mesh) -> None:
    args = tuple(decode(arg, env, mesh.device) for arg in instr.args)
    kwargs = {key: decode(arg, env, mesh.device) for key, arg in instr.kwargs}
    target = resolve(instr.target)
    if instr.target.startswith("runtime."):
        target = _bind(target, {key: _axes(kwargs.pop(key), mesh) for key in ("axis", "axes") if key in kwargs})
    node = graph.call_function(target, args, kwargs)
    if instr.is_sequence:
        for i, output in enumerate(instr.outputs):
            env[output.name] = graph.call_function(_item, (node, i))
    else:
        env[instr.name] = node


def _axes(names: Any, mesh: Mesh) -> Axis | tuple[Axis, ...]:
    return mesh.axis(names) if isinstance(names, str) else tuple(mesh.axis(name) for name in names)


def _item(values: Any, index: int) -> Any:
    return values[index]


def _bind(function: Callable[..., Any], fixed: dict[str, Any]) -> Callable[..., Any]:
    """`function` with keyword arguments fixed, under its own name: FX prints names and has no literal for an Axis."""

    def bound(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **fixed, **kwargs)

    bound.__name__ = function.__name__
    bound.__module__ = function.__module__
    return bound
