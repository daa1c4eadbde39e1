"""Cutting a dense tensor into what ranks hold under a layout, putting it together again, and comparing.

`dims` are the sizes of the factors of every dimension, outermost first, as `Value.dims` lists them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from autoplan.layout import PARTIAL, VARY, WHOLE, Layout, Split

TOLERANCE = 1e-10
_EQUAL = 1e-9  # ranks that hold one value may add in different orders

Dims = Sequence[Sequence[int]]
Window = tuple[int, int, int, int]


class Differs(Exception):
    """A result that is not the dense one: why, and by which relative distance."""

    def __init__(self, reason: str, distance: float = math.inf) -> None:
        super().__init__(reason)
        self.distance = distance


def window(dims: Dims, layout: Split) -> Window:
    """(dim, outer, size, inner) of the divided dimension."""
    sizes, k = dims[layout.dim], layout.factor
    return layout.dim, math.prod(sizes[:k]), sizes[k], math.prod(sizes[k + 1 :])


def cut(x: torch.Tensor, dims: Dims, layout: Layout, lengths: Sequence[int], room: int = 0, *, is_grad: bool = False) -> list[torch.Tensor]:
    """What each rank holds of a value (not PARTIAL), or of the cotangent of one (not VARY).

    Rank r holds `lengths[r]` entries of the factor that a Split divides, and room for `room` of them where that is more: filled with
    copies of its last one, of a gradient with zeros.
    """
    if not isinstance(layout, Split):
        return [x] * len(lengths)
    dim, outer, size, inner = window(dims, layout)
    seen = x.reshape(*x.shape[:dim], outer, size, inner, *x.shape[dim + 1 :])
    parts = []
    for part in seen.split(list(lengths), dim + 1):
        if part.shape[dim + 1] < room:
            more = part.narrow(dim + 1, part.shape[dim + 1] - 1, 1).expand(*part.shape[: dim + 1], room - part.shape[dim + 1], *part.shape[dim + 2 :])
            part = torch.cat([part, torch.zeros_like(more) if is_grad else more], dim + 1)
        parts.append(part.reshape(*x.shape[:dim], outer * part.shape[dim + 1] * inner, *x.shape[dim + 1 :]))
    return parts


def addends(x: torch.Tensor, degree: int) -> list[torch.Tensor]:
    """Random tensors that add up to x."""
    rest = [torch.randn(x.shape, generator=torch.Generator().manual_seed(r), dtype=x.dtype) for r in range(1, degree)]
    return [x - torch.stack(rest).sum(0), *rest]


def joined(what: str, parts: list[torch.Tensor], dims: Dims, layout: Layout, lengths: Sequence[int], room: int = 0) -> torch.Tensor:
    """The value that ranks hold as `layout`, with room as for `cut`. Raises Differs where shapes or copies disagree."""
    if layout == PARTIAL:
        return torch.stack(parts).sum(0)
    if not isinstance(layout, Split):
        return _equal(what, parts)
    dim, outer, _, inner = window(dims, layout)
    shape = tuple(math.prod(sizes) for sizes in dims)
    seen = []
    for part, length in zip(parts, lengths, strict=True):
        places = max(length, room)
        expected = (*shape[:dim], outer * places * inner, *shape[dim + 1 :])
        if tuple(part.shape) != expected:
            raise Differs(f"{what} has the local shape {tuple(part.shape)}, expected {expected}")
        seen.append(part.reshape(*shape[:dim], outer, places, inner, *shape[dim + 1 :]).narrow(dim + 1, 0, length))
    return torch.cat(seen, dim + 1).reshape(shape)


def joined_grad(what: str, parts: list[torch.Tensor], dims: Dims, layout: Layout, lengths: Sequence[int], room: int = 0) -> torch.Tensor:
    """The gradient of a value that was read as `layout`, from the ranks' own."""
    if layout == VARY:
        return torch.stack(parts).sum(0)
    return joined(what, parts, dims, WHOLE if layout == PARTIAL else layout, lengths, room)


def _equal(what: str, parts: list[torch.Tensor]) -> torch.Tensor:
    first = parts[0]
    for other in parts[1:]:
        if first.shape != other.shape or not torch.allclose(first, other, rtol=_EQUAL, atol=_EQUAL, equal_nan=True):
            raise Differs(f"{what} should be equal on all ranks and is not")
    return first


def distance(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], what: str) -> float:
    """The worst relative L2 distance of a tensor. Raises Differs beyond the tolerance.

    A tensor that is small beside the others is measured against 1e-4 of the largest norm; integers and tensors with
    infinities have to be equal.
    """
    norms = {name: y.norm().item() for name, y in wanted.items() if y.is_floating_point() and bool(y.isfinite().all())}
    least = max([1e-4 * norm for norm in norms.values()], default=0.0)
    worst = 0.0
    for name, y in wanted.items():
        x = found[name]
        if x.shape != y.shape or x.dtype != y.dtype:
            raise Differs(f"{what} {name} is {x.dtype} {tuple(x.shape)}, expected {y.dtype} {tuple(y.shape)}")
        if name in norms:
            error = (x - y).norm().item() / max(norms[name], least, 1e-300)
        else:
            error = 0.0 if torch.allclose(x, y, rtol=TOLERANCE, atol=0.0, equal_nan=True) else math.inf
        if not error <= TOLERANCE:
            raise Differs(f"{what} {name} differs by {error:.2g} of its norm", error)
        worst = max(worst, error)
    return worst
