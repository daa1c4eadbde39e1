"""A shape worked out: its plans, and a bound of those that were not looked at.

Integer programs for every boundary (autoplan/choose.py), best cuts under the memory limit by stage
(autoplan/cuts.py), replay (autoplan/simulate.py), for each ZeRO stage and recomputation that is not dominated by one that fits:
recomputation only adds time, and so does ZeRO-3 to -2 to -1, as long as memory does not bend the cuts.
Where memory bends or forbids these, autoplan/squeeze.py bounds the shape under what memory leaves and looks for plans that fit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from autoplan import raising, squeeze
from autoplan.chains import chain_s
from autoplan.choose import Boundary, Chosen
from autoplan.cuts import best_cuts, dealt_cuts, layer_cuts, shifted_cuts
from autoplan.exhaust import every_choice
from autoplan.least import Least
from autoplan.load import StageLoad
from autoplan.outcome import Result
from autoplan.raising import ladder, raised
from autoplan.rankmemory import by_rank, memories
from autoplan.replay import durations, least_step, step_seconds
from autoplan.shapebounds import ShapeBounds, dominates, parameter_width
from autoplan.space import MIXED, RECOMPUTES, WAYS, Shape, Storing
from autoplan.squeeze import Place
from autoplan.stagework import Work

ENOUGH = 0.005  # the search ends once nothing left can be faster by more
_DEEP = 256  # blocks, of which ranks of several stages have as many each: the best cut of many alike takes long to find and is little better
_FEW = 32  # cuts of a short model, which are all tried: the slowest stage alone does not say how long a step takes
_NUM_DEALT = 3  # cuts that deal blocks out evenly
_NUM_SHIFTS, _NUM_SHIFTED = 6, 4  # times that a block is moved to another rank, and places that are tried for it
_FAR = 1.3  # times of the memory, or of the best plan, beyond which one cut tells enough
_NEAR = 1.1  # times of the best plan, within which a plan is looked at twice


class _Found:
    """Plans of one shape, and a bound of those that were not looked at."""

    def __init__(self, best_s: float) -> None:
        self._best_s = best_s
        self.results: list[Result] = []
        self.least_s = float("inf")

    @property
    def fastest_s(self) -> float:
        """Of all plans that are known, these included."""
        return min([self._best_s, *(r.step_s for r in self.results if r.fits)])


def _stands_for(result: Result, storing: Storing, boundary: Boundary) -> bool:
    """Whether a plan is no slower than those which store so: it stores in a faster way, or mixes theirs with others."""
    if not result.fits or result.chosen.boundary != boundary:
        return False
    mixes = result.storing.recompute == MIXED and storing.recompute != "none" and result.storing.zero == storing.zero
    return mixes or (not result.is_bent and dominates(result.storing, storing))


class WorkOut:
    """Works out shapes of one search."""

    def __init__(self, shapes: ShapeBounds) -> None:
        self.shapes = shapes

    def plans(self, shape: Shape, best_s: float = float("inf"), *, is_squeezed: bool = True) -> tuple[list[Result], float]:
        """Plans of a shape, and a lower bound of all its plans that take less than `best_s` (else `best_s`).
        `is_squeezed`: what does not fit is made to; else the first plan that fits is enough."""
        chooser, price = self.shapes.chooser(shape), self.shapes.price(shape)
        found = _Found(best_s)
        every: dict[Boundary, tuple[Chosen, ...]] = {}
        known = sorted(self.shapes.by_recompute(shape).items(), key=lambda item: (item[1], WAYS.index(item[0])))
        some = best_s == float("inf") and known[0][1] == best_s  # of what cannot fit, to say what is missing
        for recompute, known_s in known:
            if not some and known_s >= found.fastest_s:
                found.least_s = min(found.least_s, known_s)
                continue
            for bound_s, _, storing, boundary, blocks in sorted(self._places(shape, recompute), key=lambda place: place[:2]):
                if not some and bound_s >= found.fastest_s:
                    found.least_s = min(found.least_s, bound_s)
                    continue
                if any(_stands_for(r, storing, boundary) for r in found.results):
                    continue
                if not is_squeezed and any(r.fits for r in found.results):
                    found.least_s = min(found.least_s, bound_s)
                    continue
                place = Place(chooser, boundary, price, self.shapes.step(shape, storing), recompute, blocks)
                if not some and self.shapes.task.stages is None and found.fastest_s < float("inf") and recompute != MIXED:
                    bound_s = max(bound_s, squeeze.squeezed(place, self.shapes.bounds, found.fastest_s, found.fastest_s * (1 - ENOUGH)).bound_s)
                    if bound_s >= found.fastest_s * (1 - ENOUGH):
                        found.least_s = min(found.least_s, bound_s)
                        continue
                picked = [chooser.choose(boundary, price, way) for way in (RECOMPUTES if recompute == MIXED else (recompute,))]
                chosen = list({tuple(s.picks for s in one.solutions.values()): one for one in picked if one is not None}.values())
                if not chosen:
                    continue

                def work(chosen: Chosen, storing: Storing = storing) -> Work:
                    again = "none" if storing.recompute == MIXED else storing.recompute
                    return Work(self.shapes.outline, chooser.local, chosen, again, self.shapes.step(shape, storing))

                def cut(chosen: Chosen, storing: Storing = storing, below_s: float = found.fastest_s) -> Result:
                    return self._cut(shape, storing, work(chosen), below_s)

                first = len(found.results)
                if recompute == MIXED:
                    found.results.extend(self._mixed(place, chosen, work, cut, shape, found.fastest_s))
                else:
                    bound_s = self._fill(found, place, chosen[0], cut, bound_s, is_squeezed=is_squeezed, some=some)
                way = "none" if recompute == MIXED else recompute
                for fitting in [r for r in found.results[first:] if r.fits and r.step_s < found.fastest_s * _NEAR]:
                    found.results.extend([cut(chooser.choose_near(fitting.chosen, other, way)) for other in squeeze.exposing(fitting, price, self._counts)])
                if boundary not in every:
                    every[boundary] = every_choice(chooser, boundary, price)
                found.results.extend(cut(one) for one in every[boundary])
                found.least_s = min(found.least_s, bound_s)
        return found.results, min(found.least_s, found.fastest_s)

    def _mixed(
        self, place: Place, chosen: list[Chosen], work: Callable[[Chosen], Work], cut: Callable[[Chosen], Result], shape: Shape, best_s: float
    ) -> list[Result]:
        """Plans of these choices that mix ways of recomputing: where none fits, of choices that keep what memory leaves for a way; if one is not far from
        the best known, of choices near its own that keep less."""
        results = [cut(one) for one in chosen]
        if not any(r.fits for r in results):
            results += [cut(lean) for way in RECOMPUTES[1:] for lean in self._leaner(place, way, shape, best_s)]
        best = min(results, key=lambda r: (not r.fits, r.order))
        if best.step_s >= _FAR * best_s:
            return results
        states = self.shapes.bounds.room.state_bytes(place.step) / self.shapes.bounds.room.width_at_rest
        leaner = raising.leaner(work(best.chosen), best, place.price, states)
        return [*results, *(cut(place.chooser.choose_near(best.chosen, lean, way)) for way, lean in leaner)]

    def _leaner(self, place: Place, way: str, shape: Shape, best_s: float) -> Iterator[Chosen]:
        """The choice of a way that keeps the budgets of plans that fit, where there is another one."""
        blocks, chosen = self.shapes.solved(shape, place.boundary, way), place.chooser.choose(place.boundary, place.price, way)
        if blocks is not None and chosen is not None and self.shapes.task.stages is None:
            own = replace(place, recompute=way, blocks=blocks)
            known = squeeze.squeezed(own, self.shapes.bounds, best_s, best_s)
            lean = squeeze.leaner(own, chosen, known.budgets)
            if lean is not None:
                yield lean

    @property
    def _counts(self) -> Mapping[str, int]:
        return self.shapes.outline.counts

    def _places(self, shape: Shape, recompute: str) -> list[tuple[float, tuple, Storing, Boundary, Mapping[str, Least]]]:
        """Bound, order and all that is fixed but choices and cuts, for every boundary and ZeRO stage."""
        places = []
        for number, boundary in enumerate(self.shapes.boundaries(shape)):
            blocks = self.shapes.solved(shape, boundary, recompute)
            if blocks is not None:
                storings = (s for s in self.shapes.storings(shape) if s.recompute == recompute)
                places += [(self.shapes.least_step_s(blocks, shape, s), (*s.order, number), s, boundary, blocks) for s in storings]
        return places

    def _fill(self, found: _Found, place: Place, chosen: Chosen, cut: Callable[[Chosen], Result], bound_s: float, *, is_squeezed: bool, some: bool) -> float:
        """Add the plan of `chosen`, and where memory bends or forbids it those that need less; returns the bound of the place's plans."""
        result = cut(chosen)
        found.results.append(result)
        if some or (result.fits and not result.is_bent):
            return bound_s
        fastest_s = min(found.fastest_s, result.step_s) if result.fits else found.fastest_s
        enough_s = fastest_s * (1 - ENOUGH)
        if self.shapes.task.stages is None:
            known = squeeze.squeezed(place, self.shapes.bounds, fastest_s, enough_s)
            bound_s = max(bound_s, known.bound_s)
            lean = squeeze.leaner(place, chosen, known.budgets) if bound_s < enough_s and is_squeezed else None
            if lean is not None:
                result = cut(lean)
                found.results.append(result)
        if not result.fits and bound_s < enough_s and is_squeezed:
            found.results.extend(squeeze.plans(place, self.shapes.bounds, result, cut))
        return bound_s

    def _cut(self, shape: Shape, storing: Storing, work: Work, best_s: float) -> Result:
        given = self.shapes.task.stages
        if given is not None:
            return self.result(shape, storing, work, given.starts, best_s)
        step, is_bent, weights = self.shapes.step(shape, storing), False, np.zeros(0)
        numbers, layers = self.shapes.outline.blocks, self.shapes.task.constraints.stage_layers
        if layers is not None:
            cuts = layer_cuts([self.shapes.task.graph.blocks[n].layer for n in numbers], layers)
        elif len(step.stage_ranks) == 1:
            cuts = (0, len(numbers))
        else:
            shares = step.shards if step.zero else 1
            tail = work.tail_per_byte_s(self.shapes.optimizer_s / parameter_width(self.shapes.task.graph) / shares) / shape.num_micro_batches
            weights = np.array([b.slot_s for b in work.blocks]) + tail
            if len(numbers) > _DEEP and self._dealt(shape):
                cuts = self._dealt(shape)[0]
            else:
                cuts, is_bent = self._best_cuts(shape, storing, work, weights)
        every = self._every(len(step.stage_ranks))
        results: dict[tuple[int, ...], Result] = {}

        def tried(cuts: tuple[int, ...]) -> Result:
            if cuts not in results:
                results[cuts] = self.result(shape, storing, work, self._starts(cuts), best_s, is_bent=is_bent)
            return results[cuts]

        def order(cuts: tuple[int, ...]) -> tuple:
            result = results[cuts]
            return not result.fits, result.step_s if result.fits else result.memory.total, result.starts

        for each in dict.fromkeys((*self._dealt(shape), cuts, *every)):
            result = tried(each)
            if not every and (result.memory.total > _FAR * self.shapes.limit_bytes or result.step_s > _FAR * best_s):
                return results[min(results, key=order)]  # other cuts of as many blocks differ by less
        best = min(results, key=order)
        enough_s = self.shapes.by_recompute(shape)[storing.recompute] * (1 + ENOUGH)
        for _ in range(_NUM_SHIFTS if 0 < len(weights) <= _DEEP and shape.num_chunks > 1 and not every else 0):
            before = best
            for moved in (
                shifted_cuts(best, weights.tolist(), step.stage_ranks)[:_NUM_SHIFTED] if results[best].step_s > enough_s or not results[best].fits else ()
            ):
                tried(moved)
            best = min(results, key=order)
            if best == before:
                break
        return results[best]

    def _best_cuts(self, shape: Shape, storing: Storing, work: Work, weights: np.ndarray) -> tuple[tuple[int, ...], bool]:
        """Those with the fastest slowest stage that fits, if there are any, and whether memory bends them."""
        step, seconds = self.shapes.step(shape, storing), weights.tolist()
        cuts = best_cuts(seconds, len(step.stage_ranks))
        assert cuts is not None, "without memory some cut fits"
        fits = work.fits(step, self.shapes.width, self.shapes.limit_bytes)
        if all(fits[j][a, b] for j, (a, b) in enumerate(itertools.pairwise(cuts))):
            return cuts, False
        if storing.recompute == MIXED and shape.num_chunks > 1:
            return cuts, True  # the fullest rank says more than its stages, and it is raised
        if storing.recompute == MIXED:
            ladders = {pattern: ladder(work, pattern) for pattern in self.shapes.outline.examples}
            fitting = best_cuts(seconds, len(step.stage_ranks), more_s=work.again_s(ladders, step, self.shapes.width, self.shapes.limit_bytes))
        else:
            fitting = best_cuts(seconds, len(step.stage_ranks), fits)
        return fitting or cuts, fitting is not None

    def _starts(self, cuts: tuple[int, ...]) -> tuple[int, ...]:
        numbers = self.shapes.outline.blocks
        return (0, *(numbers[c] for c in cuts[1:-1]), len(self.shapes.task.graph.blocks))

    def _every(self, num_stages: int) -> tuple[tuple[int, ...], ...]:
        """All cuts, where there are few."""
        count = len(self.shapes.outline.blocks)
        if self.shapes.task.constraints.stage_layers is not None or math.comb(count - 1, num_stages - 1) > _FEW:
            return ()
        return tuple((0, *inner, count) for inner in itertools.combinations(range(1, count), num_stages - 1))

    def _dealt(self, shape: Shape) -> tuple[tuple[int, ...], ...]:
        """Cuts that give ranks of several stages as much, of which the first are tried."""
        if shape.num_chunks == 1 or self.shapes.task.constraints.stage_layers is not None:
            return ()
        blocks, numbers = self.shapes.task.graph.blocks, self.shapes.outline.blocks
        has_layers = any(block.layer for block in blocks)
        units = [i for i, number in enumerate(numbers) if blocks[number].layer or not has_layers]
        return dealt_cuts(units[0], units[-1] + 1 - units[0], len(numbers) - units[-1] - 1, shape.pp, shape.num_chunks)[:_NUM_DEALT]

    def result(self, shape: Shape, storing: Storing, work: Work, starts: tuple[int, ...], best_s: float = float("inf"), *, is_bent: bool = False) -> Result:
        """Stages that begin at blocks `starts`, priced and weighed; values between them in pieces or whole, as is faster."""
        step = self.shapes.step(shape, storing)
        works = (raised(work, step, starts, self.shapes.limit_bytes) if storing.recompute == MIXED else ()) or (work,)
        best: Result | None = None
        for own, loads in ((one, loads) for one in works for loads in one.ways(starts, step.stage_ranks)):
            limit_s = best_s if best is None or not best.fits else min(best_s, best.step_s)
            found = self._weighed(shape, storing, own, starts, loads, limit_s, is_bent=is_bent)
            best = found if best is None or (not found.fits, found.step_s) < (not best.fits, best.step_s) else best
        assert best is not None, "there is always a way"
        return best

    def _weighed(
        self, shape: Shape, storing: Storing, work: Work, starts: tuple[int, ...], loads: tuple[StageLoad, ...], best_s: float, *, is_bent: bool
    ) -> Result:
        step = self.shapes.step(shape, storing)
        times = tuple(durations(load, step, self.shapes.pricer) for load in loads)
        held = by_rank(memories(loads, step), step.stage_ranks)
        fullest = max(range(len(held)), key=lambda j: held[j].total)
        step_s, idle_s = least_step(times, step)
        step_s = max(step_s, chain_s(times, step))
        if held[fullest].total <= self.shapes.limit_bytes and (step_s < best_s or self.shapes.task.stages is not None):  # else the bound tells enough
            step_s, idle_s = step_seconds(loads, times, step, self.shapes.pricer)
        return Result(
            shape,
            storing,
            work.chosen,
            starts,
            step_s,
            held[fullest],
            fullest,
            self.shapes.limit_bytes,
            loads,
            times,
            idle_s,
            is_bent,
            step.stage_ranks,
            work.modes if storing.recompute == MIXED else (),
        )
