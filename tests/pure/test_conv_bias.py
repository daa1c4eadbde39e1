"""The bias of a convolution: a sum of its own where input channels are divided, part of the call elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autoplan.frontend import capture
from autoplan.graph import Graph, options
from autoplan.lower import lower
from tests.plans import manual_plan

NETS = {
    "conv": lambda: nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 6, 3, padding="same")),
    "grouped": lambda: nn.Sequential(nn.Conv1d(4, 8, 3, padding=1, groups=2), nn.Tanh(), nn.Conv1d(8, 6, 1)),
    "transposed": lambda: nn.Sequential(nn.ConvTranspose2d(4, 8, 2, stride=2), nn.GELU(), nn.ConvTranspose2d(8, 6, 2, stride=2)),
}


def _graph(name: str) -> Graph:
    torch.manual_seed(0)
    return capture(NETS[name](), (torch.randn(4, 4, 8) if name == "grouped" else torch.randn(4, 4, 8, 6),), lambda out, _: out.square().sum())


def _targets(graph: Graph, tp: int, splits: dict[str, str]) -> list[str]:
    plan = manual_plan(graph, tp=tp, splits={block.pattern: splits for block in graph.blocks})
    (program,) = lower(plan, graph)
    return [instr.target.split(".")[1] for block in program.stages[0].bodies[0].blocks for instr in block.instrs]


@pytest.mark.parametrize("name", NETS)
def test_a_bias_is_given_back_to_its_convolution(name: str) -> None:
    targets = _targets(_graph(name), 1, {})
    assert sum("conv" in target for target in targets) == 2
    assert not {"add", "reshape"} & set(targets), targets


@pytest.mark.parametrize("name", ["conv", "transposed"])
def test_input_channels_of_a_convolution_with_bias_can_be_divided(name: str) -> None:
    graph = _graph(name)
    first, second = [op for op in graph.ops if "conv" in op.instr.target]
    assert "c" in {option.label for option in options(graph, second, 2)}
    between = {op.name: "o" for op in graph.ops if op is first}
    targets = _targets(graph, 2, between | {second.name: "c"})
    assert "all_reduce" in targets, targets
    reduced = targets.index("all_reduce", [i for i, target in enumerate(targets) if "conv" in target][1])
    assert "add" in targets[reduced:], "the bias comes after the sum, once"
