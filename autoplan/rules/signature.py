"""Signatures: which dimensions of an operator's operands and outputs are one loop index.

A signature is written like an einsum, one group of labels per tensor: `"b* i, o i -> b* o"`.

    x        a label: the dimension runs over loop index x
    x*       any number of dimensions x0, x1, ... (at most one such label per tensor)
    (x y)    the dimension is a product of loop indices, outermost first
    _  _*    nothing is known of the dimension (of any number of them)

A label that occurs in every output *maps* (its iterations are independent), unless it is named in `whole`:
those are united with their equals but never divided. A label that outputs lack is divided only where it is in
`sums` (the outputs are then partial sums) or has an `Inner` form. What a rule does not label is never divided.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any

from autoplan.graph import Inside
from runtime.instr import Arg, TensorSpec, refs
from runtime.sharded.halo import Window

Dim = tuple[str, ...]  # labels of one dimension, outermost first; () where the dimension has length 1
Dims = tuple[Dim, ...]
OPAQUE: Dim = ("_",)


@dataclass(frozen=True, slots=True)
class Inner:
    """How a label that the plain operator cannot divide is divided all the same; fields as in `autoplan.graph.Loop`."""

    kind: str
    lowering: str
    collectives: tuple[Inside, ...] = ()
    minimum: int = 1
    even: bool = False
    contiguous: bool = False  # a rank's part has to be one run of the label: only its outermost factor is divided


@dataclass(frozen=True, slots=True)
class Pair:
    """Two labels that one axis divides at once, in a function of the runtime that exchanges what is missing.

    Operands in `second_in` are divided along `second`, the others and the outputs along `first`. `is_same`: only where both are one
    index set, as the positions of queries and keys in self-attention.
    """

    name: str
    first: str
    second: str
    second_in: tuple[int, ...]
    lowering: str
    is_same: bool = False


@dataclass(frozen=True, slots=True)
class Slide:
    """A window that slides along label `read` of operand 0 and makes label `write` of the output, another number of positions."""

    read: str
    write: str
    window: Window
    inner: Inner


@dataclass(frozen=True, slots=True)
class Signature:
    """Labels of each dimension of each operand (in `runtime.instr.uses` order) and output; see the module's text.

    `sizes` gives the length of labels that never stand alone in a dimension. `linear` lists sets of operands in which
    the operator is jointly linear, so that partial sums of them may pass through it.
    """

    reads: tuple[Dims, ...]
    writes: tuple[Dims, ...]
    sums: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    linear: tuple[tuple[int, ...], ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    inner: Mapping[str, Inner] = field(default_factory=dict)
    proved: bool = True
    pairs: tuple[Pair, ...] = ()
    slides: tuple[Slide, ...] = ()


@dataclass(frozen=True, slots=True)
class Call:
    """What a rule sees of an operator: its arguments by name and the specs of its tensors.

    `inputs[i]` is the spec of operand i; `at[name]` lists the operand indices of argument `name`.
    """

    target: str
    args: Mapping[str, Arg]
    at: Mapping[str, tuple[int, ...]]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec | None, ...]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor argument `name`."""
        return self.inputs[self.at[name][0]].shape

    def rank(self, name: str) -> int:
        return len(self.shape(name))

    def has(self, name: str) -> bool:
        """Whether `name` is given as a tensor."""
        return bool(self.at.get(name))

    def out(self, index: int = 0) -> tuple[int, ...]:
        spec = self.outputs[index]
        assert spec is not None
        return spec.shape

    def get(self, name: str, default: Any = None) -> Any:
        value = self.args.get(name)
        return default if value is None else value


def integer(arg: Arg) -> int:
    """An argument that is one integer."""
    assert isinstance(arg, int), f"{arg!r} is no integer"
    return arg


def integers(arg: Arg) -> tuple[int, ...]:
    """An argument that is one integer or several."""
    return tuple(integer(item) for item in arg) if isinstance(arg, tuple) else (integer(arg),)


def bind(
    target: str, names: tuple[tuple[str, Any], ...], args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...]
) -> tuple[dict[str, Arg], dict[str, tuple[int, ...]]]:
    """Arguments by name (`names`: parameter names with defaults) and the operand indices of each."""
    if len(args) > len(names):
        raise ValueError(f"{target} takes {len(names)} arguments, got {len(args)}")
    bound: dict[str, Arg] = dict(names)
    at: dict[str, tuple[int, ...]] = {}
    count = 0
    for name, value in (*zip((n for n, _ in names), args, strict=False), *kwargs):
        bound[name] = value
        used = len(refs(value))
        at[name] = tuple(range(count, count + used))
        count += used
    return bound, at


