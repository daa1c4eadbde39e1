"""The space of plans: every combination of degrees, micro-batch size, ZeRO stage, schedule and recomputation.

A schedule puts `num_chunks` stages on every pipeline rank: one in gpipe, 1f1b and zb, two in zbv, two or more in interleaved.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from autoplan.constraints import Constraints
from autoplan.schemes import LINES, SEARCHED, Axes, grids, row_unit, scheme_of
from autoplan.sync import allows_mesh, is_served

RECOMPUTES = ("none", "selective", "full")  # more time and less memory from left to right
MIXED = "mixed"  # each layer in one of these ways
WAYS = ("none", MIXED, "selective", "full")  # of a whole plan, of which one bounds those after it
INTERLEAVED = (2, 4)  # stages on a rank that are tried


def divisors(number: int) -> tuple[int, ...]:
    """Divisors in ascending order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """What is fixed before operators are placed: the mesh, the rows of a micro-batch on a data rank and the schedule."""

    pp: int
    dp: int
    tp: int
    rows: int
    num_micro_batches: int
    schedule: str
    grid: Axes = ()  # the tensor axes, where there are several
    cp: int = 1
    ep: int = 1
    context: str = ""  # how attention exchanges over "cp" (autoplan/contextaxis.py)
    num_chunks: int = 1

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """The "pp" coordinate of every stage."""
        if self.schedule == "zbv":
            return (*range(self.pp), *reversed(range(self.pp)))
        return tuple(range(self.pp)) * self.num_chunks

    @property
    def tensor(self) -> Axes:
        return self.grid or (("tp", self.tp),)

    @property
    def axes(self) -> Axes:
        more = tuple((name, degree) for name, degree in (("cp", self.cp), ("ep", self.ep)) if degree > 1)
        return (("pp", self.pp), ("dp", self.dp), *more, *self.tensor)

    @property
    def inside(self) -> Inside:
        return Inside(self.rows, self.tensor, self.cp, self.ep, self.context)


@dataclass(frozen=True, slots=True, order=True)
class Inside:
    """What the prices of operators inside a stage depend on."""

    rows: int
    tensor: Axes
    cp: int
    ep: int
    context: str


@dataclass(frozen=True, slots=True, order=True)
class Storing:
    """How memory is saved: ZeRO stage and recomputation (of WAYS)."""

    zero: int
    recompute: str

    @property
    def order(self) -> tuple[int, int]:
        """Ascending in time: recomputation only adds to it, and so does a higher ZeRO stage above 0."""
        return (WAYS.index(self.recompute), self.zero)


@dataclass(frozen=True)
class Space:
    """Everything that is searched. `axes` lists the values of every axis of the space."""

    shapes: tuple[Shape, ...]
    storings: tuple[Storing, ...]
    axes: Mapping[str, tuple]


@dataclass(frozen=True)
class Contexts:
    """What may be searched of context and expert axes: `cp` degrees, `ep` degrees, and the ways of attention at a (cp, tp)."""

    cp: tuple[int, ...] = (1,)
    ep: tuple[int, ...] = (1,)
    ways: Callable[[int, int], tuple[str, ...]] = lambda cp, tp: ("",)


