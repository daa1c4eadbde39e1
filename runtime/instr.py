"""Instructions: the frozen form in which an operator call is kept, shipped and printed.

An `Instr` is one call `outputs = target(*args, **kwargs)`. Arguments are plain frozen data; a
tensor argument is a `Ref` to the name of an earlier value. Targets are either ATen overloads
("aten.linear.default"), `"ns.op.overload"` of a custom library, or functions of this package
("runtime.all_reduce"). Nothing here holds a tensor, so instructions compare, hash and pickle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union


@dataclass(frozen=True, slots=True)
class Ref:
    """A use of the value called `name`."""

    name: str


@dataclass(frozen=True, slots=True)
class Dtype:
    """A torch dtype as an argument, by its short name ("float32")."""

    name: str


@dataclass(frozen=True, slots=True)
class Other:
    """A layout, memory format or device argument, by kind and text ("memory_format", "channels_last")."""

    kind: str
    text: str


Arg = Union[None, bool, int, float, str, Ref, Dtype, Other, tuple["Arg", ...]]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape in elements and dtype by its short name ("float32", "int64", "bool")."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Output:
    """A value that an instruction defines. `spec` is None for an output that is no tensor."""

    name: str
    spec: TensorSpec | None


@dataclass(frozen=True, slots=True)
class Instr:
    """One operator call. More than one entry in `outputs` means that the target returns a sequence."""

    outputs: tuple[Output, ...]
    target: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...] = ()
    is_sequence: bool = False  # the target returns a tuple or list, even if it has one entry

    @property
    def name(self) -> str:
        return self.outputs[0].name


def refs(arg: Arg | tuple[tuple[str, Arg], ...]) -> tuple[str, ...]:
    """Names of the values that an argument uses, in order of appearance, repeats kept."""
    if isinstance(arg, Ref):
        return (arg.name,)
    if isinstance(arg, tuple):
        return tuple(name for item in arg for name in refs(item))
    return ()


def uses(instr: Instr) -> tuple[str, ...]:
    """Names of all tensor arguments of `instr`, positional first, repeats kept: its *operands*."""
    return refs(instr.args) + tuple(name for _, arg in instr.kwargs for name in refs(arg))
