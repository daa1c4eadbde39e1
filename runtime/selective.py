"""Selective recomputation (Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models, section 5).

Of a block that is recomputed selectively the backward pass finds what entered it and the results of its *kept* instructions:
products with a tensor at rest, convolutions, and attention in one kernel. Those take long for what they save. All else is run
again: norms, activations, dropout, and attention that is written out, whose scores are quadratic in the sequence. Masks are
drawn again from the same state (runtime/random.py); collectives are repeated.

But for sums: where ranks complete a kept product (all_reduce, reduce_scatter over axes that divide operators), the sum is kept and not the
product, which is as large as the whole on every rank. Neither is repeated: the product is then a stand-in that nobody reads, from which gradients still flow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from runtime.instr import Instr, uses
from runtime.program import BlockCode

_PRODUCTS = ("linear", "mm", "addmm", "conv1d", "conv2d", "conv3d", "convolution")
_KERNELS = ("mm", "addmm", "linear", "convolution", "_scaled_dot_product")  # what such instructions run; no bmm: it makes scores
_SUMS = ("runtime.all_reduce", "runtime.reduce_scatter")
_OTHER_AXES = ("dp", "cp", "ep")  # whose sums are repeated: what crosses them is no result of divided operators
_KEPT, _SUMMED = "kept", "summed"


def is_kept(instr: Instr, stored: Collection[str]) -> bool:
    """Whether selective recomputation does not repeat the instruction. `stored`: names of tensors at rest."""
    if not instr.target.startswith("aten."):
        return False
    name = instr.target.split(".")[1]
    return name == "scaled_dot_product_attention" or (name in _PRODUCTS and any(operand in stored for operand in uses(instr)))


@dataclass(frozen=True, slots=True)
class Keeps:
    """Of a block: instructions that are kept, by the name of their first result; those of them whose own results are not, as only sums of
    them are read; and those sums."""

    kept: frozenset[str]
    summed: frozenset[str]
    sums: frozenset[str]


def keeps(code: BlockCode) -> Keeps:
    """What a block keeps if it is recomputed selectively."""
    kept = {instr.name for instr in code.instrs if is_kept(instr, code.stored)}
    sums = {instr.name: uses(instr)[0] for instr in code.instrs if _is_sum(instr) and uses(instr)[0] in kept}
    read = dict.fromkeys((*code.outputs, *(name for instr in code.instrs if instr.name not in sums for name in uses(instr))))
    return Keeps(frozenset(kept), frozenset(name for name in sums.values() if name not in read), frozenset(sums))


def _is_sum(instr: Instr) -> bool:
    return instr.target in _SUMS and dict(instr.kwargs).get("axis") not in _OTHER_AXES


@dataclass(eq=False)
class _Results:
    """What one pass through a block keeps, in the order in which it is made, for the pass that runs it again."""

    made: list[Any] = field(default_factory=list)
    next: int = 0
    is_again: bool = False

    def keep(self, result: Any) -> None:
        self.made.append(tree_map_only(torch.Tensor, lambda x: (x.detach(), x._version), result))

    def take(self) -> Any:
        """The next result, once. Raises RuntimeError where a backward pass runs twice, or something wrote over the result."""
        if self.next >= len(self.made):
            raise RuntimeError("a selectively recomputed block was run again twice: its backward pass runs once for each forward pass")
        found, self.made[self.next] = self.made[self.next], None
        self.next += 1
        return _unchanged(found)


def _unchanged(found: Any) -> Any:
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], torch.Tensor) and isinstance(found[1], int):
        tensor, version = found
        if tensor._version != version:
            raise RuntimeError("a result that selective recomputation keeps was written over before its backward pass")
        return tensor
    return type(found)(map(_unchanged, found)) if isinstance(found, (tuple, list)) else found


_results: ContextVar[_Results | None] = ContextVar("results", default=None)
_role: ContextVar[str] = ContextVar("role", default="")


@contextmanager
def _as(role: str) -> Iterator[None]:
    token = _role.set(role)
    try:
        yield
    finally:
        _role.reset(token)


def keeping(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, its results kept by the checkpoint around it."""

    def kept(*args: Any, **kwargs: Any) -> Any:
        with _as(_KEPT):
            return function(*args, **kwargs)

    return kept


def unread(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, not run a second time by the checkpoint around it: nobody reads its results then."""

    def summed(*args: Any, **kwargs: Any) -> Any:
        with _as(_SUMMED):
            return function(*args, **kwargs)

    return summed


def keeping_sum(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, a collective that takes its result as `known`, its result kept by the checkpoint around it."""

    def kept(*args: Any, **kwargs: Any) -> Any:
        results = _results.get()
        if results is not None and results.is_again:
            return function(*args, known=results.take(), **kwargs)
        found = function(*args, **kwargs)
        if results is not None:
            results.keep(found)
        return found

    return kept


class _Pass(TorchDispatchMode):
    """One pass through a block: the first keeps, the second finds."""

    def __init__(self, results: _Results, *, is_again: bool) -> None:
        super().__init__()
        self.results, self.is_again = results, is_again

    def __enter__(self) -> Any:
        self.results.is_again = self.is_again
        self._token = _results.set(self.results)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        _results.reset(self._token)
        super().__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        role = _role.get()
        if not role or not _is_kernel(func):
            return func(*args, **(kwargs or {}))
        if self.is_again and role == _KEPT:
            return self.results.take()
        if self.is_again:
            shape, dtype, device = self.results.take()
            return torch.empty((), dtype=dtype, device=device).expand(shape)
        result = func(*args, **(kwargs or {}))
        self.results.keep(result if role == _KEPT else [tuple(result.shape), result.dtype, result.device])
        return result


def _is_kernel(op: Any) -> bool:
    name = str(op)
    return name.startswith("aten.") and name.removeprefix("aten.").startswith(_KERNELS)


def contexts() -> tuple[_Pass, _Pass]:
    """What torch.utils.checkpoint takes as `context_fn`."""
    results = _Results()
    return _Pass(results, is_again=False), _Pass(results, is_again=True)
