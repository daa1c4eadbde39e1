"""Evaluation is the plain model's in evaluation mode, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoplan

torch.set_num_threads(1)
BATCH = {"x": torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), "labels": torch.arange(8) % 3}


class Around(nn.Module):
    """Linear maps around `part`, which sees (8, 4, 5)."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part, self.head = nn.Linear(4, 20), part, nn.LazyLinear(3)
        self.head(torch.zeros(1, 20))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        y = self.part(self.first(x).view(-1, 4, 5))
        y = y[0] if isinstance(y, tuple) else y
        return F.cross_entropy(self.head(y.flatten(1)), labels)


class Louder(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x if self.training else x


PARTS: dict[str, Callable[[], nn.Module]] = {
    "dropout of channels": lambda: nn.Dropout1d(0.3),
    "alpha dropout": lambda: nn.AlphaDropout(0.3),
    "random slopes": nn.RReLU,
    "batch norm": lambda: nn.BatchNorm1d(4),
    "batch norm without statistics": lambda: nn.BatchNorm1d(4, track_running_stats=False),
    "recurrent, with dropout": lambda: nn.LSTM(5, 5, 2, dropout=0.2, batch_first=True),
}


@pytest.mark.parametrize("name", PARTS)
def test_evaluation_is_the_plain_models(name: str) -> None:
    torch.manual_seed(0)
    model = Around(PARTS[name]())
    plain = copy.deepcopy(model).eval()
    pm = autoplan.parallelize(model, BATCH)
    assert pm.evaluate(BATCH).item() == pytest.approx(plain(**BATCH).item(), rel=1e-5)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_that_computes_otherwise_in_evaluation_is_refused(device: str) -> None:
    state: Any = Around(Louder()).state_dict()
    model = Around(Louder()).to(device)
    pm = autoplan.parallelize(model, BATCH)
    pm.load_full_state_dict(state)
    pm.forward_backward(BATCH)
    with pytest.raises(autoplan.UnsupportedOpError, match="computes otherwise in evaluation mode"):
        pm.evaluate(BATCH)


def test_batch_norm_on_the_meta_device_is_evaluated() -> None:
    torch.manual_seed(0)
    plain = Around(nn.BatchNorm1d(4))
    pm = autoplan.parallelize(copy.deepcopy(plain).to("meta"), BATCH)
    pm.load_full_state_dict(plain.state_dict())
    assert pm.evaluate(BATCH).item() == pytest.approx(plain.eval()(**BATCH).item(), rel=1e-5)
