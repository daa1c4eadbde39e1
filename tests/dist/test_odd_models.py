"""Steps written in unusual ways: the plain model's loss, gradients, weights and buffers."""

from __future__ import annotations

from tests.dist.hard_parity import Try, attempts
from tests.dist.launch import run_ranks
from tests.dist.test_hard_inputs import UNEVEN, check

_DEALT = dict(dp=2, zero=3, num_micro_batches=2)
TRIES = [
    *(Try(name, UNEVEN) for name in ("recurrent", "masked")),
    *(Try(name, _DEALT) for name in ("numbers beside", "recurrent")),
    *(Try("assigned twice", plan) for plan in (dict(pp=2), dict(dp=2))),
    *(Try(name, plan) for name in ("paired", "only weights") for plan in (dict(dp=2), dict(dp=2, zero=3))),
    Try("paired", dict(pp=2)),
    Try("masked", dict(tp=2), splits_seed=1),
]


def test_steps_written_in_unusual_ways_equal_the_plain_model() -> None:
    check(TRIES, run_ranks(attempts, 2, TRIES, timeout_s=200)[0])
