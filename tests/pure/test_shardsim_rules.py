"""Every built-in rule, proved by simulation: one call or more of each, every loop and linear group, both passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoplan.graph import Graph
from autoplan.rules.registry import BUILT_IN
from autoplan.shardsim import prove_graph
from tests.pure.single import Dtype, T, bools, ints, single, t

torch.set_num_threads(1)
stat = T((6,), grad=False)

# target, arguments, keywords, labels that must be among the proved options ("" for none)
CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("aten.linear.default", (t(4, 6, 10), t(8, 10)), {}, "i o b0 b1 partial:0 partial:1"),
    ("aten.linear.default", (t(4, 10), t(8, 10), t(8)), {}, "o b0 partial:0,2 partial:1,2"),
    ("aten.matmul.default", (t(4, 6, 10), t(4, 10, 8)), {}, "b0 m k n partial:0 partial:1"),
    ("aten.matmul.default", (t(2, 4, 6, 10), t(10, 8)), {}, "b0 b1 m k n"),
    ("aten.matmul.default", (t(10), t(4, 10, 8)), {}, "b0 k n"),
    ("aten.mm.default", (t(4, 10), t(10, 6)), {}, "m k n"),
    ("aten.bmm.default", (t(2, 4, 10), t(2, 10, 6)), {}, "b0 m k n"),
    ("aten.mv.default", (t(4, 10), t(10)), {}, "m k"),
    ("aten.dot.default", (t(10), t(10)), {}, "k"),
    ("aten.outer.default", (t(4), t(6)), {}, "m n"),
    ("aten.addmm.default", (t(6), t(4, 10), t(10, 6)), {"alpha": 2.0, "beta": 0.5}, "m n partial:0,1"),
    ("aten.baddbmm.default", (t(2, 4, 6), t(2, 4, 10), t(2, 10, 6)), {}, "b m n"),
    ("aten.addmv.default", (t(4), t(4, 10), t(10)), {}, "m"),
    ("aten.einsum.default", ("bhqd,bhkd->bhqk", (t(2, 4, 6, 8), t(2, 4, 10, 8))), {}, "b h q k d"),
    ("aten.add.Tensor", (t(4, 1, 6), t(8, 6)), {"alpha": 3}, "d0 d1 d2 partial:0,1"),
    ("aten.mul.Tensor", (t(4, 8, 6), t(6)), {}, "d0 d1 d2 partial:0 partial:1"),
    ("aten.div.Tensor", (t(4, 6), t(4, 1)), {}, "d0 d1 partial:0"),
    ("aten.add.Scalar", (t(4, 6), 2.0), {}, "d0 d1"),
    ("aten.mul.Scalar", (t(4, 6), 2.0), {}, "d0 d1 partial:0"),
    ("aten.rsub.Scalar", (t(4, 6), 1.0), {}, "d0 d1"),
    ("aten.pow.Tensor_Scalar", (t(4, 6), 3), {}, "d0 d1"),
    ("aten.rsqrt.default", (t(4, 6),), {}, "d0 d1"),
    ("aten.gelu.default", (t(4, 6),), {}, "d0 d1"),
    ("aten.silu.default", (t(4, 6),), {}, "d0 d1"),
    ("aten.where.self", (bools(4, 6), t(4, 6), t(6)), {}, "d0 d1"),
    ("aten.masked_fill.Scalar", (t(4, 6), bools(4, 1), -1.0), {}, "d0 d1"),
    ("aten.eq.Scalar", (ints(4, 6), 1), {}, "d0 d1"),
    ("aten.neg.default", (t(4, 6),), {}, "d0 d1 partial:0"),
    ("aten.clone.default", (t(4, 6),), {}, "d0 d1 partial:0"),
    ("aten.nan_to_num.default", (t(4, 6),), {}, "d0 d1"),
    ("aten._to_copy.default", (t(4, 6),), {"dtype": Dtype("bfloat16")}, "d0 d1"),
    ("aten.to.dtype", (ints(4, 6), Dtype("float32")), {}, "d0 d1"),
    ("aten.detach.default", (t(4, 6),), {}, "d0 d1"),
    ("aten.zeros_like.default", (t(4, 6),), {}, "d0 d1"),
    ("aten.full_like.default", (t(4, 6), 3.0), {}, "d0 d1"),
    ("aten.prelu.default", (t(4, 6, 8), t(6)), {}, "d0 d1 d2"),
    ("aten.prelu.default", (t(4, 6), t(1)), {}, "d0 d1"),
    ("aten.dropout.default", (t(4, 6), 0.5, False), {}, "d0 d1"),
    ("aten.sum.dim_IntList", (t(4, 6, 8), (1, -1)), {}, "d0 d1 d2 partial:0"),
    ("aten.sum.default", (t(4, 6),), {}, "d0 d1"),
    *((f"aten.fft_{name}.default", (t(4, 6, 8),), {}, "d0 d1") for name in ("fft", "ifft", "rfft", "irfft")),
    *((f"aten.fft_{name}2.default", (t(4, 6, 8),), {}, "d0") for name in ("fft", "ifft", "rfft", "irfft")),
    *((f"aten.fft_{name}n.default", (t(4, 6, 8), None, (0, -1)), {}, "d1") for name in ("fft", "ifft", "rfft", "irfft")),
    ("aten.im2col.default", (t(4, 6, 5, 5), (3, 3), (1, 1), (0, 0), (1, 1)), {}, "n partial:0"),
    ("aten.col2im.default", (t(4, 54, 9), (5, 5), (3, 3), (1, 1), (0, 0), (1, 1)), {}, "n partial:0"),
    ("aten.mean.dim", (t(4, 6, 8), (-1,), True), {}, "d0 d1 partial:0"),
    ("aten.amax.default", (t(4, 6), (-1,)), {}, "d0"),
    ("aten.max.dim", (t(4, 6), 1), {}, "d0"),
    ("aten.argmax.default", (t(4, 6), -1), {}, "d0"),
    ("aten.var.correction", (t(4, 6), (1,)), {}, "d0"),
    ("aten.logsumexp.default", (t(4, 6), (1,)), {}, "d0"),
    ("aten.linalg_vector_norm.default", (t(4, 6), 2, (1,)), {}, "d0"),
    ("aten.any.dim", (bools(4, 6), 1), {}, "d0"),
    ("aten.prod.dim_int", (t(4, 6), 1), {}, "d0"),
    ("aten.softmax.int", (t(4, 6, 8), -1), {}, "d0 d1"),
    ("aten._softmax.default", (t(4, 6), 0, False), {}, "d1"),
    ("aten.log_softmax.int", (t(4, 6), 1), {}, "d0"),
    ("aten.cumsum.default", (t(4, 6), 1), {}, "d0 partial:0"),
    ("aten.sort.default", (t(4, 6), 1), {}, "d0"),
    ("aten.argsort.default", (t(4, 6), 1), {}, "d0"),
    ("aten.flip.default", (t(4, 6), (1,)), {}, "d0 partial:0"),
    ("aten.roll.default", (t(4, 6), (1,), (1,)), {}, "d0"),
    ("aten.topk.default", (t(4, 6), 2), {}, "d0"),
    ("aten.tril.default", (t(4, 6, 6),), {}, "d0 partial:0"),
    ("aten.triu.default", (t(4, 6, 6), 1), {}, "d0"),
    ("aten.diff.default", (t(4, 6),), {}, "d0"),
    ("aten.view.default", (t(4, 6, 8), (24, 2, 4)), {}, "d0 d1 d2 d3 partial:0"),
    ("aten.view.default", (t(4, 6, 8), (4, -1)), {}, "d0 d1 d2"),
    ("aten.reshape.default", (t(4, 6, 8), (-1, 8)), {}, "d0 d1 d2"),
    ("aten._unsafe_view.default", (t(24, 8), (4, 6, 8)), {}, "d0 d1 d2"),
    ("aten.flatten.using_ints", (t(4, 6, 8), 1), {}, "d0 d1 d2"),
    ("aten.unflatten.int", (t(4, 24), 1, (4, -1)), {}, "d0 d1 d2"),
    ("aten.squeeze.dim", (t(4, 1, 6), 1), {}, "d0 d1"),
    ("aten.squeeze.default", (t(2, 1, 6),), {}, "d0 d1"),
    ("aten.unsqueeze.default", (t(4, 6), 1), {}, "d0 d1"),
    ("aten.transpose.int", (t(4, 6, 8), 1, -1), {}, "d0 d1 d2 partial:0"),
    ("aten.permute.default", (t(4, 6, 8), (2, 0, 1)), {}, "d0 d1 d2"),
    ("aten.t.default", (t(4, 6),), {}, "d0 d1"),
    ("aten.movedim.int", (t(4, 6, 8), 0, -1), {}, "d0 d1 d2"),
    ("aten.mT.default", (t(4, 6, 8),), {}, "d0 d1 d2"),
    ("aten.expand.default", (t(4, 1, 6), (2, 4, 8, -1)), {}, "d0 d1 d2 d3 partial:0"),
    ("aten.repeat.default", (t(4, 6), (2, 1, 2)), {}, "d0 d1 r0 r2 partial:0"),
    ("aten.repeat_interleave.self_int", (t(4, 6), 2, 1), {}, "d0 d1 r partial:0"),
    ("aten.cat.default", ((t(4, 6), t(4, 2)), 1), {}, "d0 partial:0,1"),
    ("aten.stack.default", ((t(4, 6), t(4, 6)), 1), {}, "d0 d2 partial:0,1"),
    ("aten.split.Tensor", (t(4, 12), 4, 1), {}, "d0 r partial:0"),
    ("aten.split_with_sizes.default", (t(4, 12), (4, 8), 1), {}, "d0"),
    ("aten.chunk.default", (t(4, 12), 3, -1), {}, "d0 r partial:0"),
    ("aten.select.int", (t(4, 6, 8), 1, 2), {}, "d0 d2 partial:0"),
    ("aten.unbind.int", (t(4, 2, 8), 1), {}, "d0 d2"),
    ("aten.slice.Tensor", (t(4, 6, 8), 1, 1, 5), {}, "d0 d2 partial:0"),
    ("aten.slice.Tensor", (t(4, 6), 1, 0, 9223372036854775807), {}, "d0 d1"),
    ("aten.slice.Tensor", (t(4, 6), 1, 0, 6), {}, "d0 d1"),
    ("aten.narrow.default", (t(4, 6), 1, 0, 6), {}, "d0"),
    ("aten.constant_pad_nd.default", (t(4, 6, 8), (1, 2)), {}, "d0 d1 partial:0"),
    ("aten.pad.default", (t(4, 6, 8), (0, 0, 1, 0)), {}, "d0 d2"),
    ("aten.glu.default", (t(4, 12), -1), {}, "d0"),
    ("aten.embedding.default", (t(12, 6), ints(4, 8)), {}, "v h b0 b1 partial:0"),
    ("aten.embedding.default", (t(12, 6), ints(4, 8), 5), {}, "v h b0 b1"),
    ("aten.gather.default", (t(4, 6, 8), 1, ints(4, 2, 8)), {}, "d0 d1 d2 partial:0"),
    ("aten.index_select.default", (t(4, 6), 1, ints(8)), {}, "d0 d1 partial:0"),
    ("aten.index.Tensor", (t(4, 6, 8), (None, ints(2, 4))), {}, "d0 d2 j0 j1 partial:0"),
    ("aten.index.Tensor", (t(4, 6, 8), (ints(4), None, ints(4))), {}, "d1 j0"),
    ("aten.scatter.src", (t(4, 6), 1, ints(4, 2), t(4, 2)), {}, "d0"),
    ("aten.scatter_add.default", (t(4, 6), 1, ints(4, 2), t(4, 2)), {}, "d0"),
    ("aten.scatter_reduce.two", (t(4, 6), 1, ints(4, 2), t(4, 2), "sum"), {}, "d0"),
    ("aten.one_hot.default", (ints(4, 6), 8), {}, "b0 b1"),
    ("aten.bucketize.Tensor", (t(4, 6), T((8,), grad=False)), {}, "b0 b1"),
    ("aten.isin.Tensor_Tensor", (ints(4, 6), ints(3)), {}, "b0 b1"),
    ("aten.layer_norm.default", (t(4, 6, 8), (8,), t(8), t(8)), {}, "b0 b1"),
    ("aten.native_layer_norm.default", (t(4, 6, 8), (8,), t(8), t(8), 1e-5), {}, "b0 b1"),
    ("aten.rms_norm.default", (t(4, 6, 8), (8,), t(8)), {}, "b0 b1"),
    ("aten._fused_rms_norm.default", (t(4, 6, 8), (8,), t(8), 1e-5), {}, "b0 b1"),
    ("aten.group_norm.default", (t(4, 12, 5), 4, t(12), t(12)), {}, "n g"),
    ("aten.instance_norm.default", (t(4, 6, 8), t(6), t(6), None, None, True, 0.1, 1e-5, False), {}, "n c"),
    ("aten.batch_norm.default", (t(4, 6, 8), t(6), t(6), stat, stat, False, 0.1, 1e-5, False), {}, "n c s0"),
    ("runtime.batch_norm", (t(4, 6, 8), t(6), t(6), stat, stat, 0.1, 1e-5), {}, "n c s0"),
    ("aten.cosine_similarity.default", (t(4, 6, 8), t(4, 6, 8), 1), {}, "d0 d2"),
    ("aten.scaled_dot_product_attention.default", (t(2, 4, 6, 8), t(2, 4, 10, 8), t(2, 4, 10, 8)), {}, "b0 b1 s d partial:2"),
    ("aten.scaled_dot_product_attention.default", (t(2, 4, 6, 8), t(2, 4, 6, 8), t(2, 4, 6, 8), None, 0.0, True), {}, "b0 b1 d"),
    ("aten.scaled_dot_product_attention.default", (t(2, 4, 6, 8), t(2, 4, 6, 8), t(2, 4, 6, 8), bools(2, 1, 6, 6)), {}, "b0 b1 s d"),
    ("aten.scaled_dot_product_attention.default", (t(2, 8, 6, 8), t(2, 4, 6, 8), t(2, 4, 6, 8), t(1, 8, 6, 6)), {"enable_gqa": True}, "b0 g r s d"),
    ("runtime.attention", (t(2, 4, 6, 8), t(2, 4, 6, 8), t(2, 4, 6, 8), None, 0.3, True, None, False, "a"), {"random": True}, "b0 b1"),
    ("runtime.attention", (t(2, 8, 6, 8), t(2, 4, 6, 8), t(2, 4, 6, 8), None, 0.3, False, None, True, "a"), {"random": True}, "b0 g r s"),
    ("runtime.dropout", (t(4, 6, 8), 0.4, "d"), {"random": True}, "d0 d1 d2"),
    ("runtime.scale_by_count", (t(4, 6), 24), {"batch": True}, "d0 d1 partial:0"),
    ("runtime.experts", (t(8, 6), ints(8, 2), t(8, 2), t(4, 16, 6), t(4, 6, 8), "silu", 4), {}, "t e f"),
    ("aten.conv1d.default", (t(4, 6, 12), t(8, 6, 3), t(8), (1,), (1,)), {}, "n c o"),
    ("aten.conv2d.default", (t(4, 6, 12, 12), t(8, 6, 3, 3), None, (2, 2), (1, 1)), {}, "n c o partial:0 partial:1"),
    ("aten.conv2d.default", (t(4, 6, 8, 8), t(12, 3, 3, 3), t(12), (1, 1), (1, 1), (1, 1), 2), {}, "n g o partial:0,2"),
    ("aten.conv2d.default", (t(4, 6, 8, 8), t(6, 1, 3, 3), None, (1, 1), (1, 1), (1, 1), 6), {}, "n g"),
    ("aten.conv_transpose2d.input", (t(4, 6, 8, 8), t(6, 10, 2, 2), t(10), (2, 2)), {}, "n c o"),
    ("aten.conv_transpose2d.input", (t(4, 6, 8, 8), t(6, 5, 2, 2), None, (2, 2), (0, 0), (0, 0), 2), {}, "n g"),
    ("aten.convolution.default", (t(4, 6, 8, 8), t(10, 6, 3, 3), None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1), {}, "n c o"),
    ("aten.max_pool2d.default", (t(4, 6, 8, 8), (2, 2)), {}, "d0 d1"),
    ("aten.max_pool2d_with_indices.default", (t(4, 6, 8, 8), (2, 2)), {}, "d0 d1"),
    ("aten.avg_pool2d.default", (t(4, 6, 8, 8), (2, 2)), {}, "d0 d1 partial:0"),
    ("aten.adaptive_avg_pool2d.default", (t(4, 6, 8, 8), (1, 1)), {}, "d0 d1 partial:0"),
    ("aten.upsample_nearest2d.vec", (t(4, 6, 8, 8), None, (2.0, 2.0)), {}, "d0 d1"),
    ("aten.upsample_bilinear2d.vec", (t(4, 6, 8, 8), None, False, (2.0, 2.0)), {}, "d0 d1 partial:0"),
    ("aten.cross_entropy_loss.default", (t(8, 12), ints(8), None, 2), {}, "n v"),
    ("aten.cross_entropy_loss.default", (t(8, 12), ints(8), None, 0, -1), {}, "n v"),
    ("aten.cross_entropy_loss.default", (t(8, 12), ints(8), None, 2, -100, 0.1), {}, "n"),
    ("aten.cross_entropy_loss.default", (t(4, 12, 6), ints(4, 6), None, 2), {}, "n s0"),
    ("aten.cross_entropy_loss.default", (t(8, 12), ints(8), T((12,), grad=False), 2), {}, "n"),
    ("aten.mse_loss.default", (t(4, 6), t(4, 6), 2), {}, "d0 d1"),
    ("aten.l1_loss.default", (t(4, 6), t(4, 6), 0), {}, "d0 d1"),
    ("aten.smooth_l1_loss.default", (t(4, 6), t(4, 6), 2), {}, "d0 d1"),
    ("aten.huber_loss.default", (t(4, 6), t(4, 6), 2), {}, "d0 d1"),
    ("aten.binary_cross_entropy_with_logits.default", (t(4, 6), t(4, 6), None, None, 2), {}, "d0 d1"),
    ("aten.kl_div.default", (t(4, 6), T((4, 6), grad=False), 2), {}, "d0 d1"),
    ("aten.soft_margin_loss.default", (t(4, 6), T((4, 6), grad=False), 2), {}, "d0 d1"),
    ("aten.zeros.default", ((4, 6),), {}, "d0 d1"),
    ("aten.full.default", ((4, 6), 2.0), {}, "d0 d1"),
    ("aten.new_zeros.default", (t(3), (4, 6)), {}, "d0 d1"),
    ("aten.new_full.default", (t(3), (4, 6), 1.0), {}, "d0 d1"),
]


def _elementwise() -> list[tuple[str, tuple[Any, ...], dict[str, Any], str]]:
    x, y, n, b = t(4, 6), t(4, 1), ints(4, 6), bools(4, 6)
    one = ["relu6", "selu", "celu", "hardtanh", "hardswish", "hardsigmoid", "log_sigmoid", "mish", "softplus"]
    one += ["softshrink", "hardshrink", "square", "absolute", "fix"]
    calls: list[tuple[str, tuple[Any, ...]]] = [(f"aten.{name}.default", (x,)) for name in one]
    calls += [(f"aten.{name}.default", (x,)) for name in ("alias", "contiguous", "lift_fresh", "lift_fresh_copy", "negative", "ones_like")]
    calls += [(f"aten.{name}.default", (x,)) for name in ("isfinite", "isnan", "isinf", "isreal")]
    calls += [(f"aten.{name}.Tensor", (x, y)) for name in ("true_divide", "multiply", "subtract", "divide")]
    calls += [(f"aten.{name}.Tensor", (x, y)) for name in ("greater", "greater_equal", "less", "less_equal", "not_equal")]
    calls += [(f"aten.{name}.Tensor", (b, bools(6))) for name in ("__and__", "__or__", "__xor__", "bitwise_and", "bitwise_or", "bitwise_xor")]
    calls += [(f"aten.{name}.default", (b, bools(6))) for name in ("logical_and", "logical_or", "logical_xor")]
    calls += [("aten.logical_not.default", (b,)), ("aten.bitwise_not.default", (b,)), ("aten.type_as.default", (n, T((2,), grad=False)))]
    calls += [("aten.where.ScalarOther", (b, x, 0.0)), ("aten.where.ScalarSelf", (b, 0.0, x)), ("aten.where.Scalar", (b, 1.0, 0.0))]
    calls += [("aten.threshold.default", (x, 0.1, 0.0)), ("aten.clip.default", (x, -0.5, 0.5)), ("aten.float_power.Tensor_Scalar", (x, 2))]
    calls += [("aten.max.other", (x, y)), ("aten.min.other", (x, y)), ("aten.floor_divide.Scalar", (n, 2))]
    return [(target, args, {}, "d0 d1") for target, args in calls]


def _reductions() -> list[tuple[str, tuple[Any, ...], dict[str, Any], str]]:
    x = t(4, 6)
    calls: list[tuple[str, tuple[Any, ...], str]] = [
        ("aten.amin.default", (x, (1,)), "d0"),
        ("aten.aminmax.default", (x,), ""),
        ("aten.argmin.default", (x, 1), "d0"),
        ("aten.std.correction", (x, (1,)), "d0"),
        ("aten.var_mean.correction", (x, (1,)), "d0"),
        ("aten.std_mean.correction", (x, (1,)), "d0"),
        ("aten.norm.ScalarOpt_dim", (x, 2, (1,)), "d0"),
        ("aten.all.dim", (bools(4, 6), 1), "d0"),
        ("aten.median.dim", (x, 1), "d0"),
        ("aten.max.default", (x,), ""),
        ("aten.min.default", (x,), ""),
        ("aten.min.dim", (x, 1), "d0"),
        ("aten.count_nonzero.dim_IntList", (n := ints(4, 6), (1,)), "d0"),
        ("aten._log_softmax.default", (x, 1, False), "d0"),
        ("aten.cumprod.default", (x, 1), "d0"),
        ("aten.logcumsumexp.default", (x, 1), "d0"),
        ("aten.one_hot.default", (n, 8), "b0 b1"),
    ]
    return [(target, args, {}, wanted) for target, args, wanted in calls]


def _shapes() -> list[tuple[str, tuple[Any, ...], dict[str, Any], str]]:
    x = t(4, 6, 8)
    calls: list[tuple[str, tuple[Any, ...], str]] = [
        ("aten.view_as.default", (x, T((24, 8), grad=False)), "d0 d1 d2"),
        ("aten.reshape_as.default", (x, T((24, 8), grad=False)), "d0 d1 d2"),
        ("aten.swapaxes.default", (x, 0, 2), "d0 d1 d2"),
        ("aten.swapdims.default", (x, 0, 2), "d0 d1 d2"),
        ("aten.numpy_T.default", (x,), "d0 d1 d2"),
        ("aten.expand_as.default", (t(6, 1), T((4, 6, 8), grad=False)), ""),
        ("aten.broadcast_to.default", (t(6, 1), (4, 6, 8)), "d0 d1 d2"),
        ("aten.concat.default", ((x, t(4, 2, 8)), 1), "d0 d2"),
        ("aten.tensor_split.sections", (x, 3, 1), "d0 d2"),
        ("aten.unsafe_split.Tensor", (x, 2, 1), "d0 r d2"),
        ("aten.unsafe_chunk.default", (x, 3, 1), "d0 r d2"),
        ("aten.broadcast_tensors.default", ((t(4, 6), t(6)),), "d0 d1"),
        ("aten.ones.default", ((4, 6),), "d0 d1"),
        ("aten.new_ones.default", (t(3), (4, 6)), "d0 d1"),
    ]
    return [(target, args, {}, wanted) for target, args, wanted in calls]


def _spatial() -> list[tuple[str, tuple[Any, ...], dict[str, Any], str]]:
    line, picture, body = t(4, 6, 8), t(4, 6, 8, 8), t(4, 6, 4, 4, 4)
    calls: list[tuple[str, tuple[Any, ...], str]] = [
        ("aten.conv3d.default", (body, t(8, 6, 3, 3, 3)), "n c o"),
        ("aten.conv_transpose1d.default", (line, t(6, 10, 2)), "n c o"),
        ("aten.conv_transpose3d.input", (body, t(6, 10, 2, 2, 2)), "n c o"),
        *((f"aten.{kind}_pool1d.default", (line, (2,)), "d0 d1") for kind in ("max", "avg", "adaptive_avg", "adaptive_max")),
        *((f"aten.{kind}_pool3d.default", (body, (2, 2, 2)), "d0 d1") for kind in ("max", "avg", "adaptive_avg", "adaptive_max", "_adaptive_avg")),
        ("aten._adaptive_avg_pool2d.default", (picture, (2, 2)), "d0 d1"),
        ("aten.adaptive_max_pool2d.default", (picture, (2, 2)), "d0 d1"),
        ("aten.max_pool3d_with_indices.default", (body, (2, 2, 2)), "d0 d1"),
        ("aten.upsample_nearest1d.vec", (line, None, (2.0,)), "d0 d1"),
        ("aten.upsample_nearest3d.vec", (body, None, (2.0, 2.0, 2.0)), "d0 d1"),
        ("aten.upsample_bicubic2d.vec", (picture, None, False, (2.0, 2.0)), "d0 d1"),
        ("aten._upsample_nearest_exact2d.vec", (picture, None, (2.0, 2.0)), "d0 d1"),
        ("aten._upsample_nearest_exact1d.vec", (line, None, (2.0,)), "d0 d1"),
        ("aten._upsample_nearest_exact3d.vec", (body, None, (2.0, 2.0, 2.0)), "d0 d1"),
        ("aten.upsample_linear1d.vec", (line, None, False, (2.0,)), "d0 d1"),
        ("aten.upsample_trilinear3d.vec", (body, None, False, (2.0, 2.0, 2.0)), "d0 d1"),
    ]
    return [(target, args, {}, wanted) for target, args, wanted in calls]


def _losses() -> list[tuple[str, tuple[Any, ...], dict[str, Any], str]]:
    x, fixed, share = t(8, 12), T((8, 12), grad=False), T((4, 6), grad=False)
    calls: list[tuple[str, tuple[Any, ...], str]] = [
        ("aten.nll_loss.default", (x, ints(8), None, 2), "n"),
        ("aten.nll_loss_nd.default", (t(4, 12, 6), ints(4, 6), None, 0), "n s0"),
        ("aten.nll_loss2d.default", (t(4, 12, 6, 2), ints(4, 6, 2), None, 2), "n s0 s1"),
        ("aten.cross_entropy_loss.default", (x, fixed, None, 2), "n"),
        ("aten.cross_entropy_loss.default", (t(4, 12, 6), ints(4, 6), None, 0), "n v s0"),
        ("aten.binary_cross_entropy.default", (T((4, 6)), share, None, 2), "d0 d1"),
        ("aten.poisson_nll_loss.default", (t(4, 6), share, True, False, 1e-8, 2), "d0 d1"),
    ]
    return [(target, args, {}, wanted) for target, args, wanted in calls]


def _scattered() -> list[tuple[str, tuple[Any, ...], dict[str, Any], str]]:
    calls: list[tuple[str, tuple[Any, ...], str]] = [
        ("aten.select_scatter.default", (t(4, 6), t(4), 1, 2), "d0"),
        ("aten.slice_scatter.default", (t(4, 6), t(2, 6), 0, 1, 3), "d1"),
        ("aten.fill.Tensor", (t(4, 6), T((), grad=False)), "d0 d1"),
        ("aten.histc.default", (T((4, 6), grad=False), 4, -3, 3), "d0 d1"),
        ("aten.to.other", (t(4, 6), T((3,), grad=False)), "d0 d1"),
        ("aten._weight_norm.default", (t(4, 6, 2), t(4, 1, 1)), "d0"),
        ("aten.pixel_shuffle.default", (t(4, 8, 2, 2), 2), "d0"),
        ("aten.pixel_unshuffle.default", (t(4, 2, 4, 4), 2), "d0"),
    ]
    return [(target, args, {}, wanted) for target, args, wanted in calls]


def _recurrent() -> list[tuple[str, tuple[Any, ...], dict[str, Any], str]]:
    x, h, states = t(4, 10, 6), t(1, 4, 8), (t(1, 4, 8), t(1, 4, 8))

    def weights(gates: int) -> tuple[T, ...]:
        return t(8 * gates, 6), t(8 * gates, 8), t(8 * gates), t(8 * gates)

    rest = (True, 1, 0.0, False, False, True)  # biases, one layer, no dropout, evaluation, one direction, rows first
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("aten.lstm.input", (x, states, weights(4), *rest)),
        ("aten.gru.input", (x, h, weights(3), *rest)),
        *((f"aten.rnn_{kind}.input", (x, h, weights(1), *rest)) for kind in ("tanh", "relu")),
        ("aten.lstm_cell.default", (t(4, 6), (t(4, 8), t(4, 8)), *weights(4))),
        ("aten.gru_cell.default", (t(4, 6), t(4, 8), *weights(3))),
        *((f"aten.rnn_{kind}_cell.default", (t(4, 6), t(4, 8), *weights(1))) for kind in ("tanh", "relu")),
    ]
    return [(target, args, {}, "b") for target, args in calls]


def _paired() -> list[tuple[str, tuple[Any, ...], dict[str, Any], str]]:
    calls: list[tuple[str, tuple[Any, ...], str]] = [
        ("aten.bilinear.default", (t(4, 6), t(4, 8), t(10, 6, 8), t(10)), "b0 o"),
        ("aten.cdist.default", (t(2, 4, 6), t(2, 10, 6), 2.0, None), "b0 m n"),
        ("aten.cummax.default", (t(4, 6), 1), "d0"),
        ("aten.cummin.default", (t(4, 6), 1), "d0"),
        ("aten.index_put.default", (t(4, 6, 8), (ints(4),), t(4, 6, 8)), "d1 d2"),
        ("aten.complex.default", (t(4, 6), t(4, 6)), "d0 d1"),
        ("aten.polar.default", (t(4, 6), t(4, 6)), "d0 d1"),
    ]
    return [(target, args, {}, wanted) for target, args, wanted in calls]


CALLS += _scattered() + _recurrent() + _paired()
CALLS += _elementwise() + _reductions() + _shapes() + _spatial() + _losses()

# Rules that no call here can reach, and why.
MISSING = (
    "aten.view_as_complex",  # complex numbers are tested in test_rules.py; nor the next
    "aten.view_as_real",
    "aten.real",
    "aten.imag",
    "aten._grouped_mm",  # no fp64 on the CPU
    "transformers.grouped_mm_fallback",  # registered by transformers on use
)

_SEQUENCES = ("aten.split.Tensor", "aten.split_with_sizes.default", "aten.chunk.default", "aten.unbind.int")


def graph_of(target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
    return single(target, *args, sequence=target in _SEQUENCES, **kwargs)


@pytest.mark.parametrize("target, args, kwargs, wanted", CALLS, ids=[f"{i}-{call[0]}" for i, call in enumerate(CALLS)])
def test_every_division_that_a_rule_offers_is_right_in_both_passes(target, args, kwargs, wanted):
    rows = prove_graph(graph_of(target, args, kwargs))
    wrong = [f"{row.option} on {row.degree} ranks: {row.proof.reason}" for row in rows if not row.proof.ok]
    assert not wrong, "\n".join(wrong)
    assert set(wanted.split()) <= {row.option for row in rows}


def test_every_built_in_rule_has_a_call_in_the_table():
    targets = {target for target, *_ in CALLS}
    packets = targets | {target.rpartition(".")[0] for target in targets}
    missing = sorted(rule for rule in BUILT_IN if rule not in packets)
    assert missing == sorted(MISSING)
