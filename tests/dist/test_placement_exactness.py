"""Modules placed by hand: results of one device, each cut tensor sent once to a rank."""

from __future__ import annotations

import pytest

from tests.dist.launch import run_ranks
from tests.dist.parity import Case, Outcome, run_cases
from tests.dist.placed_models import PLACED
from tests.zoo import ZOO

ROW = 16 * 8 * 8  # bytes of 16 features of 8 rows in fp64
BUILD = {**PLACED, **ZOO}
ALTERNATING = {"branches.0": 0, "branches.1": 1, "branches.2": 0, "branches.3": 1, "branches.4": 0, "branches.5": 1, "branches.6": 1, "branches.7": 0}


def _case(model: str, placement: dict[str, int], **constraints: object) -> Case:
    return Case(model, constraints={"placement": placement, **constraints}, dtype="float64")


TWO = [
    _case("factorisation", {"user": 1, "item": 1, "fc": 0}),
    _case("factorisation", {"user": 1, "item": 1, "fc": 0}, micro_batch_size=2),
    _case("factorisation", {"user": 0, "item": 1}),
    _case("towers", {"left": 0, "right": 1}, micro_batch_size=2),
    _case("towers", {"left": 0, "right": 1}, micro_batch_size=2, schedule="gpipe"),
    _case("fan", ALTERNATING, micro_batch_size=4),
    _case("fan", {"stem": 0, "branches": 1, "head": 1}),
    _case("mlp", {"layers.0": 0, "layers.1": 1, "layers.2": 0}, micro_batch_size=2),
    _case("gpt2", {"transformer.wte": 0, "transformer.h.1": 1}, micro_batch_size=2),
]
LARGER = [_case("qwen3", {"model.layers.0": 1}), _case("t5", {"encoder": 0, "decoder": 1}, micro_batch_size=4)]
FOUR = [
    _case("fan", {"stem": 0} | {f"branches.{k}": k % 4 for k in range(8)}),
    _case("fan", {"stem": 0, "head": 3} | {f"branches.{k}": 1 + k % 2 for k in range(8)}, pp=4),
    _case("towers", {"left": 0, "right": 1}, pp=2, dp=2, micro_batch_size=2),
    _case("towers", {"left": 1, "right": 0}, pp=2, tp=2),
    _case("factorisation", {"user": 1, "item": 1, "fc": 0}, pp=2, dp=2, zero=3),
]


def _check(outcome: Outcome) -> None:
    assert not outcome.refused, outcome
    assert not outcome.missing, outcome
    assert max(outcome.errors()) < 1e-10, outcome
    assert all(h.sent == h.planned_sent for h in outcome.held), outcome.case


def _sent(outcome: Outcome, phase: str) -> int:
    return sum(t.num_bytes for h in outcome.held for t in h.sent if t.kind == "send" and t.phase == phase)


@pytest.fixture(scope="module")
def on_two() -> list[Outcome]:
    return run_ranks(run_cases, 2, TWO, BUILD, timeout_s=300.0)[0]


@pytest.fixture(scope="module")
def on_four() -> list[Outcome]:
    return run_ranks(run_cases, 4, FOUR, BUILD, timeout_s=300.0)[0]


def test_two_ranks_equal_one_device(on_two: list[Outcome]) -> None:
    for outcome in on_two:
        _check(outcome)


@pytest.mark.slow
def test_larger_models_equal_one_device() -> None:
    for outcome in run_ranks(run_cases, 2, LARGER, BUILD, timeout_s=300.0)[0]:
        _check(outcome)


@pytest.mark.slow
def test_four_ranks_equal_one_device_and_send_a_value_once_to_each(on_four: list[Outcome]) -> None:
    for outcome in on_four:
        _check(outcome)
    fan = on_four[0]  # the stem's value to three ranks; the branches' own values to the sum, or sums on the way
    assert _sent(fan, "forward") == _sent(fan, "backward") >= 3 * ROW


def test_a_cut_tensor_is_sent_once_to_a_rank_and_its_gradient_once_back(on_two: list[Outcome]) -> None:
    factorisation = on_two[0]  # the users' and the items' rows
    assert _sent(factorisation, "forward") == _sent(factorisation, "backward") == 2 * ROW
    chain = on_two[6]  # the stem's value, for eight branches and the sum
    assert _sent(chain, "forward") == _sent(chain, "backward") == ROW
