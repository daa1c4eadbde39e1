"""Compute beside collectives is slowed: by the formula, in the replay, and in what bounds it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from handmade import transformer
from hypothesis import given
from hypothesis import strategies as st
from test_bounds import check_bounds, searcher_of

from autoplan.datasums import Mode
from autoplan.load import Pass, StageLoad
from autoplan.lower import lower
from autoplan.price import Pricer
from autoplan.replay import Step, durations
from autoplan.search import forecast_of, plan_of
from autoplan.simulate import forecast
from costmodel.analytic import AnalyticPrices
from costmodel.calibration import load as calibration
from costmodel.cluster import Cluster
from costmodel.overlap import beside_s
from costmodel.scaled import ScaledPrices

seconds = st.floats(0, 100)
CLUSTER = Cluster.parse("h100-sxm-80gb:2x4")


@given(seconds, seconds, seconds, seconds, st.floats(1, 3))
def test_beside_is_between_the_larger_and_the_sum_and_convex(a: float, b: float, p: float, q: float, slow: float) -> None:
    both = beside_s(a, p, slow)
    assert max(a, p) <= both <= a + p + 1e-9
    assert both + beside_s(b, q, slow) >= beside_s(a + b, p + q, slow) - 1e-9


@given(seconds, seconds)
def test_traffic_that_slows_nothing_hides_altogether(compute: float, traffic: float) -> None:
    assert beside_s(compute, traffic, 1.0) == max(compute, traffic)


def prices(slow: float) -> AnalyticPrices:
    known = calibration()
    stack = replace(known.stack("default"), slowdown=slow)
    return AnalyticPrices(CLUSTER, replace(known, stacks={**known.stacks, "default": stack}))


def stage() -> StageLoad:
    return StageLoad(0, "a", "b", Pass(1.0), Pass(2.0), Pass(), (), 10**8, 10**8, 4, (10**8,), 0, 100, 0, 0, (), ())


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_forward_pass_takes_longer_by_the_share_of_the_gather_beside_it(zero: int) -> None:
    how = Step((("pp", 1), ("dp", 8), ("tp", 1)), "1f1b", 2, zero, None, "adamw", None, (0,), slowdown=1.25)
    pricer = Pricer(prices(1.25), None, overlap=True)
    slow, free = durations(stage(), how, pricer), durations(stage(), replace(how, slowdown=1.0), pricer)
    gather_s = free.first_forward_s - 1.0  # one unit: gathered before the pass, and beside it once more
    assert slow.first_forward_s - free.first_forward_s == pytest.approx(0.2 * gather_s)
    assert (slow.forward_s > free.forward_s) == (zero == 3)
    assert slow.last_backward_s > free.last_backward_s


def test_late_sums_slow_the_passes_beside_them() -> None:
    how = Step((("pp", 1), ("dp", 8), ("tp", 1)), "1f1b", 2, 0, None, "adamw", None, (0,), sums=Mode("", 1), slowdown=1.25)
    pricer = Pricer(prices(1.25), None, overlap=True)
    slow, free = durations(stage(), how, pricer), durations(stage(), replace(how, slowdown=1.0), pricer)
    assert slow.tail_s - free.tail_s == pytest.approx(0.2 * slow.late_s)
    assert slow.late_s == free.late_s > 0


@pytest.mark.parametrize("fixed", [dict(dp=8, zero=1), dict(dp=8, zero=3), dict(dp=4, pp=2, zero=2), dict(dp=2, tp=4, zero=3)], ids=str)
def test_the_search_and_the_program_price_the_slowdown_alike(fixed: dict) -> None:
    graph = transformer(layers=4, batch=16, seq=64, hidden=256, heads=8, inner=1024, vocab=1000)
    told = {}
    for slow in (1.0, 1.5):
        searcher = searcher_of(graph, CLUSTER, prices(slow), **fixed)
        outcome = searcher.run()
        plan = plan_of(outcome.best(), searcher, outcome)
        told[slow] = forecast(lower(plan, graph), plan, graph, prices(slow)).step_time_s
        assert forecast_of(outcome.best(), searcher).step_time_s == pytest.approx(told[slow], rel=0.02)
    assert told[1.5] >= told[1.0]


def test_bounds_stay_below_every_plan_that_is_slowed() -> None:
    graph = transformer(layers=4, batch=16, seq=64, hidden=256, heads=8, inner=1024, vocab=1000)
    check_bounds(searcher_of(graph, CLUSTER, prices(1.5)), every=5)


def test_prices_of_slower_devices_keep_the_slowdown() -> None:
    scaled = ScaledPrices(prices(1.3), (1.0,) * 8)
    assert Pricer(scaled, None).slowdown == 1.3
    assert any("1.30 times as long while a collective" in line for line in scaled.assumptions())
