"""A bound of known stages is below their replay, and meets it where nothing is sent."""

from __future__ import annotations

import random

import pytest
from handmade import FlatPrices

from autoplan.chains import chain_s
from autoplan.load import Pass, Send, StageLoad
from autoplan.price import Pricer
from autoplan.replay import Durations, Step, replay


def played_s(times: tuple[Durations, ...], step: Step, num_bytes: int) -> float:
    last = len(times) - 1
    loads = tuple(
        StageLoad(j, "", "", Pass(), Pass(), Pass(), (Send(j + 1, num_bytes, True),) if j < last else (), 0, 0, 4, (), 0, 0, 0, 0, (), ())
        for j in range(len(times))
    )
    line = replay(loads, times, step, Pricer(FlatPrices(), None))
    return max(end + time.tail_s for end, time in zip(line.end_s, times, strict=True))


def one_f_one_b(n: int, m: int) -> Step:
    return Step((("pp", n), ("dp", 1), ("tp", 1)), "1f1b", m, 0, None, "adamw", None, tuple(range(n)))


@pytest.mark.parametrize("seed", range(60))
def test_no_step_is_shorter_than_its_chains(seed: int) -> None:
    draw = random.Random(seed)
    n, m = draw.choice([2, 3, 5]), draw.choice([1, 2, 4, 9])
    times = []
    for _ in range(n):
        f, b = draw.uniform(0.1, 2), draw.uniform(0.1, 4)
        first, last = (draw.choice([0.0, draw.uniform(0, 1)]) for _ in range(2))
        times.append(Durations(f, f + first, b, b + last, (("sum", "dp", draw.uniform(0, 1)),)))
    step = one_f_one_b(n, m)
    assert chain_s(tuple(times), step) <= played_s(tuple(times), step, draw.choice([0, 10**9])) * (1 + 1e-9)


@pytest.mark.parametrize(("n", "m"), [(2, 8), (4, 4), (4, 16)])
def test_even_stages_meet_the_bound(n: int, m: int) -> None:
    times = (Durations(1.0, 1.0, 2.0, 2.0, ()),) * n
    assert chain_s(times, one_f_one_b(n, m)) == pytest.approx(3.0 * (m + n - 1))
    assert played_s(times, one_f_one_b(n, m), 0) == pytest.approx(3.0 * (m + n - 1))
