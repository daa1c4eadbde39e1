"""`parallelize` as users call it: without a batch, with shares, other sizes, evaluation, clipping, checkpoints, refusals."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autoplan
from tests.dist.launch import run_ranks
from tests.dist.parity import loss_of, relative_errors
from tests.zoo import ZOO

FP32 = 1e-5


def build(name: str) -> tuple[Any, dict[str, Any], Any]:
    torch.set_num_threads(1)
    model, batch = ZOO[name]()
    return model, batch, copy.deepcopy(model)


def rows(batch: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    return {key: value[start:stop] for key, value in batch.items()}


def grads_of(plain: Any, batch: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    plain.zero_grad()
    loss = loss_of(plain, batch)
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in plain.named_parameters(remove_duplicate=False) if p.grad is not None}


def assert_equal(pm: Any, plain: Any, batch: dict[str, Any], given: Any = None) -> None:
    for parameter in pm.parameters():
        parameter.grad = None
    loss = pm.forward_backward(batch if given is None else given)
    true_loss, true = grads_of(plain, batch)
    found = pm.full_grads()
    assert abs(loss.item() - true_loss) <= FP32 * abs(true_loss)
    if not dist.is_initialized() or dist.get_rank() == 0:
        error, name = relative_errors(found, true)
        assert found.keys() == true.keys() and error <= FP32, (error, name)


def alone() -> None:
    model, batch, plain = build("llama")
    pm = autoplan.parallelize(model)
    assert pm.plan.degree("tp") == 1
    assert_equal(pm, plain, batch)


def test_a_model_alone_infers_its_batch_and_takes_others() -> None:
    alone()


def test_a_model_that_says_nothing_is_planned_at_the_first_step() -> None:
    model, batch, plain = build("mlp")
    pm = autoplan.parallelize(model)
    with pytest.raises(autoplan.UsageError, match="waits for the first"):
        list(pm.parameters())
    pm.forward_backward(batch)
    assert_equal(pm, plain, batch)


def sizes_and_shares() -> None:
    model, batch, plain = build("llama")
    pm = autoplan.parallelize(model, batch, constraints=autoplan.Constraints(dp=2, micro_batch_size=2))
    assert_equal(pm, plain, batch)
    assert_equal(pm, plain, batch, pm.shard(batch))
    assert_equal(pm, plain, rows(batch, 0, 5))  # a smaller last batch, dealt 3 and 2
    assert_equal(pm, plain, {key: value[:, :12] for key, value in batch.items()})  # a new sequence length
    assert_equal(pm, plain, batch)
    with pytest.raises(autoplan.UsageError, match="1 row"):
        pm.forward_backward(rows(batch, 0, 1))
    with pytest.raises(ValueError, match="rows"):
        pm.forward_backward({"input_ids": batch["input_ids"], "labels": batch["labels"][:4]})


def test_other_batch_sizes_and_sequence_lengths_work_or_are_refused_before_the_step() -> None:
    run_ranks(sizes_and_shares, 2, timeout_s=250)


def evaluate_and_clip() -> None:
    model, batch, plain = build("gpt2")
    pm = autoplan.parallelize(model, batch, constraints=autoplan.Constraints(tp=2))
    assert abs(pm.evaluate(batch).item() - plain.eval()(**batch).loss.item()) <= 1e-5
    logits = pm.predict(batch)
    if dist.get_rank() == 0:
        assert torch.allclose(logits, plain(**batch).logits, rtol=1e-4, atol=1e-5)
    with pytest.raises(autoplan.UsageError, match="evaluation mode"):
        pm.eval().forward_backward(batch)
    pm.train()
    assert_equal(pm, plain.train(), batch)
    before = pm.clip_grad_norm_(0.1)
    true = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    assert abs(before.item() - true.item()) <= FP32 * true.item()
    found = pm.full_grads()
    if dist.get_rank() == 0:
        assert relative_errors(found, {n: p.grad for n, p in plain.named_parameters(remove_duplicate=False)})[0] <= FP32
    with pytest.raises(autoplan.UnsupportedOpError, match="LBFGS"):
        torch.optim.LBFGS(pm.parameters()).step(lambda: before)


def test_evaluation_prediction_clipping_and_optimizers_under_tensor_parallelism() -> None:
    run_ranks(evaluate_and_clip, 2, timeout_s=250)


def saved(folder: str) -> tuple[float, float]:
    model, batch, _ = build("llama")
    pm = autoplan.parallelize(model, batch, constraints=autoplan.Constraints(pp=2))
    opt = pm.optimizer(torch.optim.AdamW, lr=0.01)
    for _ in range(2):
        pm.forward_backward(batch)
        opt.step()
        opt.zero_grad()
    pm.save(folder, optimizer=opt)
    loss = pm.forward_backward(batch).item()
    opt.step()
    opt.zero_grad()
    return loss, pm.forward_backward(batch).item()


def resumed(folder: str, constraints: dict[str, int]) -> tuple[float, float]:
    model, batch, _ = build("llama")
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    pm = autoplan.parallelize(model, batch, constraints=autoplan.Constraints(**constraints))
    opt = pm.optimizer(torch.optim.AdamW, lr=0.01)
    pm.load(folder, optimizer=opt)
    loss = pm.forward_backward(batch).item()
    opt.step()
    opt.zero_grad()
    return loss, pm.forward_backward(batch).item()


def test_a_checkpoint_continues_under_another_plan_and_number_of_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(saved, 2, str(tmp_path / "state"), timeout_s=250)[0]
    for found in (run_ranks(resumed, 2, str(tmp_path / "state"), dict(tp=2), timeout_s=250)[0], resumed(str(tmp_path / "state"), {})):
        assert abs(found[0] - first) <= FP32 * first and abs(found[1] - second) <= FP32 * second


def test_a_plan_of_another_model_or_number_of_ranks_is_refused() -> None:
    model, batch, _ = build("mlp")
    other, other_batch, _ = build("unet")
    plan = autoplan.find_plan(other, other_batch, "cpu:1x1")
    with pytest.raises(autoplan.StalePlanError, match="plan again"):
        autoplan.parallelize(model, batch, plan=plan)
    with pytest.raises(autoplan.StalePlanError, match="this job has 1"):
        autoplan.parallelize(model, batch, plan=autoplan.find_plan(model, batch, "cpu:1x4"))


class Noisy(torch.nn.Module):
    """Draws random numbers with plain torch operators: of the rows, and of none."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.a(x + torch.randn_like(x)))
        return torch.nn.functional.mse_loss(self.b(hidden) * torch.rand(16), y)


