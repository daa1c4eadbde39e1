"""Small problems, exhausted: every choice of a few operators that is not worse in all that a plan is made of.

An integer program weighs time and memory by prices, which on small problems (where latencies rule and little hides behind much) need
not be those of the best plan. Where blocks have few operators all their choices are added up, and those that no other one beats in every
part are tried as plans.
"""

from __future__ import annotations

import itertools
import math

from autoplan.choose import Boundary, Chooser, Chosen
from autoplan.ilp import Solution
from autoplan.problem import BlockPoint, BlockProblem, Price, evaluate

_MAX_CHOICES = 500  # of one block
_MAX_PLANS = 64


def every_choice(chooser: Chooser, boundary: Boundary, price: Price) -> tuple[Chosen, ...]:
    """All combinations of unbeaten choices of all patterns; none where there are too many, or one."""
    found: list[list[Solution]] = []
    for pattern in chooser.outline.examples:
        problem = chooser.problem(pattern, boundary)
        if math.prod(len(item.choices) for item in problem.items) > _MAX_CHOICES:
            return ()
        found.append([Solution(point, picks, price.of(point), 0.0) for picks, point in _unbeaten(problem)])
        if math.prod(map(len, found)) > _MAX_PLANS:
            return ()
    if all(len(solutions) == 1 for solutions in found):
        return ()
    return tuple(Chosen(boundary, dict(zip(chooser.outline.examples, picked, strict=True))) for picked in itertools.product(*found))


def _unbeaten(problem: BlockProblem) -> list[tuple[tuple[int, ...], BlockPoint]]:
    kept: dict[tuple[float, ...], tuple[tuple[int, ...], BlockPoint]] = {}
    for picks in itertools.product(*(range(len(item.choices)) for item in problem.items)):
        point = evaluate(problem, picks)
        if point is None:
            continue
        parts = (point.forward_s, point.backward_s, point.step_s, point.parameter_bytes, point.saved_bytes)
        if not any(all(a <= b for a, b in zip(other, parts, strict=True)) for other in kept):
            kept = {other: found for other, found in kept.items() if not all(a <= b for a, b in zip(parts, other, strict=True))}
            kept[parts] = (picks, point)
    return list(kept.values())
