"""States at rest: the closed forms of ZeRO and their goldens."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.memory import Widths, states, widths

TEXTBOOK = Widths(parameter=2, gradient=2, master=4, optimizer=8)


@pytest.mark.parametrize(
    ("stage", "expected"),
    [(0, lambda p, n: 16 * p), (1, lambda p, n: 4 * p + 12 * p // n), (2, lambda p, n: 2 * p + 14 * p // n), (3, lambda p, n: 16 * p // n)],
)
def test_mixed_precision_adam_takes_the_textbook_bytes(stage: int, expected) -> None:
    p, n = 2851 * 10**6 // 8 * 8, 8
    assert states(p, TEXTBOOK, stage, n).total == expected(p, n)


def test_plain_data_parallel_of_2851_million_parameters_takes_42_gib() -> None:
    assert states(2_851_000_000, TEXTBOOK, 0, 8).total / 2**30 == pytest.approx(42.48, abs=0.01)


def test_deepspeeds_estimates_follow_from_fp32_gradients() -> None:
    with_fp32_gradients = Widths(parameter=2, gradient=4, master=4, optimizer=8)
    third = states(2_851_000_000, with_fp32_gradients, 3, 8, largest_gathered=2 * 32_000_000)
    assert third.total / 2**30 == pytest.approx(6.09, abs=0.01)
    second = states(2_851_000_000, Widths(4, 4, 4, 8), 2, 8)
    assert second.total / 2**30 == pytest.approx(15.93, abs=0.01)


def test_widths_follow_precision_and_optimizer() -> None:
    assert widths("bf16", "adamw") == Widths(2, 4, 4, 8)
    assert widths("fp32", "sgd") == Widths(4, 4, 0, 0)
    assert widths(None, "adamw", parameter_bytes=8) == Widths(8, 8, 0, 16)
    with pytest.raises(ValueError, match="known: adadelta"):
        widths("bf16", "shampoo")
    with pytest.raises(ValueError, match="fp32, bf16, fp16"):
        widths("fp7", "sgd")


@given(st.integers(0, 10**9), st.integers(1, 512))
def test_a_higher_stage_never_takes_more_and_shards_cover_everything(p: int, n: int) -> None:
    by_stage = [states(p, TEXTBOOK, stage, n) for stage in range(4)]
    assert all(a.total >= b.total for a, b in itertools.pairwise(by_stage))
    assert by_stage[3].total * n >= by_stage[0].total


def test_a_stage_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="stage is 0, 1, 2 or 3"):
        states(10, TEXTBOOK, 4, 2)
