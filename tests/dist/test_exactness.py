"""Plans that the search returns give the plain model's loss, gradients and weights, and each rank does its share alone."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from tests.dist.cases import cases_for
from tests.dist.launch import run_ranks
from tests.dist.parity import Case, Outcome, run_cases

FP32, FP64 = 1e-5, 1e-9

RANDOM_SPLITS = [
    *(Case("llama", dict(tp=2), splits_seed=seed, dtype="float32") for seed in (0, 1)),
    Case("gpt2", dict(tp=2), splits_seed=0),
    Case("bert", dict(tp=2), splits_seed=0),
    Case("unet", dict(tp=2), splits_seed=0),
    Case("mlp", dict(tp=2), splits_seed=3, dtype="float64", optimizer="AdamW"),
]
BY_HAND = [
    Case("mlp", dict(pp=2, num_micro_batches=4, schedule="gpipe"), dtype="float64", optimizer="AdamW"),
    Case("mlp", dict(dp=2, zero=1, num_micro_batches=2), dtype="float64", optimizer="AdamW"),
    Case("mlp", dict(dp=2, zero=2, num_micro_batches=2), dtype="float64", optimizer="AdamW"),
    Case("gpt2", dict(pp=2, num_micro_batches=4, recompute="full")),
    Case("gpt2", dict(pp=2, num_micro_batches=2, recompute=("none", "full", "selective"))),
    Case("t5", dict(pp=2, num_micro_batches=2)),
    Case("mixtral-aux", dict(dp=2)),
    Case("resnet50", dict(dp=2, zero=3), dtype="float64"),  # its batch statistics amplify rounding ten thousand times
]


def check(outcome: Outcome, tolerance: float) -> None:
    case = outcome.case
    assert not outcome.refused, f"{case}: {outcome.refused}"
    assert outcome.missing == (), f"{case}: one side alone has {outcome.missing}"
    assert max(outcome.errors()) <= tolerance, f"{case}: {outcome}"


def check_share(outcome: Outcome) -> None:
    """Every rank holds, computes and sends what the plan says, and far less than the whole model: with stages less, since the best cut need not be even."""
    ranks = len(outcome.held)
    has_stages = (outcome.case.constraints or {}).get("pp", 1) > 1
    for rank, held in enumerate(outcome.held):
        assert held.sent == held.planned_sent, f"{outcome.case}: rank {rank} sent {held.sent}, its program says {held.planned_sent}"
        assert held.flops <= (0.97 if has_stages else 0.85) * outcome.dense_flops, f"{outcome.case}: rank {rank} computes {held.flops} of {outcome.dense_flops}"
        if outcome.case.constraints is not None:
            assert held.flops == pytest.approx(held.planned_flops, rel=0.02), f"{outcome.case}: rank {rank}"
            assert held.parameter_bytes == pytest.approx(held.planned_parameter_bytes, rel=0.02), f"{outcome.case}: rank {rank}"
    if outcome.case.constraints is not None:
        busiest = max((held.sent for held in outcome.held), key=lambda sent: sum(use.num_bytes for use in sent))
        assert list(map(astuple, outcome.collectives)) == list(map(astuple, busiest)), f"{outcome.case}: collectives of the plan"
    total = sum(held.flops for held in outcome.held)
    assert total <= (1.0 + 0.1 * ranks) * outcome.dense_flops, f"{outcome.case}: all ranks together compute {total} of {outcome.dense_flops}"


@pytest.mark.timeout(600)
def test_searched_plans_on_two_ranks_equal_the_plain_model() -> None:
    cases = [*cases_for(2, ("llama", "gpt2")), *cases_for(2, ("vit",), ("tp2", "pp2")), *cases_for(2, ("unet",), ("zero3", "tp2"))]
    for outcome in run_ranks(run_cases, 2, cases, timeout_s=500)[0]:
        check(outcome, FP32)
        check_share(outcome)


@pytest.mark.timeout(600)
def test_any_assignment_of_loops_to_ranks_equals_the_plain_model() -> None:
    for outcome in run_ranks(run_cases, 2, RANDOM_SPLITS, timeout_s=500)[0]:
        check(outcome, FP64 if outcome.case.dtype == "float64" else FP32)


@pytest.mark.timeout(600)
def test_every_zero_stage_schedule_and_recomputation_equals_the_plain_model() -> None:
    for outcome in run_ranks(run_cases, 2, BY_HAND, timeout_s=500)[0]:
        check(outcome, FP64 if outcome.case.dtype == "float64" else FP32)


@pytest.mark.timeout(600)
def test_searched_plans_on_three_axes_equal_the_plain_model() -> None:
    for outcome in run_ranks(run_cases, 8, cases_for(8, ("llama",)), timeout_s=500)[0]:
        check(outcome, FP32)
        check_share(outcome)
