"""Counts of what schemes send, from plans at prices of volume alone: one layer's closed forms, and a transformer layer's collectives."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import pytest
import torch
from test_schemes import VolumePrices
from torch import nn

import autoplan
from autoplan.frontend import capture
from autoplan.lower import lower
from benchmarks.tensor.context import Decoder
from costmodel.cluster import Cluster
from runtime.traffic import traffic
from tests.plans import manual_plan, splits_by_name

M, K, N = 64, 96, 128


class Scaled(nn.Module):
    """A product whose input has a gradient: not the first layer of its model."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.linear = nn.Linear(K, N, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x * self.scale).square().sum()


def wire_elements(uses: list[tuple[str, int, float]]) -> float:
    """Of all ranks: (kind, ranks, elements of the tensor) by rings, scalars left out."""
    return sum((2 if kind == "all_reduce" else 1) * (ranks - 1) * elements for kind, ranks, elements in uses if elements > 1)


def sent(plan: autoplan.Plan) -> float:
    world = math.prod(size for _, size in plan.axes)
    sizes = dict(plan.axes)
    return sum(
        wire_elements([(use.kind, sizes[use.axis], use.num_bytes / 4)]) * world / sizes[use.axis]
        for use in plan.collectives
        if use.axis in sizes and use.num_bytes > 8
    )


@pytest.mark.parametrize(("ranks", "label", "elements"), [(4, "o", 36864), (4, "i", 49152), (8, "o", 86016), (8, "i", 114688)])
def test_columns_and_rows_send_their_closed_forms(ranks: int, label: str, elements: int) -> None:
    graph = capture(Scaled(), {"x": torch.randn(M, K)})
    name = next(op.name for op in graph.ops if "linear" in op.instr.target)
    pattern = next(block.pattern for block in graph.blocks for op in graph.ops[block.start : block.stop] if op.name == name)
    (program,) = lower(manual_plan(graph, tp=ranks, splits={pattern: {name: label}}), graph)
    instrs = [instr for block in program.stages[0].bodies[0].blocks for instr in block.instrs]
    moved = {"runtime.vary": "all_reduce", "runtime.all_reduce": "all_reduce"}  # the first of them in the backward pass
    size = {instr.name: math.prod(out.spec.shape) for instr in instrs if (out := instr.outputs[0]).spec is not None}
    found = wire_elements([(moved[i.target], ranks, size[i.name]) for i in instrs if i.target in moved and size[i.name] > 1])
    gathered = [i for i in instrs if i.target == "runtime.slice"]  # of rows: the input is cut, its gradient gathered
    assert found + (ranks - 1) * sum(size[i.name] * ranks for i in gathered if i.name.startswith("mul")) == elements + (ranks - 1) * M * K * (label == "i")


@pytest.mark.parametrize(("ranks", "elements"), [(4, 73728), (8, 172032)])
def test_replicas_send_their_closed_form(ranks: int, elements: int) -> None:
    how = autoplan.Constraints(dp=ranks, tp=1, pp=1, zero=0)
    plan = autoplan.find_plan(
        Scaled(), {"x": torch.randn(M, K)}, cluster=Cluster.parse(f"cpu:1x{ranks}"), constraints=how, optimizer="sgd", prices=VolumePrices()
    )
    assert sent(plan) == elements + 2 * (ranks - 1), "the weight's gradient, and that of the scale"


