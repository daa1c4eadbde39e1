"""Formulas of operators: what must hold whatever the constants."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.analytic import AnalyticPrices
from costmodel.calibration import StackConstants
from costmodel.cluster import Cluster
from costmodel.opkey import OpKey, Shape
from costmodel.roofline import op_costs

H100 = AnalyticPrices(Cluster.parse("h100-sxm-80gb:1x8"))
CPU = AnalyticPrices(Cluster.parse("cpu:1x4"))


def linear(m: int, n: int, k: int, dtype: str = "bfloat16", grads: tuple[bool, ...] = (True, True)) -> OpKey:
    args = json.dumps([[{"tensor": 0}, {"tensor": 1}], {}])
    return OpKey("aten.linear.default", (((m, k), dtype), ((n, k), dtype)), (((m, n), dtype),), args, grads, 2 * m * n * k)


def attention(b: int, h: int, s: int, d: int, causal: bool) -> OpKey:
    args = json.dumps([[{"tensor": 0}, {"tensor": 1}, {"tensor": 2}, None, 0.0, causal], {}])
    shape = (b, h, s, d)
    return OpKey("aten.scaled_dot_product_attention.default", ((shape, "bfloat16"),) * 3, ((shape, "bfloat16"),), args, (True,) * 3, 4 * b * h * s * s * d)


def elementwise(target: str, shape: Shape, operands: int = 1) -> OpKey:
    return OpKey(target, ((shape, "bfloat16"),) * operands, ((shape, "bfloat16"),), "", (True,) * operands, 0)


def test_a_large_product_reaches_the_ceiling_and_not_more() -> None:
    key = linear(8192, 8192, 8192)
    share = key.flops / H100.op(key).forward_s / H100.peak_flops_per_s("bfloat16")
    ceiling = H100.constants.device("H100-SXM-80GB").gemm_ceiling
    assert 0.8 * ceiling < share <= ceiling


def test_one_row_too_many_starts_a_wave() -> None:
    full, over = H100.op(linear(256 * 66, 256, 8192)).forward_s, H100.op(linear(256 * 66 + 1, 256, 8192)).forward_s
    assert over > 1.2 * full


def test_few_rows_are_bound_by_reading_the_weight() -> None:
    one, eight = H100.op(linear(1, 8192, 8192)).forward_s, H100.op(linear(8, 8192, 8192)).forward_s
    assert one == pytest.approx(eight, rel=0.05)
    assert one >= 2 * 8192 * 8192 / 3.35e12


def test_short_contractions_and_odd_sizes_are_less_efficient() -> None:
    assert H100.op(linear(8192, 8192, 64)).forward_s > 1.3 * H100.op(linear(8192, 8192, 8192)).forward_s / 128
    assert H100.op(linear(8192, 8192, 8190)).forward_s > 1.3 * H100.op(linear(8192, 8192, 8192)).forward_s


def test_backward_is_two_products_and_only_those_that_are_asked_for() -> None:
    both, weight, none = (H100.op(linear(4096, 4096, 4096, grads=g)) for g in ((True, True), (False, True), (False, False)))
    assert both.backward_s == pytest.approx(2 * both.forward_s, rel=0.1)
    assert weight.backward_input_s == 0 and weight.backward_weight_s == both.backward_weight_s
    assert none.backward_s == 0


def test_causal_attention_does_half_the_work_and_its_backward_more() -> None:
    full, causal = H100.op(attention(2, 32, 4096, 128, False)), H100.op(attention(2, 32, 4096, 128, True))
    assert causal.forward_s == pytest.approx(full.forward_s / 2, rel=0.05)
    assert causal.backward_s > 2 * causal.forward_s


def test_views_are_free_and_elementwise_ops_cost_their_bytes() -> None:
    assert H100.op(elementwise("aten.view.default", (8192, 8192))).forward_s == 0
    seconds = H100.op(elementwise("aten.gelu.default", (8192, 8192))).forward_s
    assert 2 * 2 * 8192 * 8192 / 3.35e12 < seconds < 2 * 2 * 8192 * 8192 / 2e12


def test_a_tiny_op_costs_a_launch() -> None:
    assert H100.op(elementwise("aten.relu.default", (4,))).forward_s == H100.constants.device("H100-SXM-80GB").launch_s


def test_ranks_that_share_cores_pay_for_it() -> None:
    from dataclasses import replace

    shared = AnalyticPrices(Cluster("x", (replace(CPU.cluster.groups[0], cores_per_node=2),)))
    key = linear(256, 256, 256, "float32")
    assert shared.op(key).forward_s == pytest.approx(2 * CPU.op(key).forward_s)


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 5000), st.sampled_from(["float32", "bfloat16", "float64"]))
def test_products_never_beat_the_peak_nor_the_memory(m: int, n: int, k: int, dtype: str) -> None:
    for prices in (H100, CPU):
        key = linear(m, n, k, dtype)
        seconds = prices.op(key)
        assert seconds.forward_s >= key.flops / prices.peak_flops_per_s(dtype)
        assert seconds.forward_s < 1e3 and seconds.backward_s >= 2 * key.flops / prices.peak_flops_per_s(dtype)


def test_an_unknown_op_is_priced_by_its_bytes() -> None:
    assert H100.op(elementwise("mylib.fancy.default", (8192, 8192))).forward_s > 0


def test_a_softmax_in_several_kernels_passes_over_the_scores_more_often() -> None:
    key, device = attention(1, 16, 2048, 64, causal=True), H100.cluster.device()
    constants = H100.constants.device(device.name)
    one, many = (op_costs(key, device, constants, StackConstants(flash=False, score_passes=n))[0] for n in (1.0, 3.5))
    passes_s = 2 * 16 * 2048 * 2048 * 2 / (device.memory_bytes_per_s * constants.memory_efficiency)
    assert many.device_s - one.device_s == pytest.approx(2.5 * passes_s, rel=0.01)