def space(world_size: int, batch: int, max_stages: int, constraints: Constraints, *, can_micro_batch: bool, contexts: Contexts | None = None) -> Space:
    """All plans of `world_size` ranks at a global batch of `batch` rows that the constraints leave.

    dp, without ranks that serve alone, divides the batch and the micro-batch size a replica's share. Without micro-batches (`can_micro_batch`) a replica's
    share is one micro-batch. The rows of a micro-batch divide by ep.
    """
    contexts = contexts or Contexts()
    num_stages = len(constraints.stage_layers) if constraints.stage_layers is not None else None
    shapes = []
    for cp, ep in ((cp, ep) for cp in contexts.cp for ep in contexts.ep if world_size % (cp * ep) == 0):
        rest = world_size // (cp * ep)
        for tp in divisors(rest):
            for pp in divisors(rest // tp):
                dp = rest // tp // pp
                replicas = max(1, dp - constraints.num_serving)
                if (
                    pp > max_stages
                    or batch % (replicas * ep)
                    or not _allows(constraints.tp, tp)
                    or not _allows(constraints.pp, pp)
                    or not _allows(constraints.dp, dp)
                ):
                    continue
                if not allows_mesh(constraints, pp, dp, tp * cp * ep):
                    continue
                if constraints.zero_group is not None and dp % constraints.zero_group:
                    continue
                share = batch // replicas
                for rows in divisors(share) if can_micro_batch else (share,):
                    if _allows(constraints.micro_batch_size, rows) and rows % ep == 0:
                        grids = [grid for grid in _grids(constraints, tp, rows) if not grid or cp == ep == 1]
                        ways = contexts.ways(cp, tp)
                        for grid, way, (schedule, chunks) in itertools.product(grids, ways, _schedules(constraints, pp, max_stages)):
                            if _allows(num_stages, pp * chunks):
                                shapes.append(Shape(pp, dp, tp, rows, share // rows, schedule, grid, cp, ep, way, chunks))
    found = {
        "pp": _values(shape.pp for shape in shapes),
        "dp": _values(shape.dp for shape in shapes),
        "tp": _values(shape.tp for shape in shapes),
        "tensor": tuple(dict.fromkeys(constraints.tensor or scheme_of(shape.axes) for shape in shapes)),
        "cp": _values(shape.cp for shape in shapes),
        "ep": _values(shape.ep for shape in shapes),
        "micro_batch_size": _values(shape.rows for shape in shapes),
        "schedule": _values(shape.schedule for shape in shapes),
        "num_chunks": _values(shape.num_chunks for shape in shapes),
        "zero": _values(storing.zero for storing in storings(constraints)),
        "zero_group": (constraints.zero_group or "all data ranks",),
        "recompute": (constraints.recompute,) if constraints.recompute is not None else (*RECOMPUTES, "per layer"),
    }
    ways = _values(shape.context for shape in shapes if shape.context)
    return Space(tuple(shapes), storings(constraints), found | ({"context": ways} if ways else {}))


def storings(constraints: Constraints) -> tuple[Storing, ...]:
    """The ways of saving memory that the constraints leave."""
    free = (1, 2, 3) if constraints.zero_group is not None else (0, 1, 2, 3)  # a group shares states
    free = (0,) if is_served(constraints) or constraints.compression == "1bit-adam" else free  # servers keep states; every rank needs whole momenta
    zeros = (constraints.zero,) if constraints.zero is not None else free
    recomputes = (constraints.recompute,) if constraints.recompute is not None else WAYS
    return tuple(Storing(zero, recompute) for recompute in recomputes for zero in zeros)


def _grids(constraints: Constraints, tp: int, rows: int) -> Iterator[Axes]:
    """The tensor axes of `tp` ranks for micro-batches of `rows` rows; () is the one axis "tp"."""
    asked = constraints.tensor
    if asked in (None, *LINES):
        yield ()
    if constraints.sequence_parallel or constraints.sync not in (None, "allreduce"):
        return
    for scheme in SEARCHED if asked is None else (asked,) if asked in SEARCHED else ():
        if scheme == "3d" and not constraints.sums_plainly:
            continue
        yield from (grid for grid in grids(scheme, tp) if rows % row_unit(grid) == 0)


def _allows(fixed: int | None, value: int) -> bool:
    return fixed is None or fixed == value


def _schedules(constraints: Constraints, pp: int, max_stages: int) -> tuple[tuple[str, int], ...]:
    """Schedules and the stages that they put on a rank."""
    free = ("1f1b", "gpipe", "interleaved", "zb", "zbv")[: 5 if constraints.sums_plainly else 2] if pp > 1 else ("1f1b",)
    found = []
    for name in (constraints.schedule,) if constraints.schedule is not None else free:
        counts = {"interleaved": INTERLEAVED, "zbv": (2,)}.get(name, (1,))
        if name == "interleaved" and constraints.num_chunks is not None:
            counts = (constraints.num_chunks,)
        found += [(name, chunks) for chunks in counts if pp * chunks <= max_stages and _allows(constraints.num_chunks, chunks)]
    return tuple(found)


def _values(items) -> tuple:
    return tuple(sorted(set(items)))
