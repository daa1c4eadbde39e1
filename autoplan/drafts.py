"""Drafts of plans for unequal devices: meshes, shares and cuts with an estimate of their time.

With s_k(b, r) the seconds of block b for r rows on kind k (linear in r between two prices), replica i on kinds k(i, j), cuts c and m micro-batches,

    t_i(r, c) = (m - 1) max over stages j of S_ij + sum over j of S_ij,     S_ij = sum over b in stage j of s_k(i,j)(b, r / m)

A draft's own estimate is the replay of its stages (autoplan/replay.py), class of replicas by class, with S_ij in proportion to rows.
Shares are the exact optimum of max t_i (autoplan/shares.py) for given cuts, cuts the best for given shares (autoplan/cuts.py) under each stage's
own memory limit, with the transfers over the link before a stage as part of its time, so that cuts stay away from slow links; the two are taken
in turn until neither changes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoplan.choose import Boundary, Chosen
from autoplan.cuts import best_cuts, layer_cuts
from autoplan.errors import InfeasibleError
from autoplan.explore import Searcher
from autoplan.rankmemory import memories
from autoplan.replay import Step, durations, replay, tails_s
from autoplan.replicas import PASSES, Kind, slowest
from autoplan.shapebounds import dominates
from autoplan.shares import best_shares, row_shares
from autoplan.space import MIXED, Shape, Storing
from autoplan.stagework import Work
from autoplan.task import Task
from costmodel.opkey import Collective, OpKey, OpTime, RankGroup
from costmodel.prices import Prices, slowdown

_NUM_TURNS = 4  # of shares and cuts


@dataclass(frozen=True)
class OnDevice:
    """Prices as the device of one rank sees them."""

    prices: Prices
    rank: int

    @property
    def source(self) -> str:
        return self.prices.source

    def op(self, key: OpKey, device: int = 0) -> OpTime:
        return self.prices.op(key, self.rank)

    def collective(self, collective: Collective) -> float:
        return self.prices.collective(collective)

    def optimizer_s(self, num_elements: int, optimizer: str, num_bytes_per_element: float, device: int = 0) -> float:
        return self.prices.optimizer_s(num_elements, optimizer, num_bytes_per_element, self.rank)

    def memory_limit_bytes(self, device: int = 0) -> int:
        return self.prices.memory_limit_bytes(self.rank)

    def peak_flops_per_s(self, dtype: str, device: int = 0) -> float:
        return self.prices.peak_flops_per_s(dtype, self.rank)

    def slowdown(self, device: int = 0) -> float:
        return slowdown(self.prices, self.rank)

    def assumptions(self) -> tuple[str, ...]:
        return self.prices.assumptions()


@dataclass(frozen=True)
class Draft:
    """A combination that may be forecast. `seconds` is the estimate of the module's text."""

    shape: Shape
    order: tuple[str, ...]
    storing: Storing
    shares: tuple[int, ...]
    starts: tuple[int, ...]
    chosen: Chosen
    seconds: float

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        sizes = dict(self.shape.axes)
        return tuple((name, sizes[name]) for name in self.order)


@dataclass(frozen=True)
class _Kind:
    """Blocks of one kind of device under a choice: seconds = base + per_row * rows, and what memory needs."""

    work: Work
    searcher: Searcher
    base_s: np.ndarray
    per_row_s: np.ndarray

    def slots_s(self, rows: float) -> np.ndarray:
        return self.base_s + self.per_row_s * rows


def drafts_of(task: Task, found: Sequence[Kind], searchers: dict[Kind, Searcher]) -> Iterator[Draft]:
    reference = searchers[slowest_kind(searchers)]
    for shape in reference.space.shapes:
        if shape.num_chunks > 1:
            continue  # stages of unequal devices run in order, one on each
        orders = [tuple(name for name, _ in shape.axes)]
        if shape.pp > 1 and shape.dp > 1:
            orders.append(("dp", *(name for name in orders[0] if name != "dp")))
        kept: list[Storing] = []
        for storing in sorted(reference.shapes.storings(shape), key=lambda s: s.order):
            if storing.recompute == MIXED or any(dominates(one, storing) for one in kept):
                continue  # replicas of unequal devices lack unequally much memory
            of_kind = _priced(shape, storing, searchers, reference)
            if of_kind is None:
                continue
            drafts = [draft for order in orders for draft in _of_shape(task, shape, order, storing, found, of_kind, reference)]
            if drafts:
                kept.append(storing)
            yield from drafts


def slowest_kind(searchers: dict[Kind, Searcher]) -> Kind:
    return min(searchers, key=lambda kind: (kind[0], -kind[2]))


