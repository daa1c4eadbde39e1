"""The minibatch schedule takes the largest size that trains no worse, whatever the optimizer, and leaves the state as it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import autoplan

ROWS, SIZES = 512, (4, 8, 16, 32, 64, 128, 256)


class Line(nn.Module):
    """Noisy least squares: small batches make many updates, large ones few."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, dtype=torch.float64))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((x @ self.weight - y) ** 2).mean()


def rows(seed: int, num_rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, 6, generator=generator, dtype=torch.float64)
    return {"x": x, "y": x @ torch.arange(1.0, 7.0, dtype=torch.float64) + 0.3 * torch.randn(num_rows, generator=generator, dtype=torch.float64)}


def batches(size: int) -> Iterator[dict[str, torch.Tensor]]:
    data = rows(1, ROWS)
    for start in range(0, ROWS - size + 1, size):
        yield {name: value[start : start + size] for name, value in data.items()}


def brute_force(cls: type[torch.optim.Optimizer], options: dict[str, Any], margin: float) -> int:
    """The largest size that is not worse after all rows, from a fresh start."""
    losses = {}
    for size in SIZES:
        model = Line()
        optimizer = cls(model.parameters(), **options)
        for batch in batches(size):
            optimizer.zero_grad()
            model(**batch).backward()
            optimizer.step()
        losses[size] = float(model(**rows(2, 256)).detach())
    best = min(losses.values())
    return max(size for size, loss in losses.items() if loss <= best * (1 + margin))


@pytest.mark.parametrize(("cls", "options"), [(torch.optim.SGD, {"lr": 0.1}), (torch.optim.Adagrad, {"lr": 2.0})], ids=["sgd", "adagrad"])
def test_the_known_best_size_is_found(cls: type[torch.optim.Optimizer], options: dict[str, Any]):
    expected = brute_force(cls, options, 0.05)
    assert SIZES[0] < expected < SIZES[-1]
    model = Line()
    optimizer = cls(model.parameters(), **options)
    schedule = autoplan.batch_size_schedule(model, optimizer, batches, rows(2, 256), sizes=SIZES, start=4, every=3, trial_rows=ROWS, margin=0.05)
    decisions = [schedule.advance() for _ in range(3)]
    assert decisions[:2] == [None, None]
    decision = decisions[2]
    assert decision is not None
    assert decision == schedule.decisions[0]
    assert (decision.before, decision.after, schedule.size) == (4, expected, expected)
    assert [t.size for t in decision.trials if t.is_accepted][-1] == expected
    assert torch.equal(model.weight, torch.zeros(6, dtype=torch.float64))
    assert all(not state["sum"].any() for state in optimizer.state.values() if "sum" in state)


def test_a_size_that_trains_worse_is_left_and_predictions_are_told():
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    best = brute_force(torch.optim.SGD, {"lr": 0.1}, 0.05)
    larger = SIZES[SIZES.index(best) + 1]
    schedule = autoplan.batch_size_schedule(
        model, optimizer, batches, rows(2, 256), sizes=SIZES, start=larger, trial_rows=ROWS, margin=0.05, throughput=lambda size: 10.0 * size
    )
    decision = schedule.search()
    assert decision.after == best
    assert all(trial.rows_per_s == 10.0 * trial.size for trial in decision.trials)
    assert f"batch {larger} -> {best}" in str(decision)


def test_what_cannot_be_a_schedule_is_refused():
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(autoplan.UsageError, match="sizes to choose from"):
        autoplan.batch_size_schedule(model, optimizer, batches, rows(2, 8))
    with pytest.raises(autoplan.UsageError, match="ascending"):
        autoplan.batch_size_schedule(model, optimizer, batches, rows(2, 8), sizes=(8, 4))
    with pytest.raises(autoplan.UsageError, match="less than the largest"):
        autoplan.batch_size_schedule(model, optimizer, batches, rows(2, 8), sizes=(4, 64), trial_rows=32)


def test_sizes_of_a_plan_divide_and_their_throughput_comes_from_the_planner():
    pm = autoplan.parallelize(Line(), rows(1, 16), cluster="cpu:1x1", optimizer="adagrad", constraints=autoplan.Constraints(micro_batch_size=4))
    optimizer = pm.optimizer(torch.optim.Adagrad, lr=1.0)
    held_back = rows(2, 16)
    with pytest.raises(autoplan.UsageError, match="take multiples of 4"):
        autoplan.batch_size_schedule(pm, optimizer, batches, held_back, sizes=(6, 16))
    schedule = autoplan.batch_size_schedule(pm, optimizer, batches, held_back, sizes=(16, 32), trial_rows=64, margin=100.0)
    pm.forward_backward(rows(1, 16))
    optimizer.step()
    optimizer.zero_grad()
    before = [p.detach().clone() for p in pm.parameters()], [v["sum"].clone() for v in optimizer.state.values()]
    decision = schedule.search()
    assert (decision.before, decision.after) == (16, 32)
    assert all(trial.rows_per_s > 0 for trial in decision.trials)
    after = list(pm.parameters()), [v["sum"] for v in optimizer.state.values()]
    assert all(torch.equal(a, b) for kind in (0, 1) for a, b in zip(before[kind], after[kind], strict=True))


def test_an_asynchronous_run_has_no_state_to_come_back_to():
    pm = autoplan.parallelize(Line(), rows(1, 16), cluster="cpu:1x1", constraints=autoplan.Constraints(sync="async"))
    with pytest.raises(autoplan.UsageError, match="asynchronous servers keep weights of their own"):
        autoplan.batch_size_schedule(pm, pm.optimizer(torch.optim.SGD, lr=0.1), batches, rows(2, 16), sizes=(16, 32))
    pm.finish()
