"""Boundary values that are sent in pieces and gathered: the plain model's results, with the traffic that the programs list."""

from __future__ import annotations

import pytest

from tests.dist.launch import run_ranks
from tests.dist.parity import Case, run_cases
from tests.dist.test_exactness import FP32, FP64, check

FOUR = [
    Case("mlp", dict(tp=2, pp=2, gathers=True, num_micro_batches=3), splits_seed=1, dtype="float64"),
    Case("llama", dict(tp=2, pp=2, gathers=True, num_micro_batches=2, recompute="full"), dtype="float64"),
]
EIGHT = [
    Case("llama", dict(tp=2, pp=2, dp=2, gathers=True, zero=3, num_micro_batches=2), splits_seed=0),
    Case("t5", dict(dp=2, tp=2, pp=2, gathers=True), dtype="float64"),  # what the encoder makes goes to several blocks
    Case("llama", dict(tp=2, pp=2, cp=2, gathers=True, num_micro_batches=2), dtype="float64"),
    Case("gpt2", dict(tp=4, pp=2, gathers=True, num_micro_batches=2, schedule="zb"), dtype="float64"),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("num_ranks", "cases"), [pytest.param(4, FOUR, id="4 ranks"), pytest.param(8, EIGHT, id="8 ranks", marks=pytest.mark.slow)])
def test_values_sent_in_pieces_arrive_whole(num_ranks: int, cases: list[Case]) -> None:
    for outcome in run_ranks(run_cases, num_ranks, cases, timeout_s=500)[0]:
        check(outcome, FP32)  # the loss, which these models compute in fp32 whatever they are in
        assert max(outcome.grad_error, outcome.weight_error) <= (FP64 if outcome.case.dtype == "float64" else FP32), outcome
        assert all(held.sent == held.planned_sent for held in outcome.held), outcome.case
        assert all(any((use.kind, use.axis) == ("all_gather", "tp") for use in held.sent) for held in outcome.held), outcome.case
