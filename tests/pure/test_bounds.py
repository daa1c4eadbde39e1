"""Bounds are below every plan, where operators compute in low precision, grids gather, backward passes are split and memory is short."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from handmade import FlatPrices, transformer
from torch import nn

import autoplan
from autoplan.choose import Outline
from autoplan.constraints import Constraints
from autoplan.explore import Searcher
from autoplan.graph import Graph
from autoplan.space import Shape
from autoplan.spine import spine_of
from autoplan.task import Task
from autoplan.workload import model_of
from costmodel.analytic import AnalyticPrices
from costmodel.cluster import Cluster
from costmodel.opkey import Collective
from costmodel.prices import Prices
from runtime.instr import TensorSpec


def searcher_of(graph: Graph, cluster: Cluster, prices: Prices, **constraints: object) -> Searcher:
    return Searcher(Task(graph, cluster, prices, Constraints(**constraints), "adamw", None, None))  # type: ignore[arg-type]


def check_bounds(searcher: Searcher, every: int = 1) -> list[Shape]:
    """The shapes that were looked at, none of which has a plan below one of its bounds."""
    looked_at = list(searcher.space.shapes[::every])
    for shape in looked_at:
        times = [r.step_s for r in searcher.works.plans(shape)[0]]
        bounds = [searcher.shapes.peak_bound(shape), *(bound(shape) for bound in searcher.shapes.tighter), searcher.shapes.program_bound(shape)]
        assert max(bounds) <= min(times) * (1 + 1e-9), (shape, bounds, min(times))
    return looked_at


class SlowLinks(FlatPrices):
    """Links of 1 GB/s."""

    def collective(self, collective: Collective) -> float:
        return 100 * super().collective(collective)


def low_precision(graph: Graph) -> Graph:
    """The graph as if its model were kept in bfloat16."""
    values = {n: replace(v, spec=TensorSpec(v.spec.shape, "bfloat16")) if v.spec.dtype == "float32" else v for n, v in graph.values.items()}
    return replace(graph, values=values)


def test_a_model_in_low_precision_is_bounded_by_its_own_peak() -> None:
    graph = low_precision(transformer(layers=2, batch=8, seq=512, hidden=1024, heads=8, inner=4096, vocab=1000))
    cluster = Cluster.parse("h100-sxm-80gb:1x4")
    check_bounds(searcher_of(graph, cluster, AnalyticPrices(cluster)), every=7)
    assert model_of(graph, {}, 1, None).dtype == "bfloat16"
    free = searcher_of(graph, cluster, AnalyticPrices(cluster)).run()
    for fixed in ({"dp": 4}, {"tp": 4}, {"pp": 4}):
        other = searcher_of(graph, cluster, AnalyticPrices(cluster), **fixed).run()
        assert other.best().step_s >= free.best().step_s * (1 - free.gap(free.best())) * (1 - 1e-9)


class Normed(nn.Module):
    """Products that do not weigh between norms whose parameters do."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(64) for _ in range(4))
        self.products = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm in self.norms:
            x = torch.tanh(norm(x))
        for product in self.products:
            x = torch.tanh(product(x))
        return x.square().sum()


@pytest.mark.parametrize("shape", [(8, 64), (8, 6, 64)], ids=["rows", "positions"])
def test_what_a_grid_gathers_at_least_no_plan_does_without(shape: tuple[int, ...]) -> None:
    graph = autoplan.capture(Normed(), (torch.randn(shape),))
    searcher = searcher_of(graph, Cluster.parse("a100-sxm-80gb:1x4"), SlowLinks(), tensor="2d")
    assert any(shape.grid for shape in check_bounds(searcher))


@pytest.mark.parametrize("schedule", ["zb", "zbv", "interleaved"])
def test_schedules_in_parts_are_bounded_where_forwards_send(schedule: str) -> None:
    graph = transformer(layers=4, batch=8, seq=64, hidden=256, heads=8, inner=1024, vocab=1000)
    searcher = searcher_of(graph, Cluster.parse("a100-sxm-80gb:1x4"), SlowLinks(), schedule=schedule, pp=2, tp=2)
    check_bounds(searcher)


def test_a_way_of_storing_that_fits_is_never_called_too_large() -> None:
    graph = transformer(layers=3, batch=4, seq=64, hidden=256, heads=4, inner=1024, vocab=100)
    cluster = Cluster.parse("a100-sxm-80gb:1x4")
    roomy = searcher_of(graph, cluster, FlatPrices(), recompute="selective")
    for shape in roomy.space.shapes[::3]:
        for result in roomy.works.plans(shape)[0]:
            tight = searcher_of(graph, cluster, FlatPrices(result.memory.total), recompute="selective")
            blocks = tight.shapes.least(shape)
            assert tight.shapes.least_step_s(blocks, shape, result.storing) <= result.step_s * (1 + 1e-9), (shape, result.storing)


class Towers(nn.Module):
    """Two towers of one input that meet in a loss: no layer of one waits for the other."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.left, self.right = (nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(num_layers)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left = right = x
        for layer in self.left:
            left = layer(left)
        for layer in self.right:
            right = layer(right)
        return (left * right).square().sum()


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zb", "zbv"])
def test_towers_that_do_not_wait_for_each_other_are_bounded_by_one_of_them(schedule: str) -> None:
    """Stages of the second tower run while those of the first do, so that such plans are faster than if each block waited for the one before it."""
    graph = autoplan.capture(Towers(4), (torch.randn(8, 64),))
    searcher = searcher_of(graph, Cluster.parse("a100-sxm-80gb:1x4"), FlatPrices(), schedule=schedule, tp=1)
    assert any(shape.pp > 1 for shape in check_bounds(searcher))


def test_a_spine_is_one_of_the_towers_and_what_follows_both() -> None:
    graph = autoplan.capture(Towers(3), (torch.randn(8, 64),))
    spine = spine_of(Outline(graph))
    names = [graph.blocks[number].name for number in spine.blocks]
    assert len({name.split(".")[0] for name in names[:-1]}) == 1
    assert names[-1] == "epilogue"
    assert (len(names), spine.num_off) == (4, 3)
    assert sum(spine.counts.values()) == 4
    assert spine.flops == sum(op.flops for op in graph.ops) // 2


def test_the_spine_of_a_chain_is_all_of_it() -> None:
    outline = Outline(transformer(layers=3))
    spine = spine_of(outline)
    assert (spine.blocks, spine.num_off) == (outline.blocks, 0)
    assert spine.counts == outline.counts


def test_a_block_without_a_gradient_is_off_the_spine() -> None:
    """Its backward pass waits for nobody."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    model[0].requires_grad_(requires_grad=False)

    class Squared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(model)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.square().sum()

    outline = Outline(autoplan.capture(Squared(), (torch.randn(8, 64),)))
    assert spine_of(outline).blocks == outline.blocks[1:]
