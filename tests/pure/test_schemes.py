"""Schemes of tensor axes: grids, labels, routes over nested divisions, and the 1.5D grid of least communication."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autoplan
from autoplan.explore import Searcher
from autoplan.layout import PARTIAL, VARY, WHOLE, Split
from autoplan.lower import lower
from autoplan.route import route
from autoplan.schemes import grids, joined, parted
from autoplan.search import forecast_of, plan_of
from autoplan.simulate import forecast
from autoplan.task import Task
from benchmarks.tensor.context import Decoder
from costmodel.analytic import AnalyticPrices
from costmodel.cluster import Cluster
from costmodel.opkey import Collective, OpKey, OpTime
from tests.zoo import ZOO

ROWS, FEATURES = Split(0), Split(1)


def test_ranks_form_the_grids_that_a_scheme_has() -> None:
    assert grids("2d", 9) == ((("tpx", 3), ("tpy", 3)),)
    assert grids("2d", 8) == ()
    assert [dict(grid)["tpd"] for grid in grids("2.5d", 32)] == [2, 8]
    assert grids("3d", 27) == ((("tpx", 3), ("tpy", 3), ("tpz", 3)),)
    assert parted(joined(("o~b0", "i")), 2) == ("o~b0", "i")
    assert parted("", 2) == ("whole", "whole")


def test_an_outer_axis_is_gathered_after_the_inner_one_that_divides_the_same_factor() -> None:
    def order(_: Split) -> tuple[int, ...]:
        return (0, 1)

    assert route((ROWS, ROWS), (WHOLE, ROWS), order) == ((1, WHOLE), (0, WHOLE), (1, ROWS))
    assert route((WHOLE, ROWS), (ROWS, ROWS), order) == ((1, WHOLE), (0, ROWS), (1, ROWS))
    assert route((ROWS, PARTIAL), (ROWS, ROWS), order) == ((1, ROWS),)
    assert route((ROWS, ROWS), (VARY, WHOLE), order) == ((1, WHOLE), (0, VARY))
    assert route((PARTIAL, FEATURES), (WHOLE, WHOLE), order) == ((0, WHOLE), (1, WHOLE))


class VolumePrices:
    """Work is free, a byte on the wire of a ring takes a microsecond."""

    source = "measured"

    def op(self, key: OpKey, device: int = 0) -> OpTime:
        return OpTime(0.0, 0.0, 0.0)

    def collective(self, collective: Collective) -> float:
        p, n = collective.group.size, collective.num_bytes
        share = 1.0 if collective.kind == "send" else (p - 1) / p * (2.0 if collective.kind == "all_reduce" else 1.0)
        return share * n * 1e-6

    def peak_flops_per_s(self, dtype: str, device: int = 0) -> float:
        return 1e30

    def optimizer_s(self, num_elements: int, optimizer: str, num_bytes_per_element: float, device: int = 0) -> float:
        return 0.0

    def memory_limit_bytes(self, device: int = 0) -> int:
        return 10**15

    def assumptions(self) -> tuple[str, ...]:
        return ()


class Product(nn.Module):
    def __init__(self, features: int = 96, outputs: int = 128) -> None:
        super().__init__()
        self.linear = nn.Linear(features, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().sum()


@pytest.mark.parametrize(("dp", "elements"), [(8, 172032), (4, 81920), (2, 49152), (1, 57344)])
def test_the_first_layer_of_a_line_of_lines_sends_its_closed_form(dp: int, elements: int) -> None:
    prices, batch = VolumePrices(), {"x": torch.randn(64, 96)}
    how = autoplan.Constraints(tensor="1.5d", dp=dp, pp=1, zero=0)
    plan = autoplan.find_plan(Product(), batch, cluster=Cluster.parse("cpu:1x8"), constraints=how, optimizer="sgd", prices=prices)
    sizes = dict(plan.axes)
    uses = [use for use in plan.collectives if use.axis in sizes and use.num_bytes > 8]
    ring = {use: (sizes[use.axis] - 1) / sizes[use.axis] * (2 if use.kind == "all_reduce" else 1) for use in uses}
    assert sum(ring[use] * use.num_bytes / 4 for use in uses) * 8 == elements


def test_neither_pure_form_sends_least() -> None:
    how = autoplan.Constraints(tensor="1.5d", pp=1, zero=0)
    plan = autoplan.find_plan(Product(), {"x": torch.randn(64, 96)}, cluster=Cluster.parse("cpu:1x8"), constraints=how, optimizer="sgd", prices=VolumePrices())
    assert (plan.degree("dp"), plan.degree("tp")) == (2, 4)


@pytest.mark.parametrize("fixed", [dict(), dict(pp=2), dict(dp=2)], ids=str)
def test_a_cube_is_searched_at_the_price_of_its_program(fixed: dict[str, int]) -> None:
    model, batch = ZOO["bert"]()
    graph, cluster = autoplan.capture(model, batch), Cluster.parse(f"cpu:1x{8 * max([1, *fixed.values()])}")
    searcher = Searcher(Task(graph, cluster, AnalyticPrices(cluster), autoplan.Constraints(tensor="3d", **fixed), "sgd", None, None))
    outcome = searcher.run()
    best = outcome.best()
    plan = plan_of(best, searcher, outcome)
    found, told = forecast_of(best, searcher), forecast(lower(plan, graph), plan, graph, AnalyticPrices(cluster), overlap=False)
    assert dict(plan.axes) | {"tpx": 2, "tpy": 2, "tpz": 2} == dict(plan.axes)
    assert found.step_time_s == pytest.approx(told.step_time_s, rel=0.02)
    for stage, true in zip(found.stages, told.stages, strict=True):
        assert (stage.memory.parameters, stage.memory.gradients, stage.memory.activations) == (
            true.memory.parameters,
            true.memory.gradients,
            true.memory.activations,
        )


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_cube_is_bounded_by_its_products_without_lowering_it(name: str) -> None:
    graph, cluster = autoplan.capture(*ZOO[name]()), Cluster.parse("a100-sxm-40gb:1x8")
    searcher = Searcher(Task(graph, cluster, AnalyticPrices(cluster), autoplan.Constraints(tensor="3d", dp=1, pp=1), "sgd", None, None))
    chooser = searcher.shapes.chooser(searcher.space.shapes[0])
    outline, prices = chooser.outline, chooser.prices
    shares = []
    for number in outline.examples.values():
        indices = outline.indices(graph.blocks[number])
        least = sum(prices.least_s(i) + prices.least_sent_s(i) for i in indices)
        shares.append(least / sum(item.choices[0].seconds for item in prices.items(indices)[0]))
    assert max(shares) <= 1.0
    assert max(shares) > 0.2


@pytest.mark.parametrize(
    ("rows", "sizes", "ranks", "asked", "reason"),
    [
        (8, (96, 128), 4, dict(tensor="1d", tp=3), "tp=3 multiply to 3, which does not divide the cluster's 4 devices"),
        (7, (95, 127), 4, dict(tensor="1d", tp=4), "tp=4 can split nothing .*sizes that can be split"),
        (9, (96, 128), 4, dict(tensor="1.5d", dp=2), "dp=2 does not divide the global batch of 9 rows: nearest that does is dp=1"),
        (7, (95, 127), 4, dict(tensor="1.5d", tp=4), "tp=4 can split nothing"),
        (8, (96, 128), 8, dict(tensor="2d", tp=8), "grid of q x q, and 8 is no such product. Nearest: tp=4"),
        (8, (96, 128), 6, dict(tensor="2d"), "on 6 devices: no divisor of 6 is a grid of q x q. Use tensor='1d', or 4 or 8 devices"),
        (9, (96, 128), 4, dict(tensor="2d"), "divides the rows of the batch by 2, and a replica has 9. Use a batch that is a multiple of 2"),
        (8, (95, 127), 4, dict(tensor="2d"), r"q=2 divides nothing of aten\.linear.* \(sizes: 95, 127\)"),
        (8, (96, 128), 8, dict(tensor="2.5d", tp=4), "grid of d x q x q with d >= 2, and 4 is no such product. Nearest: tp=8"),
        (6, (96, 128), 8, dict(tensor="2.5d"), "divides the rows of the batch by 4, and a replica has 6. Use a batch that is a multiple of 4"),
        (8, (95, 127), 8, dict(tensor="2.5d"), r"q=2 divides nothing of aten\.linear"),
        (8, (96, 128), 4, dict(tensor="3d"), "on 4 devices: no divisor of 4 is a grid of q x q x q"),
        (6, (96, 128), 8, dict(tensor="3d"), "divides the rows of the batch by 4"),
        (8, (95, 127), 8, dict(tensor="3d"), r"q=2 divides nothing of aten\.linear"),
        (8, (96, 128), 8, dict(tensor="2d", cp=2), "with cp=2: a grid stands beside dp and pp alone"),
        (8, (96, 128), 8, dict(tensor="2.5d", ep=2), "with ep=2: a grid stands beside dp and pp alone"),
        (8, (96, 128), 4, dict(tensor="2d", sequence_parallel=True), "with sequence_parallel=True"),
    ],
    ids=lambda value: " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_what_does_not_divide_is_said_before_anything_is_planned(rows: int, sizes: tuple[int, int], ranks: int, asked: dict, reason: str) -> None:
    with torch.device("meta"):
        model, batch = Product(*sizes), {"x": torch.empty(rows, sizes[0])}
    with pytest.raises(autoplan.InfeasibleError, match=reason):
        autoplan.find_plan(model, batch, cluster=f"cpu:1x{ranks}", constraints=autoplan.Constraints(**asked))


def test_a_grid_that_was_asked_for_is_not_replaced_by_another_division_of_long_sequences() -> None:
    with torch.device("meta"):
        model, batch = (
            Decoder(1, hidden=64, heads=4, key_heads=4, ffn=128, vocab=64),
            {name: torch.empty(2, 16384, dtype=torch.int64) for name in ("ids", "labels")},
        )
    plan = autoplan.find_plan(model, batch, cluster="h100-sxm-80gb:1x4", constraints=autoplan.Constraints(tensor="2d"))
    assert (plan.degree("cp"), plan.degree("tpx"), plan.degree("tpy")) == (1, 2, 2) and plan.space["tensor"] == ("2d",)
