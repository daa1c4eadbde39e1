"""Inputs that broke other systems: each gives the plain model's result, or is refused by name before the step."""

from __future__ import annotations

import pytest

from tests.dist.hard_parity import Found, Try, attempts
from tests.dist.launch import run_ranks
from tests.hard import HARD
from tests.harder import HARDER

FP32, BF16 = 1e-5, 2e-2
UNEVEN = dict(pp=2, num_micro_batches=3, recompute="full")  # 8 rows as 3, 3, 2; one micro-batch has no valid label
NEEDS_ALL_ROWS = {
    "batch norm": "batch_norm in layers.0.norm",
    "buffer follows": "of all rows at once",
}

STAGES = [Try(name, UNEVEN) for name in HARD if name not in NEEDS_ALL_ROWS]
CUTS = [Try(name, dict(pp=2, num_micro_batches=2), cut=cut) for name in ("aliases cross", "alias written", "transposed crosses") for cut in (1, 2, 3)]
FULL_BATCH = [
    *(Try(name, dict(pp=2, recompute="full")) for name in NEEDS_ALL_ROWS),
    *(Try(name, dict(dp=2)) for name in ("batch norm", "buffer follows", "buffers")),
]
SHARDED = [
    Try(name, dict(dp=2, zero=3))
    for name in ("tied", "weighted", "own mean", "summed", "frozen prefix", "only the head", "adapters on bf16", "unused", "integers cross")
]
SPLIT = [
    Try(name, dict(tp=2), splits_seed=1)
    for name in ("tied", "words", "weighted", "6 heads", "adapters on bf16", "alias written", "unused", "no grad inside", "batch norm")
]
CLIPPED = [
    *(Try("tied", dict(pp=2, num_micro_batches=2), norm_type=norm_type) for norm_type in (2.0, float("inf"))),
    *(Try("tied", dict(tp=2), splits_seed=2, norm_type=norm_type) for norm_type in (2.0, 1.0, float("inf"))),
    Try("tied", dict(dp=2, zero=3), norm_type=2.0),
    Try("tied", dict(dp=2, zero=2), norm_type=float("inf")),
]
ACCUMULATED = [Try("words", dict(pp=2, num_micro_batches=2), calls=3), Try("tied", dict(dp=2, zero=2, num_micro_batches=2), calls=3)]
FOUR = [
    *(Try("tied", dict(dp=2, pp=2, zero=zero, num_micro_batches=2), optimizer="AdamW", steps=10) for zero in (0, 1, 3)),
    Try("tied", dict(tp=2, pp=2, num_micro_batches=3), splits_seed=4, norm_type=2.0),
    Try("skips", dict(pp=4, num_micro_batches=8)),
    Try("skips", dict(pp=4, num_micro_batches=2, schedule="gpipe", recompute="full")),
    Try("frozen middle", dict(pp=4, num_micro_batches=4)),
    Try("frozen prefix", dict(pp=4, num_micro_batches=4)),
    Try("only the head", dict(dp=2, pp=2, zero=1, num_micro_batches=2)),
    Try("6 heads", dict(tp=4), splits_seed=1),
    Try("buffers", dict(dp=2, pp=2, num_micro_batches=2)),
    Try("weighted", dict(dp=2, pp=2, num_micro_batches=2, zero=1)),
    Try("weighted by a chain", dict(dp=2, tp=2, num_micro_batches=3), splits_seed=2),
]


def check(tries: list[Try], found: list[Found]) -> None:
    for item, outcome in zip(tries, found, strict=True):
        assert not outcome.refused, f"{item}: {outcome.refused}"
        assert outcome.missing == (), f"{item}: one side alone has {outcome.missing}"
        assert outcome.worst() <= (BF16 if "bf16" in item.model else FP32), f"{item}: {outcome}"


@pytest.mark.timeout(400)
def test_hard_inputs_on_two_ranks_equal_the_plain_model_or_are_refused_by_name() -> None:
    tries = [*STAGES, *CUTS, *FULL_BATCH, *SHARDED, *SPLIT, *CLIPPED, *ACCUMULATED]
    refused = [Try(name, UNEVEN) for name in NEEDS_ALL_ROWS]
    found = run_ranks(attempts, 2, tries + refused, timeout_s=360)[0]
    check(tries, found[: len(tries)])
    for item, outcome in zip(refused, found[len(tries) :], strict=True):
        assert NEEDS_ALL_ROWS[item.model] in outcome.refused and "hard.py" in outcome.refused, outcome


@pytest.mark.timeout(400)
def test_hard_inputs_on_four_ranks_equal_the_plain_model() -> None:
    check(FOUR, run_ranks(attempts, 4, FOUR, timeout_s=360)[0])


@pytest.mark.slow
@pytest.mark.timeout(590)
def test_harder_inputs_equal_the_plain_model() -> None:
    plans = (UNEVEN, dict(dp=2, zero=3, num_micro_batches=2), dict(tp=2, num_micro_batches=2))
    tries = [Try(name, plan, splits_seed=1 if "tp" in plan else None) for name in HARDER for plan in plans]
    check(tries, run_ranks(attempts, 2, tries, timeout_s=560)[0])
