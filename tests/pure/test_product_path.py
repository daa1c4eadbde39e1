"""Published runs through the planner's own blocks and schedule."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.accuracy.footprint import saved_bytes
from benchmarks.accuracy.predict import predict, refit
from benchmarks.accuracy.product import Product
from benchmarks.accuracy.record import Run, run_of
from benchmarks.accuracy.step import Pricer, canonical_pipeline, step_time
from costmodel.calibration import load

GPT: dict[str, Any] = {"layers": 6, "hidden": 2048, "heads": 16, "kv_heads": 16, "ffn": 8192, "seq_len": 1024, "vocab": 50257}
LLAMA = GPT | {"act": "swiglu", "kv_heads": 4, "ffn": 5632}
PLAN = {"tp": 4, "pp": 2, "dp": 2, "cp": 1, "vpp": 1, "micro_batch": 2, "global_batch": 32, "recompute": "none", "zero_stage": 0, "sequence_parallel": False}


def row(model: dict[str, Any] = GPT, source: str = "Megatron-LM", **plan: Any) -> dict[str, Any]:
    cluster = {"gpu": "A100-SXM-80GB", "n_gpus": 16, "gpus_per_node": 8, "intra_bw_GBps": 300, "inter_bw_GBps": 200}
    return {
        "source": source, "row_id": "r", "model": model, "cluster": cluster, "plan": PLAN | plan, "precision": "bf16", "measured": {"iteration_s": 1.0},
    }  # fmt: skip


def run(model: dict[str, Any] = GPT, source: str = "Megatron-LM", **plan: Any) -> Run:
    return run_of(row(model, source, **plan))


@pytest.mark.parametrize(
    ("model", "source"),
    [(GPT, "Megatron-LM"), (GPT, "llm-foundry"), (GPT | {"act": "relu"}, "Megatron-LM"), (LLAMA, "torchtitan")],
    ids=["gpt", "mpt", "relu", "llama"],
)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_captured_layer_keeps_what_the_closed_form_says(model: dict[str, Any], source: str, sequence_parallel: bool) -> None:
    one = run(model, source, sequence_parallel=sequence_parallel)
    found = Product(one, load())
    for flash in (True, False) if model is not LLAMA else (True,):
        assert found.saved_bytes(one, flash) == pytest.approx(
            saved_bytes(one, flash), rel=1e-3 if model is not LLAMA else 0.02
        )  # keys and values share a storage


@pytest.mark.parametrize(
    "plan",
    [
        dict(recompute="full"),
        dict(sequence_parallel=True, recompute="selective"),
        dict(vpp=3, zero_stage=1),
        dict(pp=1, dp=4, zero_stage=3, recompute="selective_op"),
        dict(pp=1, dp=2, cp=2, micro_batch=1),
        dict(tp=1, pp=6, dp=2, global_batch=64),
    ],
    ids=str,
)
def test_every_kind_of_plan_is_forecast_near_the_closed_formulas(plan: dict[str, Any]) -> None:
    one, calibration = run(**plan), load()
    product = step_time(one, calibration, Product(one, calibration).pipeline)
    closed_s = step_time(one, calibration).total_s  # which counts one transfer of an interleaved schedule's many
    assert product.total_s == pytest.approx(closed_s, rel=0.08 if one.vpp == 1 else 0.12)
    assert "canonical" not in predict(row(**plan), calibration, "product")


def test_weights_are_divided_over_the_tensor_axis_as_the_row_says() -> None:
    one = run(sequence_parallel=True)
    product = Product(one, load())
    _, _, chosen = product.chosen(0)
    layer = next(block.pattern for block in product.graph.blocks if block.layer)
    elements = (4 * 2048**2 + 2 * 2048 * 8192) // 4
    assert chosen.point(layer).parameter_elements == pytest.approx(elements, rel=0.01)


def test_stages_wait_for_what_they_send() -> None:
    """Two micro-batches through two stages: the second stage begins a transfer later, and ends one later for the first."""
    one = run(tp=1, pp=2, dp=8, micro_batch=1, global_batch=16)
    replayed_s, (first, last) = Product(one, load()).pipeline(Pricer(one, load()))
    assert replayed_s == pytest.approx(first.forward_s + 2 * last.total_s + first.backward_s, rel=0.05)
    assert replayed_s < canonical_pipeline(Pricer(one, load()))[0] * 1.05


def test_layers_that_chunks_do_not_divide_are_interleaved_all_the_same() -> None:
    """Four layers and three: chunks of two layers each, and of two and one."""

    def step_s(vpp: int) -> float:
        one = run(GPT | {"layers": 7, "vocab": 1024}, tp=1, dp=8, vpp=vpp, micro_batch=1, global_batch=16)
        assert [stage.layers for stage in one.stages] == [4, 3]
        return Product(one, load()).pipeline(Pricer(one, load()))[0]

    assert step_s(2) < 0.95 * step_s(1)


def test_what_the_planner_does_not_offer_falls_back_and_says_so() -> None:
    found = predict(row(tp=4, pp=4, dp=1, layer_partitions=[2, 0, 2, 2]), load(), "product")
    assert "leave one without work" in found["canonical"] and found["iteration_s"] > 0


def test_a_fit_of_the_product_path_meets_what_that_path_predicts() -> None:
    """Of stages that hold a large vocabulary the two paths differ: constants of the one would leave the other beside the measurement."""
    measured = row(tp=1, pp=6, dp=2, global_batch=64)
    one, start = run_of(measured), load()
    seconds = step_time(one, start, Product(one, start).pipeline).total_s * 1.04
    measured["measured"] = {"iteration_s": seconds}
    of_product = predict(measured, refit({"s": [measured]}, start, "product"), "product")["iteration_s"]
    of_canonical = predict(measured, refit({"s": [measured]}, start), "product")["iteration_s"]
    assert abs(of_product / seconds - 1) <= abs(of_canonical / seconds - 1)
    assert of_product == pytest.approx(seconds, rel=0.02)
