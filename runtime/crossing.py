"""Who sends what to whom where a value crosses between stages of different meshes: pure data.

A rank's part of a value is a box in the space of its factors: [i n / p, (i + 1) n / p) of a factor of length n that an axis of p ranks divides, the
rows of its data rank's micro-batch, all of any other factor. A receiver gets the intersection of its box with the box of a sender, each element
once: of senders that hold copies, the j-th of the receivers with equal boxes takes the one of number j modulo their count. Over an axis where the
ranks' tensors add up, sender i of p gives to receiver i modulo q of q: what the receivers hold adds up to the same sum.

A gradient goes the same way back, from the boxes of the reader to those of the maker. Where both meshes are alike every rank sends all it has to
the rank in its own place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from runtime.program import Spread, StageMesh

Box = tuple[tuple[int, int], ...]  # [start, stop) of every factor


@dataclass(frozen=True, slots=True)
class Piece:
    """A part that one rank sends to another: `box` of the whole value, by global rank."""

    sender: int
    receiver: int
    box: Box


@dataclass(frozen=True, slots=True)
class _Holder:
    """What a rank holds: its box, and its coordinates on the axes over which tensors add up."""

    rank: int
    box: Box
    place: tuple[int, ...]


def coordinates_of(mesh: StageMesh, rank: int) -> dict[str, int]:
    """A global rank's coordinates on the axes of its mesh."""
    left, found = rank - mesh.first, {}
    for name, size in reversed(mesh.axes):
        left, found[name] = divmod(left, size)
    return found


def num_ranks(mesh: StageMesh) -> int:
    return math.prod(size for _, size in mesh.axes)


@lru_cache(maxsize=4096)
def box_of(spread: Spread, mesh: StageMesh, rank: int, micro_batch: int) -> Box:
    """What a rank holds of a value in one micro-batch."""
    place, sizes = coordinates_of(mesh, rank), dict(mesh.axes)
    all_rows = [own[micro_batch] for own in mesh.micro_batches]
    base = min(m.start for m in all_rows)
    total = max(m.stop for m in all_rows) - base
    box = [(0, size or total) for size in spread.sizes]
    for axis, factor in spread.divided:
        if axis == "dp" and spread.sizes[factor] == 0:
            own = all_rows[place.get("dp", 0)]
            box[factor] = (own.start - base, own.stop - base)
        elif sizes.get(axis, 1) > 1:
            start, stop = box[factor]
            each, rest = divmod(stop - start, sizes[axis])
            assert rest == 0, f"{sizes[axis]} ranks of {axis} do not divide {stop - start}"
            box[factor] = (start + place[axis] * each, start + (place[axis] + 1) * each)
    return tuple(box)


@lru_cache(maxsize=4096)
def pieces(spread: Spread, sender: StageMesh, receiver: StageMesh, micro_batch: int, *, is_grad: bool) -> tuple[Piece, ...]:
    """Everything that travels of one value in one micro-batch, by receiver, then sender. `is_grad`: of its gradient, whose `sender` is the
    mesh that reads the value."""
    summed = spread.vary if is_grad else spread.partial
    sources, targets = (_holders(spread, mesh, micro_batch, summed) for mesh in (sender, receiver))
    modulus = tuple(dict(receiver.axes).get(axis, 1) for axis in summed)
    copies: dict[tuple[Box, tuple[int, ...]], list[int]] = {}
    for source in sources:
        copies.setdefault((source.box, source.place), []).append(source.rank)
    seen: dict[tuple[Box, tuple[int, ...]], int] = {}
    found = []
    for target in targets:
        number = seen.setdefault((target.box, target.place), 0)
        seen[target.box, target.place] += 1
        for (box, place), ranks in copies.items():
            common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, target.box, strict=True))
            is_for = all(i % q == at for i, q, at in zip(place, modulus, target.place, strict=True))
            if is_for and all(start < stop for start, stop in common):
                found.append(Piece(ranks[number % len(ranks)], target.rank, common))
    return tuple(sorted(found, key=lambda piece: (piece.receiver, piece.sender)))


def _holders(spread: Spread, mesh: StageMesh, micro_batch: int, summed: tuple[str, ...]) -> tuple[_Holder, ...]:
    ranks = range(mesh.first, mesh.first + num_ranks(mesh))
    return tuple(_Holder(rank, box_of(spread, mesh, rank, micro_batch), tuple(coordinates_of(mesh, rank).get(axis, 0) for axis in summed)) for rank in ranks)


def shape_of(box: Box) -> tuple[int, ...]:
    """The lengths of a box: of a local tensor seen by its factors."""
    return tuple(stop - start for start, stop in box)


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Where a box lies in one that holds it."""
    return tuple(slice(start - base, stop - base) for (start, stop), (base, _) in zip(box, outer, strict=True))


def num_elements(box: Box) -> int:
    return math.prod(shape_of(box))
