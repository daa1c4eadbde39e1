"""Stages with meshes of their own: the plain model's loss, gradients and weights, and exactly the planned traffic."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.launch import run_ranks
from tests.dist.parity import Case, run_cases

FP32, FP64 = 1e-5, 1e-10


def mesh(dp: int, tp: int) -> tuple[tuple[str, int], ...]:
    return (("dp", dp), ("tp", tp))


def stages(*meshes: tuple[int, int], **more: Any) -> dict[str, Any]:
    """Keyword arguments of `manual_plan` for stages of these (dp, tp)."""
    return dict(pp=len(meshes), stage_meshes=tuple(mesh(*each) for each in meshes), **more)


QUICK = [  # 6 ranks
    Case("mlp", stages((1, 4), (2, 1), num_micro_batches=2, schedule="gpipe"), splits_seed=3, dtype="float64", optimizer="AdamW"),
    Case("mlp", stages((3, 1), (1, 3), zero=2, num_micro_batches=2), splits_seed=1, dtype="float64"),  # rows 2, 1, 1 of a micro-batch of 4
    Case("gpt2", stages((1, 4), (2, 1), zero=3, num_micro_batches=2, recompute="full"), splits_seed=0, dtype="float64"),  # tied embedding
    Case("llama", stages((2, 1), (1, 2), (2, 1), num_micro_batches=4), splits_seed=1, dtype="float64"),
]
MORE = [  # 8 ranks
    Case("mlp", stages((1, 4), (2, 2), num_micro_batches=4, schedule="zb", zero=1), splits_seed=5, dtype="float64", optimizer="AdamW"),
    Case("llama", stages((2, 2), (1, 4), zero=1, num_micro_batches=2, recompute="selective"), splits_seed=2, dtype="float64", optimizer="AdamW"),
    Case("t5", stages((4, 1), (1, 2), (2, 1), num_micro_batches=2), splits_seed=0, dtype="float64"),  # skips
    Case("gpt2", stages((1, 2), (2, 2), (2, 1), num_micro_batches=2, schedule="gpipe"), splits_seed=4, dtype="float64", optimizer="AdamW"),
    Case("mixtral-aux", stages((2, 2), (4, 1), zero=3), splits_seed=0),  # a router's loss of all rows at once
    Case("resnet50", stages((2, 1), (4, 1), (2, 1)), dtype="float64"),  # batch statistics
    Case("bert", stages((4, 1), (2, 2), num_micro_batches=2), splits_seed=1),
    Case("vit", stages((1, 2), (6, 1), num_micro_batches=1), splits_seed=1),
]


@pytest.mark.timeout(600)
def test_stages_of_other_meshes_equal_the_plain_model() -> None:
    for outcome in run_ranks(run_cases, 6, QUICK, timeout_s=500)[0]:
        check_case(outcome)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_more_stages_of_other_meshes_equal_the_plain_model() -> None:
    for outcome in run_ranks(run_cases, 8, MORE, timeout_s=800)[0]:
        check_case(outcome)


def check_case(outcome: Any) -> None:
    assert outcome.missing == (), f"{outcome.case}: one side alone has {outcome.missing}"
    assert max(outcome.errors()) <= (FP64 if outcome.case.dtype == "float64" else FP32), f"{outcome.case}: {outcome}"
    for rank, held in enumerate(outcome.held):
        assert held.sent == held.planned_sent, f"{outcome.case}: rank {rank} sent {held.sent}, its program says {held.planned_sent}"
