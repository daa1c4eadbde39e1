"""What the search says of a plan is what its program says, where an operator becomes another one, or a sum is made in another dtype."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autoplan
from autoplan.explore import Searcher
from autoplan.lower import lower
from autoplan.price import Pricer
from autoplan.search import forecast_of, plan_of
from autoplan.simulate import forecast
from autoplan.task import Task
from autoplan.workload import load_of
from benchmarks.tensor.context import decoder
from costmodel.analytic import AnalyticPrices
from costmodel.cluster import Cluster
from costmodel.opkey import OpKey, OpTime


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


@pytest.mark.parametrize("how", [dict(tensor="1.5d", tp=4), dict(tp=4), dict(tp=4, sequence_parallel=True)], ids=str)
def test_what_selective_recomputation_makes_again_is_weighed_as_its_program_says(how: dict) -> None:
    """A kept value that is read in another layout is gathered again, and then weighs as a whole."""
    graph, cluster = decoder(2, 4, 8192), Cluster.parse("h100-sxm-80gb:1x4")
    prices = AnalyticPrices(cluster)
    asked = autoplan.Constraints(recompute="selective", pp=1, dp=1, cp=1, zero=0, micro_batch_size=1, **how)
    searcher = Searcher(Task(graph, cluster, prices, asked, "adamw", "bf16", None))
    outcome = searcher.run()
    plan = plan_of(outcome.best(), searcher, outcome)
    told = forecast(lower(plan, graph), plan, graph, prices, overlap=searcher.shapes.overlap)
    assert forecast_of(outcome.best(), searcher).stages[0].memory.activations == pytest.approx(told.stages[0].memory.activations, rel=0.02)


class _Seen:
    """Prices that remember what they were asked."""

    def __init__(self, prices: AnalyticPrices) -> None:
        self.prices, self.targets = prices, set[str]()

    def __getattr__(self, name: str) -> object:
        return getattr(self.prices, name)

    def op(self, key: OpKey, device: int = 0) -> OpTime:
        self.targets.add(key.target)
        return self.prices.op(key, device)


@pytest.mark.parametrize(("dp", "target"), [(1, "runtime.batch_norm"), (2, "runtime.sync_batch_norm")])
def test_statistics_over_ranks_are_priced_as_the_chain_that_they_run_as(dp: int, target: str) -> None:
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 12 * 12, 4))
    graph = autoplan.capture(layers, (torch.randn(4, 3, 16, 16),), loss_fn=lambda out, batch: out.square().mean())
    cluster, asked = Cluster.parse(f"cpu:1x{dp}"), autoplan.Constraints(dp=dp, pp=1, tp=1)
    searched, told = _Seen(AnalyticPrices(cluster)), _Seen(AnalyticPrices(cluster))
    searcher = Searcher(Task(graph, cluster, searched, asked, "adamw", None, None))  # type: ignore[arg-type]
    outcome = searcher.run()
    plan = plan_of(outcome.best(), searcher, outcome)
    step_s = forecast(lower(plan, graph), plan, graph, told, overlap=False).step_time_s  # type: ignore[arg-type]
    assert forecast_of(outcome.best(), searcher).step_time_s == pytest.approx(step_s, rel=0.01, abs=1e-5)  # a call that lowering leaves out
    norms = [{name for name in seen.targets if "batch_norm" in name} for seen in (searched, told)]
    assert norms == [{target}, {target}]


def test_sums_over_depth_are_searched_in_the_dtype_in_which_they_are_made() -> None:
    graph, cluster = decoder(1, 8, 64), Cluster.parse("h100-sxm-80gb:1x8")
    prices = AnalyticPrices(cluster)
    searcher = Searcher(Task(graph, cluster, prices, autoplan.Constraints(tensor="2.5d", tp=8), "adamw", "bf16", None))
    outcome = searcher.run()
    best = outcome.best()
    (program,) = lower(plan_of(best, searcher, outcome), graph)
    made = load_of(program, program.stages[0], graph, Pricer(prices, "bf16")).deferred
    searched = [use for load in best.loads for use in load.deferred]
    summed = [sum(size for axis, size in found if axis == "tpd") for found in (searched, made)]
    assert summed[0] == summed[1] > 0
