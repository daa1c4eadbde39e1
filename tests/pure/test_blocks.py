"""Blocks follow the model's layers, equal layers have one pattern, and what crosses a boundary is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autoplan.blocks import cut_points
from autoplan.errors import UsageError
from autoplan.frontend import capture
from autoplan.graph import Graph
from autoplan.lower import lower
from autoplan.plan import StagePlan
from tests.hard import _seeded, _tokens
from tests.hardest import Steps
from tests.plans import manual_plan
from tests.zoo import ROWS, ZOO, gpt2, llama

torch.set_num_threads(1)


def total(out: torch.Tensor, batch: Any) -> torch.Tensor:
    return out.sum()


def names(graph: Graph) -> list[str]:
    return [b.name for b in graph.blocks]


@pytest.mark.parametrize("name", list(ZOO))
def test_blocks_cover_the_operators_in_a_topological_order(name: str) -> None:
    graph = capture(*ZOO[name](), check=False)
    assert [b.start for b in graph.blocks] == [0, *(b.stop for b in graph.blocks[:-1])] and graph.blocks[-1].stop == len(graph.ops)
    made = {n for n, v in graph.values.items() if v.kind != "activation"}
    for op in graph.ops:
        assert made.issuperset(op.operands)
        made.update(op.outputs)
    assert len(set(names(graph))) == len(graph.blocks)


def test_a_models_layers_are_one_pattern() -> None:
    for build, prefix in ((llama, "model.layers"), (gpt2, "transformer.h")):
        model, batch = build(**({"num_hidden_layers": 5} if build is llama else {"n_layer": 5}))
        graph = capture(model, batch, check=False)
        assert names(graph) == ["prologue", *(f"{prefix}.{i}" for i in range(5)), "epilogue"]
        assert len({b.pattern for b in graph.blocks}) == 3
        assert [b.layer for b in graph.blocks] == [False, *[True] * 5, False]


def test_layers_of_different_form_have_different_patterns() -> None:
    graph = capture(*ZOO["resnet50"](), check=False)
    stages = [b for b in graph.blocks if b.layer]
    assert [b.name for b in stages] == [f"layer{i + 1}.{j}" for i, depth in enumerate((3, 4, 6, 3)) for j in range(depth)]
    assert len({b.pattern for b in stages}) == 8


def test_two_stacks_are_found_with_what_lies_between() -> None:
    graph = capture(*ZOO["t5"](), check=False)
    assert names(graph) == ["prologue", "encoder.block.0", "encoder.block.1", "part.1", "decoder.block.0", "decoder.block.1", "epilogue"]


def test_a_chain_of_layers_passes_one_activation() -> None:
    model, batch = llama(num_hidden_layers=4)
    graph = capture(model, batch, check=False)
    carried = [[v for v in cut.values if graph.values[v].requires_grad] for cut in cut_points(graph)]
    assert [len(c) for c in carried] == [1] * 5
    cut = cut_points(graph)[2]
    assert cut.num_bytes == sum(4 * torch.Size(graph.values[v].spec.shape).numel() for v in cut.values)


def test_skips_cross_every_boundary_between_their_ends() -> None:
    graph = capture(*ZOO["unet"](), check=False)
    carried = {graph.blocks[c.block].name: len(c.values) for c in cut_points(graph)}
    assert carried["middle.0"] == 2, "the skip of the outer level, and the inner level's output, which is its skip as well"
    assert carried["up.1"] == 2
    assert graph.batch_size == ROWS


def test_operators_of_interleaved_towers_are_gathered() -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.right = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x
            for a, b in zip(self.left, self.right, strict=True):
                x, y = a(x).tanh(), b(y).tanh() + x
            return (x * y).sum()

    graph = capture(Towers(), (torch.randn(6, 4),))
    assert len(graph.blocks) >= 6
    for block in graph.blocks:
        modules = {op.module for op in graph.ops[block.start : block.stop] if op.flops}
        assert len(modules) <= 1


def test_a_sequence_nested_in_a_sequence_is_cut_inside() -> None:
    inner = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(6)))
    graph = capture(nn.Sequential(nn.Linear(4, 8), inner, nn.Linear(8, 2)), (torch.randn(6, 4),), total)
    assert [n for n in names(graph) if n.startswith("1.")] == [f"1.{i}" for i in range(6)]


def test_a_model_without_containers_is_cut_where_little_is_alive() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x).relu()
            x = x + self.c(self.b(x).relu())
            return self.d(x).sum()

    graph = capture(Plain(), (torch.randn(6, 8),))
    assert len(graph.blocks) >= 3 and graph.blocks[0].name == "part.0"
    assert all(len(cut.values) == 1 for cut in cut_points(graph)), "no cut inside the residual"


def test_patterns_do_not_depend_on_names_or_random_streams() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.sum()

    graph = capture(Net(), (torch.randn(6, 8),))
    first, second, third = (b.pattern for b in graph.blocks if b.layer)
    assert second == third
    assert first != second, "what the first layer reads needs no gradient"


def test_all_that_uses_a_buffer_which_steps_update_is_one_block() -> None:
    """A stage keeps what it updates to itself, so that no cut parts it; by hand it is refused."""
    model, batch = _seeded(Steps), _tokens()
    graph = capture(model, batch)
    where = {i for i, op in enumerate(graph.ops) if graph.buffer_updates[0][0] in op.operands or graph.buffer_updates[0][1] in op.outputs}
    assert len(where) > 1
    assert len([b for b in graph.blocks if where & set(range(b.start, b.stop))]) == 1
    start = min(where) + 1
    joined = next(b for b in graph.blocks if b.start < start < b.stop)
    parts = (replace(joined, stop=start), replace(joined, name="rest", start=start, pattern="rest"))
    parted = replace(graph, blocks=tuple(part for b in graph.blocks for part in (parts if b is joined else (b,))))
    plan = manual_plan(parted)
    number = parted.blocks.index(parts[1])
    stages = (StagePlan(0, number, "prologue", joined.name, 0), StagePlan(number, len(parted.blocks), "rest", "epilogue", 1))
    with pytest.raises(UsageError, match="buffer count is updated by every step and used on stages 0, 1"):
        lower(replace(plan, axes=(("pp", 2), ("dp", 1), ("tp", 1)), stages=stages), parted)
