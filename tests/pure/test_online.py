"""Changing devices, decided: drift against noise, groups of like speeds, a budget that is kept in the long run."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.budget import Budget, Choice
from autoplan.drift import Drift, grouped


def _noisy(speeds: tuple[float, ...], rng: random.Random, *, normal: bool) -> list[float]:
    return [speed / (rng.gauss(1.0, 0.1) if normal else rng.uniform(0.9, 1.1)) for speed in speeds]


@pytest.mark.parametrize("normal", [False, True])
def test_ten_percent_of_noise_is_no_drift(normal: bool) -> None:
    alarms = 0
    for seed in range(20):
        rng, drift = random.Random(seed), Drift((1.0, 1.0, 1.0, 1.0))
        for _ in range(100):
            drift = drift.after(_noisy((1.0, 1.0, 1.0, 1.0), rng, normal=normal))
            alarms += drift.has_drifted
            drift = drift.settled(drift.planned) if drift.has_drifted else drift
    assert alarms == 0 if not normal else alarms <= 4


def test_half_the_speed_is_seen_within_two_windows_and_estimated_closely() -> None:
    for seed in range(20):
        rng, drift, steps = random.Random(seed), Drift((1.0,) * 4), 0
        while not drift.has_drifted:
            drift, steps = drift.after(_noisy((1.0, 1.0, 0.5, 1.0), rng, normal=True)), steps + 1
        assert steps <= 2 * drift.window
        assert drift.speeds[2] / drift.speeds[0] == pytest.approx(0.5, rel=0.25)


def test_one_outlier_and_a_common_slowdown_are_no_drift() -> None:
    drift = Drift((1.0,) * 4)
    for step in range(40):
        drift = drift.after([0.1, 1.0, 1.0, 1.0] if step % 6 == 0 else [1.0] * 4)
        assert not drift.has_drifted
    for _ in range(40):
        drift = drift.after([0.5] * 4)
        assert not drift.has_drifted


def test_speeds_that_differ_by_noise_are_one() -> None:
    found = grouped((1.02, 0.5, 0.97, 1.0))
    assert found[0] == found[2] == found[3] and found[1] == 0.5 and found[0] == pytest.approx(0.9965, rel=1e-3)


@settings(max_examples=60, deadline=None)
@given(st.floats(0.01, 0.5), st.floats(0.01, 100.0), st.integers(0, 1000))
def test_costs_stay_within_the_budget_and_the_queue(mean_cost: float, worth: float, seed: int) -> None:
    """Sum of costs <= T b + Q_T, whatever is offered; and Q is bounded by what a change can be worth."""
    rng, budget = random.Random(seed), Budget(mean_cost, worth)
    gains = [rng.random() for _ in range(400)]
    for gain in gains:
        pick = budget.choose([Choice(1.0, 0.0), Choice(1.0 - gain, 1.0)])
        budget = budget.after(float(pick))
    assert budget.spent <= mean_cost * budget.num_slots + budget.queue + 1e-9
    assert budget.queue <= worth * max(gains) + 1.0


def test_the_average_cost_is_within_the_budget_over_many_slots() -> None:
    budget, rng = Budget(0.05, worth=2.0), random.Random(3)
    for _ in range(2000):
        pick = budget.choose([Choice(1.0, 0.0), Choice(1.0 - rng.random(), 1.0)])
        budget = budget.after(float(pick))
    assert budget.average <= 0.05 + 3 / 2000  # the queue holds at most V and one change
    assert budget.spent > 50  # the budget is used
    while budget.queue:
        budget = budget.after(0.0)
    assert budget.average <= 0.05 + 1e-12


def test_without_a_budget_the_fastest_choice_is_taken() -> None:
    assert Budget().choose([Choice(1.0, 0.0), Choice(0.5, 1e9), Choice(0.7, 0.0)]) == 1
    assert Budget(1.0, queue=5.0).choose([Choice(1.0, 0.0), Choice(0.5, 1.0)]) == 0
