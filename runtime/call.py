"""From an instruction to a call: resolving targets and turning frozen arguments into Python ones, and back."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from runtime.instr import Arg, Dtype, Instr, Other, Ref, TensorSpec

# Functions of this project that instructions may name, by the module that holds them.
_RUNTIME_MODULES = ("runtime.collective", "runtime.sharded_ops", "runtime.random")


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` -> "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The name "float32" -> `torch.float32`. Raises ValueError for an unknown name."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"no torch dtype is called {name!r}")
    return found


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(int(n) for n in tensor.shape), dtype_name(tensor.dtype))


def num_bytes(spec: TensorSpec) -> int:
    """Bytes of a dense tensor of this spec."""
    count = 1
    for n in spec.shape:
        count *= n
    return count * dtype_of(spec.dtype).itemsize


def resolve(target: str) -> Callable[..., Any]:
    """The callable that a target names: "aten.linear.default", "ns.op.overload" or "runtime.function".

    Raises ValueError where nothing of that name is loaded.
    """
    namespace, _, rest = target.partition(".")
    if namespace == "runtime":
        for module in _RUNTIME_MODULES:
            found = getattr(importlib.import_module(module), rest, None)
            if found is not None:
                return found
    elif namespace == "operator":
        return getattr(importlib.import_module("operator"), rest)
    else:
        name, _, overload = rest.rpartition(".")
        packet = getattr(getattr(torch.ops, namespace), name, None)
        if packet is not None:
            return getattr(packet, overload)
    raise ValueError(f"no operator is called {target!r}: import the library that registers it first")


def encode(value: Any, name_of: Callable[[Any], str]) -> Arg:
    """An FX argument as frozen data; `name_of` names FX nodes. Raises ValueError for what cannot be frozen."""
    if isinstance(value, torch.fx.Node):
        return Ref(name_of(value))
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.dtype):
        return Dtype(dtype_name(value))
    if isinstance(value, torch.device):
        return Other("device", value.type)
    if isinstance(value, torch.memory_format):
        return Other("memory_format", str(value).removeprefix("torch."))
    if isinstance(value, torch.layout):
        return Other("layout", str(value).removeprefix("torch."))
    if isinstance(value, (tuple, list)):
        return tuple(encode(item, name_of) for item in value)
    raise ValueError(f"an argument of type {type(value).__name__} cannot be kept in a graph: {value!r}")


def decode(arg: Arg, env: Mapping[str, Any], device: torch.device) -> Any:
    """A frozen argument as the Python value to call with. Every device argument becomes `device`."""
    if isinstance(arg, Ref):
        return env[arg.name]
    if isinstance(arg, Dtype):
        return dtype_of(arg.name)
    if isinstance(arg, Other):
        return device if arg.kind == "device" else getattr(torch, arg.text)
    if isinstance(arg, tuple):
        return [decode(item, env, device) for item in arg]
    return arg


def run(instr: Instr, env: dict[str, Any], device: torch.device) -> None:
    """Call `instr` on the values in `env` and put its outputs there."""
    result = resolve(instr.target)(*(decode(a, env, device) for a in instr.args), **{k: decode(a, env, device) for k, a in instr.kwargs})
    if not instr.is_sequence:
        result = (result,)
    for output, value in zip(instr.outputs, result, strict=True):
        env[output.name] = value
