"""On small problems the search finds what brute force over all executable plans finds."""

from __future__ import annotations

import pytest
from bruteforce import ASKED, instance, least_step_s

from autoplan.errors import InfeasibleError
from autoplan.search import search

_TOLERANCE = 0.01  # the gap that a search leaves by default


def check(seed: int) -> float:
    """How much slower the search's plan is than the fastest executable one, as a part of its time."""
    case = instance(seed)
    least_s = least_step_s(case)
    try:
        plan = search(case.graph, case.cluster, case.prices, ASKED)
    except InfeasibleError:
        assert least_s == float("inf"), f"seed {seed}: brute force has a plan of {least_s} s, the search none"
        return 0.0
    step_s = plan.forecast.step_time_s
    assert plan.forecast.peak_memory_bytes <= case.prices.limit_bytes
    assert step_s >= least_s * (1 - 1e-9), f"seed {seed}: the search's plan is none that brute force knows"
    assert least_s >= step_s * (1 - plan.gap) * (1 - 1e-9), f"seed {seed}: a gap of {plan.gap} is told, but {least_s} s is possible, not {step_s} s"
    return 1 - least_s / step_s


@pytest.mark.parametrize("seed", range(6))
def test_the_plan_is_the_fastest_of_all_executable_plans(seed: int) -> None:
    assert check(seed) <= _TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 500))
def test_the_plan_is_the_fastest_of_all_executable_plans_at_length(seed: int) -> None:
    assert check(seed) <= _TOLERANCE
