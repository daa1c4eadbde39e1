"""Schemes: how a tensor-parallel degree becomes axes of the mesh, and what each axis is for.

    scheme   axes (outermost first)        degree    rows divided by     output features by    contraction by
    1d       tp                            p                             tp                    tp
    1.5d     tp, beside dp                 p         dp                  tp
    2d       tpx, tpy                      q^2       tpx                 tpy
    2.5d     tpd, tpx, tpy                 d q^2     tpd, tpx            tpy
    3d       tpx, tpy, tpz                 q^3       tpx and, at rest,   tpy or tpz            the other of the two
                                                     tpy or tpz

An axis is known by its name:

    rows      "tpd"                 divides the batch as the data axis does (autoplan/batchaxis.py); parameters are copies, their gradients summed once a step
    gathered  "tpx"                 divides the batch too; parameters rest divided, and are gathered where they are read
    features  "tp", "tpy", "tpz"    divides what the plan says, operator by operator

Sources: Xu et al. 2021 (2D, arXiv 2104.05343), Wang et al. 2021 (2.5D, arXiv 2105.14500), Bian et al. 2021 (3D, arXiv 2105.14450), Gholami et al.
2018 (1.5D, arXiv 1712.04432).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt, prod
from typing import Literal

Axes = tuple[tuple[str, int], ...]
Role = Literal["rows", "gathered", "features"]

ROLES: Mapping[str, Role] = {"tp": "features", "tpd": "rows", "tpx": "gathered", "tpy": "features", "tpz": "features"}
SCHEMES = ("1d", "1.5d", "2d", "2.5d", "3d", "domain")
LINES = ("1d", "1.5d", "domain")  # which have one tensor axis
SEARCHED = ("2d", "2.5d", "3d")  # whose grids have axes of their own
_JOIN = " | "


def tensor_axes(axes: Axes) -> Axes:
    """Those of a mesh's axes that divide tensors."""
    return tuple((name, degree) for name, degree in axes if name in ROLES)


def row_axes(axes: Axes) -> Axes:
    """Those that divide the rows of the batch beside the data axis."""
    return tuple((name, degree) for name, degree in axes if ROLES.get(name) in ("rows", "gathered"))


def feature_axes(axes: Axes) -> Axes:
    """Those that the plan's options speak of, in order."""
    return tuple((name, degree) for name, degree in axes if ROLES.get(name) == "features")


def degree_of(axes: Axes, axis: str) -> int:
    """Ranks along an axis, 1 where there is none; along all tensor axes together for "tp"."""
    if axis == "tp":
        return prod(degree for _, degree in tensor_axes(axes))
    return dict(axes).get(axis, 1)


def row_unit(axes: Axes) -> int:
    """Rows of a micro-batch on a data rank come in multiples of this: they are divided over the axes of rows, in a cube over one of the others too."""
    return prod(degree for _, degree in row_axes(axes)) * dict(axes).get("tpz", 1)


def scheme_of(axes: Axes) -> str:
    """The scheme that a mesh's axes spell; "1d" for all that have one tensor axis."""
    names = tuple(name for name, _ in tensor_axes(axes))
    return {("tpx", "tpy"): "2d", ("tpd", "tpx", "tpy"): "2.5d", ("tpx", "tpy", "tpz"): "3d"}.get(names, "1d")


def grids(scheme: str, degree: int) -> tuple[Axes, ...]:
    """Every way in which `degree` ranks form the grid of a scheme; none where they cannot."""
    if scheme in LINES:
        return ((("tp", degree),),)
    if scheme == "2d":
        q = isqrt(degree)
        return ((("tpx", q), ("tpy", q)),) if q > 1 and q * q == degree else ()
    if scheme == "2.5d":
        sides = [q for q in range(isqrt(degree), 1, -1) if degree % (q * q) == 0 and degree > q * q]
        return tuple((("tpd", degree // (q * q)), ("tpx", q), ("tpy", q)) for q in sides)
    q = round(degree ** (1 / 3))
    return ((("tpx", q), ("tpy", q), ("tpz", q)),) if q > 1 and q**3 == degree else ()


def joined(labels: tuple[str, ...]) -> str:
    """Option labels of the feature axes in order as one text; "" where all are whole."""
    return "" if all(label == "whole" for label in labels) else _JOIN.join(labels)


def parted(text: str, count: int) -> tuple[str, ...]:
    """The inverse of `joined` for `count` feature axes. A text without divisions is whole on all of them."""
    found = tuple(text.split(_JOIN)) if text else ("whole",) * count
    return ("whole",) * count if found == ("whole",) else found
