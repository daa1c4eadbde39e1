"""What the search says of a recomputed plan is what its program says, where a kept operator becomes one that exchanges inside."""

from __future__ import annotations

import pytest

import autoplan
from autoplan.explore import Searcher
from autoplan.lower import lower
from autoplan.search import forecast_of, plan_of
from autoplan.simulate import forecast
from autoplan.task import Task
from benchmarks.tensor.context import decoder
from costmodel.analytic import AnalyticPrices
from costmodel.cluster import Cluster


@pytest.mark.parametrize(("how", "tolerance"), [(dict(cp=4, tp=1), 0.02), (dict(tensor="2d", tp=4), 0.05)], ids=str)
def test_selective_recomputation_is_searched_at_the_price_of_its_program(how: dict, tolerance: float) -> None:
    """Ring attention and gathered products are run again, unlike what they stand for."""
    graph, cluster = decoder(2, 4, 8192), Cluster.parse("h100-sxm-80gb:1x4")
    prices = AnalyticPrices(cluster)
    asked = autoplan.Constraints(recompute="selective", pp=1, dp=1, zero=0, **how)
    searcher = Searcher(Task(graph, cluster, prices, asked, "adamw", "bf16", None))
    outcome = searcher.run()
    best = outcome.best()
    plan = plan_of(best, searcher, outcome)
    told = forecast(lower(plan, graph), plan, graph, prices, overlap=searcher.shapes.overlap)
    assert forecast_of(best, searcher).step_time_s == pytest.approx(told.step_time_s, rel=tolerance)
