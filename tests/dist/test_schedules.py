"""Plans of every schedule and way of recomputing, searched, against the plain model."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.launch import run_ranks
from tests.dist.parity import Case, run_cases
from tests.dist.test_exactness import FP32, FP64, check


def _case(model: str, **constraints: Any) -> Case:
    return Case(model, constraints=constraints, dtype="float64")


TWO = [
    _case("llama", pp=2, schedule="interleaved", num_chunks=2, micro_batch_size=1),
    _case("llama", pp=2, schedule="zb", micro_batch_size=1),
    _case("llama", pp=2, schedule="zbv", micro_batch_size=1),
    _case("gpt2", pp=2, schedule="zbv", micro_batch_size=1, recompute="selective"),
    _case("llama", tp=2, pp=1, recompute="selective"),
]
FOUR = [
    _case("llama", pp=2, dp=2, tp=1, zero=3, schedule="interleaved", num_chunks=2, micro_batch_size=1),
    _case("llama", pp=2, dp=2, tp=1, zero=3, schedule="zb", micro_batch_size=1),
    _case("llama", pp=2, dp=2, tp=1, zero=2, schedule="zbv", micro_batch_size=1, recompute="full"),
    _case("llama", pp=2, tp=2, dp=1, schedule="zb", micro_batch_size=1, recompute="selective"),
    _case("llama", dp=2, tp=2, pp=1, zero=3, recompute="selective"),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("num_ranks", "cases"), [pytest.param(2, TWO, id="2 ranks"), pytest.param(4, FOUR, id="4 ranks", marks=pytest.mark.slow)])
def test_every_schedule_equals_the_plain_model_and_moves_what_its_plan_says(num_ranks: int, cases: list[Case]) -> None:
    for outcome in run_ranks(run_cases, num_ranks, cases, timeout_s=500)[0]:
        check(outcome, FP32)  # the loss, which these models compute in fp32 whatever they are in
        assert max(outcome.grad_error, outcome.weight_error) <= FP64, outcome
        for rank, held in enumerate(outcome.held):
            assert held.sent == held.planned_sent, f"{outcome.case}: rank {rank} sent {held.sent}, its program says {held.planned_sent}"
            assert held.flops == pytest.approx(held.planned_flops, rel=0.02), f"{outcome.case}: rank {rank}"
            assert held.parameter_bytes == pytest.approx(held.planned_parameter_bytes, rel=0.02), f"{outcome.case}: rank {rank}"