def _priced(shape: Shape, storing: Storing, searchers: dict[Kind, Searcher], reference: Searcher) -> dict[Kind, _Kind] | None:
    """The blocks of every kind, under the boundary that is best on the slowest; None where there is none."""
    found: dict[Kind, _Kind] = {}
    boundaries = reference.shapes.boundaries(shape)
    chosen = {b: reference.shapes.chooser(shape).choose(b, reference.shapes.price(shape)) for b in boundaries}
    possible = [b for b in boundaries if chosen[b] is not None]
    if not possible:
        return None

    def works(searcher: Searcher, rows: int, boundary: Boundary) -> Work | None:
        chooser = searcher.shapes.chooser(replace(shape, rows=rows))
        picked = chooser.choose(boundary, searcher.shapes.price(shape))
        return None if picked is None else Work(searcher.shapes.outline, chooser.local, picked, storing.recompute, searcher.shapes.step(shape, storing))

    slots = {b: work for b in possible if (work := works(reference, shape.rows, b)) is not None}
    boundary = min(slots, key=lambda b: sum(block.slot_s for block in slots[b].blocks))
    other = shape.rows * 2 if (reference.shapes.batch // shape.rows) % 2 == 0 else shape.rows // 2 if shape.rows % 2 == 0 else 0
    for kind, searcher in searchers.items():
        work = works(searcher, shape.rows, boundary)
        second = works(searcher, other, boundary) if other else None
        if work is None:
            return None
        here = np.array([block.slot_s for block in work.blocks])
        if second is None:
            found[kind] = _Kind(work, searcher, np.zeros_like(here), here / shape.rows)
            continue
        there = np.array([block.slot_s for block in second.blocks])
        per_row = np.clip((there - here) / (other - shape.rows), 0.0, here / shape.rows)
        found[kind] = _Kind(work, searcher, here - per_row * shape.rows, per_row)
    return found


def _of_shape(
    task: Task, shape: Shape, order: tuple[str, ...], storing: Storing, found: Sequence[Kind], of_kind: dict[Kind, _Kind], reference: Searcher
) -> Iterator[Draft]:
    """The draft with the best shares, and the one with even shares where that is another one."""
    sizes = dict(shape.axes)
    cells = slowest(tuple((name, sizes[name]) for name in order), found)
    places = [[of_kind[found[cells[j, i]]] for j in range(shape.pp)] for i in range(shape.dp)]
    even = row_shares(reference.shapes.batch, shape.dp)
    numbers = reference.shapes.outline.blocks
    slow = of_kind[slowest_kind({k: v.searcher for k, v in of_kind.items()})]
    chosen = slow.work.chosen
    m = shape.num_micro_batches

    entry_s = _entry_s(task, slow, cells, shape)

    def cut(shares: Sequence[int]) -> tuple[int, ...] | None:
        layers = task.constraints.stage_layers
        if layers is not None:
            return layer_cuts([task.graph.blocks[n].layer for n in numbers], layers)
        if shape.pp == 1:
            return (0, len(numbers))
        weights = np.array([np.max([places[i][j].slots_s(shares[i] / m) for i in range(shape.dp)], axis=0) for j in range(shape.pp)])
        fits = [np.all([_fits(places[i][j], shape, storing)[j] for i in range(shape.dp)], axis=0) for j in range(shape.pp)]
        return best_cuts(weights, shape.pp, fits, entry_s)

    def seconds(i: int, cuts: Sequence[int]) -> Callable[[int], float]:
        base = [float(places[i][j].base_s[a:b].sum()) for j, (a, b) in enumerate(itertools.pairwise(cuts))]
        per_row = [float(places[i][j].per_row_s[a:b].sum()) for j, (a, b) in enumerate(itertools.pairwise(cuts))]

        def of(rows: int) -> float:
            slots = [x + y * rows / m for x, y in zip(base, per_row, strict=True)]
            return (m - 1) * max(slots) + sum(slots)

        return of

    step = replace(reference.shapes.step(shape, storing), axes=tuple((name, sizes[name]) for name in order))

    def draft(shares: Sequence[int], cuts: Sequence[int]) -> Draft:
        starts = (0, *(numbers[c] for c in cuts[1:-1]), len(task.graph.blocks))
        classes = {(tuple(map(id, places[i])), rows): (places[i], rows / m) for i, rows in enumerate(shares)}
        return Draft(shape, order, storing, tuple(shares), starts, chosen, _replayed_s(list(classes.values()), starts, cuts, shape, step))

    shares, cuts = even, cut(even)
    if cuts is None:
        return
    first = draft(even, cuts)
    best = first
    for _ in range(_NUM_TURNS if shape.dp > 1 else 0):
        try:
            shares = best_shares(
                [seconds(i, cuts) for i in range(shape.dp)],
                reference.shapes.batch,
                least=m,
                caps=[_cap(places[i], shape, storing, cuts) for i in range(shape.dp)],
            )
        except InfeasibleError:
            break
        again = cut(shares)
        if again is None or (shares, again) == (best.shares, cuts):
            break
        cuts = again
        best = min(best, draft(shares, cuts), key=lambda d: d.seconds)
    yield best
    if best is not first:
        yield first


def _replayed_s(classes: Sequence[tuple[Sequence[_Kind], float]], starts: tuple[int, ...], cuts: Sequence[int], shape: Shape, step: Step) -> float:
    """The module's estimate. `classes`: of replicas, the kinds of their stages and the rows of their micro-batches."""
    ends, tails = [0.0] * shape.pp, [0.0] * shape.pp
    for kinds, rows in classes:
        every = {id(kind): kind.work.stage_loads(starts, shape.stage_ranks) for kind in kinds}
        loads = tuple(every[id(kind)][j] for j, kind in enumerate(kinds))
        times = []
        for j, (kind, load) in enumerate(zip(kinds, loads, strict=True)):
            a, b = cuts[j], cuts[j + 1]
            share = float(kind.slots_s(rows)[a:b].sum() / kind.slots_s(shape.rows)[a:b].sum()) if rows != shape.rows and b > a else 1.0
            time = durations(load, step, kind.searcher.shapes.pricer)
            times.append(replace(time, **{name: share * getattr(time, name) for name in PASSES}))
        line, after = replay(loads, tuple(times), step, kinds[0].searcher.shapes.pricer), tails_s(tuple(times), step)
        ends, tails = [max(pair) for pair in zip(ends, line.end_s, strict=True)], [max(pair) for pair in zip(tails, after, strict=True)]
    return max(end + tail for end, tail in zip(ends, tails, strict=True))


def _entry_s(task: Task, kind: _Kind, cells: Mapping[tuple[int, int], int], shape: Shape) -> np.ndarray:
    """[j, a]: seconds of the transfers of a micro-batch, there and back, over the link before stage j where it begins at block a."""
    outline, work = kind.searcher.shapes.outline, kind.work
    numbers, place = outline.blocks, {number: a for a, number in enumerate(outline.blocks)}
    crossing = np.zeros(len(numbers) + 1)
    for name, readers in outline.crossing.items():
        home = place[outline.block_of[task.graph.producer[name]]]
        size = work.boundary_bytes(name) * (2 if task.graph.values[name].requires_grad else 1)
        crossing[home + 1 : max(place[r] for r in readers) + 1] += size
    entry = np.zeros((shape.pp, len(numbers) + 1))
    for j in range(1, shape.pp):
        low, high = sorted((cells[j - 1, 0], cells[j, 0]))
        group = RankGroup(2, high - low, low, max(1, task.cluster.num_devices // shape.pp))
        for a in range(1, len(numbers)):
            entry[j, a] = task.prices.collective(Collective("send", int(crossing[a]), group)) if crossing[a] else 0.0
    return entry


def _fits(kind: _Kind, shape: Shape, storing: Storing) -> list[np.ndarray]:
    return kind.work.fits(kind.searcher.shapes.step(shape, storing), kind.searcher.shapes.width, kind.searcher.shapes.limit_bytes)


def _cap(stages: Sequence[_Kind], shape: Shape, storing: Storing, cuts: Sequence[int]) -> int:
    """The most rows of a replica: what memory its stages have beside what does not grow with rows."""
    rows = None
    for j, kind in enumerate(stages):
        numbers = kind.searcher.shapes.outline.blocks
        starts = (0, *(numbers[c] for c in cuts[1:-1]), len(kind.searcher.task.graph.blocks))
        loads, step = kind.work.stage_loads(starts, shape.stage_ranks), kind.searcher.shapes.step(shape, storing)
        empty = tuple(replace(load, saved_bytes=0, transient_bytes=0, sends=()) for load in loads)
        full, fixed = (memories(each, step)[j].total for each in (loads, empty))
        room, each = kind.searcher.shapes.limit_bytes - fixed, max(1e-9, (full - fixed) / shape.rows)
        most = int(max(0, room) / each) * shape.num_micro_batches
        rows = most if rows is None else min(rows, most)
    return min(rows or 0, stages[0].searcher.shapes.batch)
