"""Schemes of tensor axes: grids, labels, routes over nested divisions, and the 1.5D grid of least communication."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autoplan
from autoplan.layout import PARTIAL, VARY, WHOLE, Split
from autoplan.route import route
from autoplan.schemes import grids, joined, parted
from costmodel.cluster import Cluster
from costmodel.opkey import Collective, OpKey, OpTime

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
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(96, 128, bias=False)

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
