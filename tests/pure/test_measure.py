"""Measuring: keys run again from their text, times are kept, prices say where they come from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from costmodel.analytic import AnalyticPrices
from costmodel.cluster import Cluster
from costmodel.links import fit
from costmodel.measure import NotMeasurableError, measure
from costmodel.measured import MeasuredPrices
from costmodel.opkey import Collective, OpKey, OpTime, RankGroup
from costmodel.profile import Environment, LinkFit, Profile

torch.set_num_threads(1)
T0, T1, T2 = ({"tensor": i} for i in range(3))


def call(*args: object, **kwargs: object) -> str:
    return json.dumps([list(args), kwargs])


def linear(m: int, n: int, k: int) -> OpKey:
    return OpKey("aten.linear.default", (((m, k), "float32"), ((n, k), "float32")), (((m, n), "float32"),), call(T0, T1), (True, True), 2 * m * n * k)


EMBEDDING = OpKey("aten.embedding.default", (((10, 8), "float32"), ((2, 5), "int64")), (((2, 5, 8), "float32"),), call(T0, T1), (True, False), 0)
LOSS = OpKey("aten.cross_entropy_loss.default", (((12, 7), "float32"), ((12,), "int64")), (((), "float32"),), call(T0, T1, None, 2), (True, False), 0)
ATTENTION = OpKey(
    "aten.scaled_dot_product_attention.default",
    (((1, 2, 8, 4), "float32"),) * 3,
    (((1, 2, 8, 4), "float32"),),
    call(T0, T1, T2, None, 0.0, True),
    (True,) * 3,
    0,
)
CAST = OpKey("aten.to.dtype", (((4, 4), "float32"),), (((4, 4), "float64"),), call(T0, {"dtype": "float64"}), (True,), 0)
MASKED = OpKey("aten.where.self", (((4, 4), "bool"), ((4, 4), "float32"), ((), "float32")), (((4, 4), "float32"),), call(T0, T1, T2), (False, True, False), 0)


@pytest.mark.parametrize("key", [linear(16, 16, 16), EMBEDDING, LOSS, ATTENTION, CAST, MASKED], ids=lambda k: k.target)
def test_a_key_is_run_again_forward_and_backward(key: OpKey) -> None:
    timing = measure(key, device="cpu", budget_s=0.002)
    assert 0 < timing.forward_s < 0.1 and 0 < timing.backward_s < 0.1 and timing.num_runs > 3


def test_an_op_without_gradients_has_no_backward() -> None:
    key = OpKey("aten.add.Tensor", (((4,), "float32"),) * 2, (((4,), "float32"),), call(T0, T1), (False, False), 0)
    assert measure(key, device="cpu", budget_s=0.002).backward_s == 0


def test_more_work_takes_longer() -> None:
    assert measure(linear(256, 256, 256), device="cpu").forward_s > 5 * measure(linear(32, 32, 32), device="cpu").forward_s


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (OpKey("runtime.all_reduce", (), (), "", (), 0), "no operator of torch.ops"),
        (OpKey("aten.linear.default", (((4, 4), "float32"), ((4, 5), "float32")), (((4, 4), "float32"),), call(T0, T1), (), 0), "aten.linear"),
        (OpKey("aten.relu.default", (((4,), "float32"),), (((5,), "float32"),), call(T0), (), 0), "the key says"),
    ],
)
def test_a_key_that_does_not_run_is_refused_with_its_reason(key: OpKey, words: str) -> None:
    with pytest.raises(NotMeasurableError, match=words):
        measure(key, device="cpu")


def test_functions_of_other_packages_come_from_the_resolver() -> None:
    key = OpKey("runtime.double", (((64,), "float32"),), (((64,), "float32"),), call(T0), (True,), 0)
    assert measure(key, lambda target: lambda x: 2 * x, device="cpu", budget_s=0.002).forward_s > 0


def prices(folder: Path, ranks: int = 2, budget_s: float = 1.0) -> MeasuredPrices:
    cluster = Cluster.parse(f"cpu:1x{ranks}")
    return MeasuredPrices(cluster, Profile(folder / "p.sqlite"), AnalyticPrices(cluster), budget_s=budget_s)


def test_times_are_kept_for_the_next_process(tmp_path: Path) -> None:
    first = prices(tmp_path).op(linear(64, 64, 64))
    again = prices(tmp_path, budget_s=0.0)
    assert again.op(linear(64, 64, 64)) == first
    assert again.origins == {"measured": 1}


def test_another_environment_does_not_see_them(tmp_path: Path) -> None:
    prices(tmp_path).op(linear(64, 64, 64))
    assert Profile(tmp_path / "p.sqlite", Environment("another", "cpu", torch.__version__, 1)).num_ops == 0


def test_without_budget_the_formula_is_scaled_by_the_nearest_measurement(tmp_path: Path) -> None:
    some = prices(tmp_path, budget_s=0.0)
    formula = some.fallback.op(linear(64, 64, 64))
    some.profile.put_op(linear(64, 64, 64), OpTime(3 * formula.forward_s, 2 * formula.backward_input_s, 2 * formula.backward_weight_s), 1)
    some.op(linear(64, 64, 64))
    far = linear(128, 128, 128)
    assert some.op(far).forward_s == pytest.approx(3 * some.fallback.op(far).forward_s)
    assert some.op(far).backward_s == pytest.approx(2 * some.fallback.op(far).backward_s)
    assert some.op(EMBEDDING) == some.fallback.op(EMBEDDING)
    assert some.origins == {"measured": 1, "interpolated": 1, "formula": 1}


def test_a_price_stays_the_same_once_it_was_given(tmp_path: Path) -> None:
    some = prices(tmp_path, budget_s=0.0)
    before = some.op(linear(32, 32, 32))
    some.budget_s = 1.0
    assert some.op(linear(32, 32, 32)) == before


def test_what_is_not_measurable_falls_back_and_is_named(tmp_path: Path) -> None:
    some = prices(tmp_path)
    key = OpKey("runtime.mystery", (((64,), "float32"),), (((64,), "float32"),), "", (True,), 0)
    assert some.op(key) == some.fallback.op(key)
    assert any("runtime.mystery" in line for line in some.assumptions())


def test_collectives_inside_the_node_come_from_the_links_that_were_measured(tmp_path: Path) -> None:
    some = prices(tmp_path, ranks=4)
    some.profile.put_link(LinkFit("all_reduce", 2, 4, 1e-4, 1e9, 0.1), "gloo")
    assert some.collective(Collective("all_reduce", 10**6, RankGroup(2, 2, 0, 2))) == pytest.approx(1e-4 + 1e-3)
    other = Collective("all_gather", 10**6, RankGroup(2))
    assert some.collective(other) == some.fallback.collective(other)


def test_a_straight_line_is_fitted_exactly_and_never_negative() -> None:
    found = fit("all_reduce", 2, 4, [(n, 1e-4 + n / 2e9) for n in (10, 1000, 10**6)])
    assert (found.base_s, found.bytes_per_s, found.error) == (pytest.approx(1e-4), pytest.approx(2e9), pytest.approx(0, abs=1e-6))
    steep = fit("send", 2, 4, [(1000, 1e-6), (10**6, 2e-3)])
    assert steep.base_s >= 0 and steep.bytes_per_s > 0


def test_the_optimizer_is_timed_at_two_sizes_and_scales_with_the_parameters(tmp_path: Path) -> None:
    some = prices(tmp_path)
    small = some.optimizer_s(10**6, "adamw", 16.0)
    assert 1e-5 < small < 1.0
    assert some.optimizer_s(4 * 10**6, "adamw", 16.0) == pytest.approx(4 * small, rel=0.2)  # a call costs something too
    assert prices(tmp_path, budget_s=0.0).optimizer_s(10**6, "adamw", 16.0) == small
    assert some.optimizer_s(10**6, "unheard-of", 16.0) == some.fallback.optimizer_s(10**6, "unheard-of", 16.0)