def random_steps(constraints: dict[str, int]) -> list[float]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(rank)  # ranks that were not seeded alike: rank 0's weights count
    model = Noisy()
    generator = torch.Generator().manual_seed(1)
    batch = {name: torch.randn(8, 16, generator=generator) for name in ("x", "y")}
    pm = autoplan.parallelize(model, batch, constraints=autoplan.Constraints(**constraints), seed=3)
    opt = pm.optimizer(torch.optim.SGD, lr=0.1)
    losses = []
    for _ in range(3):
        losses.append(pm.forward_backward(batch).item())
        opt.step()
        opt.zero_grad()
    return losses


def test_ranks_start_from_the_first_ones_weights_and_draw_the_same_random_numbers() -> None:
    alone = random_steps({})
    assert len(set(alone)) == 3
    for constraints in (dict(tp=2), dict(dp=2)):
        for losses in run_ranks(random_steps, 2, constraints, timeout_s=250):
            assert losses == pytest.approx(alone, rel=FP32), constraints


def different_rows() -> str:
    model, batch, _ = build("mlp")
    pm = autoplan.parallelize(model, batch, constraints=autoplan.Constraints(pp=2))
    pm.forward_backward(batch)
    with pytest.raises(autoplan.RunError, match="batch of the same shape") as caught:
        pm.forward_backward(rows(batch, 0, 4) if dist.get_rank() else batch)
    return str(caught.value)


def test_ranks_that_are_given_batches_of_different_shapes_all_stop() -> None:
    first, second = run_ranks(different_rows, 2, timeout_s=100)
    assert "in call 2 rank 1 runs" in first and "in call 2 rank 1 runs" in second
