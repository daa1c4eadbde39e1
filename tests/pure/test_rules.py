"""Every row of the rules: which loops it offers, and that the shard simulator proves each of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoplan.factors import annotate
from autoplan.graph import Graph, Op, Value
from autoplan.shardsim import prove_graph
from runtime.call import resolve, spec_of
from runtime.instr import Arg, Dtype, Instr, Output, Ref

torch.set_num_threads(1)


def graph_of(target: str, *args: Any, fixed: tuple[int, ...] = (), batch: tuple[str, ...] = (), **kwargs: Any) -> Graph:
    """One operator on example tensors as a graph of its own; operands in `fixed` have no gradient."""
    values: dict[str, Value] = {}

    def frozen(arg: Any) -> Arg:
        if isinstance(arg, torch.Tensor):
            name = f"a{len(values)}"
            values[name] = Value(name, spec_of(arg), "input", (), arg.is_floating_point() and len(values) not in fixed)
            return Ref(name)
        if isinstance(arg, torch.dtype):
            return Dtype(str(arg).removeprefix("torch."))
        return tuple(frozen(item) for item in arg) if isinstance(arg, (list, tuple)) else arg

    frozen_args, frozen_kwargs = tuple(frozen(a) for a in args), tuple((k, frozen(v)) for k, v in kwargs.items())
    found = resolve(target)(*args, **kwargs)
    several = not isinstance(found, torch.Tensor)
    outputs = tuple(Output(f"y{i}", spec_of(t)) for i, t in enumerate(found if several else (found,)))
    instr = Instr(outputs, target, frozen_args, frozen_kwargs, several)
    values |= {o.name: Value(o.name, o.spec, "activation", (), o.spec.dtype.startswith("float")) for o in outputs if o.spec is not None}
    op = Op(instr, (), (), "", "", 1, (), random=target == "runtime.dropout")
    new_values, ops, sizes, batch_factor = annotate(values, (op,), batch)
    return Graph("one", new_values, ops, (), sizes, batch_factor, None, tuple(o.name for o in outputs), (), "")


def offered(graph: Graph) -> str:
    """Labels by kind: "maps | sums | inner"."""
    by_kind = {kind: [loop.label for loop in graph.ops[0].loops if loop.kind == kind] for kind in ("map", "sum", "inner")}
    return " | ".join(" ".join(sorted(labels)) for labels in by_kind.values()).rstrip(" |").replace("|  |", "| |")


def x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def ids(*shape: int, below: int = 4) -> torch.Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(3))


SDPA = "aten.scaled_dot_product_attention.default"
CASES: list[tuple[str, str, tuple[Any, ...], dict[str, Any]]] = [
    ("b0 b1 o | i", "aten.linear.default", (x(4, 6, 8), x(10, 8)), {}),
    ("b0 b1 o", "aten.linear.default", (x(4, 6, 8), x(10, 8), x(10)), {}),
    ("o | i", "aten.linear.default", (x(8), x(10, 8)), {}),
    ("m n | k", "aten.mm.default", (x(4, 6), x(6, 8)), {}),
    ("b0 m n | k", "aten.bmm.default", (x(2, 4, 6), x(2, 6, 8)), {}),
    ("b0 b1 m n | k", "aten.matmul.default", (x(4, 1, 6, 8), x(2, 8, 10)), {}),
    ("b0 m | k", "aten.matmul.default", (x(2, 4, 6), x(6)), {}),
    ("b0 n | k", "aten.matmul.default", (x(6), x(2, 6, 4)), {}),
    (" | k", "aten.dot.default", (x(6), x(6)), {}),
    ("m | k", "aten.mv.default", (x(4, 6), x(6)), {}),
    ("m n", "aten.addmm.default", (x(8), x(4, 6), x(6, 8)), {}),
    ("b m n", "aten.baddbmm.default", (x(4, 1), x(2, 4, 6), x(2, 6, 8)), {"beta": 2.0}),
    ("b h i j | d", "aten.einsum.default", ("bhid,bhjd->bhij", [x(2, 4, 6, 8), x(2, 4, 10, 8)]), {}),
    ("a", "aten.einsum.default", ("aii->a", [x(4, 6, 6)]), {}),
    ("m n", "aten.outer.default", (x(4), x(6)), {}),
    ("d0 d1", "aten.add.Tensor", (x(4, 6), x(6)), {"alpha": 0.5}),
    ("d0 d1", "aten.add.Tensor", (x(4, 1), x(4, 6)), {}),
    ("d0", "aten.mul.Tensor", (x(4), 3.0), {}),
    ("d0 d1", "aten.where.self", (x(4, 6) > 0, x(6), x(4, 1)), {}),
    ("d0 d1", "aten.masked_fill.Scalar", (x(4, 6), x(4, 6) > 0, 1.0), {}),
    ("d0 d1", "aten.gelu.default", (x(4, 6),), {"approximate": "tanh"}),
    ("d0", "aten.to.dtype", (x(4), torch.float64), {}),
    ("d0 d1", "aten.prelu.default", (x(4, 6), x(6)), {}),
    ("d0 d1", "aten.zeros_like.default", (x(4, 6),), {}),
    ("d0 d1", "aten.new_zeros.default", (x(3), [4, 6]), {}),
    ("", "aten.bernoulli.default", (x(4).abs().clamp(max=1),), {}),
    ("", "aten.dropout.default", (x(4), 0.5, True), {}),
    ("", "aten.arange.default", (8,), {}),
    ("d0 d1 | d2", "aten.sum.dim_IntList", (x(4, 6, 8), [-1]), {}),
    ("d0 d2 | d1", "aten.sum.dim_IntList", (x(4, 6, 8), [1], True), {}),
    (" | d0 d1", "aten.sum.default", (x(4, 6),), {}),
    ("d0", "aten.mean.dim", (x(4, 6), [1], True), {}),
    ("d1", "aten.amax.default", (x(4, 6), [0]), {}),
    ("d0", "aten.var_mean.correction", (x(4, 6), [1]), {"correction": 1}),
    ("d0", "aten.max.dim", (x(4, 6), 1), {}),
    ("d0 d1", "aten.max.other", (x(4, 6), x(6)), {}),
    ("", "aten.max.default", (x(4, 6),), {}),
    ("d0", "aten.linalg_vector_norm.default", (x(4, 6), 2, [1]), {}),
    ("d0 d1", "aten.softmax.int", (x(4, 6, 8), -1), {}),
    ("d0 d2", "aten.log_softmax.int", (x(4, 6, 8), 1), {}),
    ("d0", "aten.cumsum.default", (x(4, 6), 1), {}),
    ("d0", "aten.sort.default", (x(4, 6),), {}),
    ("d0", "aten.topk.default", (x(4, 6), 2), {}),
    ("d1", "aten.flip.default", (x(4, 6), [0]), {}),
    ("d1", "aten.roll.default", (x(4, 6), [1], [0]), {}),
    ("", "aten.roll.default", (x(4, 6), [1]), {}),
    ("d0", "aten.tril.default", (x(4, 6, 6),), {}),
    ("d0", "aten.diff.default", (x(4, 6),), {}),
    ("d0 d1 d2", "aten.view.default", (x(4, 6), [2, 2, -1]), {}),
    ("d0 d1", "aten.reshape.default", (x(4, 6), [24]), {}),
    ("", "aten.view.default", (x(4, 6), [6, 4]), {}),
    ("d0", "aten.view.default", (x(2, 4, 6), [2, 6, 4]), {}),
    ("d0 d1 d2 d3", "aten.view.default", (x(4, 6, 10), [4, 3, 20]), {}),
    ("d0 d1", "aten.flatten.using_ints", (x(4, 6),), {}),
    ("d0 d1 d2", "aten.unflatten.int", (x(4, 6), 1, [2, 3]), {}),
    ("d0 d1", "aten.squeeze.default", (x(4, 1, 6),), {}),
    ("d0 d1", "aten.unsqueeze.default", (x(4, 6), 1), {}),
    ("d0 d1 d2", "aten.permute.default", (x(4, 6, 8), [2, 0, 1]), {}),
    ("d0 d1 d2", "aten.transpose.int", (x(4, 6, 8), -1, 0), {}),
    ("d0 d1", "aten.t.default", (x(4, 6),), {}),
    ("d0 d1 d2", "aten.movedim.int", (x(4, 6, 8), 0, 2), {}),
    ("d0 d1 d2", "aten.expand.default", (x(4, 1), [2, -1, 6]), {}),
    ("d0 d1 r0 r1", "aten.repeat.default", (x(4, 6), [2, 2]), {}),
    ("d0 d1 r", "aten.repeat_interleave.self_int", (x(4, 6), 2, 1), {}),
    ("d0", "aten.cat.default", ([x(4, 6), x(4, 8)], 1), {}),
    ("d0 d2", "aten.stack.default", ([x(4, 6), x(4, 6)], 1), {}),
    ("d0 r", "aten.split.Tensor", (x(4, 12), 4, 1), {}),
    ("d0", "aten.split.Tensor", (x(4, 10), 4, 1), {}),
    ("d0 r", "aten.split_with_sizes.default", (x(4, 12), [6, 6], -1), {}),
    ("d0", "aten.split_with_sizes.default", (x(4, 12), [4, 8], -1), {}),
    ("d0 r", "aten.chunk.default", (x(4, 12), 3, -1), {}),
    ("d1", "aten.unbind.int", (x(4, 6),), {}),
    ("d1", "aten.select.int", (x(4, 6), 0, 2), {}),
    ("d0", "aten.slice.Tensor", (x(4, 6), 1, 0, 3), {}),
    ("d0 d1", "aten.slice.Tensor", (x(4, 6), 1, 0, 2**63 - 1), {}),
    ("d0 d1", "aten.slice.Tensor", (x(4, 6), 1, -6, 6), {}),
    ("d0", "aten.slice.Tensor", (x(4, 6), 1, 0, 6, 2), {}),
    ("d0", "aten.pad.default", (x(4, 6), [0, 1]), {}),
    ("d0 d1", "aten.glu.default", (x(4, 12), 1), {}),
    ("b0 b1 h | v", "aten.embedding.default", (x(12, 8), ids(4, 6)), {}),
    ("b0 b1 h | v", "aten.embedding.default", (x(12, 8), ids(4, 6), 2), {}),
    ("", "aten.embedding.default", (x(12, 8), ids(4, 6), -1, True), {}),
    ("d0 d1", "aten.gather.default", (x(4, 6), 1, ids(4, 8)), {}),
    ("d1", "aten.gather.default", (x(4, 6), 1, ids(2, 8)), {}),
    ("d0 d1", "aten.index_select.default", (x(4, 6), 0, ids(8)), {}),
    ("d0 j0", "aten.index.Tensor", (x(4, 6), [None, ids(8)]), {}),
    ("d2 j0 j1", "aten.index.Tensor", (x(4, 6, 8), [ids(2, 1), ids(6)]), {}),
    ("d1 j0", "aten.index.Tensor", (x(4, 6, 4), [ids(8), None, ids(8)]), {}),
    ("d0", "aten.scatter.src", (x(4, 6), 1, ids(4, 2), x(4, 2)), {}),
    ("d0", "aten.select_scatter.default", (x(4, 6), x(4), 1, 2), {}),
    ("d1", "aten.slice_scatter.default", (x(4, 6), x(2, 6), 0, 1, 3), {}),
    ("d0", "aten.fill.Tensor", (x(4), torch.tensor(2.0)), {}),
    (" | d0 d1", "aten.histc.default", (ids(4, 6).float(), 4, 0, 4), {"fixed": (0,)}),
    ("d0", "aten.pixel_shuffle.default", (x(4, 8, 2, 2), 2), {}),
    ("b0 b1", "aten.one_hot.default", (ids(4, 6), 5), {}),
    ("b0 b1", "aten.bucketize.Tensor", (x(4, 6), torch.tensor([0.0, 1.0])), {}),
    ("b0 b1 d s", SDPA, (x(2, 4, 6, 8), x(2, 4, 10, 8), x(2, 4, 10, 12)), {}),
    ("b0 b1 d", SDPA, (x(2, 4, 6, 8), x(2, 4, 6, 8), x(2, 4, 6, 8), None, 0.0, True), {}),
    ("b0 b1 d s", SDPA, (x(2, 4, 6, 8), x(2, 4, 10, 8), x(2, 4, 10, 8), x(2, 1, 6, 10)), {}),
    ("b0 d g r", SDPA, (x(2, 8, 6, 8), x(2, 4, 6, 8), x(2, 4, 6, 8), None, 0.0, True), {"enable_gqa": True}),
    ("b0 d g r s", SDPA, (x(2, 8, 6, 8), x(2, 4, 6, 8), x(2, 4, 6, 8), x(2, 8, 6, 6)), {"enable_gqa": True}),
    ("", SDPA, (x(2, 4, 6, 8), x(2, 4, 6, 8), x(2, 4, 6, 8), None, 0.5), {}),
    ("b0 b1", "aten.layer_norm.default", (x(4, 6, 8), [8], x(8), x(8)), {}),
    ("b0", "aten.layer_norm.default", (x(4, 6, 8), [6, 8]), {}),
    ("b0 b1", "aten.rms_norm.default", (x(4, 6, 8), [8], x(8)), {}),
    ("g n s0 s1", "aten.group_norm.default", (x(4, 12, 6, 6), 4, x(12), x(12)), {}),
    ("c n s0 s1", "aten.batch_norm.default", (x(4, 6, 2, 2), x(6), x(6), x(6), x(6).abs(), False, 0.1, 1e-5, False), {"fixed": (3, 4)}),
    ("c | | n s0 s1", "runtime.batch_norm", (x(4, 6, 2, 2), x(6), x(6), x(6), x(6).abs(), 0.1, 1e-5), {"fixed": (3, 4)}),
    ("n o x0 x1 | c", "aten.conv2d.default", (x(4, 6, 8, 8), x(10, 6, 3, 3)), {}),
    ("n o x0 x1 | c", "aten.conv2d.default", (x(4, 6, 8, 8), x(10, 6, 3, 3), x(10)), {}),
    ("g n o x0 x1 | c", "aten.conv2d.default", (x(4, 8, 6, 6), x(8, 4, 3, 3), None, [1, 1], [1, 1], [1, 1], 2), {}),
    ("g n x0 x1", "aten.conv2d.default", (x(4, 6, 6, 6), x(6, 1, 3, 3), None, [1, 1], [1, 1], [1, 1], 6), {}),
    ("n o x0 x1 | c", "aten.conv_transpose2d.input", (x(4, 6, 4, 4), x(6, 8, 2, 2), None, [2, 2]), {}),
    ("g n o x0 x1 | c", "aten.conv_transpose2d.input", (x(4, 8, 4, 4), x(8, 4, 2, 2), None, [2, 2], [0, 0], [0, 0], 2), {}),
    ("n o x0 | c", "aten.conv1d.padding", (x(4, 6, 8), x(10, 6, 3), None, [1], "same"), {}),
    ("d0 d1 x0 x1", "aten.max_pool2d.default", (x(4, 6, 8, 8), [2, 2]), {}),
    ("d0 d1 | x0 x1", "aten.adaptive_avg_pool2d.default", (x(4, 6, 8, 8), [1, 1]), {}),
    ("d0 d1 x0 x1", "aten.upsample_nearest2d.vec", (x(4, 6, 4, 4), None, [2.0, 2.0]), {}),
    (" | n | v", "aten.cross_entropy_loss.default", (x(6, 12), ids(6), None, 2, -100, 0.1), {}),
    ("n | | v", "aten.cross_entropy_loss.default", (x(6, 12), ids(6), None, 0), {}),
    ("", "aten.cross_entropy_loss.default", (x(6, 12), ids(6)), {}),
    (" | n s0 s1 | v", "aten.cross_entropy_loss.default", (x(4, 6, 2, 2), ids(4, 2, 2), None, 2), {}),
    (" | n", "aten.cross_entropy_loss.default", (x(6, 12), ids(6), x(12).abs(), 2), {"fixed": (2,)}),
    (" | n", "aten.cross_entropy_loss.default", (x(6, 12), x(6, 12), None, 2), {}),
    (" | n", "aten.nll_loss_nd.default", (x(6, 12), ids(6), None, 2), {}),
    (" | d0 d1", "aten.mse_loss.default", (x(4, 6), x(4, 6), 2), {}),
    ("d0 d1", "aten.mse_loss.default", (x(4, 6), x(4, 6), 0), {}),
    ("", "aten.mse_loss.default", (x(4, 6), x(4, 6)), {}),
    ("d0 d1", "runtime.dropout", (x(4, 6), 0.5, "drop"), {}),
    ("d0", "runtime.scale_by_count", (x(4), 12), {"batch": ("a0",)}),
    ("", "aten.nonzero.default", (ids(4),), {}),
    ("", "aten.index.Tensor", (x(4, 6), [torch.tensor([True, False, True, True])]), {}),
]


def _name(case: tuple[str, str, tuple[Any, ...], dict[str, Any]]) -> str:
    shapes = [list(a.shape) if isinstance(a, torch.Tensor) else "[..]" if isinstance(a, list) else a for a in case[2]]
    return f"{case[1]}{shapes}{case[3] or ''}"


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_a_rule_offers_these_loops_and_each_is_proved(case: tuple[str, str, tuple[Any, ...], dict[str, Any]]) -> None:
    expected, target, args, kwargs = case
    graph = graph_of(target, *args, **kwargs)
    assert offered(graph) == expected.rstrip(" |")
    wrong = [(row.option, row.degree, row.proof.reason) for row in prove_graph(graph) if not row.proof.ok]
    assert wrong == []


def test_complex_pairs_keep_their_leading_dimensions() -> None:
    graph = graph_of("aten.view_as_complex.default", x(4, 6, 2))
    assert offered(graph) == "d0 d1"
    assert offered(graph_of("aten.view_as_real.default", torch.view_as_complex(x(4, 6, 2)))) == "d0 d1"
    assert offered(graph_of("aten.mul.Tensor", torch.view_as_complex(x(4, 6, 2)), torch.view_as_complex(x(6, 2)))) == "d0 d1"
