"""Factors: dimensions name themselves, and what is known of each model's structure follows from its graph alone."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoplan.batchaxis import batch_split
from autoplan.factors import Atoms, annotate, unknown_ops
from autoplan.frontend import capture
from autoplan.graph import Graph, Op, Value
from autoplan.layout import Split
from runtime.instr import Instr, Output, Ref, TensorSpec
from tests.zoo import FFN, HIDDEN, ROWS, SEQ, VOCAB, ZOO

torch.set_num_threads(1)


@cache
def graph_of(name: str) -> Graph:
    model, batch = ZOO[name]()
    return capture(model, batch, check=False)


def parameter(graph: Graph, fqn: str) -> Value:
    return next(v for v in graph.values.values() if fqn in (v.fqn, *v.aliases))


def sizes(graph: Graph, fqn: str) -> list[tuple[int, ...]]:
    return [tuple(graph.factor_sizes[f] for f in dim) for dim in parameter(graph, fqn).dims]


# -- atoms


@given(st.lists(st.integers(2, 5), min_size=1, max_size=5), st.data())
def test_uniting_two_groupings_of_one_dimension_makes_them_the_same_leaves(factors: list[int], data: st.DataObject) -> None:
    def grouped(atoms: Atoms) -> list[int]:
        cuts = sorted(data.draw(st.sets(st.integers(1, len(factors) - 1) if len(factors) > 1 else st.nothing())))
        pieces = [factors[a:b] for a, b in zip([0, *cuts], [*cuts, len(factors)], strict=True)]
        return [atom for piece in pieces for atom in atoms.new(prod(piece))]

    atoms = Atoms()
    first, second = grouped(atoms), grouped(atoms)
    atoms.unite(first, second)
    x, y = atoms.leaves(first), atoms.leaves(second)
    assert prod(atoms.length[a] for a in x) == prod(atoms.length[a] for a in y) == prod(factors)
    shorter, longer = sorted((x[::-1], y[::-1]), key=len)
    agreed = next((k for k, (a, b) in enumerate(zip(shorter, longer, strict=False)) if a != b), len(shorter))
    if agreed < len(shorter):  # they stop agreeing only where neither length divides the other
        m, n = atoms.length[shorter[agreed]], atoms.length[longer[agreed]]
        assert m % n and n % m


def test_dimensions_without_a_common_refinement_keep_what_they_share() -> None:
    atoms = Atoms()
    first = [*atoms.new(3), *atoms.new(2), *atoms.new(5)]
    second = [*atoms.new(2), *atoms.new(3), *atoms.new(5)]
    atoms.unite(first, second)
    assert atoms.leaves(first)[-1] == atoms.leaves(second)[-1]
    assert atoms.leaves(first)[:-1] != atoms.leaves(second)[:-1]


# -- structure of models


def test_llama_has_one_batch_one_sequence_and_one_hidden_factor() -> None:
    graph = graph_of("llama")
    ids = next(v for v in graph.inputs() if v.fqn == "input_ids")
    (batch,), (sequence,) = ids.dims
    (hidden,) = parameter(graph, "model.norm.weight").dims[0]
    assert (graph.batch_factor, graph.factor_sizes[batch], graph.factor_sizes[sequence], graph.factor_sizes[hidden]) == (batch, ROWS, SEQ, HIDDEN)
    residual = [v for v in graph.values.values() if v.kind == "activation" and v.spec.shape == (ROWS, SEQ, HIDDEN)]
    streams = {v.dims for v in residual if v.dims[2] == (hidden,)}
    assert streams == {((batch,), (sequence,), (hidden,))}
    attended = {v.dims[2] for v in residual} - {(hidden,)}
    assert {tuple(graph.factor_sizes[f] for f in dim) for dim in attended} == {(2, 2, 16)}  # queries by kv head, repetition, feature


def test_llama_projections_are_products_of_heads_and_features() -> None:
    graph = graph_of("llama")
    layer = "model.layers.1."
    assert sizes(graph, layer + "self_attn.q_proj.weight") == [(2, 2, 16), (HIDDEN,)]
    assert sizes(graph, layer + "self_attn.k_proj.weight") == [(2, 16), (HIDDEN,)]
    assert sizes(graph, layer + "self_attn.o_proj.weight") == [(HIDDEN,), (2, 2, 16)]
    assert sizes(graph, layer + "mlp.gate_proj.weight") == [(FFN,), (HIDDEN,)]
    heads = {parameter(graph, layer + f"self_attn.{name}_proj.weight").dims[0][0] for name in "qkv"}
    assert len(heads) == 1
    feed = [parameter(graph, layer + f"mlp.{name}_proj.weight").dims for name in ("gate", "up", "down")]
    assert feed[0] == feed[1] == feed[2][::-1]


def test_gpt2_fused_projection_is_split_by_heads_not_by_contiguous_parts() -> None:
    graph = graph_of("gpt2")
    assert sizes(graph, "transformer.h.0.attn.c_attn.weight") == [(HIDDEN,), (3, 4, 16)]
    assert sizes(graph, "transformer.h.0.attn.c_proj.weight") == [(4, 16), (HIDDEN,)]
    fused = next(op for op in graph.ops if parameter(graph, "transformer.h.0.attn.c_attn.weight").name in op.operands)
    heads = next(loop for loop in fused.loops if loop.writes == (Split(1, 1),) or loop.writes == (Split(2, 1),))
    assert graph.factor_sizes[heads.factor] == 4 and heads.kind == "map"


def test_a_tied_embedding_serves_both_ends_with_the_same_factors() -> None:
    graph = graph_of("gpt2")
    tied = parameter(graph, "transformer.wte.weight")
    assert "lm_head.weight" in tied.aliases
    (vocabulary,), (hidden,) = tied.dims
    assert (graph.factor_sizes[vocabulary], graph.factor_sizes[hidden]) == (VOCAB, HIDDEN)
    assert parameter(graph, "transformer.ln_f.weight").dims == ((hidden,),)
    lookup, loss = (next(op for op in graph.ops if op.instr.target.startswith(f"aten.{name}") and tied.name in op.operands) for name in ("embedding", "linear"))
    assert any(loop.factor == vocabulary and loop.lowering == "runtime.vocab_embedding" for loop in lookup.loops)
    assert any(loop.factor == vocabulary and loop.kind == "map" for loop in loss.loops)


@pytest.mark.parametrize("name", list(ZOO))
def test_every_product_of_a_model_divides_by_rows_and_by_features(name: str) -> None:
    graph = graph_of(name)
    products = [op for op in graph.ops if op.flops]
    assert products and graph.batch_size == ROWS
    assert [op.name for op in products if not any(loop.factor == graph.batch_factor for loop in op.loops)] == []
    assert [op.name for op in products if not any(loop.factor != graph.batch_factor and len(loop.writes) == 1 for loop in op.loops)] == []


@pytest.mark.parametrize("name", list(ZOO))
def test_the_batch_reaches_the_loss_as_a_sum(name: str) -> None:
    graph = graph_of(name)
    reductions = [op for op in graph.ops for loop in op.loops if loop.factor == graph.batch_factor and loop.kind == "sum" and "loss" in op.instr.target]
    assert len(reductions) == 1
    logits = reductions[0].operands[0]
    assert batch_split(graph, logits) is not None


@pytest.mark.parametrize("name", ["mixtral", "resnet50", "t5"])
def test_the_same_model_has_the_same_factors_every_time(name: str) -> None:
    first = graph_of(name)
    model, batch = ZOO[name]()
    second = capture(model, batch, check=False)
    assert (first.factor_sizes, first.batch_factor, first.ops) == (second.factor_sizes, second.batch_factor, second.ops)
    assert dict(first.values) == dict(second.values)


@pytest.mark.parametrize("name", list(ZOO))
def test_factors_fill_every_dimension_and_loops_lie_where_they_say(name: str) -> None:
    graph = graph_of(name)
    for value in graph.values.values():
        assert tuple(prod(graph.factor_sizes[f] for f in dim) for dim in value.dims) == value.spec.shape
    for op in graph.ops:
        assert len({loop.label for loop in op.loops}) == len(op.loops)
        for loop in op.loops:
            assert len(loop.reads) == len(op.operands) and len(loop.writes) == len(op.outputs)
            places = [*zip(op.operands, loop.reads, strict=True), *zip(op.outputs, loop.writes, strict=True)]
            assert all(where is None or graph.values[n].dims[where.dim][where.factor] == loop.factor for n, where in places)
            assert loop.kind != "map" or all(loop.writes)


# -- small graphs


def op(target: str, out: str, shape: tuple[int, ...], *args: object, dtype: str = "float32", **kwargs: object) -> Op:
    frozen = tuple(Ref(a) if isinstance(a, str) and a.islower() else a for a in args)
    instr = Instr((Output(out, TensorSpec(shape, dtype)),), target, frozen, tuple(kwargs.items()))  # type: ignore[arg-type]
    return Op(instr, (), (), "", "", 0, ())


def values(*named: tuple[str, tuple[int, ...]], ops: tuple[Op, ...]) -> dict[str, Value]:
    found = {name: Value(name, TensorSpec(shape, "float32"), "input", (), True) for name, shape in named}
    return found | {o.name: Value(o.name, o.spec, "activation", (), True) for item in ops for o in item.instr.outputs if o.spec}


def test_an_operator_without_a_rule_has_no_loops_and_is_reported() -> None:
    ops = (replace(op("aten.cholesky.default", "y", (4, 4), "x", False), flops=7),)
    _, annotated, _, _ = annotate(values(("x", (4, 4)), ops=ops), ops, ("x",))
    assert annotated[0].loops == () and annotated[0].linear_in == ()
    (warning,) = unknown_ops(ops, values(("x", (4, 4)), ops=ops))
    assert "aten.cholesky.default (1 calls, 7 FLOPs forward) has no rule" in warning and "register_rule" in warning


def test_a_batch_of_one_row_has_no_factor() -> None:
    ops = (op("aten.relu.default", "y", (1, 4), "x"),)
    found, _, sizes_, batch = annotate(values(("x", (1, 4)), ops=ops), ops, ("x",))
    assert batch is None and found["y"].dims == ((), (0,)) and sizes_ == (4,)


def test_inputs_without_rows_do_not_hide_the_batch() -> None:
    ops = (op("aten.mul.Tensor", "y", (6, 4), "x", "scale"), op("aten.add.Tensor", "z", (6, 4), "y", "bias"))
    _, _, sizes_, batch = annotate(values(("scale", ()), ("bias", (1, 4)), ("x", (6, 4)), ops=ops), ops, ("scale", "bias", "x"))
    assert batch is not None and sizes_[batch] == 6


def test_a_batch_that_the_model_views_as_a_product_has_no_single_factor() -> None:
    ops = (op("aten.view.default", "y", (2, 3, 4), "x", (2, 3, 4)),)
    found, _, _, batch = annotate(values(("x", (6, 4)), ops=ops), ops, ("x",))
    assert batch is None and len(found["x"].dims[0]) == 2


def test_a_refinement_that_comes_later_reaches_the_operators_before_it() -> None:
    ops = (op("aten.linear.default", "y", (3, 8), "x", "w"), op("aten.view.default", "z", (3, 4, 2), "y", (3, 4, 2)))
    found, annotated, _, _ = annotate(values(("x", (3, 5)), ("w", (8, 5)), ops=ops), ops, ("x",))
    assert [loop.label for loop in annotated[0].loops] == ["b0", "i", "o.0", "o.1"]
    assert [loop.reads for loop in annotated[0].loops][2:] == [(None, Split(0, 0)), (None, Split(0, 1))]
    assert found["w"].dims[0] == found["z"].dims[1] + found["z"].dims[2]


def test_one_factor_twice_in_a_tensor_is_two_loops() -> None:
    ops = (op("aten.matmul.default", "y", (4, 4), "x", "x_t"), op("aten.relu.default", "z", (4, 4), "y"))
    turned = op("aten.t.default", "x_t", (6, 4), "x")
    found, annotated, _, _ = annotate(values(("x", (4, 6)), ops=(turned, *ops)), (turned, *ops), ("x",))
    assert found["z"].dims[0] == found["z"].dims[1]
    assert [loop.writes for loop in annotated[2].loops] == [(Split(0),), (Split(1),)]


@pytest.mark.parametrize("name", list(ZOO))
def test_repeated_blocks_have_the_same_loops(name: str) -> None:
    graph = graph_of(name)
    by_pattern: dict[str, list[list[list[tuple[object, ...]]]]] = {}
    for block in graph.blocks:
        loops = [[(loop.label, graph.factor_sizes[loop.factor], *loop.reads, *loop.writes) for loop in o.loops] for o in graph.ops[block.start : block.stop]]
        by_pattern.setdefault(block.pattern, []).append(loops)
    assert any(len(same) > 1 for same in by_pattern.values()) or name in ("mlp", "unet", "t5")
    assert all(loops == same[0] for same in by_pattern.values() for loops in same)
