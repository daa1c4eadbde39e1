"""Programs that need more memory than the search thought."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bruteforce import ASKED, RandomPrices, instance

import autoplan.search
from autoplan.errors import InfeasibleError
from autoplan.forecast import Forecast
from autoplan.search import search
from autoplan.simulate import forecast

SEED = 1  # whose plans differ in memory


def heavier(more_bytes: int):
    """Forecasts of programs that need so much more than the search's own."""

    def told(*asked, **given) -> Forecast:
        plain = forecast(*asked, **given)
        stages = tuple(replace(s, memory=replace(s.memory, activations=s.memory.activations + more_bytes)) for s in plain.stages)
        return replace(plain, peak_memory_bytes=plain.peak_memory_bytes + more_bytes, stages=stages)

    return told


def test_plans_whose_programs_fit_are_searched_for_where_those_found_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    case = instance(SEED)
    free = search(case.graph, case.cluster, RandomPrices(SEED, 1 << 40), ASKED)
    least = least_bytes(case)
    more_bytes = free.forecast.peak_memory_bytes - least
    assert more_bytes > 0
    limit_bytes = free.forecast.peak_memory_bytes
    leaner = search(case.graph, case.cluster, RandomPrices(SEED, limit_bytes - more_bytes), ASKED)
    monkeypatch.setattr(autoplan.search, "forecast", heavier(more_bytes))
    plan = search(case.graph, case.cluster, RandomPrices(SEED, limit_bytes), ASKED)
    assert plan.forecast.peak_memory_bytes <= limit_bytes
    assert plan.forecast.step_time_s == leaner.forecast.step_time_s
    assert plan.gap >= 1 - free.forecast.step_time_s / plan.forecast.step_time_s - 0.01, "what was left out for its program's memory counts"
    assert all(stage.memory_limit_bytes == limit_bytes for stage in plan.forecast.stages)


def test_the_refusal_says_what_the_smallest_program_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    case = instance(SEED)
    limit_bytes = search(case.graph, case.cluster, RandomPrices(SEED, 1 << 40), ASKED).forecast.peak_memory_bytes
    monkeypatch.setattr(autoplan.search, "forecast", heavier(2 * limit_bytes))
    with pytest.raises(InfeasibleError, match="GiB more than the limit"):
        search(case.graph, case.cluster, RandomPrices(SEED, limit_bytes), ASKED)


def least_bytes(case) -> int:
    """Peak of the plan that needs least, found by asking for ever less."""
    limit_bytes = 1 << 40
    while True:
        try:
            limit_bytes = search(case.graph, case.cluster, RandomPrices(SEED, limit_bytes), ASKED).forecast.peak_memory_bytes - 1
        except InfeasibleError:
            return limit_bytes + 1
