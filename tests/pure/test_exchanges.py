"""Collectives inside the passes that no option avoids."""

from __future__ import annotations

import torch
from torch import nn

from autoplan import Constraints, capture
from autoplan.exchanges import exchanges
from autoplan.explore import Searcher
from autoplan.task import Task
from costmodel.analytic import AnalyticPrices
from costmodel.cluster import Cluster

CLUSTER = Cluster.parse("v100-sxm2-32gb:2x2")


class Convolutions(nn.Module):
    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), norm(8), nn.ReLU()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def searched(norm: type[nn.Module]) -> Searcher:
    graph = capture(Convolutions(norm), (torch.randn(16, 8, 8, 8),))
    return Searcher(Task(graph, CLUSTER, AnalyticPrices(CLUSTER), Constraints(dp=4, zero=0), "adamw", None, None))


def test_statistics_of_a_whole_batch_count_in_the_bound() -> None:
    searcher = searched(nn.BatchNorm2d)
    result = searcher.run().best()
    shapes, shape = searcher.shapes, result.shape
    exchanged_s = sum(load.forward.collective_s + load.backward.collective_s for load in result.loads)
    computed_s = sum(block.count * block.seconds for block in shapes.least(shape).values())
    assert exchanged_s > computed_s / 10, "they are summed over the data ranks inside the passes"
    assert shapes.operator_bound(shape) >= (computed_s + exchanged_s) * (1 - 1e-9)


def test_rows_that_are_alone_exchange_nothing() -> None:
    searcher = searched(nn.Identity)
    shape, shapes = searcher.space.shapes[0], searcher.shapes
    assert all(exchanges(shapes.chooser(shape).local, indices, (), shape.axes).seconds == 0 for indices in shapes.examples.values())
