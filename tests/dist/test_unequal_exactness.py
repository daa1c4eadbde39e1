"""Uneven data shares and other orders of the mesh: results of one device."""

from __future__ import annotations

import pytest

from tests.dist.launch import run_ranks
from tests.dist.parity import Case, Outcome, run_cases

DATA_OUTSIDE = ("dp", "pp", "tp")
TWO = [
    Case("mlp", dict(dp=2, shares=(6, 2), num_micro_batches=2), dtype="float64"),
    Case("mlp", dict(dp=2, shares=(5, 3), num_micro_batches=2, zero=2), dtype="float64"),
    Case("bert", dict(dp=2, shares=(1, 7), zero=3), dtype="float64"),
    Case("gpt2", dict(dp=2, shares=(7, 1), zero=1), dtype="float64"),
]
FOUR = [
    Case("mlp", dict(dp=2, pp=2, shares=(6, 2), num_micro_batches=2, order=DATA_OUTSIDE), dtype="float64"),
    Case("gpt2", dict(dp=2, pp=2, shares=(5, 3), num_micro_batches=3, zero=1, order=DATA_OUTSIDE), dtype="float64"),
    Case("mlp", dict(dp=2, pp=2, shares=(5, 3), num_micro_batches=3, schedule="zb"), dtype="float64"),
    Case("gpt2", dict(dp=2, pp=2, shares=(3, 5), num_micro_batches=2, zero=1, schedule="zb", order=DATA_OUTSIDE), dtype="float64"),
    Case("mlp", dict(dp=2, tp=2, shares=(2, 6)), splits_seed=3, dtype="float64"),
    Case("qwen3", dict(dp=4, shares=(3, 3, 1, 1), zero=3), dtype="float64"),
]


def _check(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        assert not outcome.missing and max(outcome.errors()) < 1e-10, outcome
        assert all(h.sent == h.planned_sent for h in outcome.held), outcome.case


def test_unevenly_dealt_rows_equal_one_device() -> None:
    _check(run_ranks(run_cases, 2, TWO, timeout_s=200.0)[0])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_replicas_side_by_side_with_pipelines_inside_equal_one_device() -> None:
    _check(run_ranks(run_cases, 4, FOUR, timeout_s=800.0)[0])