@cache
def parse(text: str) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]]:
    """Tokens of every tensor left and right of the arrow. Raises ValueError for text of another form."""
    left, arrow, right = text.partition("->")
    sides = []
    for side in (left, right):
        tensors = []
        for tensor in side.split(","):
            tokens = re.findall(r"\([^()]*\)|[A-Za-z]\w*\*?|_\*?", tensor)
            if "".join(tokens).replace(" ", "") != re.sub(r"\s", "", tensor):
                raise ValueError(f"cannot read {tensor.strip()!r} in the rule {text!r}: write labels such as 'b s (h d)', 'b* i' or '_'")
            if sum(token.endswith("*") for token in tokens) > 1:
                raise ValueError(f"{tensor.strip()!r} in the rule {text!r} has two starred labels: one tensor can have one")
            tensors.append(tuple(tokens))
        sides.append(tuple(tensors))
    if not arrow:
        raise ValueError(f"the rule {text!r} has no '->': write operands, '->', outputs, as in 'b i, o i -> b o'")
    return sides[0], sides[1]


def expand(tokens: tuple[str, ...], rank: int) -> Dims | None:
    """Tokens of one tensor as labels of its `rank` dimensions; None where the numbers do not agree."""
    fill = rank - len(tokens) + 1
    starred = any(token.endswith("*") for token in tokens)
    if (starred and fill < 0) or (not starred and fill != 1):
        return None
    dims: list[Dim] = []
    for token in tokens:
        if token.endswith("*"):
            dims += [OPAQUE if token == "_*" else (f"{token[:-1]}{k}",) for k in range(fill)]
        else:
            dims.append(tuple(token.strip("()").split()))
    return tuple(dims)


def sign(call: Call, text: str, **fields: Any) -> Signature:
    """The signature `text` for the shapes of `call`. Operands beyond the text's are opaque.

    `fields` are those of `Signature`; `sums`, `whole` may be given as text ("i j", "b*" for all that start so).
    """
    left, right = parse(text)
    reads = [expand(tokens, len(spec.shape)) for tokens, spec in zip(left, call.inputs, strict=False)]
    reads += [(OPAQUE,) * len(spec.shape) for spec in call.inputs[len(left) :]]
    outputs = [spec for spec in call.outputs if spec is not None]
    writes = [expand(tokens, len(spec.shape)) for tokens, spec in zip(right, outputs, strict=False)]
    writes += [(OPAQUE,) * len(spec.shape) for spec in outputs[len(right) :]]
    if None in reads or None in writes:
        found = ", ".join(str(list(spec.shape)) for spec in call.inputs) + " -> " + ", ".join(str(list(spec.shape)) for spec in outputs)
        raise ValueError(f"the rule {text!r} of {call.target} does not fit shapes {found}")
    used = {label for dims in (*reads, *writes) if dims for dim in dims for label in dim}
    for name in ("sums", "whole"):
        if isinstance(fields.get(name), str):
            fields[name] = select(fields[name], used)
    return Signature(tuple(d for d in reads if d is not None), tuple(d for d in writes if d is not None), **fields)


def lengths(found: Signature, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> dict[str, int]:
    """Length of every label. Raises ValueError where the labels and the shapes of the tensors contradict each other."""
    if (len(found.reads), len(found.writes)) != (len(inputs), len(outputs)):
        raise ValueError(f"speaks of {len(found.reads)} operands and {len(found.writes)} outputs, the call has {len(inputs)} and {len(outputs)}")
    known = dict(found.sizes)
    products: list[tuple[Dim, int]] = []
    for spec, dims in zip((*inputs, *outputs), (*found.reads, *found.writes), strict=True):
        if len(dims) != len(spec.shape):
            raise ValueError(f"labels {len(dims)} dimensions of a tensor of shape {list(spec.shape)}")
        for dim, length in zip(dims, spec.shape, strict=True):
            if not dim and length != 1:
                raise ValueError(f"gives no label to a dimension of {length}")
            if len(dim) == 1 and dim != OPAQUE and known.setdefault(dim[0], length) != length:
                raise ValueError(f"gives the label {dim[0]!r} two lengths, {known[dim[0]]} and {length}")
            if len(dim) > 1:
                products.append((dim, length))
    for dim, length in products * 2:  # a second time for labels that others make known
        unknown = [label for label in dim if label not in known]
        rest = prod(known[label] for label in dim if label in known)
        if len(unknown) == 1 and rest and length % rest == 0:
            known[unknown[0]] = length // rest
        elif not unknown and rest != length:
            raise ValueError(f"makes a dimension of {length} the product of {' '.join(dim)}, which is {rest}")
    missing = [label for dim, _ in products for label in dim if label not in known]
    if missing:
        raise ValueError(f"does not tell the length of {missing[0]!r}, which stands alone in no dimension")
    return known


def select(text: str, used: set[str]) -> frozenset[str]:
    """The labels of `used` that a list such as "i b*" names."""
    found: set[str] = set()
    for token in text.split():
        stem = token[:-1]
        found |= {label for label in used if label.startswith(stem) and label[len(stem) :].isdigit()} if token.endswith("*") else {token}
    return frozenset(found)


def aligned(shape: tuple[int, ...], out: tuple[int, ...], stem: str = "d") -> Dims:
    """Labels of an operand that is broadcast against `out`, whose dimensions are d0, d1, ..."""
    shift = len(out) - len(shape)
    return tuple((f"{stem}{k + shift}",) if n == out[k + shift] else () for k, n in enumerate(shape))


def labels(rank: int, stem: str = "d") -> Dims:
    return tuple((f"{stem}{k}",) for k in range(rank))
