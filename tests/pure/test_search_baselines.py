"""Baselines are plans like any other, and none is better than the searched one."""

from __future__ import annotations

import pytest
from handmade import FlatPrices, transformer

from autoplan.baselines import BASELINES, baseline, even_layers
from autoplan.constraints import Constraints
from autoplan.errors import InfeasibleError, UsageError
from autoplan.graph import Graph
from autoplan.plan import Plan
from autoplan.search import search
from costmodel.cluster import Cluster

CLUSTER = Cluster.parse("a100-sxm-80gb:1x4")


@pytest.fixture(scope="module")
def graph() -> Graph:
    return transformer(layers=4, batch=8, seq=32, hidden=256, heads=8, inner=1024, vocab=1000)


@pytest.fixture(scope="module")
def best(graph: Graph) -> Plan:
    return search(graph, CLUSTER, FlatPrices(), Constraints())


@pytest.mark.parametrize("name", BASELINES)
def test_no_baseline_beats_the_searched_plan(graph: Graph, best: Plan, name: str) -> None:
    plan = baseline(name, graph, CLUSTER, FlatPrices())
    assert plan.forecast.step_time_s >= best.forecast.step_time_s * (1 - best.gap) * (1 - 1e-9)


def test_each_strategy_is_what_its_name_says(graph: Graph) -> None:
    ddp, fsdp, megatron, gpipe = (baseline(name, graph, CLUSTER, FlatPrices()) for name in ("ddp", "fsdp", "megatron", "gpipe"))
    assert (ddp.degree("dp"), ddp.zero) == (4, 0)
    assert (fsdp.degree("dp"), fsdp.zero) == (4, 3)
    assert (megatron.degree("tp"), megatron.degree("pp")) == (4, 1)
    assert (gpipe.degree("pp"), gpipe.schedule, len(gpipe.stages)) == (4, "gpipe", 4)


def test_layers_are_spread_evenly() -> None:
    assert even_layers(10, 4) == (3, 3, 2, 2)
    assert even_layers(10, 1) is None


def test_an_unknown_baseline_and_one_that_never_fits_are_refused(graph: Graph) -> None:
    with pytest.raises(UsageError, match="no baseline"):
        baseline("alpha", graph, CLUSTER, FlatPrices())
    with pytest.raises(InfeasibleError, match="ddp has no plan that fits"):
        baseline("ddp", graph, CLUSTER, FlatPrices(limit_bytes=2**20))