@pytest.mark.parametrize(("tp", "elements"), [(1, 172032), (2, 94208), (4, 86016), (8, 143360)])
def test_a_line_of_lines_sends_its_closed_form(tp: int, elements: int) -> None:
    how = autoplan.Constraints(tensor="1.5d", tp=tp, pp=1, zero=0)
    plan = autoplan.find_plan(Scaled(), {"x": torch.randn(M, K)}, cluster=Cluster.parse("cpu:1x8"), constraints=how, optimizer="sgd", prices=VolumePrices())
    scale = 2 * (8 // tp - 1) * tp  # its gradient's sum over replicas, on every one of their ranks
    assert sent(plan) == pytest.approx(elements + scale, abs=2 * 8)


def test_the_planner_takes_the_grid_that_sends_least() -> None:
    how = autoplan.Constraints(tensor="1.5d", pp=1, zero=0)
    plan = autoplan.find_plan(Scaled(), {"x": torch.randn(M, K)}, cluster=Cluster.parse("cpu:1x8"), constraints=how, optimizer="sgd", prices=VolumePrices())
    assert (plan.degree("tp"), plan.degree("dp")) == (4, 2)


def test_a_layer_of_megatron_sums_twice_in_each_pass() -> None:
    with torch.device("meta"):
        model = Decoder(3, hidden=1024, heads=8, key_heads=8, ffn=4096, vocab=512)
        graph = capture(model, {name: torch.empty(4, 128, dtype=torch.int64) for name in ("ids", "labels")}, precision="bf16")
    how = autoplan.Constraints(tp=4, dp=1, pp=1, sequence_parallel=False)
    plan = autoplan.find_plan(graph, cluster="h100-sxm-80gb:1x4", constraints=how, precision="bf16")
    (program,) = lower(plan, graph)
    layer = next(block for block in program.stages[0].bodies[0].blocks if block.name.endswith("layers.1"))
    stream = 4 * 128 * 1024
    counts: Counter[tuple[str, int]] = Counter()
    for instr in layer.instrs:
        spec = instr.outputs[0].spec
        if instr.target.startswith("runtime.") and spec is not None and math.prod(spec.shape) >= stream // 4:
            counts[instr.target, math.prod(spec.shape)] += 1
    assert counts == {("runtime.vary", stream): 2, ("runtime.all_reduce", stream): 2}, "two sums forward, two backward"


SPLITS = {f"linear{i}": "o.0" for i in ("", "_1", "_2")} | {f"{name}{i}": "d2" for name in ("view", "transpose") for i in ("", "_1", "_2")}
SPLITS |= {"scaled_dot_product_attention": "b1", "transpose_3": "d1", "reshape": "d2", "linear_3": "i.0"}
SPLITS |= {"linear_4": "o", "linear_5": "o", "silu": "d2", "mul": "d2", "linear_6": "i"}
SEQUENCE = {f"rms_norm{i}": "b1" for i in ("", "_1", "_6", "_8")} | {"embedding": "b1", "add": "d1", "add_1": "d1"}  # the last norm is number 6 or 8


def sent_by_layer(labels: Mapping[str, str], recompute: str = "none") -> Counter[tuple[str, str]]:
    """Elements that a rank of four sends by rings because of one layer, by kind and pass: a model of four layers against one of three."""
    found: Counter[tuple[str, str]] = Counter()
    for layers, sign in ((4, 1), (3, -1)):
        with torch.device("meta"):
            model = Decoder(layers, hidden=256, heads=8, key_heads=8, ffn=1024, vocab=512)
            graph = capture(model, {name: torch.empty(8, 128, dtype=torch.int64) for name in ("ids", "labels")})
        (program,) = lower(manual_plan(graph, tp=4, splits=splits_by_name(graph, labels), recompute=recompute), graph)
        for use in traffic(program, {"tp": 0}):
            found[use.kind, use.phase] += sign * int((2 if use.kind == "all_reduce" else 1) * 3 / 4 * use.num_bytes / 4)
    return Counter({key: count for key, count in found.items() if count})


def test_a_layer_on_one_line_sends_the_closed_form_as_sums_or_as_gathers_and_scatters() -> None:
    stream = 8 * 128 * 256
    sums = sent_by_layer(SPLITS)
    assert sums == {("all_reduce", "forward"): 2 * 2 * 3 / 4 * stream, ("all_reduce", "backward"): 2 * 2 * 3 / 4 * stream}
    assert sums.total() == 8 * 3 / 4 * stream == 1572864
    assert sent_by_layer(SPLITS, recompute="full").total() == 12 * 3 / 4 * stream == 2359296
    parts = sent_by_layer(SPLITS | SEQUENCE)
    assert parts.pop(("all_reduce", "reduce")) == 2 * 256 * 2 * 3 / 4, "the gradients of both norms, once a step"
    assert parts == {(kind, phase): 2 * 3 / 4 * stream for kind in ("all_gather", "reduce_scatter") for phase in ("forward", "backward")}
    assert parts.total() == sums.total()
