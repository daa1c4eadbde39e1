from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from tests.dist.launch import run_ranks


def _sum_of_ranks(offset: float) -> torch.Tensor:
    x = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(x)
    return x


def _fails_on_one() -> None:
    if dist.get_rank() == 1:
        raise KeyError("the culprit")
    dist.all_reduce(torch.zeros(1))


def _never_ends() -> None:
    time.sleep(1000)


def test_results_come_back_in_rank_order():
    assert [t.item() for t in run_ranks(_sum_of_ranks, 2, 0.5)] == [2.0, 2.0]


def test_the_first_error_is_shown():
    with pytest.raises(RuntimeError, match="the culprit"):
        run_ranks(_fails_on_one, 2)


def test_a_rank_that_does_not_end_is_a_timeout():
    with pytest.raises(RuntimeError, match="rank 0, 1 of 2 did not end within 8 s"):
        run_ranks(_never_ends, 2, timeout_s=8)
