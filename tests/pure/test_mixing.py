"""What memory asks of plans that recompute every layer in a way of its own: never more than what the best of them does."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.mixing import Mixture, hull

WAYS = ((0.0, 100.0), (1.0, 40.0), (6.0, 10.0))


def mixture(room: tuple[float, ...], held: tuple[float, ...], count: int, *, states: float = 5.0, made: float = 0.0) -> Mixture:
    micro_batches = np.array(held)[:, None]
    nothing = np.zeros_like(micro_batches)
    return Mixture(WAYS, WAYS[0][1], states, np.array(room), micro_batches, nothing, nothing, made, count)


def least_again_s(room: float, held: float, count: int, states: float, made: float) -> float:
    """Of all ways to recompute `count` blocks on one rank: the least that is run again; infinity where none fits."""
    best = float("inf")
    for picks in itertools.combinations_with_replacement(range(len(WAYS)), count):
        used = sum(states + held * WAYS[i][1] for i in picks) + (made if any(picks) else 0.0)
        if used <= room:
            best = min(best, sum(WAYS[i][0] for i in picks))
    return best


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(20.0, 900.0), st.integers(1, 4)), min_size=1, max_size=3),
    st.integers(1, 6),
    st.sampled_from([0.0, 5.0, 30.0]),
    st.sampled_from([0.0, 12.0]),
)
def test_no_placing_of_blocks_runs_less_again(ranks: list[tuple[float, int]], count: int, states: float, made: float) -> None:
    told = mixture(tuple(room for room, _ in ranks), tuple(float(held) for _, held in ranks), count, states=states, made=made).least_again_s
    best = float("inf")
    for numbers in itertools.product(range(count + 1), repeat=len(ranks)):
        if sum(numbers) == count:
            best = min(best, sum(least_again_s(room, held, n, states, made) for n, (room, held) in zip(numbers, ranks, strict=True)))
    assert told <= best * (1 + 1e-9) + 1e-9


@settings(max_examples=60, deadline=None)
@given(st.floats(20.0, 900.0), st.integers(1, 4), st.floats(1.0, 40.0), st.sampled_from([0.0, 12.0]))
def test_no_rank_has_time_and_memory_for_more_blocks(room: float, held: int, seconds: float, made: float) -> None:
    cost, times = 2.0, 3.0
    most = mixture((room,), (float(held),), 8, made=made).whole(np.array([seconds]), np.array([cost]), times, np.array([8.0]))[0]
    possible = [n for n in range(9) if n * cost + times * least_again_s(room, held, n, 5.0, made) <= seconds]
    assert most >= max(possible)


def test_one_rank_mixes_the_two_ways_between_which_its_memory_lies() -> None:
    assert mixture((400.0,), (1.0,), 4).least_again_s == pytest.approx(20.0 / 60.0)  # 420 bytes without recomputation, 60 less for a second
    assert mixture((150.0,), (1.0,), 4).least_again_s == pytest.approx(4.0 + 30.0 * 5.0 / 30.0)


def test_ways_above_the_line_between_others_are_left_out() -> None:
    assert hull(((0.0, 10.0), (3.0, 9.0), (4.0, 2.0), (5.0, 2.0))) == ((0.0, 10.0), (4.0, 2.0))
