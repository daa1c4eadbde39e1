"""What cannot be done is refused in one message of this project's own errors, before anything is changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import autoplan
from autoplan.capture_check import _compare


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        return (h * 2 if h.sum() > 0 else h).mean()


class Selects(Branches):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[x > 0].mean()


class Silent(Branches):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Scores(Branches):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((8,), 2.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * self.scale).square().mean()


BATCH = {"x": torch.linspace(-1, 1, 64).reshape(8, 8)}


@pytest.mark.parametrize("make", [Branches, Selects])
def test_what_depends_on_data_names_the_users_line(make: Callable[[], nn.Module], capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(autoplan.CaptureError, match=r"test_refusals.py:\d+, in forward: .*depends on data"):
        autoplan.capture(make(), BATCH)
    assert capfd.readouterr().err == ""


def test_a_model_without_a_loss_is_not_trained() -> None:
    model = autoplan.parallelize(Silent(), BATCH)
    with pytest.raises(autoplan.UsageError, match=r"gives no loss.*loss_fn"):
        model.forward_backward(BATCH)
    with pytest.raises(autoplan.UsageError, match="gives no loss"):
        model.evaluate(BATCH)
    assert model.predict(BATCH).shape == (8, 8)


def test_an_unknown_optimizer_is_a_usage_error() -> None:
    with pytest.raises(autoplan.UsageError, match=r"'adamz' is not known; known: .*adamw"):
        autoplan.find_plan(Scores(), BATCH, "cpu:1x2", optimizer="adamz")


def test_a_state_must_have_the_models_names_and_shapes() -> None:
    model = autoplan.parallelize(Scores(), BATCH)
    state = model.full_state_dict()
    with pytest.raises(autoplan.UsageError, match=r"lacks layer.bias"):
        model.load_full_state_dict({"layer.weight": state["layer.weight"]})
    with pytest.raises(autoplan.UsageError, match=r"unknown head.weight"):
        model.load_full_state_dict(state | {"head.weight": torch.zeros(1)})
    with pytest.raises(autoplan.UsageError, match=r"layer.weight has shape \(8, 8\), got \(8, 9\)"):
        model.load_full_state_dict(state | {"layer.weight": torch.zeros(8, 9)})
    before = model.forward_backward(BATCH)
    model.load_full_state_dict(state)  # the buffer that no state holds keeps its value
    assert model.forward_backward(BATCH) == before


def test_what_fails_inside_a_step_is_an_error_of_this_project() -> None:
    model = autoplan.parallelize(Scores(), BATCH)
    with pytest.raises(autoplan.RunError, match="rank 0, stage 0, micro-batch 0"):
        model.forward_backward({"x": BATCH["x"].double()})
    with pytest.raises(autoplan.UsageError, match="no checkpoint"):
        model.load("nowhere")


def test_a_gradient_that_cancels_to_rounding_is_no_reason_to_refuse_and_a_wrong_one_is() -> None:
    expected = {"loss": torch.tensor(1.0), "weight": torch.ones(100), "bias": torch.full((1,), 1e-8)}
    _compare(expected, expected | {"bias": torch.full((1,), 3e-7)}, 2e-5)
    with pytest.raises(autoplan.CaptureError, match="gradient of 'bias'"):
        _compare(expected, expected | {"bias": torch.full((1,), 3e-6)}, 2e-5)
    with pytest.raises(autoplan.CaptureError, match="its loss"):
        _compare(expected, expected | {"loss": torch.tensor(1.0 + 1e-4)}, 2e-5)
