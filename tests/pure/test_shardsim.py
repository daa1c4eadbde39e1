"""The shard simulator accepts what is right and finds what is wrong, in either pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autoplan.graph import Graph, Inside, Loop
from autoplan.layout import Split
from autoplan.rules.registry import Registry
from autoplan.shardsim import prove, prove_graph, proved_loops, with_proved_rules
from tests.pure.single import T, bools, ints, single, t

torch.set_num_threads(1)


def claim(graph: Graph, kind: str, reads: tuple[Split | None, ...], writes: tuple[Split | None, ...], **fields) -> Graph:
    """The graph whose operator has this loop alone, named "claim"; its factor is read off a place where it lies."""
    op = graph.ops[0]
    places = [(name, where) for names, wheres in ((op.operands, reads), (op.outputs, writes)) for name, where in zip(names, wheres, strict=True) if where]
    name, where = places[0]
    loop = Loop("claim", graph.values[name].dims[where.dim][where.factor], kind, reads, writes, **fields)  # type: ignore[arg-type]
    return replace(graph, ops=(replace(op, loops=(loop,), linear_in=()),))


def linear_claim(graph: Graph, *group: int) -> Graph:
    return replace(graph, ops=(replace(graph.ops[0], loops=(), linear_in=(group,)),))


S0, S1, S2 = Split(0), Split(1), Split(2)
stat = T((6,), grad=False)

WRONG: dict[str, Graph] = {
    "a softmax divided along itself": claim(single("aten.softmax.int", t(4, 8), -1), "map", (S1,), (S1,)),
    "a norm divided along what it normalises": claim(single("aten.layer_norm.default", t(4, 8), (8,)), "map", (S1,), (S1,)),
    "a cumulative sum divided along itself": claim(single("aten.cumsum.default", t(4, 8), 1), "map", (S1,), (S1,)),
    "a sum whose parts are taken for the whole": claim(single("aten.sum.dim_IntList", t(4, 8), (1,)), "inner", (S1,), (None,)),
    "a mean whose parts are summed": claim(single("aten.mean.dim", t(4, 8), (1,)), "sum", (S1,), (None,)),
    "a maximum whose parts are summed": claim(single("aten.amax.default", t(4, 8), (1,)), "sum", (S1,), (None,)),
    "a contraction with a bias that every rank adds": claim(single("aten.linear.default", t(4, 8), t(6, 8), t(6)), "sum", (S1, S1, None), (None,)),
    "causal attention divided by query": claim(
        single("aten.scaled_dot_product_attention.default", t(2, 8, 6), t(2, 8, 6), t(2, 8, 6), None, 0.0, True), "map", (S1, None, None), (S1,)
    ),
    "attention divided by key": claim(single("aten.scaled_dot_product_attention.default", t(2, 8, 6), t(2, 8, 6), t(2, 8, 6)), "sum", (None, S1, S1), (None,)),
    "batch statistics of a part of the rows": claim(
        single("runtime.batch_norm", t(4, 6), t(6), t(6), stat, stat, 0.1, 1e-5), "map", (S0, None, None, None, None), (S0, None, None)
    ),
    "an embedding divided by vocabulary without a mask": claim(single("aten.embedding.default", t(8, 6), ints(4)), "sum", (S0, None), (None,)),
    "a loss of a part of the classes": claim(single("aten.cross_entropy_loss.default", t(4, 8), ints(4), None, 2), "sum", (S1, None), (None,)),
    "an index into a divided dimension": claim(single("aten.index_select.default", t(8, 6), 0, ints(4)), "sum", (S0, None), (None,)),
    "a convolution divided along the picture": claim(single("aten.conv1d.default", t(4, 6, 8), t(6, 6, 3), None, (1,), (1,)), "map", (S2, None), (S2,)),
    "a triangle divided by row": claim(single("aten.tril.default", t(8, 8)), "map", (S0,), (S0,)),
    "a reversal": claim(single("aten.flip.default", t(8, 6), (0,)), "map", (S0,), (S0,)),
    "a transposition that keeps the place": claim(single("aten.transpose.int", t(8, 8), 0, 1), "map", (S0,), (S0,)),
    "a loop that is not on both operands": claim(single("aten.mul.Tensor", t(8, 6), t(8, 6)), "map", (S0, None), (S0,)),
    "partial sums through a non-linear operator": linear_claim(single("aten.gelu.default", t(4, 8)), 0),
    "partial sums plus a number": linear_claim(single("aten.add.Scalar", t(4, 8), 1.0), 0),
    "partial sums through one side of an addition": linear_claim(single("aten.add.Tensor", t(4, 8), t(4, 8)), 0),
    "partial sums through both sides of a product": linear_claim(single("aten.mul.Tensor", t(4, 8), t(4, 8)), 0, 1),
    "partial sums through a denominator": linear_claim(single("aten.div.Tensor", t(4, 8), t(4, 8)), 1),
    "partial sums through a mask's fill": linear_claim(single("aten.masked_fill.Scalar", t(4, 8), bools(4, 8), 1.0), 0),
    "communication that is not declared": claim(
        single("runtime.batch_norm", t(4, 6), t(6), t(6), stat, stat, 0.1, 1e-5),
        "inner",
        (S0, None, None, None, None),
        (S0, None, None),
        lowering="runtime.sync_batch_norm",
        inner=(Inside("all_reduce", ("out", 1), "forward"),),
    ),
}


@pytest.mark.parametrize("graph", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_claim_is_found(graph):
    (row,) = prove_graph(graph)
    assert not row.proof.ok and row.proof.reason


class _BackwardCouplesRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        return dy * 2 - dy.mean(0)


@pytest.fixture(scope="module")
def library():
    with torch.library._scoped_library("shardsim_test", "FRAGMENT") as lib:
        lib.define("scale(Tensor x) -> Tensor")
        lib.impl("scale", _BackwardCouplesRows.apply, "CompositeImplicitAutograd")
        lib.define("tagged(Tensor x, Tensor w) -> Tensor")
        lib.impl("tagged", lambda x, w: torch.softmax(x, -1) * w, "CompositeImplicitAutograd")
        yield lib


def test_a_claim_whose_backward_pass_alone_is_wrong_is_found(library):
    graph = claim(single("shardsim_test.scale.default", t(4, 6)), "map", (S0,), (S0,))
    proof = prove(graph, graph.ops[0], "claim")
    assert not proof.ok and proof.reason.startswith("gradient") and 1e-3 < proof.error < 10
    columns = claim(single("shardsim_test.scale.default", t(4, 6)), "map", (S1,), (S1,))
    assert prove(columns, columns.ops[0], "claim").ok


def test_a_users_rule_keeps_what_proves_and_warns_of_the_rest(library):
    registry = Registry()
    registry.register("shardsim_test::tagged", "b s h, h -> b s h")
    graph = single("shardsim_test.tagged.default", t(4, 6, 8), t(8), registry=registry)
    assert not graph.ops[0].proved and {loop.label for loop in graph.ops[0].loops} == {"b", "s", "h"}
    op, warnings = proved_loops(graph, graph.ops[0])
    assert op.proved and [loop.label for loop in op.loops] == ["b", "s"]
    assert len(warnings) == 1 and "'h'" in warnings[0] and "shardsim_test.tagged" in warnings[0]
    checked = with_proved_rules(graph)
    assert checked.ops[0].loops == op.loops and checked.warnings == warnings


def test_a_users_rule_on_large_tensors_is_proved_on_small_ones(library):
    registry = Registry()
    registry.register("shardsim_test::tagged", "b s h, h -> b s h")
    graph = single("shardsim_test.tagged.default", t(512, 4096, 4096), t(4096), registry=registry)
    op, warnings = proved_loops(graph, graph.ops[0])
    assert [loop.label for loop in op.loops] == ["b", "s"] and len(warnings) == 1


def test_large_built_in_operators_are_proved_on_short_loops():
    graph = single("aten.view.default", t(4096, 8192), (4096, 64, -1))
    assert all(row.proof.ok for row in prove_graph(graph, 4)) and len(prove_graph(graph, 4)) == 4


def test_operators_that_are_alike_are_proved_once():
    graph = single("aten.gelu.default", t(4, 6))
    twin = replace(graph.ops[0], instr=replace(graph.ops[0].instr))
    assert len(prove_graph(replace(graph, ops=(graph.ops[0], twin)))) == 2


def test_a_label_that_is_not_there_is_not_proved():
    graph = single("aten.gelu.default", t(4, 5))
    assert "no option 'd9'" in prove(graph, graph.ops[0], "d9").reason
    assert "no option 'd1'" in prove(graph, graph.ops[0], "d1", 8).reason, "5 positions are too few for 8 ranks"
    assert prove(graph, graph.ops[0], "d1").ok, "2 and 3 of them"
