"""The real positions of a rank, and room for as many as every rank has: see runtime/pieces.py.

    function            forward                                  backward
    real_rows           takes the copies away                    zeros in their place
    with_copies         copies of the last real one at the end   takes theirs away
    real_of, filled     both, of all dimensions that `spans` name

None communicates. A dimension is [outer, positions, inner] on the rank; `sizes[i]` are the positions that `axis[i]` divides, outermost axis first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.mesh import Axis
from runtime.pieces import most, real


def _num_real(sizes: Sequence[int], axis: Axis | Sequence[Axis]) -> tuple[int, int]:
    """Real positions of this rank, and those that it has room for."""
    axes = (axis,) if isinstance(axis, Axis) else tuple(axis)
    return real(sizes, [a.size for a in axes], [a.index for a in axes]), most(sizes[-1], axes[-1].size)


def real_rows(x: torch.Tensor, dim: int, outer: int, sizes: Sequence[int], inner: int, *, axis: Axis | Sequence[Axis]) -> torch.Tensor:
    """x without the copies along `dim`."""
    kept, places = _num_real(sizes, axis)
    assert x.shape[dim] == outer * places * inner, f"dimension {dim} of {tuple(x.shape)} should be {outer} x {places} x {inner}"
    if kept == places:
        return x
    return x.unflatten(dim, (outer, places, inner)).narrow(dim + 1, 0, kept).flatten(dim, dim + 2)


def with_copies(x: torch.Tensor, dim: int, outer: int, sizes: Sequence[int], inner: int, *, axis: Axis | Sequence[Axis]) -> torch.Tensor:
    """x, real positions along `dim`, with room for as many as every rank has; zeros where this one has none."""
    kept, places = _num_real(sizes, axis)
    if kept == places:
        return x
    seen = x.reshape(*x.shape[:dim], outer, kept, inner, *x.shape[dim + 1 :])
    shape = (*seen.shape[: dim + 1], places - kept, *seen.shape[dim + 2 :])
    more = seen.detach().narrow(dim + 1, kept - 1, 1).expand(shape) if kept else seen.new_zeros(shape)
    return torch.cat([seen, more], dim + 1).flatten(dim, dim + 2)


Spans = Sequence[Sequence[int]]


def real_of(x: torch.Tensor, axes: Sequence[Axis], spans: Spans) -> torch.Tensor:
    """The real positions of x. `spans[i]` = (dim, outer, size, inner): what `axes[i]` divides, () where that is no dimension of positions.

    Axes of one dimension nest, the outermost first.
    """
    for (dim, outer, inner), own, sizes in _nests(axes, spans):
        x = real_rows(x, dim, outer, sizes, inner, axis=own)
    return x


def filled(y: torch.Tensor, axes: Sequence[Axis], spans: Spans) -> torch.Tensor:
    """The inverse: y with room for all."""
    for (dim, outer, inner), own, sizes in _nests(axes, spans):
        y = with_copies(y, dim, outer, sizes, inner, axis=own)
    return y


def _nests(axes: Sequence[Axis], spans: Spans) -> list[tuple[tuple[int, int, int], list[Axis], list[int]]]:
    """(dim, outer, inner) with the axes that divide it and what each of them divides."""
    found: dict[tuple[int, int, int], tuple[list[Axis], list[int]]] = {}
    for axis, span in zip(axes, spans or ((),) * len(axes), strict=True):
        if span:
            dim, outer, size, inner = span
            own, sizes = found.setdefault((dim, outer, inner), ([], []))
            own.append(axis)
            sizes.append(size)
    return [(place, own, sizes) for place, (own, sizes) in found.items()]
