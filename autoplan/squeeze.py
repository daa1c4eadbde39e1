"""Plans that memory binds: the commonest block's integer program under the memory that a plan has left for it.

A bound. Any plan that fits and takes less than the best one found keeps the budgets of autoplan/room.py, so the program that keeps
the two which the free choice exceeds most bounds the seconds of its blocks.

Plans. Of a plan that does not fit, the fullest rank has n main blocks, n_s of them on its stage s, of which it holds h_s micro-batches, and needs M bytes
with the block's P and A. With the other blocks and the same cuts it fits where, with H the most that sum of n_s h_s is at any moment,

    n * states(P') + H * A' <= limit - (M - n * states(P) - H * A)

(recomputed: A' once, what enters the blocks does not change; selectively: A is what is kept). The program under this budget gives the next
plan; a stage that is too full then adds its own. Where the block has nothing more to give, the other patterns weigh memory too.

The first choice takes parameters to move beside compute (`exposing`: where they do not, they weigh more in a second one).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from autoplan.bounds import Bounds
from autoplan.choose import Boundary, Chooser, Chosen
from autoplan.holding import moments
from autoplan.least import Least, main_pattern
from autoplan.outcome import Result
from autoplan.problem import Budget, Price
from autoplan.replay import Step

_TRIES = 4
_ROUNDS = 4
_CHANGE = 1e-3  # of a bound from one round to the next, less than which ends them
_NUM_BUDGETS = 2  # in one program
_EXPOSED = 0.01  # of a step, of moving parameters
_WEIGHTS = (1.0,)  # of what is exposed
_WEIGHT = 0.5  # of memory against time, of the other patterns


@dataclass(frozen=True)
class Place:
    """Where plans are looked for: all that is fixed but the choices of operators and the cuts."""

    chooser: Chooser
    boundary: Boundary
    price: Price
    step: Step
    recompute: str
    blocks: Mapping[str, Least]  # at least, at this boundary


@dataclass(frozen=True)
class Squeezed:
    """A lower bound of plans that fit and take less than the best one known (else that), and the budgets that they keep."""

    bound_s: float
    budgets: tuple[Budget, ...]


def squeezed(place: Place, bounds: Bounds, best_s: float, enough_s: float) -> Squeezed:
    """Bound the plans at `place`. Slower blocks leave less room for many of them on one stage, so that the budgets are tightened
    until nothing changes, or the bound reaches `enough_s`."""
    name = main_pattern(place.blocks)
    blocks, budgets, bound_s = place.blocks, (), 0.0
    for _ in range(_ROUNDS):
        budgets = _tightest(bounds.room.budgets(blocks, place.step, place.recompute, best_s), place)
        seconds = place.chooser.within_s(name, place.boundary, budgets, place.recompute)
        if seconds is None:
            return Squeezed(best_s, budgets)
        main = blocks[name]
        blocks = {**blocks, name: replace(main, seconds=max(main.seconds, seconds - main.again_s(place.recompute)))}
        before, bound_s = bound_s, max(bound_s, bounds.step_s(blocks, place.step, place.recompute))
        if bound_s >= enough_s or bound_s <= before * (1 + _CHANGE) or not budgets:
            break
    return Squeezed(min(best_s, bound_s), budgets)


def leaner(place: Place, chosen: Chosen, budgets: tuple[Budget, ...]) -> Chosen | None:
    """`chosen` with a main block that keeps `budgets`; None where none was found, or it does already."""
    name = main_pattern(place.blocks)
    found = place.chooser.within(name, place.boundary, place.price, budgets, place.recompute)
    return None if found is None or found.picks == chosen.solutions[name].picks else Chosen(place.boundary, {**chosen.solutions, name: found})


def plans(place: Place, bounds: Bounds, first: Result, cut: Callable[[Chosen], Result]) -> list[Result]:
    """Plans at `place` that need less memory than `first`, which does not fit, until one fits."""
    name = main_pattern(place.blocks)
    outline = place.chooser.outline
    budgets: list[Budget] = []
    results: list[Result] = []
    others, last = first.chosen, first
    for _ in range(_TRIES):
        budget = _missing(last, name, place, bounds)
        found = None
        if budget is not None:
            budgets.append(budget)
            found = place.chooser.within(name, place.boundary, place.price, tuple(budgets[-_NUM_BUDGETS:]), place.recompute)
        if found is None:
            if others is not first.chosen:
                break
            others = place.chooser.choose_near(first.chosen, _lean(first.chosen, place.price, outline.counts), place.recompute)
            found = others.solutions[name]
            budgets.clear()
        result = cut(Chosen(place.boundary, {**others.solutions, name: found}))
        results.append(result)
        if result.fits:
            break
        last = result
    return results


def _tightest(budgets: tuple[Budget, ...], place: Place) -> tuple[Budget, ...]:
    """The budgets that the free choice exceeds most."""
    free = place.chooser.free(main_pattern(place.blocks), place.boundary, place.recompute)
    over = {b: b.used_bytes(free.point) - b.limit_bytes for b in budgets}
    worst = sorted((b for b in budgets if over[b] > 0.0), key=lambda b: (-over[b] / max(1.0, b.limit_bytes), b.limit_bytes, b.saved_factor))
    return tuple(worst[:_NUM_BUDGETS])


def _missing(result: Result, name: str, place: Place, bounds: Bounds) -> Budget | None:
    """The budget under which the fullest rank of a plan would fit; None where its main blocks have nothing to do with it."""
    graph, step = place.chooser.outline.graph, place.step
    rank = result.stage_ranks[result.fullest]
    counts = {
        s: sum(graph.blocks[i].pattern == name for i in range(result.starts[s], result.starts[s + 1])) for s, at in enumerate(result.stage_ranks) if at == rank
    }
    count = sum(counts.values())
    if not count:
        return None
    point, main = result.chosen.point(name), place.blocks[name]
    if place.recompute == "selective" and main.is_recomputed:
        point = replace(point, saved_bytes=point.kept_bytes)
    states = bounds.room.state_bytes(step) / bounds.room.width_at_rest
    if place.recompute == "full" and main.is_recomputed:
        held = 1
    else:
        candidates = moments(step.schedule, result.stage_ranks, step.num_micro_batches)[rank]
        held = max(sum(saved * counts[s] for s, saved, _ in moment.counts) for moment in candidates)
    budget = Budget(0.0, count * states, float(held))
    limit = result.limit_bytes - (result.memory.total - budget.used_bytes(point))
    return replace(budget, limit_bytes=limit) if limit > 0.0 else None


def exposing(result: Result, price: Price, counts: Mapping[str, int]) -> tuple[Price, ...]:
    """Prices at which parameters also weigh what moving them adds to the step of a plan, and more than that, as they do where compute hides
    behind it; none where that is next to nothing."""
    m = result.shape.num_micro_batches
    stage = max(range(len(result.loads)), key=lambda j: result.loads[j].slot_s)
    load, time = result.loads[stage], result.times[stage]
    moved_s = time.first_forward_s + time.last_backward_s + (m - 1) * (time.forward_s + time.backward_s) - m * load.slot_s
    moved_s += sum(seconds for _, stream, seconds in time.tail if stream == "dp")
    if moved_s < _EXPOSED * result.step_s:
        return ()
    kept = sum(solution.point.parameter_bytes * counts[p] for p, solution in result.chosen.solutions.items()) / len(result.loads)
    return tuple(replace(price, per_parameter_byte_s=price.per_parameter_byte_s + weight * moved_s / max(1.0, kept)) for weight in _WEIGHTS)


def _lean(chosen: Chosen, price: Price, counts: Mapping[str, int]) -> Price:
    """A price at which memory weighs as a part of all time does."""
    seconds = sum(price.of(s.point) * counts[p] for p, s in chosen.solutions.items())
    kept = sum((s.point.parameter_bytes + s.point.saved_bytes) * counts[p] for p, s in chosen.solutions.items())
    weight = _WEIGHT * seconds / max(1, kept)
    return Price(price.num_micro_batches, price.per_parameter_byte_s + weight, weight)
