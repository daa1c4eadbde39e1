"""Stage boundaries: golden vectors on which published balancers fail, and enumeration."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.cuts import best_cuts, dealt_cuts, layer_cuts
from autoplan.errors import InfeasibleError


def slowest(weights: list[float], cuts: tuple[int, ...]) -> float:
    return max(sum(weights[a:b]) for a, b in itertools.pairwise(cuts))


@pytest.mark.parametrize(
    ("weights", "num_stages", "optimum"),
    [
        ([1, 1, 2, 2], 3, 2),
        ([1, 1, 2], 2, 2),
        ([2, 2, 2, 5, 5], 4, 5),
        ([8, 8, 8, 20, 10, 8], 4, 20),
        ([5, 1, 5, 2, 2], 4, 5),
        ([2, 3, 20, 10, 0, 10, 0], 3, 20),
        ([3, 8, 3, 3, 2, 3, 0, 5, 1], 4, 9),
        ([1] * 5, 4, 2),
        ([1] * 42, 16, 3),
    ],
)
def test_golden_vectors_reach_the_optimal_bottleneck_without_an_empty_stage(weights: list[float], num_stages: int, optimum: float) -> None:
    cuts = best_cuts(weights, num_stages)
    assert cuts is not None
    assert slowest(weights, cuts) == optimum
    assert all(a < b for a, b in itertools.pairwise(cuts))
    assert len(cuts) == num_stages + 1


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(1, 5), st.integers(0, 3), st.integers(1, 30))
def test_cuts_equal_enumeration_under_a_limit_by_stage(weights: list[int], num_stages: int, growth: int, limit: int) -> None:
    n = len(weights)
    if n < num_stages:
        with pytest.raises(InfeasibleError, match=f"the model has {n} blocks"):
            best_cuts(weights, num_stages)
        return
    fits = [np.array([[(b - a) * (1 + growth * (num_stages - 1 - j)) <= limit for b in range(n + 1)] for a in range(n + 1)]) for j in range(num_stages)]
    options = [(0, *inner, n) for inner in itertools.combinations(range(1, n), num_stages - 1)]
    options = [c for c in options if all(fits[j][a, b] for j, (a, b) in enumerate(itertools.pairwise(c)))]
    found = best_cuts(weights, num_stages, fits)
    if not options:
        assert found is None
        return
    assert found in options
    assert slowest(weights, found) == min(slowest(weights, c) for c in options)


def test_even_layers_spread_evenly_and_the_same_way_each_time() -> None:
    assert best_cuts([1.0] * 8, 4) == (0, 2, 4, 6, 8)
    assert best_cuts([1.0] * 10, 4) == best_cuts([1.0] * 10, 4)


def test_stage_layers_count_layers_and_carry_embedding_and_head() -> None:
    is_layer = [False, True, True, True, True, False]
    assert layer_cuts(is_layer, (1, 3)) == (0, 2, 6)
    assert layer_cuts(is_layer, (0, 4)) == (0, 1, 6)
    assert layer_cuts(is_layer, (4, 0)) == (0, 5, 6)
    with pytest.raises(InfeasibleError, match="places 3 layers, but the model has 4"):
        layer_cuts(is_layer, (1, 2))
    with pytest.raises(InfeasibleError, match="without any block"):
        layer_cuts(is_layer, (2, 0, 2))


@pytest.mark.parametrize(("ranks", "chunks", "units"), [(4, 2, 16), (4, 2, 12), (16, 4, 96), (16, 4, 126), (8, 4, 36), (3, 2, 7)])
def test_blocks_are_dealt_to_ranks_evenly(ranks: int, chunks: int, units: int) -> None:
    found = dealt_cuts(1, units, 2, ranks, chunks)
    assert found
    for cuts in found:
        sizes = [b - a for a, b in itertools.pairwise(cuts)]
        assert len(sizes) == ranks * chunks and cuts[0] == 0 and cuts[-1] == units + 3
        sizes[0], sizes[-1] = sizes[0] - 1, sizes[-1] - 2
        assert min(sizes) > 0
        of_rank = [sum(sizes[rank::ranks]) for rank in range(ranks)]
        assert max(of_rank) <= -(-units // ranks), (cuts, of_rank)


def test_too_few_blocks_are_not_dealt() -> None:
    assert dealt_cuts(1, 7, 1, 4, 2) == ()
