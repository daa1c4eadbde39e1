"""What one row's result takes from other rows: micro-batches are refused with the operator's name and the user's line, or change nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoplan
from autoplan.frontend import capture
from tests.plans import manual_plan

ROWS, WIDTH, WORDS = 8, 12, 7


def rows_of(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x, labels, reduction="none")


class Model(nn.Module):
    """An embedding, a `body` on [rows, WIDTH], and a loss."""

    def __init__(self, body: Callable[..., torch.Tensor], loss: Callable[..., torch.Tensor], **embedding: bool) -> None:
        super().__init__()
        self.words, self.body, self.loss = nn.Embedding(WORDS, WIDTH, **embedding), body, loss
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(self.head(self.body(torch.tanh(self.words(ids).mean(1)))), labels)


def same(x: torch.Tensor) -> torch.Tensor:
    return x


def hardest(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return rows_of(x, labels).topk(3).values.mean()


def over_threshold(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    far = rows_of(x, labels).detach() > 2.4
    return (rows_of(x, labels) * far).sum() / far.sum()


def built(body: Callable[..., torch.Tensor], loss: Callable[..., torch.Tensor], **embedding: bool) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Model(body, loss, **embedding), {"ids": torch.randint(0, WORDS, (ROWS, 5)), "labels": torch.arange(ROWS) % 3}


@pytest.mark.parametrize(
    ("body", "loss", "embedding", "operator"),
    [
        (same, F.cross_entropy, dict(scale_grad_by_freq=True), "aten.embedding.default"),  # its gradient counts words over all rows
        (lambda x: x * torch.roll(x, 1, 0), F.cross_entropy, {}, "aten.roll.default"),
        (lambda x: x - x.mean(0).detach(), F.cross_entropy, {}, "aten.sub.Tensor"),
        (same, hardest, {}, "aten.topk.default"),
        (same, over_threshold, {}, "aten.div.Tensor"),
    ],
    ids=["word counts", "neighbours", "centred", "hardest rows", "mean of chosen rows"],
)
def test_what_reads_all_rows_refuses_micro_batches_by_name(body: Callable, loss: Callable, embedding: dict[str, bool], operator: str) -> None:
    model, batch = built(body, loss, **embedding)
    plan = manual_plan(capture(model, batch), num_micro_batches=2)
    with pytest.raises(autoplan.UsageError, match=rf"2 micro-batches, but {operator}.*test_all_rows\.py:\d+, in .* of all rows at once"):
        autoplan.parallelize(model, batch, plan=plan)


def test_a_count_of_rows_and_a_weight_that_is_computed_change_nothing() -> None:
    model, batch = built(same, lambda x, labels: rows_of(x, labels).sum() / len(labels) ** 0.5)
    plain = copy.deepcopy(model)
    pm = autoplan.parallelize(model, batch, plan=manual_plan(capture(model, batch), num_micro_batches=2))
    loss, true = pm.forward_backward(batch), plain(**batch)
    true.backward()
    grads = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert abs(loss.item() - true.item()) <= 1e-6 * true.item()
    for name, grad in pm.full_grads().items():
        assert (grad - grads[name]).norm() <= 1e-5 * grads[name].norm(), name  # type: ignore[union-attr, operator]
