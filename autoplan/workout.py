"""A shape worked out: its plans, and a bound of those that were not looked at.

Integer programs for every boundary (autoplan/choose.py), best cuts under the memory limit by stage
(autoplan/cuts.py), replay (autoplan/simulate.py), for each ZeRO stage and recomputation that is not dominated by one that fits:
recomputation only adds time, and so does ZeRO-3 to -2 to -1, as long as memory does not bend the cuts.
Where memory bends or forbids these, autoplan/squeeze.py bounds the shape under what memory leaves and looks for plans that fit.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np

from autoplan import squeeze
from autoplan.bounds import Least
from autoplan.chains import chain_s
from autoplan.choose import Boundary, Chosen
from autoplan.cuts import best_cuts, layer_cuts
from autoplan.exhaust import every_choice
from autoplan.outcome import Result
from autoplan.rankmemory import by_rank, memories
from autoplan.replay import durations, least_step, step_seconds
from autoplan.shapebounds import ShapeBounds, dominates, parameter_width
from autoplan.space import Shape, Storing
from autoplan.squeeze import Place
from autoplan.stagework import Work

ENOUGH = 0.005  # the search ends once nothing left can be faster by more
_NEAR = 1.1  # times of the best plan, within which a plan is looked at twice


class WorkOut:
    """Works out shapes of one search."""

    def __init__(self, shapes: ShapeBounds) -> None:
        self.shapes = shapes

    def plans(self, shape: Shape, best_s: float = float("inf"), *, is_squeezed: bool = True) -> tuple[list[Result], float]:
        """Plans of a shape, and a lower bound of all its plans that take less than `best_s` (else `best_s`).
        `is_squeezed`: what does not fit is made to."""
        chooser, price = self.shapes.chooser(shape), self.shapes.price(shape)
        places: list[tuple[float, tuple, Storing, Boundary, Mapping[str, Least]]] = []
        for number, boundary in enumerate(self.shapes.boundaries(shape)):
            blocks = self.shapes.solved(shape, boundary)
            if blocks is not None:
                for s in self.shapes.storings(shape):
                    places.append((self.shapes.least_step_s(blocks, shape, s), (*s.order, number), s, boundary, blocks))
        some = best_s == float("inf") and all(place[0] == float("inf") for place in places)  # of what cannot fit, to say what is missing
        results: list[Result] = []
        every: dict[Boundary, tuple[Chosen, ...]] = {}
        least_s = float("inf")
        for bound_s, _, storing, boundary, blocks in sorted(places, key=lambda place: place[:2]):
            fastest_s = min([best_s, *(r.step_s for r in results if r.fits)])
            if bound_s >= fastest_s and not some:
                least_s = min(least_s, bound_s)
                continue
            if any(r.fits and not r.is_bent and r.chosen.boundary == boundary and dominates(r.storing, storing) for r in results):
                continue
            chosen = chooser.choose(boundary, price)
            if chosen is None:
                continue

            def cut(chosen: Chosen, storing: Storing = storing, below_s: float = fastest_s) -> Result | None:
                return self._cut(shape, storing, Work(self.shapes.outline, chooser.local, chosen, storing.recompute, self.shapes.step(shape, storing)), below_s)

            result = cut(chosen)
            if result is None:
                continue
            first = len(results)
            results.append(result)
            if (not result.fits or result.is_bent) and not some:
                place = Place(chooser, boundary, price, self.shapes.step(shape, storing), storing.recompute, blocks)
                fastest_s = min(fastest_s, result.step_s) if result.fits else fastest_s
                enough_s = fastest_s * (1 - ENOUGH)
                if self.shapes.task.stages is None:
                    known = squeeze.squeezed(place, self.shapes.bounds, fastest_s, enough_s)
                    bound_s = max(bound_s, known.bound_s)
                    lean = squeeze.leaner(place, chosen, known.budgets) if bound_s < enough_s and is_squeezed else None
                    result = (cut(lean) if lean is not None else None) or result
                    results += [result] if result is not results[-1] else []
                if not result.fits and bound_s < enough_s and is_squeezed:
                    results += squeeze.plans(place, self.shapes.bounds, result, cut)
            for fitting in [r for r in results[first:] if r.fits and r.step_s < fastest_s * _NEAR]:
                for weighing in squeeze.exposing(fitting, price, self.shapes.outline.counts):
                    again = cut(chooser.choose_near(fitting.chosen, weighing))
                    results += [again] if again is not None else []
            if boundary not in every:
                every[boundary] = every_choice(chooser, boundary, price)
            results += [more for one in every[boundary] if (more := cut(one)) is not None]
            least_s = min(least_s, bound_s)
        return results, min([least_s, best_s, *(r.step_s for r in results if r.fits)])

    def _cut(self, shape: Shape, storing: Storing, work: Work, best_s: float) -> Result | None:
        step, is_bent = self.shapes.step(shape, storing), False
        numbers, layers = self.shapes.outline.blocks, self.shapes.task.constraints.stage_layers
        if self.shapes.task.stages is not None:
            cuts: tuple[int, ...] | None = None
        elif layers is not None:
            cuts = layer_cuts([self.shapes.task.graph.blocks[n].layer for n in numbers], layers)
        elif len(step.stage_ranks) == 1:
            cuts = (0, len(numbers))
        else:
            shares = step.shards if step.zero else 1
            tail = work.tail_per_byte_s(self.shapes.optimizer_s / parameter_width(self.shapes.task.graph) / shares) / shape.num_micro_batches
            weights = np.array([b.slot_s for b in work.blocks]) + tail
            cuts = best_cuts(weights.tolist(), len(step.stage_ranks))
            fits = work.fits(step, self.shapes.width, self.shapes.limit_bytes)
            if cuts is not None and not all(fits[j][a, b] for j, (a, b) in enumerate(itertools.pairwise(cuts))):
                fitting = best_cuts(weights.tolist(), len(step.stage_ranks), fits)
                cuts, is_bent = fitting or cuts, fitting is not None
        if self.shapes.task.stages is not None:
            starts = self.shapes.task.stages.starts
        else:
            assert cuts is not None
            starts = (0, *(numbers[c] for c in cuts[1:-1]), len(self.shapes.task.graph.blocks))
        return self.result(shape, storing, work, starts, best_s, is_bent=is_bent)

    def result(self, shape: Shape, storing: Storing, work: Work, starts: tuple[int, ...], best_s: float = float("inf"), *, is_bent: bool = False) -> Result:
        """Stages that begin at blocks `starts`, priced and weighed."""
        step = self.shapes.step(shape, storing)
        loads = work.stage_loads(starts, step.stage_ranks)
        times = tuple(durations(load, step, self.shapes.pricer) for load in loads)
        held = by_rank(memories(loads, step), step.stage_ranks)
        fullest = max(range(len(held)), key=lambda j: held[j].total)
        step_s, idle_s = least_step(times, step)
        step_s = max(step_s, chain_s(times, step))
        if held[fullest].total <= self.shapes.limit_bytes and (step_s < best_s or self.shapes.task.stages is not None):  # else the bound tells enough
            step_s, idle_s = step_seconds(loads, times, step, self.shapes.pricer)
        return Result(
            shape, storing, work.chosen, starts, step_s, held[fullest], fullest, self.shapes.limit_bytes, loads, times, idle_s, is_bent, step.stage_ranks
        )
