"""Unusual things about shared tensors, losses and steps: the plain model's result under every plan, or a refusal by name."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

import autoplan
from autoplan.frontend import capture
from autoplan.models import MLP
from tests.dist.hard_parity import Try, attempts
from tests.dist.launch import run_ranks
from tests.dist.parity import Case, relative_errors, run_cases
from tests.dist.test_hard_inputs import FP32, UNEVEN, check
from tests.hard import _seeded, _tokens
from tests.hardest import HARDEST, Dropped, smoothed_experts
from tests.plans import manual_plan

TWO = [
    *(Try(name, plan, splits_seed=1 if "tp" in plan else None, norm_type=2.0) for name in HARDEST for plan in (
        UNEVEN, dict(dp=2, zero=3, num_micro_batches=2), dict(dp=2, num_micro_batches=2), dict(tp=2, num_micro_batches=2))),
    Try("bf16 between float32", dict(dp=2, zero=1), optimizer="AdamW", norm_type=float("inf"), steps=3),
]  # fmt: skip
FOUR = [
    *(Try(name, dict(pp=4, num_micro_batches=3), norm_type=2.0) for name in ("norm of all layers", "carried to the end")),
    Try("norm of all layers", dict(pp=2, dp=2, zero=3, num_micro_batches=2, schedule="zb"), optimizer="AdamW", norm_type=2.0, steps=3),
    Try("tied and detached", dict(pp=2, dp=2, zero=1, num_micro_batches=2), optimizer="AdamW", norm_type=2.0, steps=3),
    Try("map both ways", dict(pp=2, tp=2, num_micro_batches=2), splits_seed=3, norm_type=1.0),
    Try("counter of two blocks", dict(pp=2, dp=2, num_micro_batches=2, recompute="full")),
]


@pytest.mark.slow
@pytest.mark.timeout(590)
def test_hardest_inputs_on_two_ranks_equal_the_plain_model() -> None:
    check(TWO, run_ranks(attempts, 2, TWO, timeout_s=560)[0])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_hardest_inputs_on_four_ranks_equal_the_plain_model() -> None:
    check(FOUR, run_ranks(attempts, 4, FOUR, timeout_s=360)[0])


def _experts() -> list:
    cases = [Case("experts", dict(ep=2, num_micro_batches=2)), Case("experts", dict(pp=2, num_micro_batches=2))]
    return run_cases(cases, {"experts": smoothed_experts})


@pytest.mark.slow
def test_a_smoothed_loss_with_ignored_labels_is_exact_where_experts_are_divided() -> None:
    for outcome in run_ranks(_experts, 2, timeout_s=200)[0]:
        assert not outcome.refused and outcome.missing == () and max(outcome.errors()) <= FP32, outcome


def _dropped(plan: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.set_num_threads(1)
    model, batch = _seeded(Dropped), _tokens()
    pm = autoplan.parallelize(model, batch, plan=manual_plan(capture(model, batch), **plan), seed=7)
    optimizer = pm.optimizer(torch.optim.SGD, lr=0.1)
    losses = []
    for _ in range(3):
        losses.append(pm.forward_backward(batch).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, pm.full_state_dict()


@pytest.mark.slow
def test_a_block_with_dropout_that_runs_twice_has_the_masks_of_one_process() -> None:
    losses, weights = _dropped({})
    for plan in (dict(pp=2, num_micro_batches=3, recompute="full"), dict(dp=2, zero=3, num_micro_batches=2)):
        found, state = run_ranks(_dropped, 2, plan, timeout_s=100)[0]
        assert found == pytest.approx(losses, rel=FP32), plan
        assert relative_errors(state, weights)[0] <= FP32, plan


def _interrupted(plan: dict[str, Any]) -> tuple[list[bool], float, list[float], list[float]]:
    """Three optimizer steps of two accumulated batches each, the first batch of the second step not finite: (which calls were skipped, the
    error of the weights, learning rates, those of the plain model)."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = MLP((8, 16, 16, 4))
    true = copy.deepcopy(model)
    batches = [{"x": torch.randn(8, 8), "labels": torch.arange(8) % 4} for _ in range(6)]
    pm = autoplan.parallelize(model, batches[0], plan=manual_plan(capture(model, batches[0]), **plan))
    ours, theirs = pm.optimizer(torch.optim.AdamW, lr=0.1), torch.optim.AdamW(true.parameters(), lr=0.1)
    schedules = [torch.optim.lr_scheduler.OneCycleLR(each, 0.2, total_steps=4) for each in (ours, theirs)]
    skipped, rates = [], ([], [])
    for number, batch in enumerate(batches):
        if number == 2:
            batch = batch | {"x": batch["x"].clone().fill_(float("inf"))}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            pm.forward_backward(batch)
        skipped.append(pm.step_was_skipped)
        if number != 2:
            true(**batch).backward()
        if number % 2:
            for optimizer, schedule, seen in zip((ours, theirs), schedules, rates, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                seen.append(optimizer.param_groups[0]["lr"])
    error = relative_errors(pm.full_state_dict(), true.state_dict())[0]  # the state is rank 0's alone
    return skipped, error, rates[0], rates[1]


@pytest.mark.parametrize("plan", [dict(pp=2, num_micro_batches=2), dict(dp=2, zero=2)], ids=str)
def test_a_batch_that_is_not_finite_is_left_out_of_an_accumulated_step(plan: dict[str, Any]) -> None:
    for skipped, error, ours, theirs in run_ranks(_interrupted, 2, plan):
        assert skipped == [False, False, True, False, False, False]
        assert error <= FP32 and ours == theirs


def test_hooks_that_come_after_the_model_was_taken_are_refused_by_name() -> None:
    model, batch = MLP((8, 16, 4)), {"x": torch.randn(8, 8), "labels": torch.arange(8) % 4}
    pm = autoplan.parallelize(model, batch)
    pm.forward_backward(batch)
    name, module = next((name, m) for name, m in model.named_modules() if isinstance(m, torch.nn.Linear))
    hook = module.register_forward_hook(lambda *_: None)
    with pytest.raises(autoplan.UsageError, match=f"module '{name}' was given a hook"):
        pm.forward_backward(batch)
    hook.remove()
    pm.forward_backward(batch)
    next(model.parameters()).register_hook(lambda grad: grad)
    with pytest.raises(autoplan.UsageError, match="was given a hook"):
        pm.forward_backward(batch)
