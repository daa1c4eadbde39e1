"""What happens to a model that was given to `parallelize`."""

from __future__ import annotations

import copy
import gc
import io
import threading
import warnings
import weakref

import pytest
import torch
from torch import nn

import autoplan


class Net(nn.Module):
    """Two layers with tied weights over a sequence of any length; a plain tensor and a buffer besides."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.register_buffer("shift", torch.ones(8))
        self.factor = torch.tensor(2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x) + self.shift) * self.factor).square().mean()


def batch(length: int = 4) -> dict[str, torch.Tensor]:
    return {"x": torch.linspace(-1, 1, 4 * length * 8).reshape(4, length, 8)}


def given(model: nn.Module) -> autoplan.ParallelModel:
    return autoplan.parallelize(model, batch(), cluster="cpu:1x1")


def test_weights_are_gone_once_the_caller_lets_go_and_other_shapes_still_run() -> None:
    torch.manual_seed(0)
    model = Net()
    plain, parameters = copy.deepcopy(model), [weakref.ref(p) for p in model.parameters()]
    pm = given(model)
    del model
    gc.collect()
    assert [p() for p in parameters] == [None] * len(parameters)
    for length in (4, 6):
        assert pm.forward_backward(batch(length)).item() == pytest.approx(plain(**batch(length)).item(), rel=1e-6)
        assert pm.evaluate(batch(length)).item() == pytest.approx(plain.eval()(**batch(length)).item(), rel=1e-6)
    assert pm.full_state_dict().keys() == plain.state_dict().keys()


def test_a_model_that_is_kept_runs_as_it_was_and_warns_once_training_has_left_it_behind() -> None:
    model = Net()
    pm = given(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model(**batch()).item() == pytest.approx(pm.forward_backward(batch()).item(), rel=1e-6)
    torch.optim.SGD(pm.parameters(), lr=0.1).step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pm.evaluate(batch(6))
    with pytest.warns(RuntimeWarning, match="have changed since"):
        model(**batch())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**batch())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.load(file, weights_only=False)(**batch()).item() == model(**batch()).item()
    assert given(model).forward_backward(batch()).item() == pytest.approx(model(**batch()).item(), rel=1e-6)


def test_a_model_that_cannot_be_copied_is_kept() -> None:
    model = Net()
    plain = copy.deepcopy(model)
    model.lock = threading.Lock()  # type: ignore[assignment]
    pm = given(model)
    assert pm.forward_backward(batch(6)).item() == pytest.approx(plain(**batch(6)).item(), rel=1e-6)
