"""Layouts: how a tensor lies on one mesh axis, and what a change of layout costs in both passes.

Notation. A tensor dimension is a product of factors, outermost first. On one mesh axis of p ranks a
value has one of four layouts:

    WHOLE        every rank holds the same value ("invariant"); its cotangent is complete on every rank
    Split(d, k)  factor k of dimension d is divided among the ranks; so is the cotangent
    PARTIAL      the value is the sum of what the ranks hold; its cotangent is complete on every rank
    VARY         a copy of a WHOLE value used by work that differs by rank; its cotangent is PARTIAL.
                 Nothing is produced as VARY: it is only a way to *read* a value.

Reading a value that lies as `src` as `dst` (elements n of the value on this axis' ranks together):

    src      dst      forward          backward
    WHOLE    VARY     -                all_reduce n
    WHOLE    Split    slice            all_gather n
    Split    WHOLE    all_gather n     slice
    Split    VARY     all_gather n     reduce_scatter n
    Split    Split'   all_to_all n     all_to_all n        (all_gather n and a local slice where both lie in one dimension)
    PARTIAL  WHOLE    all_reduce n     -
    PARTIAL  VARY     all_reduce n     all_reduce n
    PARTIAL  Split    reduce_scatter n all_gather n

PARTIAL -> PARTIAL and equal layouts are free. Everything else is not offered. This is the whole
communication of tensor, sequence, vocabulary and data parallelism: see docs/decisions/0001.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Union

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "slice"]


@dataclass(frozen=True, slots=True, order=True)
class Split:
    """Factor number `factor` (0 = outermost) of dimension `dim` is divided among the ranks."""

    dim: int
    factor: int = 0

    def __str__(self) -> str:
        return f"split({self.dim}.{self.factor})"


@dataclass(frozen=True, slots=True)
class Mode:
    """One of the layouts that name no dimension."""

    name: Literal["whole", "partial", "vary"]

    def __str__(self) -> str:
        return self.name


WHOLE = Mode("whole")
PARTIAL = Mode("partial")
VARY = Mode("vary")
Layout = Union[Split, Mode]


@dataclass(frozen=True, slots=True)
class Conversion:
    """The collectives of one change of layout; None where a pass moves nothing."""

    forward: Kind | None
    backward: Kind | None


_FREE = Conversion(None, None)


def conversion(src: Layout, dst: Layout) -> Conversion | None:
    """How to read a value that lies as `src` as `dst`; None where that cannot be had."""
    if src == VARY:
        return None
    if src == dst:
        return _FREE
    if isinstance(src, Split):
        if isinstance(dst, Split):
            kind: Kind = "all_gather" if src.dim == dst.dim else "all_to_all"
            return Conversion(kind, kind)
        if dst == PARTIAL:
            return None
        return Conversion("all_gather", "slice" if dst == WHOLE else "reduce_scatter")
    if src == WHOLE:
        if dst == VARY:
            return Conversion(None, "all_reduce")
        return Conversion("slice", "all_gather") if isinstance(dst, Split) else None
    if dst == WHOLE:
        return Conversion("all_reduce", None)
    if dst == VARY:
        return Conversion("all_reduce", "all_reduce")
    return Conversion("reduce_scatter", "all_gather")
