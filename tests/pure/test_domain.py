"""Positions are divided where windows allow it, proved against the dense operator, and chosen where the batch is too small."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autoplan
from autoplan.frontend import capture
from autoplan.models import UNet
from autoplan.shardsim import prove_graph


class Squares(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().sum()


def _graph(*layers: nn.Module, shape: tuple[int, ...] = (4, 2, 16, 8)):
    return capture(Squares(*layers).double(), (torch.randn(shape, dtype=torch.float64),), check=False)


def _divided(graph, target: str) -> list[str]:
    """Labels of the loops over positions of the first operator of this kind."""
    op = next(op for op in graph.ops if op.instr.target.startswith(target))
    return [loop.label for loop in op.loops if loop.label[0] in "xs"]


WINDOWS = pytest.mark.parametrize(
    "layers",
    [
        (nn.Conv2d(2, 4, 1), nn.Conv2d(4, 4, 3, 1, 1), nn.Conv2d(4, 2, 5, 2, 2)),
        (nn.Conv2d(2, 4, 7, 2, 3, bias=False), nn.MaxPool2d(3, 2, 1)),
        (nn.Conv2d(2, 4, 3, 1, "same", dilation=2, groups=2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1)),
        (nn.ConvTranspose2d(2, 4, 2, 2), nn.ConvTranspose2d(4, 2, 3, 2, 1, 1), nn.ConvTranspose2d(2, 2, 4, 2, 1)),
        (nn.Conv2d(2, 4, 3, 1, 1), nn.GroupNorm(2, 4), nn.BatchNorm2d(4), nn.Upsample(scale_factor=2), nn.AvgPool2d(3, 1, 1)),
    ],
    ids=["convolutions", "stem", "pooling", "transposed", "norms"],
)


@WINDOWS
def test_a_window_over_divided_positions_is_the_dense_one(layers):
    for degree in (2, 4):
        for row in prove_graph(_graph(*layers), degree):
            assert row.proof.ok, row


@WINDOWS
def test_a_window_over_parts_of_unequal_lengths_is_the_dense_one(layers):
    rows = prove_graph(_graph(*layers, shape=(2, 2, 13, 11)), 3)
    assert all(row.proof.ok for row in rows), [row for row in rows if not row.proof.ok]
    assert {row.degree for row in rows if row.option[0] in "xs" and row.target != "aten.sum.default"} == {3}


@pytest.mark.parametrize("layer", [nn.Conv2d(2, 2, 5), nn.Conv2d(2, 2, 2, 2), nn.MaxPool2d(3), nn.ConvTranspose2d(2, 2, 3), nn.ConvTranspose2d(2, 2, 3, 2, 1)])
def test_a_window_whose_output_has_another_length_is_divided_with_its_input(layer):
    for degree in (2, 3):
        rows = [row for row in prove_graph(_graph(nn.Conv2d(2, 2, 1), layer, shape=(2, 2, 13, 11)), degree) if row.option in ("x0", "x1")]
        assert len(rows) == 4 and all(row.proof.ok for row in rows), rows


def test_windows_that_cannot_be_divided_stay_whole():
    assert _divided(_graph(nn.Conv2d(2, 2, 3, padding=0)), "aten.conv2d") == ["x0", "x1"], "the output is shorter"
    assert _divided(_graph(nn.Conv2d(2, 2, 3, 2, 1), shape=(4, 2, 13, 9)), "aten.conv2d") == ["x0", "x1"], "lengths are not n and 2 n"
    assert _divided(_graph(nn.Conv2d(2, 2, (3, 4), padding="same")), "aten.conv2d") == [], "one side is padded more"
    assert _divided(_graph(nn.AvgPool2d(3, 1, 1, count_include_pad=False)), "aten.avg_pool2d") == [], "divisors differ at the ends"
    assert _divided(_graph(nn.Conv2d(2, 2, 3, 1, 1)), "aten.conv2d") == ["x0", "x1"]


def test_a_rank_holds_at_least_as_many_rows_as_it_gives_away():
    graph = _graph(nn.Conv2d(2, 2, 9, padding=4), shape=(4, 2, 16, 16))
    (loop,) = [loop for loop in graph.ops[0].loops if loop.label == "x0"]
    assert loop.minimum == 4
    labels = {degree: [o.label for o in autoplan.graph.options(graph, graph.ops[0], degree)] for degree in (3, 4, 5, 8)}
    assert "x0" in labels[3] and "x0" in labels[4], "16 rows on 3 ranks are 5, 5 and 6"
    assert "x0" not in labels[5] and "x0" not in labels[8]


def test_channels_that_do_not_divide_stay_whole():
    graph = _graph(nn.Conv2d(2, 6, 3, 1, 1), nn.Conv2d(6, 2, 3, 1, 1))
    assert [o.label for o in autoplan.graph.options(graph, graph.ops[0], 4) if o.label in ("o", "x0")] == ["x0"]


def test_more_ranks_than_images_divide_the_images():
    with torch.device("meta"):
        model, batch = UNet(3, 4, width=64, depth=2), {"x": torch.empty(2, 3, 512, 512), "target": torch.empty(2, 4, 512, 512)}
    plan = autoplan.find_plan(model, batch, cluster="h100-sxm-80gb:1x8", constraints=autoplan.Constraints(pp=1), precision="bf16")
    assert plan.degree("tp") >= 4, "two images keep two ranks busy at most"
    splits = [label for block in plan.blocks for label in block.splits.values()]
    assert sum(label.startswith("x") for label in splits) >= len(plan.blocks)
    assert any(use.kind == "send" and use.axis == "tp" for use in plan.collectives)


def test_a_batch_of_one_image_is_planned():
    with torch.device("meta"):
        model, batch = UNet(3, 4, width=32, depth=2), {"x": torch.empty(1, 3, 512, 512), "target": torch.empty(1, 4, 512, 512)}
    plan = autoplan.find_plan(model, batch, cluster="h100-sxm-80gb:1x4", precision="bf16")
    assert plan.degree("dp") == 1


def test_images_whose_heights_do_not_divide_are_divided_where_that_is_best():
    with torch.device("meta"):
        model, batch = UNet(3, 4, width=64, depth=2), {"x": torch.empty(1, 3, 500, 500), "target": torch.empty(1, 4, 500, 500)}
    plan = autoplan.find_plan(model, batch, cluster="h100-sxm-80gb:1x4", constraints=autoplan.Constraints(pp=1), precision="bf16")
    splits = [label for block in plan.blocks for label in block.splits.values()]
    assert plan.degree("tp") == 4 and sum(label.startswith("x") for label in splits) >= len(plan.blocks), "125 steps of 4 rows on 4 ranks"
    assert any(use.kind == "send" and use.axis == "tp" for use in plan.collectives)


def test_positions_alone_are_divided_where_that_is_asked_for() -> None:
    graph = _graph(nn.Conv2d(2, 4, 3, 1, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 8, 3, 1, 1), shape=(2, 2, 32, 32))
    plan = autoplan.find_plan(graph, cluster="h100-sxm-80gb:1x2", constraints=autoplan.Constraints(tensor="domain", tp=2), optimizer="sgd")
    labels = {op.name: label for block in plan.blocks for op in graph.ops if (label := block.splits.get(op.name))}
    loops = {op.name: {loop.label: loop.factor for loop in op.loops} for op in graph.ops}
    divided = [loops[name][label] for name, label in labels.items() if not label.startswith("partial")]
    assert divided and set(divided) <= graph.windowed


def test_a_model_without_windows_has_no_positions() -> None:
    graph = capture(Squares(nn.Linear(8, 8)), (torch.randn(4, 8),), check=False)
    with pytest.raises(autoplan.InfeasibleError, match="no convolution or pooling"):
        autoplan.find_plan(graph, cluster="cpu:1x2", constraints=autoplan.Constraints(tensor="domain"))
